"""What gives way first, second and third when one thing of a run grows.

Each edge is exact: the last value that holds and the next one that does not. Of a run file, a model of the catalog or a
Hugging Face config.json.
"""

from __future__ import annotations

import argparse
from typing import Any

from trainledger.cli.arguments import (
    RUN_OR_MODEL,
    add_cluster,
    add_json,
    add_plot,
    add_run,
    check_plot_of,
    print_json,
    while_waiting,
    write_plot_of,
)


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser, help=RUN_OR_MODEL)
    add_cluster(parser)
    parser.add_argument(
        "--along", action="append", metavar="AXIS",
        help="sequence, batch, width, depth, devices, dataset or vocabulary; may be repeated; absent = all",
    )  # fmt: skip
    parser.add_argument("--reach", default="64", metavar="TIMES", help="how often the planned value at most (64)")
    parser.add_argument("--most", default="3", metavar="N", help="how many breaks of each (3)")
    parser.add_argument(
        "--exposed", default="20%", metavar="SHARE",
        help="share of a step that communication, or the bubble, may take (20%%)",
    )  # fmt: skip
    parser.add_argument(
        "--lost", default="10%", metavar="SHARE", help="share of a run that checkpoints and failures may take (10%%)"
    )
    parser.add_argument("--unique-tokens", metavar="N", help='tokens that the dataset has, such as "15T"')
    add_json(parser)
    add_plot(parser)


def execute(args: argparse.Namespace) -> int:
    from trainledger.cli.plan import run_of_some_length
    from trainledger.plan.breaks import to_json
    from trainledger.questions import breaks
    from trainledger.report.breaks import figures, text

    check_plot_of(args)
    say = while_waiting()
    asked = read_options(args)
    found = breaks(run_of_some_length(args), along=args.along, **asked, say=say)
    say("")
    if args.json:
        print_json(to_json(found))
    else:
        print(text(found))
    write_plot_of(args, figures(found), f"What gives way when {found.run.model.name} grows")
    return 0


def read_options(args: argparse.Namespace) -> dict[str, Any]:
    """The numbers among the arguments; raises InvalidInput with every problem."""
    from trainledger.spec.problem import InvalidInput, Problem
    from trainledger.units import NotAQuantity, parse_count, parse_number

    problems: list[Problem] = []
    found: dict[str, Any] = {}
    for name, parse, least, most in (
        ("reach", parse_count, 2, 10**6), ("most", parse_count, 1, 20), ("exposed", parse_number, 0, 1),
        ("lost", parse_number, 0, 1), ("unique_tokens", parse_count, 1, 10**18),
    ):  # fmt: skip
        given = getattr(args, name)
        if given is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        try:
            value = parse(given)
        except NotAQuantity as error:
            problems.append(Problem(flag, given, error.rule, error.nearest))
            continue
        if not least <= value <= most:
            nearest = least if value < least else most
            problems.append(Problem(flag, given, f"must be between {least} and {most:g}", nearest))
        found[name] = value
    if problems:
        raise InvalidInput(problems)
    return found
