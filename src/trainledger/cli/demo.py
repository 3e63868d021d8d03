"""The whole loop on a small run: measure this machine, forecast, train on real text, sample, reconcile.

About four minutes on two CPU cores. A demo that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

from trainledger.api.cost import plan
from trainledger.api.load import load
from trainledger.api.machine import machine_of
from trainledger.cli.arguments import add_json, print_json
from trainledger.cli.measure import measure_and_keep
from trainledger.cli.sample import continue_text, visible
from trainledger.cli.train import print_result, train_and_reconcile
from trainledger.spec.problem import printable
from trainledger.spec.runfile import run_name

if TYPE_CHECKING:
    from trainledger.spec.run import Run

PROMPT = "def read(self, path):\n"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="change one field")
    parser.add_argument("--dir", default="runs", metavar="DIR", help="where the runs are (runs)")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    with as_file(files("trainledger.cli") / "demo.toml") as path:
        run = load(path, args.set)
    run_dir = Path(args.dir) / run_name(run)
    say = _silent if args.json else _heading
    _measure_once(run, say)
    if not args.json:
        say("What it will cost")
        print(plan(run))
        say("Training it")
    code, result = train_and_reconcile(run, run_dir, resume=run_dir.exists())
    if code:
        return code
    written = _sample(run_dir)
    if args.json:
        print_json({**result, "sample": written})
        return 0

    print_result(result)
    say("What the model writes")
    print(written)
    say("What was forecast, and what happened")
    print(result["reconciliation_text"])
    print(printable(f"\nWith figures, in one file that opens offline: {result['html']}"))
    return 0


def _measure_once(run: Run, say: _Say) -> None:
    """A calibration of this machine, if there is none yet."""
    if machine_of(run) is not None:
        return
    say("Measuring this machine (half a minute, once)")

    calibration, path = measure_and_keep(run.cluster.backend)
    print(printable(f"{calibration.title}, kept in {path}"), file=sys.stderr)


def _sample(run_dir: Path) -> str:
    written, _ = continue_text(run_dir, PROMPT, tokens=160, temperature=0.7, top_k=40, seed=0)
    return visible(PROMPT + written)


def _heading(title: str) -> None:
    print(f"\n== {title} ==\n", flush=True)


def _silent(title: str) -> None:
    pass


if TYPE_CHECKING:
    from collections.abc import Callable

    _Say = Callable[[str], None]
