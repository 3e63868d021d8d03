"""Measure this machine, or one optimizer step of a run on it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from trainledger.cli.arguments import add_json, add_output, add_run, load_run, print_json
from trainledger.ledger.ledger import summary, write_ledger
from trainledger.report.plain_data import run_data
from trainledger.report.table import table
from trainledger.spec.calibration import calibration_path, to_device, write_calibration
from trainledger.spec.plain import check_target, to_plain
from trainledger.spec.problem import InvalidInput, printable
from trainledger.spec.runfile import read_table
from trainledger.units import GIGA, format_count, format_flops, format_flops_per_second, format_nbytes, format_seconds

_MACHINE = """Measure this machine: matmul rates by shape and dtype, memory, attention and overhead, in half a
minute. The rates are kept in a file that forecasts read; $TRAINLEDGER_CALIBRATION names another place for it."""
_STEP = """Run one optimizer step of a run file on random tokens, recording every operation and every byte."""

if TYPE_CHECKING:
    from trainledger.ledger.ledger import Ledger
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
    if args.json:
        device = to_device(calibration)
        print_json(
            {
                "path": str(path),
                "peak_flops_per_second": device.peak_flops_per_second,
                "memory_bytes_per_second": device.memory_bytes_per_second,
                **to_plain(calibration),
            }
        )
    else:
        print(printable(text(calibration)))
        print(printable(f"\nKept in {path}"))
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
    if args.json:
        told = {"run": run_data(run), **summary(ledger)}
        print_json({**told, "seconds_by_kind": _seconds(ledger, "kind"), "output": args.output})
        return 0
    facts = summary(ledger)
    rows = [
        [kind, format_flops(facts["flops"].get(kind, 0)), format_seconds(seconds)]
        for kind, seconds in _seconds(ledger, "kind").items()
    ]
    print(f"{format_count(facts['parameters'])} parameters, {len(ledger)} operations in one optimizer step")
    print(f"peak {format_nbytes(facts['peak_nbytes'])}, kept for backward {format_nbytes(facts['kept_nbytes'])}\n")
    print(table(["kind", "FLOPs", "time"], rows, align="lrr"))
    print("\nTimes are those under the recorder, which makes small operations look slow.")
    return 0


def _seconds(ledger: Ledger, key: str) -> dict[str, float]:
    split: dict[str, float] = {}
    for each in ledger:
        if each.seconds is not None:
            split[getattr(each, key)] = split.get(getattr(each, key), 0.0) + each.seconds
    return split


def text(calibration: Calibration) -> str:
    """A calibration for a terminal of 80 columns."""
    kernels = [
        [
            each.operation or " ".join(filter(None, (each.kind, each.phase))),
            each.dtype,
            " x ".join(map(str, each.shape)),
            f"{each.flops_per_second / GIGA:,.1f}" if each.kind in ("matmul", "attention") else "",
            f"{each.bytes_per_second / GIGA:,.1f}",
            format_seconds(each.seconds),
        ]
        for each in calibration.kernels
    ]
    return "\n\n".join(
        [
            f"{calibration.title}, {calibration.backend}, threads: {calibration.threads}",
            table(["kernel", "dtype", "shape", "GFLOP/s", "GB/s", "one call"], kernels, align="lllrrr"),
            table(["in short", ""], _summary(calibration), align="ll"),
            *(fill(each, 80) for each in _remarks(calibration)),
        ]
    )


def _summary(calibration: Calibration) -> list[list[str]]:
    rows = [
        [f"peak, {dtype}", format_flops_per_second(rate) + " (the best matmul)"]
        for dtype, rate in calibration.peak_flops_per_second.items()
    ]
    if calibration.memory_bytes_per_second is not None:
        rows.append(["memory", format_nbytes(calibration.memory_bytes_per_second) + "/s copied, read and write"])
    if calibration.fresh_bytes_per_second is not None:
        rows.append(["memory, fresh", format_nbytes(calibration.fresh_bytes_per_second) + "/s into untouched pages"])
    rows.append(["one operation", format_seconds(calibration.operation_seconds) + " however small"])
    call, tensor = (format_seconds(each) for each in (calibration.update_seconds, calibration.update_tensor_seconds))
    rows.append(["the optimizer", f"{call} a call and {tensor} a tensor, beyond its operations"])
    if calibration.storage_bytes_per_second is not None:
        rate = format_nbytes(calibration.storage_bytes_per_second)
        rows.append(["storage", f"{rate}/s written, synced and hashed"])
    return rows


def _remarks(calibration: Calibration) -> Iterator[str]:
    yield f"{calibration.samples} samples, {calibration.discarded} disturbed by other processes and left out."
    yield from (f"Note: {each}." for each in calibration.notes)


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
