"""What breaks first, second and third when one size of a run grows.

Each edge is exact: the last value that holds and the next one that does not (a vocabulary grows by 128 rows for each
tensor rank). With --set layout=auto the layout follows the size, on a grid of values. Of a run file, a model of the
catalog or a Hugging Face config.json.
"""

from __future__ import annotations

import argparse

from trainledger.api.questions import breaks
from trainledger.cli.arguments import (
    RUN_OR_MODEL,
    Quantity,
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
from trainledger.report.breaks import document
from trainledger.report.show import show
from trainledger.units import parse_number


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser, help=RUN_OR_MODEL)
    add_cluster(parser)
    parser.add_argument(
        "--along", action="append", metavar="AXIS",
        help="sequence, batch, width, depth, devices, dataset or vocabulary; may be repeated; absent = all",
    )  # fmt: skip
    add_count(
        parser, "--reach", least=2, most=10**6, default=64, metavar="TIMES",
        help="how often the planned value at most (64)",
    )  # fmt: skip
    add_count(parser, "--most", most=20, default=3, metavar="N", help="how many breaks of each (3)")
    parser.add_argument(
        "--exposed", action=Quantity, parse=parse_number, least=0, most=1, default=0.2, metavar="SHARE",
        help="share of a step that communication, or the bubble, may take (20%%)",
    )  # fmt: skip
    parser.add_argument(
        "--lost", action=Quantity, parse=parse_number, least=0, most=1, default=0.1, metavar="SHARE",
        help="share of a run that checkpoints and failures may take (10%%)",
    )  # fmt: skip
    parser.add_argument(
        "--keep-batch", action="store_true",
        help="longer sequences are as many in a step; absent: fewer, so that a step keeps its tokens",
    )  # fmt: skip
    add_count(parser, "--unique-tokens", metavar="N", help='tokens that the dataset has, such as "15T"')
    add_json(parser)
    add_plot(parser)


def execute(args: argparse.Namespace) -> int:
    check_plot_of(args)
    say = while_waiting()
    found = breaks(
        args.run,
        args.set,
        along=args.along,
        reach=args.reach,
        most=args.most,
        exposed=args.exposed,
        lost=args.lost,
        unique_tokens=args.unique_tokens,
        keep_tokens=not args.keep_batch,
        say=say,
        progress=while_searching(),
    )
    say("")
    say_assumed(found.run)
    show(document(found), as_json=args.json, plot=args.plot)
    return 0
