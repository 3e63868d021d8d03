"""Measure this machine, or one optimizer step of a run on it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainledger.cli.arguments import add_json, add_output, add_run, load_run, print_json
from trainledger.ledger.ledger import write_ledger
from trainledger.report import measured as report
from trainledger.report.show import show
from trainledger.spec.calibration import calibration_path, write_calibration
from trainledger.spec.plain import check_target
from trainledger.spec.problem import InvalidInput, printable
from trainledger.spec.runfile import read_table

_MACHINE = """Measure this machine: matmul rates by shape and dtype, memory, attention and overhead, in half a
minute. The rates are kept in a file that forecasts read; $TRAINLEDGER_CALIBRATION names another place for it."""
_STEP = """Run one optimizer step of a run file on random tokens, recording every operation and every byte."""

if TYPE_CHECKING:
    from trainledger.spec.calibration import Calibration


def configure(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    machine = what.add_parser("machine", help="this machine's rates, kept for forecasts", description=_MACHINE)
    machine.add_argument("--quick", action="store_true", help="fewer shapes and samples, about 8 s")
    machine.add_argument("--backend", default="auto", help="auto, cpu, cuda or mps")
    add_output(
        machine, "--output", suffix=".toml", ours=_is_calibration, metavar="FILE.toml",
        help="where to keep the calibration",
    )  # fmt: skip
    add_json(machine)
    step = what.add_parser("step", help="one real step with random tokens, operation by operation", description=_STEP)
    add_run(step)
    add_output(
        step, "--output", suffix=".json.gz", metavar="FILE.json.gz", help="keep the measured ledger there"
    )  # fmt: skip
    add_json(step)


def _is_calibration(path: Path) -> bool:
    """Whether a file holds a calibration, of another version too."""
    try:
        return {"format", "backend"} <= read_table(path).keys()
    except InvalidInput:
        return False


def execute(args: argparse.Namespace) -> int:
    return _measure_machine(args) if args.what == "machine" else _measure_step(args)


def _measure_machine(args: argparse.Namespace) -> int:
    calibration, path = measure_and_keep(args.backend, quick=args.quick, output=args.output)
    show(report.machine(calibration, path), as_json=args.json)
    return 0


def measure_and_keep(backend: str, *, quick: bool = False, output: str | None = None) -> tuple[Calibration, Path]:
    """Measure this machine under a progress bar and write its calibration where forecasts look for it."""
    if output is not None:
        check_target(output, "--output")
    with _progress() as tell:
        from trainledger.measure.machine import measure_machine
        from trainledger.train.device import find_device

        calibration = measure_machine(find_device(backend).type, quick=quick, progress=tell)
    path = Path(output) if output else calibration_path(calibration.backend)
    write_calibration(calibration, path)
    return calibration, path


def _measure_step(args: argparse.Namespace) -> int:
    run = load_run(args)
    if args.output is not None:
        check_target(args.output, "--output")

    from trainledger.closed_loop import refuse_what_does_not_fit
    from trainledger.measure.step import rehearse_really
    from trainledger.train.device import find_device
    from trainledger.train.stop import OutOfMemory, memory_told

    refuse_what_does_not_fit(run, find_device("cpu"))  # where the step runs
    try:
        with memory_told():
            ledger = rehearse_really(run)
    except OutOfMemory as end:
        print(printable(str(end)), file=sys.stderr)
        if args.json:
            print_json({"state": "stopped", "why": str(end), "exit_code": end.exit_code})
        return end.exit_code
    if args.output:
        write_ledger(ledger, args.output)
    show(report.step(run, ledger, args.output), as_json=args.json)
    return 0


@contextmanager
def _progress() -> Iterator[Callable[[float, str], None]]:
    """A bar on the terminal; nothing where standard error is none."""
    if not sys.stderr.isatty():
        yield lambda share, name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting torch", total=1.0)
        yield lambda share, name: bar.update(task, completed=share, description=name)
