"""The largest model, the longest sequence, the largest micro-batch, the fewest devices and the least memory that fit.

RUN is a run file, or a model of the catalog or a Hugging Face config.json: then states are sharded over --count
devices, one sequence of at most 8,192 tokens at a time, unless --set says otherwise; with --set layout=auto it is the
run that `plan` takes.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from trainledger.cli.arguments import (
    RUN_OR_MODEL,
    add_count,
    add_json,
    add_plot,
    add_run,
    check_plot_of,
    print_json,
    while_waiting,
    write_plot_of,
)
from trainledger.plan.fit import QUESTIONS
from trainledger.units import parse_count

if TYPE_CHECKING:
    from trainledger.plan.fit import Progress
    from trainledger.spec.run import Run

_OTHER_AXES = tuple(f"layout.{axis}" for axis in ("replicate", "context", "tensor", "pipeline"))


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser, help=RUN_OR_MODEL)
    parser.add_argument("--device", help="a device of the catalog, or this-machine; short for --set cluster.device=")
    add_count(
        parser, "--count", most=10**7, metavar="COUNT",
        help="how many devices; of a named model, also how many share its states",
    )  # fmt: skip
    parser.add_argument(
        "--of", action="append", metavar="QUESTION",
        help=f"only this question: {', '.join(QUESTIONS)}; may be repeated",
    )  # fmt: skip
    parser.add_argument("--as-is", action="store_true", help="the recipe as it is, without changes that save memory")
    add_json(parser)
    add_plot(parser)


def execute(args: argparse.Namespace) -> int:
    from trainledger.cli.taken import taken_by_default
    from trainledger.plan.fit import to_json
    from trainledger.questions import fit

    check_plot_of(args)
    found = fit(run_to_fit(args), of=args.of, changes=not args.as_is, progress=_progress())
    if args.json:
        print_json(to_json(found, (*args.taken, *taken_by_default(args, found.run))))
    else:
        from trainledger.report.fit import text

        print(text(found))
    if args.plot is not None:
        from trainledger.report.fit import about, figures

        write_plot_of(args, figures(found), "What fits", about(found))
    return 0


def run_to_fit(args: argparse.Namespace) -> Run:
    """The run file, or a model spread over the devices that are named; raises InvalidInput.

    ``args.taken`` are then the overrides that it was given and nobody said.
    """
    from trainledger.cli.plan import asks_for_layout, run_or_model
    from trainledger.loaded import is_run_file

    said = [] if args.device is None else [f"cluster.device={args.device}"]
    if args.count is not None:
        said.append(f"cluster.count={args.count}")
    taken = [] if is_run_file(args.run) or asks_for_layout(args) else _taken(args)
    args.set, args.taken = [*said, *taken, *args.set], taken
    run = run_or_model(args)
    if taken:
        _tell_taken(taken)
    return run


def _devices(text: str) -> int:
    """The devices that `--set` says; one where that is no number (loading the run says so)."""
    try:
        return max(1, parse_count(text))
    except ValueError:
        return 1


def _taken(args: argparse.Namespace) -> list[str]:
    """What a model is asked about where `--set` does not say it."""
    from trainledger.loaded import said

    given = said(args.set)
    count = args.count or _devices(given.get("cluster.count", "1"))
    taken = [f"recipe.seq_len={_seq_len(args.run)}", "recipe.micro_batch=1", f"recipe.global_batch={2 * count}"]
    if count > 1:
        taken.append("recipe.precision=bf16-sharded")
        if not any(name.startswith(_OTHER_AXES) for name in given):
            taken.append(f"layout.shard={count}")
    return [each for each in taken if each.partition("=")[0] not in given]


def _tell_taken(taken: list[str]) -> None:
    """Say on standard error what makes it another run than that of `plan`, which takes one device."""
    from trainledger.report.table import wrapped

    lines = " ".join(f"--set {each}" for each in taken)
    print(wrapped(f"Taken to have {lines}"), "(with these `plan` is about the same run)", sep="\n", file=sys.stderr)


def _seq_len(named: str) -> int:
    from trainledger.catalog import model
    from trainledger.loaded import TRAINED_LENGTH, config_fields

    fields = config_fields(named) if named.endswith(".json") else model(named, "RUN")
    return min(int(fields["max_seq_len"]), TRAINED_LENGTH)


def _progress() -> Progress:
    """Says on a terminal how far it is; nothing anywhere else."""
    say = while_waiting()
    return lambda done, of: say("" if done == of else f"{done} of {of} questions")
