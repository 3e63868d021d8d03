"""The quickest ways to spread a run over devices: every layout is bounded, the best are accounted for.

RUN is a run file, or a model of the catalog or a Hugging Face config.json. Its own layout, micro-batch and activation
checkpointing are not looked at: they are what is searched for, unless --fix gives them a value. A model without a batch
gets one of about 4 million tokens, in sequences of at most 8,192. Exit code 130 where it was interrupted: what was
accounted for until then is ranked.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from trainledger.api.layout import why_no_layout
from trainledger.api.questions import layouts
from trainledger.cli import DONE, INTERRUPTED, WRONG_INPUT
from trainledger.cli.arguments import (
    RUN_OR_MODEL,
    add_cluster,
    add_count,
    add_json,
    add_plot,
    add_run,
    check_plot_of,
    error_json,
    print_json,
    say_assumed,
    while_searching,
)
from trainledger.plan.layouts.grid import FIELDS, KNOWN, read_fixed
from trainledger.report.layouts import document
from trainledger.report.show import show
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.runfile import value_of
from trainledger.units import NotAQuantity, parse_seconds

if TYPE_CHECKING:
    from trainledger.plan.layouts.result import Layouts


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser, help=RUN_OR_MODEL)
    add_cluster(parser)
    parser.add_argument(
        "--fix", action="append", default=[], metavar="NAME=VALUE",
        help="only layouts with this, such as tensor=8 or micro_batch=1; may be repeated",
    )  # fmt: skip
    add_count(parser, "--keep", most=1000, default=10, metavar="N", help="how many are ranked (10)")
    parser.add_argument(
        "--limit", default="30s", metavar="TIME", help="how long the best are accounted for at most (30s)"
    )
    add_json(parser)
    add_plot(parser)


def execute(args: argparse.Namespace) -> int:
    check_plot_of(args)
    fixed, limit = _fixed(args.fix), _seconds(args.limit)
    found = layouts(
        args.run, args.set, fixed=fixed, keep=args.keep, limit_seconds=limit, why=False, progress=while_searching()
    )
    say_assumed(found.run)
    if found.best is None:
        return _none(args, found, fixed)
    show(document(found), as_json=args.json, plot=args.plot)
    return INTERRUPTED if found.interrupted else DONE


def _none(args: argparse.Namespace, found: Layouts, fixed: dict[str, Any]) -> int:
    """Say why there is no layout, and what else would do: wrong input, as it is to a plan with layout=auto."""
    if found.interrupted:
        raise KeyboardInterrupt
    if not args.json:
        print(found, flush=True)
    error = InvalidInput([why_no_layout(found, fixed, progress=while_searching())])
    if not args.json:
        raise error
    print_json({**document(found).data(), **error_json(error)})
    print(error, file=sys.stderr)
    return WRONG_INPUT


def _fixed(words: list[str]) -> dict[str, Any]:
    """The values that axes are given, as `--fix` says them; raises InvalidInput."""
    said: dict[str, Any] = {}
    problems: list[Problem] = []
    for word in words:
        name, equals, text = word.partition("=")
        name = name.strip().rpartition(".")[2]
        if not equals or name not in FIELDS:
            rule = f"is written NAME=VALUE, with a name of {', '.join(FIELDS)}"
            problems.append(Problem("--fix", word, rule, nearest_text(name, FIELDS)))
        else:
            said[name] = value_of(KNOWN[name], text.strip())
    found = read_fixed(said, problems, "--fix ")
    if problems:
        raise InvalidInput(problems)
    return found


def _seconds(text: str) -> float:
    try:
        value = parse_seconds(text)
    except NotAQuantity as error:
        raise InvalidInput([Problem("--limit", text, error.rule, error.nearest)]) from None
    if not 0 <= value <= 10**6:
        raise InvalidInput([Problem("--limit", text, "must be between 0 s and a million seconds", "30s")])
    return float(value)
