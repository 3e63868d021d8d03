"""Rules of thumb beside the ledger of a run, each with its error and what it leaves out; and the FLOPs of a step by
each convention in use."""

from __future__ import annotations

import argparse

from trainledger.api.cost import plan
from trainledger.api.machine import kernels_of
from trainledger.cli.arguments import (
    RUN_OR_MODEL,
    add_cluster,
    add_json,
    add_run,
    say_assumed,
    while_searching,
)
from trainledger.report.rules import document
from trainledger.report.show import show


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser, help=RUN_OR_MODEL)
    add_cluster(parser)
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    made = plan(args.run, args.set, progress=while_searching())
    say_assumed(made.run)
    show(document(made, kernels_of(made.run)), as_json=args.json)
    return 0
