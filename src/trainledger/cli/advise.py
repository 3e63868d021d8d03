"""What to change about a run, ranked by what it gains in time, or in memory where it does not fit.

Every change is made and predicted; each is told with its --set line to paste, and whether it changes what is trained.
RUN is a run file, a model of the catalog or a Hugging Face config.json.
"""

from __future__ import annotations

import argparse

from trainledger.api.questions import advise
from trainledger.cli.arguments import (
    RUN_OR_MODEL,
    add_cluster,
    add_count,
    add_json,
    add_plot,
    add_run,
    check_plot_of,
    say_assumed,
    while_searching,
    while_waiting,
)
from trainledger.report.advise import document
from trainledger.report.show import show


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser, help=RUN_OR_MODEL)
    add_cluster(parser)
    parser.add_argument("--goal", metavar="GOAL", help="time or memory; absent = memory where the run does not fit")
    add_count(
        parser, "--together", least=0, most=10, default=3, metavar="N", help="how many changes to combine at most (3)"
    )  # fmt: skip
    parser.add_argument("--any-result", action="store_true", help="combine also what changes what is trained")
    add_count(parser, "--most", most=1000, default=10, metavar="N", help="how many of each kind to print (10)")
    add_json(parser)
    add_plot(parser)


def execute(args: argparse.Namespace) -> int:
    check_plot_of(args)
    say = while_waiting()
    advice = advise(
        args.run, args.set, goal=args.goal, together=args.together, any_result=args.any_result, say=say,
        progress=while_searching(),
    )  # fmt: skip
    say("")
    say_assumed(advice.run)
    show(document(advice, most=args.most), as_json=args.json, plot=args.plot)
    return 0
