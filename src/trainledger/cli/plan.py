"""What a run will cost before it starts: time, money, energy, memory by category, and what the time goes to.

RUN is a run file, or a model of the catalog or a Hugging Face config.json under a default recipe: one full-length
sequence in bf16 autocast, or on several devices 4 million tokens in sequences of at most 8,192 and the layout that a
search finds. Exit code 2 where the devices cannot share the run.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from trainledger.api.cost import plan, why_impossible
from trainledger.cli import DONE, WRONG_INPUT
from trainledger.cli.arguments import (
    RUN_OR_MODEL,
    add_cluster,
    add_count,
    add_json,
    add_plot,
    add_run,
    check_plot_of,
    say_assumed,
    while_searching,
)
from trainledger.report.plan import document
from trainledger.report.show import show
from trainledger.report.table import wrapped
from trainledger.spec.problem import InvalidInput, Problem

SERVING = {
    "batch": "sequences at once (1)",
    "context": "tokens of each sequence (recipe.seq_len)",
    "weights": "format of the weights: bf16, int8, int4, fp8, nf4, mxfp4 and others (that of --compute)",
    "cache": "format of keys and values: bf16, fp8, int8, int4 (that of --compute)",
    "compute": "format of matmuls and of what is not quantized: bf16, fp16, fp32 (bf16)",
    "quantized": "which matrices have the format of the weights: linear or experts (linear)",
}
TRAINING = {"mfu": "0.5", "convention": "dense"}


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser, help=RUN_OR_MODEL)
    add_cluster(parser)
    parser.add_argument("--mfu", default=TRAINING["mfu"], help="share of the peak for the napkin's days (0.5, or 50%%)")
    parser.add_argument(
        "--convention", default=TRAINING["convention"], metavar="NAME",
        help="how model FLOPs and MFU are counted: 6nd, 6nd+attention, dense, causal or kernels (trainledger rules)",
    )  # fmt: skip
    group = parser.add_argument_group("a trained model, served")
    group.add_argument("--phase", help="prefill or decode: one forward of the model instead of training")
    for name, help in SERVING.items():
        if name in ("batch", "context"):
            add_count(group, f"--{name}", metavar="N", help=help)
        else:
            group.add_argument(f"--{name}", help=help)
    add_json(parser)
    add_plot(parser)


def execute(args: argparse.Namespace) -> int:
    check_plot_of(args)
    if args.phase is not None:
        return _served(args)
    _refuse(args, dict.fromkeys(SERVING), "is for a served model; give --phase too", "--phase decode")
    made = plan(args.run, args.set, mfu=args.mfu, convention=args.convention, progress=while_searching())
    say_assumed(made.run)
    show(document(made), as_json=args.json, plot=args.plot)
    problem = why_impossible(made)
    if problem is None:
        return DONE
    print(wrapped(str(problem)), file=sys.stderr)
    return WRONG_INPUT


def _served(args: argparse.Namespace) -> int:
    """One forward of the model, of which modules that predict further tokens are no part."""
    from trainledger.api.serving import inference
    from trainledger.report import serving

    _refuse(args, TRAINING, "is for training; a served model has no MFU: leave it out")
    given: dict[str, Any] = {name: getattr(args, name) for name in SERVING if getattr(args, name) is not None}
    served = inference(args.run, args.set, phase=args.phase, **given)
    show(serving.document(served), as_json=args.json, plot=args.plot)
    return 0


def _refuse(args: argparse.Namespace, usual: dict[str, Any], rule: str, nearest: str | None = None) -> None:
    """Raise `InvalidInput` where one of the flags is given."""
    given = {f"--{name}": getattr(args, name) for name, each in usual.items() if getattr(args, name) != each}
    if given:
        raise InvalidInput([Problem(flag, value, rule, nearest) for flag, value in given.items()])
