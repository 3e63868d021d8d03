"""Train what a run file says, in a directory of its own under --dir, and go on where a stopped run ended."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainledger.cli.arguments import add_json, add_run, load_run, print_json
from trainledger.predict.roofline import NoRate
from trainledger.predict.utilization import mfu, step_peak
from trainledger.report.reconciliation import document, write_html
from trainledger.report.record import read_run
from trainledger.report.terminal import text
from trainledger.spec.problem import InvalidInput, Problem, printable
from trainledger.spec.runfile import run_name
from trainledger.units import format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainledger.spec.run import Run

EXIT_CODES = (
    "exit codes: 0 finished, 1 failed (such as out of memory), 2 wrong input, 3 diverged, 4 disk full, "
    "130 Ctrl-C, 143 SIGTERM"
)

_MOST_NAMED = 6


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the newest valid checkpoint")
    parser.add_argument("--dir", default="runs", metavar="DIR", help="where the runs are (runs)")
    add_json(parser)
    parser.epilog = EXIT_CODES


def execute(args: argparse.Namespace) -> int:
    run = load_run(args)

    run_dir = Path(args.dir) / run_name(run)
    if args.resume:
        _refuse_if_not_begun(run, run_dir)
    code, result = train_and_reconcile(run, run_dir, resume=args.resume)
    if args.json:
        print_json(result)
    elif code == 0:
        print_result(result)
        print("\n" + result["reconciliation_text"])
        print(printable(f"\nWith figures, in one file that opens offline: {result['html']}"))
    return code


def _refuse_if_not_begun(run: Run, run_dir: Path) -> None:
    """Raise `InvalidInput` where there is nothing to resume, naming the begun run that is nearest to this one."""
    from trainledger.train.run_directory import is_begun, nearest_begun

    if is_begun(run_dir):
        return
    rule, nearest = f"no run of this file was begun ({run_dir}); without --resume it starts", None
    found = nearest_begun(run_dir.parent, run)
    if found is not None:
        path, fields = found
        named = [f"{name} = {before!r} (now {now!r})" for name, (before, now) in list(fields.items())[:_MOST_NAMED]]
        if len(fields) > _MOST_NAMED:
            named.append(f"{len(fields) - _MOST_NAMED} fields more")
        nearest = f"{path}, begun with {', '.join(named)}"
    raise InvalidInput([Problem("--resume", None, rule, nearest)])


def train_and_reconcile(run: Run, run_dir: Path, *, resume: bool) -> tuple[int, dict[str, Any]]:
    """The exit code, and what there is to tell: the end of the run, and forecast beside measurement."""
    from trainledger.closed_loop import run_closed_loop
    from trainledger.train.metrics import TensorBoard
    from trainledger.train.progress import Progress
    from trainledger.train.stop import Stopped

    progress = Progress(mfu=_mfu(run))
    try:
        finished = run_closed_loop(run, run_dir, resume=resume, observers=[progress, TensorBoard()])
    except Stopped as end:
        print(printable(str(end)), file=sys.stderr)
        return end.exit_code, {"state": "stopped", "run_dir": run_dir, "why": str(end), "exit_code": end.exit_code}
    record = read_run(run_dir)
    html = run_dir / "report.html"
    write_html(record, html)
    return 0, {
        "state": "finished",
        **vars(finished),
        "html": html,
        "reconciliation": document(record.reconciliation).data(),
        "reconciliation_text": text(document(record.reconciliation)),
    }


def _mfu(run: Run) -> Callable[[float], float] | None:
    """Seconds per step to MFU, where the peak of the device that trains is known."""
    from trainledger.closed_loop import closed_form, machine_on
    from trainledger.train.device import find_device

    device = find_device(run.cluster.backend)
    machine, _ = machine_on(run, device)
    ledger = closed_form(run, device)
    try:
        peak = None if machine is None else step_peak(ledger, machine)
    except NoRate:
        peak = None
    return None if peak is None else lambda seconds: mfu(ledger.model_flops, seconds, peak)


def print_result(result: dict[str, Any]) -> None:
    """How a run ended, in a few lines."""
    took = f"{format_count(result['tokens'])} tokens in {format_seconds(result['seconds'])}"
    print(printable(f"{result['run_dir']}: {result['step']} steps, {took}"))
    if result["validation_loss"] is not None and result["unigram_entropy"] is not None:
        print(f"validation loss {result['validation_loss']:.3f} nats per token")
        print(f"unigram entropy {result['unigram_entropy']:.3f}: what knowing only each token's frequency would give")
    print(printable(f"weights: {result['checkpoint'] / 'model.safetensors'}"))
