"""The largest model, the longest sequence, the largest micro-batch, the fewest devices and the least memory that fit.

RUN is a run file, or a model of the catalog or a Hugging Face config.json: then states are sharded over --count
devices, one sequence of at most 8,192 tokens at a time, unless --set says otherwise; with --set layout=auto it is the
run that `plan` takes.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trainledger.api.questions import fit
from trainledger.cli.arguments import (
    RUN_OR_MODEL,
    add_cluster,
    add_json,
    add_plot,
    add_run,
    check_plot_of,
    say_assumed,
    while_searching,
    while_waiting,
)
from trainledger.plan.fit import QUESTIONS
from trainledger.report.fit import document
from trainledger.report.show import show

if TYPE_CHECKING:
    from trainledger.plan.fit import Progress


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser, help=RUN_OR_MODEL)
    add_cluster(parser)
    parser.add_argument(
        "--of", action="append", metavar="QUESTION",
        help=f"only this question: {', '.join(QUESTIONS)}; may be repeated",
    )  # fmt: skip
    parser.add_argument("--as-is", action="store_true", help="the recipe as it is, without changes that save memory")
    add_json(parser)
    add_plot(parser)


def execute(args: argparse.Namespace) -> int:
    check_plot_of(args)
    found = fit(
        args.run, args.set, of=args.of, changes=not args.as_is, answered=_progress(), progress=while_searching()
    )  # fmt: skip
    say_assumed(found.run)
    show(document(found), as_json=args.json, plot=args.plot)
    return 0


def _progress() -> Progress:
    """Says on a terminal how far it is; nothing anywhere else."""
    say = while_waiting()
    return lambda done, of: say("" if done == of else f"{done} of {of} questions")
