"""What a run will cost before it starts: parameters, FLOPs, memory by category, time and money.

RUN is a run file, or a model of the catalog under a default recipe (one full-length sequence, bf16 autocast).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from trainledger.cli.arguments import add_json, add_run, load_run, print_json

if TYPE_CHECKING:
    from trainledger.spec.run import Run


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--mfu", default="0.5", help="share of the peak for the napkin's days (0.5)")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    from trainledger.api import plan
    from trainledger.units import parse_number

    made = plan(run_or_model(args), mfu=parse_number(args.mfu))
    if args.json:
        from trainledger.plan.plan import to_json

        print_json(to_json(made))
    else:
        from trainledger.report.plan import text

        print(text(made))
    return 0


def run_or_model(args: argparse.Namespace) -> Run:
    """The run file, or a default run of a catalog model where ``args.run`` is the name of one."""
    import os

    if args.run.endswith(".toml") or os.path.exists(args.run):
        return load_run(args)
    from trainledger import catalog
    from trainledger.api import load

    recipe: dict[str, Any] = {
        "seq_len": catalog.model(args.run)["max_seq_len"],
        "global_batch": 1,
        "precision": "bf16-mixed",
    }
    if not any(each.startswith("recipe.tokens") for each in args.set):
        recipe["steps"] = 1
    return load({"model": {"preset": args.run}, "recipe": recipe}, args.set)
