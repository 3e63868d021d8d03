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

from trainledger.cli.arguments import (
    RUN_OR_MODEL,
    add_count,
    add_json,
    add_plot,
    add_run,
    check_plot_of,
    error_json,
    print_json,
    while_searching,
    write_plot_of,
)

if TYPE_CHECKING:
    from trainledger.plan.layouts.result import Layouts
    from trainledger.spec.run import Run


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser, help=RUN_OR_MODEL)
    parser.add_argument("--device", help="a device of the catalog; short for --set cluster.device=")
    parser.add_argument("--count", help="how many devices; short for --set cluster.count=")
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
    from trainledger.cli import DONE, INTERRUPTED
    from trainledger.cli.taken import taken_by_default
    from trainledger.questions import spread
    from trainledger.report.layouts import about, figures, text, to_json

    check_plot_of(args)
    fixed, limit = _fixed(args.fix), _seconds(args.limit)
    run = run_to_spread(args)
    found = spread(run, fixed=fixed, keep=args.keep, limit_seconds=limit, progress=while_searching())
    if found.best is None:
        return _none(args, found, fixed)
    if args.json:
        print_json(to_json(found, taken_by_default(args, run)))
    else:
        print(text(found))
    if args.plot is not None:
        write_plot_of(args, figures(found), f"Layouts of {found.run.model.name}", about(found))
    return INTERRUPTED if found.interrupted else DONE


def _none(args: argparse.Namespace, found: Layouts, fixed: dict[str, Any]) -> int:
    """Tell why there is no layout, and what else would do: wrong input, as it is to a plan with layout=auto."""
    from trainledger.cli import WRONG_INPUT
    from trainledger.cli.taken import taken_by_default
    from trainledger.loaded import why_no_layout
    from trainledger.report.layouts import text, to_json
    from trainledger.spec.problem import InvalidInput

    if found.interrupted:
        raise KeyboardInterrupt
    if not args.json:
        print(text(found), flush=True)
    error = InvalidInput([why_no_layout(found, fixed, progress=while_searching())])
    if not args.json:
        raise error
    print_json({**to_json(found, taken_by_default(args, found.run)), **error_json(error)})
    print(error, file=sys.stderr)
    return WRONG_INPUT


def run_to_spread(args: argparse.Namespace) -> Run:
    """The run whose layout is searched for; raises InvalidInput."""
    from trainledger import loaded

    said = [] if args.device is None else [f"cluster.device={args.device}"]
    said += [] if args.count is None else [f"cluster.count={args.count}"]
    given = [*said, *args.set, "layout=auto"]  # a layout of its own would be held against the count
    if loaded.is_run_file(args.run):
        return loaded.load_file(args.run, given, search=False)
    run = loaded.run_to_spread(args.run, given)
    tell_batch(run, given)
    return run


def tell_batch(run: Run, given: list[str]) -> None:
    """Say on standard error which batch and which shorter sequences `run_to_spread` took, where nobody gave them."""
    from trainledger.loaded import said
    from trainledger.units import counted, format_count

    recipe, longest = run.recipe, run.model.max_seq_len
    if "recipe.global_batch" not in said(given):
        tokens = f"{counted(recipe.global_batch, 'sequence')}, {format_count(recipe.tokens_per_step)} tokens"
        print(f"Taken to have {tokens}, in a step\n(--set recipe.global_batch=... says another)", file=sys.stderr)
    if "recipe.seq_len" not in said(given) and recipe.seq_len < longest:
        length = f"sequences of {recipe.seq_len:,} tokens, of the {longest:,} that the model takes"
        print(f"Taken to have {length}\n(--set recipe.seq_len={longest} takes all)", file=sys.stderr)


def _fixed(words: list[str]) -> dict[str, Any]:
    """The values that axes are given, as `--fix` says them; raises InvalidInput."""
    from trainledger.plan.layouts.grid import FIELDS, KNOWN, read_fixed
    from trainledger.spec.problem import InvalidInput, Problem, nearest_text
    from trainledger.spec.runfile import value_of

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
    from trainledger.spec.problem import InvalidInput, Problem
    from trainledger.units import NotAQuantity, parse_seconds

    try:
        value = parse_seconds(text)
    except NotAQuantity as error:
        raise InvalidInput([Problem("--limit", text, error.rule, error.nearest)]) from None
    if not 0 <= value <= 10**6:
        raise InvalidInput([Problem("--limit", text, "must be between 0 s and a million seconds", "30s")])
    return float(value)
