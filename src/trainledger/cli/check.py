"""Fail where a target of trainledger.lock costs more than it did: parameters, FLOPs, kept and peak bytes, collectives.

TARGET names some of them; absent, all. Exit code 1 where one is more than its lock by more than its tolerance (or is
another target now), 2 where the lock does not fit the project.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trainledger.cli import DONE, FAILED
from trainledger.cli.arguments import add_json, while_waiting
from trainledger.cli.lock import add_lock
from trainledger.regression.check import check
from trainledger.regression.tolerance import read_flags
from trainledger.report.budget import checked
from trainledger.report.show import show


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="*", metavar="TARGET", help="what to check; absent, all")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="QUANTITY=TOLERANCE",
        help="how much more is no failure, such as peak=1%% or kept=64MB; comes before pyproject.toml's",
    )  # fmt: skip
    parser.add_argument("--tight", action="store_true", help="also fail where something is less than locked")
    add_lock(parser)
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    allowed = read_flags(args.allow)
    found = check(args.target, root=Path.cwd(), file=args.lock, allowed=allowed, say=while_waiting())
    show(checked(found, tight=args.tight), as_json=args.json)
    return FAILED if any(each.fails(tight=args.tight) for each in found) else DONE
