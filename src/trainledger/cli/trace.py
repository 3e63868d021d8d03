"""Trace one optimizer step of a run's real model on fake tensors, beside the closed form.

RUN is a run file, or a model of the catalog under a default recipe. Nothing is computed: any size fits any machine.
Exit code 1 where the two differ in parameters, matmul or attention FLOPs, or kept bytes.
"""

from __future__ import annotations

import argparse

from trainledger.cli.arguments import RUN_OR_MODEL, add_json, add_run, print_json
from trainledger.report.agreement import SPLITS


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser, help=RUN_OR_MODEL)
    parser.add_argument("--by", choices=SPLITS, help="also split the FLOPs; by category: the most bytes of each")
    parser.add_argument("-o", "--output", metavar="FILE", help="also keep the traced ledger in a file")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    from trainledger.cli import DONE, FAILED
    from trainledger.cli.plan import run_or_model
    from trainledger.ledger.step import account
    from trainledger.report.agreement import agree, compare, split, text, to_json

    run = run_or_model(args)
    if not run.layout.alone:
        from trainledger.spec.problem import InvalidInput, Problem

        rule = "the modules are traced on one device; of a layout the ranks are accounted for by plan and explain"
        raise InvalidInput([Problem("layout", None, f"{rule}; leave [layout] out here")])
    if args.output is not None:
        from trainledger.spec.plain import check_target

        check_target(args.output, "--output")
    from trainledger.measure.step import rehearse

    predicted, traced = account(run), rehearse(run)
    rows = compare(predicted, traced)
    parts = split(predicted, traced, args.by) if args.by else []
    if args.output:
        from trainledger.ledger.store import write_ledger

        write_ledger(traced, args.output)
    uncounted = dict(traced.uncounted)
    if args.json:
        told = {"equal": agree(rows), "rows": to_json(rows), "operations": len(traced), "uncounted": uncounted}
        print_json({**told, "by": to_json(parts), "output": args.output})
    else:
        print(f"One optimizer step of {run.model.name}: {len(traced):,} operations traced\n")
        print(text(rows))
        if parts:
            print("\n" + text(parts, args.by))
        if uncounted:
            print("\nNot counted: " + ", ".join(f"{name} ({times} times)" for name, times in uncounted.items()))
        if not agree(rows):
            print("\nThe two differ where they must not: one of them is wrong about this model.")
    return DONE if agree(rows) else FAILED
