"""What a run will cost before it starts: parameters, FLOPs, memory by category, time and money.

RUN is a run file, or a model of the catalog under a default recipe (one full-length sequence, bf16 autocast).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from trainledger.cli.arguments import add_json, add_run, load_run, print_json

if TYPE_CHECKING:
    from trainledger.spec.run import Run


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--mfu", default="0.5", help="share of the peak for the napkin's days (0.5)")
    parser.add_argument(
        "--convention", default="dense", metavar="NAME",
        help="how model FLOPs and MFU are counted: 6nd, 6nd+attention, dense, causal or kernels (trainledger rules)",
    )  # fmt: skip
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    from trainledger.api import plan
    from trainledger.plan.mfu import read_mfu
    from trainledger.plan.plan import counted_by, of_one_step

    made = plan(run_or_model(args), mfu=read_mfu(args.mfu))
    if args.convention != made.convention:
        made = counted_by(made, args.convention)
    if not _is_file(args.run) and not _says_length(args):
        made = of_one_step(made)
    if args.json:
        from trainledger.plan.plan import to_json

        print_json(to_json(made))
    else:
        from trainledger.report.plan import text

        print(text(made))
    return 0


def run_or_model(args: argparse.Namespace) -> Run:
    """The run file, or a default run of a catalog model where ``args.run`` is the name of one."""
    if _is_file(args.run):
        return load_run(args)
    from trainledger import catalog
    from trainledger.api import kernels_of, load

    recipe: dict[str, Any] = {
        "seq_len": catalog.model(args.run)["max_seq_len"],
        "global_batch": 1,
        "precision": "bf16-mixed",
    }
    if not any(each.lstrip().startswith("recipe.tokens") for each in args.set):
        recipe["steps"] = 1
    run = load({"model": {"preset": args.run}, "recipe": recipe}, args.set)
    if run.model.attention_softcap is None and not run.model.attention_sinks:
        return run
    # PyTorch's own fused attention has neither capped scores nor sinks.
    recipe["attention"] = "flash" if kernels_of(run) != "cpu" else "math"
    return load({"model": {"preset": args.run}, "recipe": recipe}, args.set)


def _is_file(named: str) -> bool:
    """Whether a run file is named, even one that is not there; a name alone may be a model's."""
    import os

    return named.endswith(".toml") or os.sep in named or os.path.isfile(named)


def _says_length(args: argparse.Namespace) -> bool:
    return any(each.lstrip().startswith(("recipe.tokens", "recipe.steps")) for each in args.set)
