"""Rules of thumb beside the ledger of a run, each with its error and what it leaves out; and the FLOPs of a step by
each convention in use."""

from __future__ import annotations

import argparse

from trainledger.cli.arguments import (
    RUN_OR_MODEL,
    add_cluster,
    add_json,
    add_run,
    print_json,
    say_assumed,
    while_searching,
)


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser, help=RUN_OR_MODEL)
    add_cluster(parser)
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    from trainledger.api.cost import plan
    from trainledger.api.machine import kernels_of
    from trainledger.ledger.conventions import CONVENTIONS
    from trainledger.plan import in_json
    from trainledger.plan.rules_of_thumb_error import step_facts

    made = plan(args.run, args.set, progress=while_searching())
    say_assumed(made.run)
    counted = {name: each.flops(made.run, made.ledger) for name, each in CONVENTIONS.items()}
    if args.json:
        counts = [
            {"name": name, "formula": each.formula, "source": each.source, "flops": counted[name]}
            for name, each in CONVENTIONS.items()
        ]
        rows = [{**vars(each), "error": each.error} for each in made.rules]
        facts = [vars(each) for each in step_facts(made.run, made.ledger)]
        print_json({
            "run": in_json.run(made.run), "rules_of_thumb": rows, "step": facts,
            "conventions": counts, "tokens": made.ledger.tokens,
        })  # fmt: skip
        return 0
    from trainledger.report.heading import heading
    from trainledger.report.rules import conventions, facts_of_step, rules

    print(heading(made.run, kernels_of(made.run)) + "\n")
    print(rules(made.rules))
    told = step_facts(made.run, made.ledger)
    if told:
        print("\n" + facts_of_step(told))
    print()
    print(conventions(CONVENTIONS.values(), counted, made.ledger.tokens))
    return 0
