"""Verbs that look back: a machine and a step measured, runs listed, forecast and measurement compared."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainledger.answers.pages import measured
from trainledger.answers.pages import runs as listing
from trainledger.answers.pages.reconciliation import page, write_html
from trainledger.answers.pages.record import is_run, read_run
from trainledger.answers.refit import PastRun, undo_update, update_calibration
from trainledger.cli.arguments import RUN_FILE, SET, Outcome, flag, option, output, takes
from trainledger.cli.asking import lines, run_of_file, say
from trainledger.ledger.ledger import write_ledger
from trainledger.report.document import Document
from trainledger.report.html import parts, whole_page
from trainledger.spec.calibration import Calibration, calibration_path, read_calibration, write_calibration
from trainledger.spec.plain import replace_file
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.runfile import read_table
from trainledger.spec.units import counted


def _is_calibration(path: Path) -> bool:
    """Whether a file holds a calibration, of another version too."""
    try:
        return {"format", "backend"} <= read_table(path).keys()
    except InvalidInput:
        return False


@takes(
    flag("--quick", "fewer shapes and samples, no collectives: about 8 s"),
    option("--backend", "auto, cpu, cuda or mps", default="auto"),
    output("--output FILE.toml", "where to keep the calibration", suffix=".toml", ours=_is_calibration),
)
def measure_machine(args: Namespace) -> Document:
    """Measure this machine in under a minute: matmuls, memory, attention, overhead, disk, data loader, collectives.

    Forecasts read the rates from a file; $TRAINLEDGER_CALIBRATION names another place for it.
    """
    calibration, path = measure_and_keep(args.backend, quick=args.quick, output=args.output)
    return measured.machine(calibration, path)


def measure_and_keep(backend: str, *, quick: bool = False, output: str | None = None) -> tuple[Calibration, Path]:
    """Measure this machine under a progress bar and write its calibration where forecasts look for it."""
    with progress_bar() as tell:
        from trainledger.engine.train.device import find_device
        from trainledger.observe.measure.machine import measure_machine

        calibration = measure_machine(find_device(backend).type, quick=quick, progress=tell)
    path = Path(output) if output else calibration_path(calibration.backend)
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
    replace_file(path, whole_page(document.title, parts(document), document.figures()).encode())
    return Outcome(document, remarks=(f"Written to {path}",))


@takes(
    *RUN_FILE,
    output("--output FILE.json.gz", "write the measured ledger there", suffix=".json.gz"),
)
def measure_step(args: Namespace) -> Document | Outcome:
    """Run one optimizer step of a run file on random tokens, recording every operation and every byte."""
    run = run_of_file(args)

    from trainledger.answers.closed_loop import refuse_what_does_not_fit
    from trainledger.engine.train.device import find_device
    from trainledger.engine.train.stop import OutOfMemory, memory_told
    from trainledger.observe.measure.step import rehearse_really

    refuse_what_does_not_fit(run, find_device("cpu"))  # where the step runs
    try:
        with memory_told():
            ledger = rehearse_really(run)
    except OutOfMemory as end:
        say(str(end))
        return Outcome(lines("", {"state": "stopped", "why": str(end), "exit_code": end.exit_code}), end.exit_code)
    if args.output:
        write_ledger(ledger, args.output)
    return measured.step(run, ledger, args.output)


@takes(option("--dir DIR", "where the run directories are", default=listing.DEFAULT))
def runs(args: Namespace) -> Document:
    """The runs so far: how each ended, measured over predicted for its step time and its peak, and how to resume it."""
    folder = Path(args.dir)
    if not args.dir or (not folder.is_dir() and (args.dir != listing.DEFAULT or folder.exists())):
        rule = "is not a directory" if folder.exists() else "does not exist"
        raise InvalidInput([Problem("--dir", args.dir, rule if args.dir else "must not be empty")])
    found = sorted((each for each in folder.iterdir() if is_run(each)) if folder.is_dir() else [])
    return listing.page(folder, [read_run(each, ledgers=False) for each in found])


@takes(
    option("run_dirs RUN_DIR", "the directory of a run; with --update of several", nargs="*", default=[]),
    option(
        "--trace FILE",
        "instead: a trace of torch.profiler, of any program (.json, .json.gz), or a directory of ranks",
        default=None,
    ),
    option("--memory SNAPSHOT", "instead: a snapshot of CUDA's allocator (torch.cuda.memory)", default=None),
    flag("--update", "fit the calibration of this machine to past runs: RUN_DIR ..., or those in --runs"),
    option("--runs DIR", "with --update: where the run directories are (runs)", default=None),
    flag("--undo", "undo the last --update of the calibration"),
    option("--against OTHER", "another trace, or directory of ranks, that this one is compared with", default=None),
    option("--run RUN.toml", "with a trace or a snapshot: its run, whose forecast is compared with it", default=None),
    SET,
    output("--html OUT.html", "also write one self-contained HTML file with figures", suffix=".html"),
)
def reconcile(args: Namespace) -> Document | Outcome:
    """Compare forecast and measurement of a run: ratios, where the differences are, and the unexplained rest.

    Of a profiler's trace: where the time of its steps went, of a snapshot of CUDA's allocator its peak, with --run
    against the forecast. With --update the calibration learns from past runs.
    """
    of_file = args.trace is not None or args.memory is not None
    given = {"--run": args.run, "--set": args.set, "--against": args.against}
    if not of_file and any(given.values()):
        rule = "is for --trace and --memory"
        raise InvalidInput([Problem(name, value, rule) for name, value in given.items() if value])
    if args.update or args.undo or args.runs is not None:
        return _refitted(args)
    args.run_dir = _only(args.run_dirs)
    if of_file:
        from trainledger.cli import profile  # brings in numpy

        if args.memory is not None:
            return with_html(profile.of_memory(args), args.html)
        return profile.of_trace(args, progress_bar)
    if not args.run_dir or not Path(args.run_dir).is_dir():
        rule = "is not a directory; trainledger runs lists those there are"
        raise InvalidInput([Problem("RUN_DIR", args.run_dir, rule)])
    record = read_run(args.run_dir, ledgers=args.html is not None)
    if record.forecast is None and not record.lines:
        raise InvalidInput([Problem("RUN_DIR", args.run_dir, f"has no run: {each}") for each in record.missing])
    if args.html is None:
        return page(record)
    write_html(record, args.html)
    return Outcome(page(record), remarks=(f"Written to {args.html}",))


def _only(run_dirs: list[str]) -> str | None:
    """The one run directory that is named, or None; raises InvalidInput."""
    if len(run_dirs) > 1:
        raise InvalidInput([Problem("RUN_DIR", run_dirs[1], "is a second run directory; only --update takes several")])
    return run_dirs[0] if run_dirs else None


def _refitted(args: Namespace) -> Document | Outcome:
    """The calibration fitted to past runs, or the last fit taken back."""
    for name, value in (("--trace", args.trace), ("--memory", args.memory)):
        if value is not None:
            raise InvalidInput([Problem(name, value, "is no run of this engine; --update takes run directories")])
    if args.undo:
        if args.update or args.run_dirs or args.runs is not None:
            raise InvalidInput([Problem("--undo", None, "removes the last fit, and takes no other arguments")])
        path, left = undo_update()
        return lines(f"{path} is as it was before the last fit; fits left: {left}", {"path": str(path), "fits": left})
    if not args.update:
        raise InvalidInput([Problem("--runs", args.runs, "goes with --update")])
    if args.run_dirs and args.runs is not None:
        raise InvalidInput([Problem("--runs", args.runs, "replaces RUN_DIR ...; give one of them")])
    for each in args.run_dirs:
        if not is_run(Path(each)):
            raise InvalidInput([Problem("RUN_DIR", each, "is not the directory of a run")])
    found = [Path(each) for each in args.run_dirs] or _runs_in(Path(args.runs or listing.DEFAULT))
    with progress_bar("reading", "runs") as tell:
        answer = update_calibration(_past(found, tell))
    return with_html(answer.document(), args.html)


def _past(run_dirs: list[Path], tell: Callable[[float, str], None]) -> Iterator[PastRun]:
    """What is kept of each run, one after another."""
    for at, each in enumerate(run_dirs):
        tell(at / len(run_dirs), each.name)
        record = read_run(each)
        yield PastRun(path=each, measured=record.measured, ledger=record.measured_ledger)


def _runs_in(folder: Path) -> list[Path]:
    """The run directories in a folder, by name; raises InvalidInput."""
    if not folder.is_dir():
        raise InvalidInput([Problem("--runs", str(folder), "is not a directory")])
    return sorted(each for each in folder.iterdir() if is_run(each))
