"""Two plans side by side: which fields differ, what each costs, and which causes make up the difference.

A and B are run files, models of the catalog or Hugging Face config.json files. Without B it is A again, changed by
--set-b: trainledger compare run.toml --set-b recipe.activation_checkpointing=full
"""

from __future__ import annotations

import argparse

from trainledger.api.cost import compare
from trainledger.api.load import resolve
from trainledger.cli.arguments import (
    add_cluster,
    add_json,
    add_plot,
    check_plot_of,
    say_assumed,
    while_searching,
)
from trainledger.report.compare import document
from trainledger.report.show import show
from trainledger.spec.problem import InvalidInput, Problem


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", nargs="?", default="run.toml", help="the first plan (run.toml)")
    parser.add_argument("b", metavar="B", nargs="?", help="the second; absent = A again")
    for flag, whose in (("--set", "both"), ("--set-a", "A"), ("--set-b", "B")):
        parser.add_argument(
            flag, action="append", default=[], metavar="SECTION.FIELD=VALUE",
            help=f"change one field of {whose}; may be repeated",
        )  # fmt: skip
    add_cluster(parser)
    add_json(parser)
    add_plot(parser)


def execute(args: argparse.Namespace) -> int:
    check_plot_of(args)
    if args.b is None and not args.set_a and not args.set_b:
        rule = "there is nothing to compare with: name a second plan, or change this one with --set-b"
        raise InvalidInput([Problem("B", None, rule)])
    sides = [(args.a, args.set + args.set_a), (args.b or args.a, args.set + args.set_b)]
    progress = while_searching()
    a, b = (resolve(name, changes, progress=progress) for name, changes in sides)
    found = compare(a, b)
    for run in dict.fromkeys((found.a, found.b)):
        say_assumed(run)
    names = [" ".join([name, *changes]) for (name, _), changes in zip(sides, (args.set_a, args.set_b), strict=True)]
    show(document(found, names=names), as_json=args.json, plot=args.plot)
    return 0
