"""Verbs that look back: a machine and a step measured, runs listed, forecast and measurement compared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

from trainledger.answers.load import load_file
from trainledger.answers.pages import log as log_page
from trainledger.answers.pages import measured
from trainledger.answers.pages import runs as listing
from trainledger.answers.pages.reconciliation import page, write_html
from trainledger.answers.pages.record import is_run, read_run
from trainledger.answers.plan import plan as plan_of
from trainledger.answers.question import output, question, text, word
from trainledger.answers.refit import PastRun, undo_update, update_calibration
from trainledger.cli.arguments import Outcome, RunFile
from trainledger.cli.asking import lines, say, while_searching
from trainledger.ledger.ledger import write_ledger
from trainledger.observe.logs import read_log
from trainledger.report.document import Document
from trainledger.report.html import parts, whole_page
from trainledger.spec.calibration import Calibration, calibration_path, read_calibration, write_calibration
from trainledger.spec.plain import replace_file
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import Overrides
from trainledger.spec.runfile import read_table
from trainledger.spec.units import counted


def _is_calibration(path: Path) -> bool:
    """Whether a file holds a calibration, of another version too."""
    try:
        return {"format", "backend"} <= read_table(path).keys()
    except InvalidInput:
        return False


Backend = Annotated[str, text("auto, cpu, cuda or mps")]
Html = Annotated[str | None, output("also write one self-contained HTML file with figures", ".html")]


@question(plots=False)
def measure_machine(
    *,
    quick: Annotated[bool, text("fewer shapes and samples, no collectives: about 8 s")] = False,
    backend: Backend = "auto",
    kept_in: Annotated[
        str | None, output("where to keep the calibration", ".toml", ours=_is_calibration, flag="--output")
    ] = None,
) -> Document:
    """Measure this machine in under a minute: matmuls, memory, attention, overhead, disk, data loader, collectives.

    Forecasts read the rates from a file; $TRAINLEDGER_CALIBRATION names another place for it.
    """
    calibration, path = measure_and_keep(backend, quick=quick, kept_in=kept_in)
    return measured.machine(calibration, path)


def measure_and_keep(backend: str, *, quick: bool = False, kept_in: str | None = None) -> tuple[Calibration, Path]:
    """Measure this machine under a progress bar and write its calibration where forecasts look for it."""
    with progress_bar() as tell:
        from trainledger.engine.train.device import find_device
        from trainledger.observe.measure.machine import measure_machine

        calibration = measure_machine(find_device(backend).type, quick=quick, progress=tell)
    path = Path(kept_in) if kept_in else calibration_path(calibration.backend)
    with suppress(InvalidInput):
        if path.exists() and (fits := read_calibration(path).fits):
            gone = counted(len(fits), "fit")
            say(f"{gone} to past runs went with the old rates; reconcile --update fits the new ones")
    write_calibration(calibration, path)
    return calibration, path


@contextmanager
def progress_bar(doing: str = "measuring", first: str = "starting torch") -> Iterator[Callable[[float, str], None]]:
    """A bar on the terminal; nothing where standard error is none."""
    if not sys.stderr.isatty():
        yield lambda share, name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(doing), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=1.0)
        yield lambda share, name: bar.update(task, completed=share, description=name)


def with_html(document: Document, path: str | None) -> Document | Outcome:
    """The document, also written as a page with its figures where requested."""
    if path is None:
        return document
    replace_file(
        path, whole_page(document.title, parts(document), document.figures()).encode(errors="backslashreplace")
    )
    return Outcome(document, remarks=(f"Written to {path}",))


@question(plots=False)
def measure_step(
    run: RunFile = "run.toml",
    overrides: Overrides = (),
    *,
    kept_in: Annotated[str | None, output("write the measured ledger there", ".json.gz", flag="--output")] = None,
) -> Document | Outcome:
    """Run one optimizer step of a run file on random tokens, recording every operation and every byte."""
    from trainledger.answers.closed_loop import refuse_what_does_not_fit
    from trainledger.engine.train.device import find_device
    from trainledger.engine.train.stop import OutOfMemory, memory_told
    from trainledger.observe.measure.step import rehearse_really

    planned = load_file(run, overrides, progress=while_searching())
    refuse_what_does_not_fit(planned, find_device("cpu"))  # where the step runs
    try:
        with memory_told():
            ledger = rehearse_really(planned)
    except OutOfMemory as end:
        say(str(end))
        return Outcome(lines("", {"state": "stopped", "why": str(end), "exit_code": end.exit_code}), end.exit_code)
    if kept_in:
        write_ledger(ledger, kept_in)
    return measured.step(planned, ledger, kept_in)


@question(plots=False)
def runs(
    *, directory: Annotated[str, text("where the run directories are", flag="--dir", metavar="DIR")] = listing.DEFAULT
) -> Document:
    """The runs so far: how each ended, measured over predicted for its step time and its peak, and how to resume it."""
    folder = Path(directory)
    if not directory or (not folder.is_dir() and (directory != listing.DEFAULT or folder.exists())):
        rule = "is not a directory" if folder.exists() else "does not exist"
        raise InvalidInput([Problem("--dir", directory, rule if directory else "must not be empty")])
    paths = sorted((path for path in folder.iterdir() if is_run(path)) if folder.is_dir() else [])
    return listing.page(folder, [read_run(path, ledgers=False) for path in paths])


@question(plots=False)
def reconcile(
    run_dirs: Annotated[
        Sequence[str], word("the directory of a run; with --update of several", several=True, metavar="RUN_DIR")
    ] = (),
    overrides: Overrides = (),
    *,
    trace: Annotated[
        str | None,
        text("instead: a trace of torch.profiler, of any program (.json, .json.gz), or a directory of ranks"),
    ] = None,
    memory: Annotated[
        str | None, text("instead: a snapshot of CUDA's allocator (torch.cuda.memory)", metavar="SNAPSHOT")
    ] = None,
    log: Annotated[
        str | None, text("instead: a program's log, a trainer_state.json or a summary of W&B", metavar="FILE")
    ] = None,
    update: Annotated[
        bool, text("fit the calibration of this machine to past runs: RUN_DIR ..., or those in --runs")
    ] = False,
    runs: Annotated[str | None, text("with --update: where the run directories are (runs)", metavar="DIR")] = None,
    undo: Annotated[bool, text("undo the last --update of the calibration")] = False,
    against: Annotated[
        str | None, text("another trace, or directory of ranks, that this one is compared with", metavar="OTHER")
    ] = None,
    run: Annotated[
        str | None, text("with one of these: its run, whose forecast is compared with it", metavar="RUN.toml")
    ] = None,
    html: Html = None,
) -> Document | Outcome:
    """Compare forecast and measurement of a run: ratios, where the differences are, and the unexplained rest.

    Of a profiler's trace: where the time of its steps went, of a snapshot of CUDA's allocator its peak, of a log its
    speed and when that changed, with --run against the forecast. With --update the calibration learns from past runs.
    """
    files = {"--trace": trace, "--memory": memory, "--log": log}
    of_file = any(value is not None for value in files.values())
    given = {"--run": run, "--set": overrides, "--against": against}
    if not of_file and any(given.values()):
        rule = f"is for {', '.join(files)}"
        raise InvalidInput([Problem(name, value, rule) for name, value in given.items() if value])
    if of_file and overrides and run is None:
        raise InvalidInput([Problem("--set", next(iter(overrides)), "changes a field of the run; name it with --run")])
    if undo:
        if update or run_dirs or runs is not None:
            raise InvalidInput([Problem("--undo", None, "removes the last fit, and takes no other arguments")])
        path, left = undo_update()
        return lines(f"{path} is as it was before the last fit; fits left: {left}", {"path": str(path), "fits": left})
    if update or runs is not None:
        for name, value in files.items():
            if value is not None:
                raise InvalidInput([Problem(name, value, "is no run of this engine; --update takes run directories")])
        return with_html(_refitted(run_dirs, runs, update=update), html)
    if len(run_dirs) > 1:
        raise InvalidInput([Problem("RUN_DIR", run_dirs[1], "is a second run directory; only --update takes several")])
    run_dir = run_dirs[0] if run_dirs else None
    if log is not None:
        given = {"RUN_DIR": run_dir, "--trace": trace, "--memory": memory, "--against": against}
        if other := next((name for name, value in given.items() if value), None):
            raise InvalidInput([Problem("--log", log, f"cannot be combined with {other}")])
        return with_html(
            log_page.page(read_log(log), None if run is None else plan_of(run, overrides), run or ""), html
        )
    if of_file:
        from trainledger.cli import profile  # brings in numpy

        file = profile.File(
            trace=trace or "", memory=memory or "", against=against, run=run, overrides=overrides, run_dir=run_dir
        )
        return with_html(profile.of_memory(file), html) if memory else profile.of_trace(file, html, progress_bar)
    if not run_dir or not Path(run_dir).is_dir():
        rule = "is not a directory; trainledger runs lists those there are"
        raise InvalidInput([Problem("RUN_DIR", run_dir, rule)])
    record = read_run(run_dir, ledgers=html is not None)
    if record.forecast is None and not record.lines:
        raise InvalidInput([Problem("RUN_DIR", run_dir, f"has no run: {missing}") for missing in record.missing])
    if html is None:
        return page(record)
    write_html(record, html)
    return Outcome(page(record), remarks=(f"Written to {html}",))


def _refitted(run_dirs: Sequence[str], runs: str | None, *, update: bool) -> Document:
    """The calibration fitted to past runs."""
    if not update:
        raise InvalidInput([Problem("--runs", runs, "goes with --update")])
    if run_dirs and runs is not None:
        raise InvalidInput([Problem("--runs", runs, "replaces RUN_DIR ...; give one of them")])
    for run_dir in run_dirs:
        if not is_run(Path(run_dir)):
            raise InvalidInput([Problem("RUN_DIR", run_dir, "is not the directory of a run")])
    past = [Path(run_dir) for run_dir in run_dirs] or _runs_in(Path(runs or listing.DEFAULT))
    with progress_bar("reading", "runs") as tell:
        return update_calibration(_past(past, tell)).document()


def _past(run_dirs: list[Path], tell: Callable[[float, str], None]) -> Iterator[PastRun]:
    """What is kept of each run, one after another."""
    for at, run_dir in enumerate(run_dirs):
        tell(at / len(run_dirs), run_dir.name)
        record = read_run(run_dir)
        yield PastRun(path=run_dir, measured=record.measured, ledger=record.measured_ledger)


def _runs_in(folder: Path) -> list[Path]:
    """The run directories in a folder, by name; raises InvalidInput."""
    if not folder.is_dir():
        raise InvalidInput([Problem("--runs", str(folder), "is not a directory")])
    return sorted(path for path in folder.iterdir() if is_run(path))
