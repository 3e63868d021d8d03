"""What a run will cost before it starts: time, money, energy, memory by category, and what the time goes to.

RUN is a run file, or a model of the catalog or a Hugging Face config.json under a default recipe (one full-length
sequence, bf16 autocast; with layout=auto 4 million tokens in sequences of at most 8,192).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trainledger.cli.arguments import (
    RUN_OR_MODEL,
    add_cluster,
    add_json,
    add_plot,
    add_run,
    check_plot_of,
    load_run,
    while_searching,
)
from trainledger.cli.serving import add_serving, execute_serving, refuse_without_phase, run_to_serve

if TYPE_CHECKING:
    from trainledger.spec.run import Run


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser, help=RUN_OR_MODEL)
    add_cluster(parser)
    parser.add_argument("--mfu", default="0.5", help="share of the peak for the napkin's days (0.5)")
    parser.add_argument(
        "--convention", default="dense", metavar="NAME",
        help="how model FLOPs and MFU are counted: 6nd, 6nd+attention, dense, causal or kernels (trainledger rules)",
    )  # fmt: skip
    add_serving(parser)
    add_json(parser)
    add_plot(parser)


def execute(args: argparse.Namespace) -> int:
    if args.phase is not None:
        args.set.append("model.n_predict_ahead=0")  # what predicts further tokens is not served
        _refuse_code(args.run)
        return execute_serving(args, run_to_serve(args))
    refuse_without_phase(args)
    from trainledger.loaded import kernels_of, machine_of
    from trainledger.plan.plan import counted_by, make_plan, of_one_step, with_notes
    from trainledger.plan.quantity import checked_mfu

    check_plot_of(args)
    mfu, run = checked_mfu(args.mfu), run_or_model(args)
    made = make_plan(run, machine_of(run), backend=kernels_of(run), mfu=mfu)
    if args.convention != made.convention:
        made = counted_by(made, args.convention)
    if not says_length(args):
        made = of_one_step(made)
    made = with_notes(made, _notes_of_config(args))
    from trainledger.cli.taken import taken_by_default
    from trainledger.report.plan import document
    from trainledger.report.show import show

    defaults = taken_by_default(args, made.run) if args.json else ()
    show(
        document(made, defaults=defaults, found_layout=_found_layout(args, made.run)), as_json=args.json, plot=args.plot
    )
    return 0


def run_or_model(args: argparse.Namespace, *, search: bool = True) -> Run:
    """The run file, or a default run of a catalog model or config.json where ``args.run`` names one.

    With ``search`` off a layout that is to be found (layout=auto) is not searched for.
    """
    from trainledger.loaded import is_run_file, named_run, with_layout

    _refuse_code(args.run)
    if is_run_file(args.run):
        return load_run(args, search=search)
    run = named_run(args.run, args.set)
    if not run.layout.auto:
        return run
    from trainledger.cli.layouts import tell_batch
    from trainledger.spec.runfile import written

    tell_batch(run, args.set)
    if not search:
        return run
    return with_layout(run, written=written({}, args.set), progress=while_searching())


def _refuse_code(named: str) -> None:
    """Raises InvalidInput where code is named, of which `trace` makes the ledger."""
    from trainledger.loaded import is_run_file

    path, _, name = named.partition(":")
    if not path.endswith(".py") and (not name.isidentifier() or is_run_file(named)):
        return
    from trainledger.spec.problem import InvalidInput, Problem

    module = path.removesuffix(".py").removeprefix("./").replace("/", ".")
    if not all(each.isidentifier() for each in module.split(".")):
        module = "package.module"
    rule = "is code, where a run file or a model is expected; a step of code is accounted for and timed by trace"
    near = f"trainledger trace {module}:{name or 'build'} --device h100-sxm"
    raise InvalidInput([Problem("RUN", named, rule, near)])


def _found_layout(args: argparse.Namespace, run: Run) -> str:
    """The layout as it was found, to paste into the run file, where that asks for a search."""
    if run.layout.alone and run.recipe.micro_batch is None:  # one device whose rates are unknown: nothing to find
        return ""
    from trainledger.plan.layouts.result import as_toml

    return as_toml(run) if asks_for_layout(args) else ""


def asks_for_layout(args: argparse.Namespace) -> bool:
    """Whether a run file or its overrides ask for a search of the layout."""
    from trainledger import loaded

    if loaded.asks_for_layout(args.set):
        return True
    if not loaded.is_run_file(args.run):
        return False
    from trainledger.spec.runfile import read_table

    layout = read_table(args.run).get("layout")
    return layout == "auto" or (isinstance(layout, dict) and layout.get("auto") is True)


def _notes_of_config(args: argparse.Namespace) -> list[str]:
    """What the model's config.json says that no account holds."""
    from trainledger.loaded import config_notes, is_run_file

    if args.run.endswith(".json"):
        path = args.run
    elif is_run_file(args.run):
        from trainledger.spec.runfile import read_table

        path = read_table(args.run).get("model", {}).get("config")
    else:
        return []
    if path is None:
        return []
    return config_notes(path)


def says_length(args: argparse.Namespace) -> bool:
    """Whether somebody said how long the run is: its file, or an override of a model's default run."""
    from trainledger.loaded import is_run_file, said

    return is_run_file(args.run) or not {"recipe.tokens", "recipe.steps"}.isdisjoint(said(args.set))


def run_of_some_length(args: argparse.Namespace, *, search: bool = True) -> Run:
    """As `run_or_model`, a model alone with 20 tokens for each parameter (told on standard error)."""
    import sys

    run = run_or_model(args, search=search)
    if says_length(args):
        return run
    from dataclasses import replace

    from trainledger.ledger.model.parameters import parameters
    from trainledger.units import format_count

    tokens = 20 * parameters(run.model).active
    told = f"{format_count(tokens)} tokens, 20 for each parameter (Hoffmann et al. 2022)"
    print(f"Taken to train on {told}\n(--set recipe.tokens=... says another number)", file=sys.stderr)
    return replace(run, recipe=replace(run.recipe, steps=None, tokens=tokens))
