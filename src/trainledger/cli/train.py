"""Train what a run file says, in a directory of its own under --dir, and go on where a stopped run ended."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainledger.cli.arguments import add_json, add_run, load_run, print_json
from trainledger.units import format_count, format_seconds

EXIT_CODES = "exit codes: 0 finished, 2 wrong input, 3 diverged, 4 disk full, 130 Ctrl-C, 143 SIGTERM"


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the newest valid checkpoint")
    parser.add_argument("--dir", default="runs", metavar="DIR", help="where the runs are (runs)")
    add_json(parser)
    parser.epilog = EXIT_CODES


def execute(args: argparse.Namespace) -> int:
    run = load_run(args)

    from trainledger.spec.runfile import run_name
    from trainledger.train.engine import train
    from trainledger.train.metrics import TensorBoard
    from trainledger.train.observer import Observer
    from trainledger.train.progress import Progress
    from trainledger.train.stop import Stopped

    run_dir = Path(args.dir) / run_name(run)
    # --- before the run: the forecast goes here; it may give Progress(mfu=...) a function of seconds per step ---
    # --- while it runs: the recorder of a metered step goes here, as one more observer ---
    observers: list[Observer] = [Progress(), TensorBoard()]
    try:
        finished = train(run, run_dir, resume=args.resume, observers=observers)
    except Stopped as end:
        print(end, file=sys.stderr)
        if args.json:
            print_json({"state": "stopped", "run_dir": run_dir, "why": str(end), "exit_code": end.exit_code})
        return end.exit_code
    # --- after the run: reconciling goes here ---
    if args.json:
        print_json({"state": "finished", **vars(finished)})
        return 0
    took = f"{format_count(finished.tokens)} tokens in {format_seconds(finished.seconds)}"
    print(f"{run_dir}: {finished.step} steps, {took}")
    if finished.validation_loss is not None and finished.unigram_entropy is not None:
        told = f"validation loss {finished.validation_loss:.3f} nats"
        print(f"{told}; knowing only how often each token occurs would give {finished.unigram_entropy:.3f}")
    print(f"weights: {finished.checkpoint / 'model.safetensors'}")
    return 0
