"""Verbs of a run file: one written, its tokens made, its model trained, and all of it as a demonstration."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from importlib.resources import as_file, files
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trainledger import catalog
from trainledger.answers.fast_precision import fast_precision
from trainledger.answers.load import load, load_file
from trainledger.answers.machine import machine_of
from trainledger.answers.megatron import arguments_of, read_megatron, run_of_arguments
from trainledger.answers.pages.heading import read_as
from trainledger.answers.pages.reconciliation import page as reconciliation_page
from trainledger.answers.pages.reconciliation import write_html
from trainledger.answers.pages.record import read_run
from trainledger.answers.plan import plan
from trainledger.answers.question import count, output, question, text
from trainledger.answers.trainers import read_trainer, run_of_read
from trainledger.cli.arguments import DISK_FULL, FAILED, WRONG_INPUT, Outcome, RunFile
from trainledger.cli.asking import lines, say, while_searching
from trainledger.cli.measure import measure_and_keep
from trainledger.cli.trained import continued, visible
from trainledger.engine.processors import make_way
from trainledger.engine.remarks import unheard
from trainledger.forecast.predict.roofline import NoRate, mfu, step_peak
from trainledger.report import terminal
from trainledger.report.document import Document
from trainledger.spec.convert.trainers import values_of
from trainledger.spec.durable import is_full
from trainledger.spec.plain import not_written
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import Overrides
from trainledger.spec.run import Run
from trainledger.spec.run_text import commented
from trainledger.spec.runfile import run_name
from trainledger.spec.units import format_count, format_seconds

if TYPE_CHECKING:
    from trainledger.engine.train.observer import Observer

_LONGEST_SEQUENCE = 1024
_WHY = {  # a new run file sets each of these fields
    "model.preset": "a small model: it trains in minutes on a laptop",
    "recipe.seq_len": "what the model takes, but at most 1,024: attention grows with its square",
    "recipe.global_batch": "sequences in a step: few, so that a step is short on a CPU",
    "recipe.steps": 'optimizer steps: enough to see the loss fall; tokens = "1B" says it in tokens',
    "recipe.learning_rate": "above the default of large models: small ones learn faster at it",
    "recipe.schedule.warmup_steps": "a tenth of the steps: Adam's moments settle before the rate is at its peak",
    "recipe.evaluation.every": "the loss of held-out text four times; without it only at the end",
    "recipe.checkpoints.every": "a killed run continues from here (--resume); without it only at the end",
    "data.tokenizer": "a vocabulary trained on the text; the default, bytes, makes sequences longer",
}
_MOST_NAMED = 6
_PROMPT = "def read(self, path):\n"
_SECONDS_TO_TRAIN = 400.0  # of a demonstration of ten minutes, from its begin; sample and report take the rest
_SHARES = {"steps": 1, "schedule.warmup_steps": 10, "evaluation.every": 4, "checkpoints.every": 3}  # of all steps
Directory = Annotated[str, text("where the runs are", flag="--dir", metavar="DIR")]


def _is_ours(path: Path) -> bool:
    return path.suffix == ".toml" and path.name != "pyproject.toml"


@question(plots=False)
def init(
    path: Annotated[str, output("where to write it", ".toml", ours=_is_ours, word=True, metavar="path")] = "run.toml",
    *,
    preset: Annotated[str, text("a model of the catalog")] = "teach-10m",
    source: Annotated[
        str | None,
        text(
            "a script, YAML map or log with arguments of Megatron-LM, or a file or launch line of another trainer",
            flag="--from",
        ),
    ] = None,
    count: Annotated[int | None, count("how many devices the run of --from has (as many as the file says)")] = None,
    all: Annotated[bool, text("every field, its default as a comment")] = False,
    force: Annotated[bool, text("overwrite the file if it exists")] = False,
) -> Document:
    """Write a commented run file: what differs from the defaults, or with --all every field and its default."""
    if source is not None:
        given = {} if count is None else {"cluster.count": count}
        if (launch := values_of(source)) is not None:  # a file is read once, whatever comes of it
            table, found = read_trainer(source, given, launch)
            planned = run_of_read(source, given, table, found)
            remarks = found.remarks
        else:
            arguments = arguments_of(source)
            read = read_megatron(source, count, arguments=arguments)
            table, remarks, planned = read.table, read.remarks, run_of_arguments(source, given, arguments)
        _write_new(path, commented(table, every=all), force=force)
        said = [f"wrote {path}; next: trainledger plan {path} --device h100-sxm"]
        said += [*read_as(planned, by_file=count is None), *remarks]
        return lines("\n".join(said), {"path": path, "from": source, "notes": list(remarks)})
    base = catalog.model(preset, "--preset")
    start: dict[str, dict[str, Any]] = {
        "model": {"preset": preset},
        "recipe": {
            "seq_len": min(base["max_seq_len"], _LONGEST_SEQUENCE),
            "global_batch": 16,
            "steps": 400,
            "learning_rate": 1e-3,
            "schedule": {"warmup_steps": 40},
            "evaluation": {"every": 100},
            "checkpoints": {"every": 100},
        },
        "data": {"tokenizer": "bpe"},
    }
    why = dict(_WHY)
    if (fast := fast_precision(load(start))) is not None:
        start["recipe"]["precision"], why["recipe.precision"] = fast.kind, fast.why
    _write_new(path, commented(start, base, why=why, every=all), force=force)
    return lines(f"wrote {path}; next: trainledger plan {path}", {"path": path, "preset": preset})


def _write_new(path: str, text: str, *, force: bool) -> None:
    """Write a new file whole or not at all; an existing one only by force. Raises InvalidInput."""
    if os.path.lexists(path) and not force:
        raise InvalidInput([Problem("path", path, "exists already; --force overwrites it")])
    draft = f"{path}.{os.getpid()}.new"
    try:
        with open(draft, "x", encoding="utf-8") as file:
            file.write(text)
        if force:
            os.replace(draft, path)
        else:
            os.link(draft, path)  # unlike a rename, fails where the path came to exist meanwhile
    except OSError as error:
        raise not_written(error, path, "path") from None
    finally:
        if os.path.exists(draft):
            os.remove(draft)


@question(plots=False)
def train(
    run: RunFile = "run.toml",
    overrides: Overrides = (),
    *,
    resume: Annotated[bool, text("continue from the newest valid checkpoint")] = False,
    resume_if_begun: Annotated[
        bool, text("continue where the run was begun, else begin it: for schedulers that start a job again")
    ] = False,
    folder: Directory = "runs",
    ranks: Annotated[
        int | None, count("start N processes on this machine, as many as the layout takes (torchrun)")
    ] = None,
    restarts: Annotated[int, count("start again what --ranks lost, N times at most", least=0)] = 3,
    wandb: Annotated[str | None, text("also log to Weights & Biases, where it is installed", metavar="PROJECT")] = None,
    mlflow: Annotated[str | None, text("also log to MLflow, where it is installed", metavar="EXPERIMENT")] = None,
    rank_timeout: Annotated[
        int, count("how long a rank waits for another before it gives up", metavar="SECONDS")
    ] = 600,
    no_preflight: Annotated[bool, text("do not check memory, disk and ranks before the first step")] = False,
    as_json: bool = False,
) -> Outcome:
    """Train the model of a run file, in a separate directory under --dir, or continue a stopped run.

    A layout of several devices takes as many processes: --ranks starts them here, torchrun on several machines.
    """
    if (busy := make_way(fewer=False)) is not None:
        say(busy)
    from trainledger.engine.train.stop import leave_end, left_end

    if (code := left_end()) is not None:
        raise SystemExit(code)
    from trainledger.engine.train.ranks import this_rank

    sys.stdout = unheard(sys.stdout)  # a run whose report cannot be printed is still a run
    planned = load_file(run, overrides, progress=while_searching())
    run_dir = Path(folder) / run_name(planned)
    if this_rank() in (None, 0):
        say(_text_of(planned))
    if resume and this_rank() in (None, 0):
        _refuse_if_not_begun(planned, run_dir)
    if ranks is not None and this_rank() is None:
        from trainledger.engine.train.launch import launch

        words = ["train", run, "--dir", folder, "--rank-timeout", str(rank_timeout)]
        words += [word for change in overrides for word in ("--set", change)]
        trackers = {"--wandb": wandb, "--mlflow": mlflow}
        words += [word for flag, name in trackers.items() if name is not None for word in (flag, name)]
        switches = {"--resume": resume, "--resume-if-begun": resume_if_begun, "--json": as_json}
        switches["--no-preflight"] = no_preflight
        words += [flag for flag, given in switches.items() if given]
        raise SystemExit(launch(planned, ranks, words, restarts=restarts, say=say))
    try:
        code, result = _train(
            planned,
            run_dir,
            resume=resume or resume_if_begun,
            trackers=_trackers(wandb, mlflow),
            rank_timeout=rank_timeout,
            preflight=not no_preflight,
        )
    except InvalidInput:
        leave_end(WRONG_INPUT)
        raise
    except OSError as error:
        leave_end(DISK_FULL if is_full(error) else FAILED)
        raise
    leave_end(code)
    if this_rank():
        raise SystemExit(code)  # the first rank speaks for all
    report = "" if code else f"{_ended(result)}\n\n{result['reconciliation_text']}\n\n{_written(result)}"
    return Outcome(lines(report, result), code)


def _text_of(run: Run) -> str:
    """The text that a run trains on, in a line."""
    paths = ", ".join(dict.fromkeys(path for _, source in run.data.sources for path in source.path))
    return f"Trains on {paths} (data.path), tokenizer {run.data.tokenizer}."


def _refuse_if_not_begun(run: Run, run_dir: Path) -> None:
    """Raise `InvalidInput` where there is nothing to resume, naming the begun run that is nearest to this one."""
    from trainledger.engine.train.run_directory import is_begun, nearest_begun

    if is_begun(run_dir):
        return
    rule, nearest = f"no run of this file was begun ({run_dir}); without --resume it starts", None
    found = nearest_begun(run_dir.parent, run)
    if found is not None:
        path, fields = found
        named = [f"{field.field} = {field.a!r} (now {field.b!r})" for field in fields[:_MOST_NAMED]]
        if len(fields) > _MOST_NAMED:
            named.append(f"{len(fields) - _MOST_NAMED} fields more")
        nearest = f"{path}, begun with {', '.join(named)}"
    raise InvalidInput([Problem("--resume", None, rule, nearest)])


def _trackers(wandb: str | None, mlflow: str | None) -> list[Observer]:
    """The tracker of a name; raises `InvalidInput` where it is not installed."""
    from trainledger.engine.train.progress import MLflow, WeightsAndBiases

    trackers: list[Observer] = [] if wandb is None else [WeightsAndBiases(wandb, say)]
    return trackers if mlflow is None else [*trackers, MLflow(mlflow, say)]


def _train(
    run: Run,
    run_dir: Path,
    *,
    resume: bool,
    rank_timeout: float = 600,
    trackers: Sequence[Observer] = (),
    preflight: bool = True,
) -> tuple[int, dict[str, Any]]:
    """The exit code, and for programs the end of the run and its reconciliation."""
    from trainledger.answers.closed_loop import run_closed_loop
    from trainledger.engine.train.progress import Progress, TensorBoard
    from trainledger.engine.train.ranks import this_rank
    from trainledger.engine.train.stop import Stopped

    observers = [Progress(mfu=_mfu(run)), TensorBoard(say), *trackers]
    try:
        finished = run_closed_loop(
            run, run_dir, resume=resume, observers=observers, rank_timeout=rank_timeout, preflight=preflight
        )
    except Stopped as end:
        if str(end) and not (end.of_all_ranks and this_rank()):
            say(str(end))
        return end.exit_code, {"state": "stopped", "run_dir": run_dir, "why": str(end), "exit_code": end.exit_code}
    return 0, {"state": "finished", **vars(finished), **_reconciled(finished.run_dir)}


def _reconciled(run_dir: Path) -> dict[str, Any]:
    """The reconciliation of a run, also written as a page."""
    record, html = read_run(run_dir), run_dir / "report.html"
    try:
        write_html(record, html)
    except (OSError, InvalidInput) as error:  # the result of a run is said all the same
        say(f"The report could not be written: {error}")
    reconciled = reconciliation_page(record)
    return {"html": html, "reconciliation": reconciled.data(), "reconciliation_text": terminal.text(reconciled)}


def _mfu(run: Run) -> Callable[[float], float] | None:
    """Seconds per step to MFU, where the peak of the device that trains is known."""
    from trainledger.answers.closed_loop import closed_form, machine_on
    from trainledger.engine.train.device import find_device

    device = find_device(run.cluster.backend)
    machine, _ = machine_on(run, device)
    ledger = closed_form(run, device)
    try:
        peak = None if machine is None else step_peak(ledger, machine)
    except NoRate:
        peak = None
    return None if peak is None else lambda seconds: mfu(ledger.model_flops, seconds, peak)


def _ended(result: dict[str, Any]) -> str:
    """How a run ended, in a few lines."""
    took = f"{format_count(result['tokens'])} tokens in {format_seconds(result['seconds'])}"
    texts = [f"{result['run_dir']}: {result['step']} steps, {took}"]
    if result["validation_loss"] is not None and result["unigram_entropy"] is not None:
        texts.append(f"validation loss {result['validation_loss']:.3f} nats per token")
        texts.append(
            f"unigram entropy {result['unigram_entropy']:.3f}: the loss of knowing only each token's frequency"
        )
    alone = result["checkpoint"] / "model.safetensors"  # of several ranks there is a file each
    return "\n".join([*texts, f"weights: {alone if alone.exists() else result['checkpoint']}"])


def _written(result: dict[str, Any]) -> str:
    return f"With figures, in one file that opens offline: {result['html']}"


@question(plots=False)
def demo(
    *,
    changes: Annotated[
        Sequence[str], text("change one field", several=True, flag="--set", metavar="SECTION.FIELD=VALUE")
    ] = (),
    folder: Directory = "runs",
    as_json: bool = False,
) -> Outcome:
    """The whole loop on a small run: measure this machine, forecast, train on real text, sample, reconcile.

    About four minutes on two CPU cores; shorter, and at most ten, where steps are slow. An interrupted demo continues
    where it stopped.
    """
    sys.stdout, began = unheard(sys.stdout), time.monotonic()
    if (busy := make_way()) is not None:
        say(busy)
    from trainledger.answers.closed_loop import Deadline  # without torch it fails here, before the forecast

    with as_file(files("trainledger.cli") / "demo.toml") as path:
        run = load(path, changes)

    def heading(title: str, *texts: object) -> None:
        if not as_json:
            print(f"\n== {title} ==\n", *texts, sep="\n", flush=True)

    if machine_of(run) is None:
        heading("Measuring this machine (a minute, once)")
        calibration, kept_in = measure_and_keep(run.cluster.backend, quick=busy is not None)
        say(f"{calibration.title}, kept in {kept_in}")
    if "recipe.precision" not in run.origin.explicit and (fast := fast_precision(run)) is not None:
        run = load(run, {"recipe.precision": fast.kind})
        say(f"Training in {fast.kind}: {fast.why}")
    run_dir = Path(folder) / run_name(run)
    if not as_json:
        heading("What it will cost", plan(run))
    heading("Training it")
    # As long as a person has said.
    fixed = any(change.startswith(("recipe.steps=", "recipe.tokens=")) for change in changes)
    deadline, begun = Deadline(inf if fixed else began + _SECONDS_TO_TRAIN), run_dir.exists()
    code, result = _train(run, run_dir, resume=begun, trackers=[deadline])
    if steps := deadline.fewer:
        say(f"Steps are slow here: {steps} instead of {run.recipe.total_steps}, so that this ends within ten minutes.")
        shutil.rmtree(run_dir)
        run = load(run, {f"recipe.{name}": max(1, steps // share) for name, share in _SHARES.items()})
        run_dir, deadline = Path(folder) / run_name(run), Deadline(deadline.at)
        code, result = _train(run, run_dir, resume=run_dir.exists(), trackers=[deadline])
    if code and not deadline.passed:
        return Outcome(lines("", result), code)
    result |= _reconciled(run_dir) if code else {}
    written, _ = continued(run_dir, _PROMPT, tokens=160, temperature=0.7, top_k=40, seed=0)
    result["sample"] = visible(_PROMPT + written)
    heading("What the model writes", result["sample"])
    heading("Forecast and measurement", result["reconciliation_text"])
    return Outcome(lines(f"\n{_written(result)}", result))
