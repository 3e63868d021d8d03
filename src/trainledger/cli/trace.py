"""Account for one training step by running its code on fake tensors: nothing is computed, any size fits any machine.

RUN is a run file or a model of the catalog, whose trace is set beside the closed form; or your own code, as
package.module:build, a function (or class) that gives an nn.Module or a trainledger.TrainingStep; or, with --hf, a
Hugging Face config.json, whose class is built without weights. Only what is named is imported.

Exit code 1 where closed form and trace differ in parameters, matmul or attention FLOPs, or kept bytes, and where your
code could not be followed to its end.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainledger import catalog
from trainledger.api.load import resolve
from trainledger.cli import DONE, FAILED
from trainledger.cli.arguments import (
    RUN_OR_MODEL,
    add_count,
    add_json,
    add_output,
    add_plot,
    add_run,
    check_plot_of,
    say_assumed,
)
from trainledger.ledger.ledger import write_ledger
from trainledger.ledger.step import account
from trainledger.predict.step import on_device
from trainledger.report.memory_viz import write_memory_viz
from trainledger.report.show import show
from trainledger.report.table import wrapped
from trainledger.report.traced import LONGEST, SPLITS
from trainledger.spec.kernels import KERNELS, kernels_of_capability
from trainledger.spec.plain import check_target
from trainledger.spec.problem import InvalidInput, Problem

if TYPE_CHECKING:
    from trainledger.ledger.ledger import Ledger

_OF_CODE: dict[str, Any] = {
    # option: what it is without being given; a run file says these itself
    "input": [], "label": None, "loss": None, "step": None, "autocast": None, "dtype": None, "kernels": None,
    "device": None, "grad_accum": 1, "checkpointing": [], "first_step": False, "world_size": None, "rank": 0,
}  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser, help=f"{RUN_OR_MODEL}, or package.module:build")
    code = parser.add_argument_group("your own code")
    code.add_argument("--hf", metavar="CONFIG", help="a Hugging Face config.json: its class, without weights")
    code.add_argument(
        "--input", action="append", default=[], metavar="SHAPE",
        help="an input of the model, such as int64[8,2048] or labels=int64[8,2048]; may be repeated",
    )  # fmt: skip
    code.add_argument(
        "--loss", metavar="LOSS",
        help="a part of what the model returns (.loss, .1), package.module:function of it, mean, sum, or a loss of "
        "torch.nn.functional (the output itself or its .loss)",
    )  # fmt: skip
    code.add_argument("--label", metavar="SHAPE", help="what the loss sets the output against, such as int64[8,2048]")
    code.add_argument("--step", help="forward, backward, or an optimizer such as adamw-fused (adamw)")
    code.add_argument("--autocast", metavar="DTYPE", help="run forward under autocast, such as bf16")
    code.add_argument("--dtype", help="the format of what is built without one (fp32, or the configuration's)")
    code.add_argument("--kernels", help="whose: cpu, cuda, sm90, sm100 (cpu; the --device's)")
    code.add_argument(
        "--device", metavar="NAME", help="also the time of a step on a device of the catalog, and whether it fits there"
    )
    add_count(code, "--grad-accum", default=1, metavar="N", help="micro-batches in a step (1)")
    code.add_argument(
        "--checkpointing", action="append", default=[], metavar="PATHS",
        help="run modules again in backward, such as layers.*; may be repeated",
    )  # fmt: skip
    add_count(
        code, "--world-size", metavar="N",
        help="RUN is a program for torchrun: the step of one rank of N, with its collectives",
    )  # fmt: skip
    add_count(code, "--rank", least=0, default=0, metavar="R", help="which rank of the world (0)")
    code.add_argument("--first-step", action="store_true", help="the step that creates the optimizer's state")
    told = parser.add_argument_group("what is told")
    told.add_argument(
        "--blocks", choices=("auto", "once", "all"), default="auto",
        help="trace all equal blocks, or few and multiply (auto: few where there are 8 and no tensors are asked for)",
    )  # fmt: skip
    told.add_argument("--by", choices=SPLITS, help="split the FLOPs and bytes; by category: the most bytes of each")
    add_count(told, "--top", default=LONGEST, metavar="N", help=f"rows of a split ({LONGEST})")
    told.add_argument("--tensors", action="store_true", help="the tensors that make up the peak")
    add_output(
        told,
        "--memory-viz",
        suffix=".pickle",
        metavar="FILE",
        help="a snapshot for PyTorch's memory viewer (out.pickle)",
    )
    add_output(told, "-o", "--output", suffix=".json.gz", metavar="FILE", help="keep the traced ledger in a file")
    add_plot(parser)
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    for flag, file in (("--output", args.output), ("--memory-viz", args.memory_viz)):
        if file is not None:
            check_target(file, flag)
    check_plot_of(args)
    if args.blocks == "auto" and (args.tensors or args.memory_viz):
        args.blocks = "all"  # what is multiplied has no tensors one by one
    if args.hf is None and args.run.endswith(".py") and Path(args.run).is_file():
        module = Path(args.run).with_suffix("").as_posix().replace("/", ".")
        rule = "is a file of code, of which a function or class is traced by its name"
        raise InvalidInput([Problem("RUN", args.run, rule, f"{module}:build, or trainledger annotate {args.run}")])
    code = args.hf is not None or (":" in args.run and not Path(args.run).exists())
    if not code:
        return _trace_run(args)
    with _warnings_last():
        return _trace_code(args)


@contextmanager
def _warnings_last() -> Iterator[None]:
    """Have what code warns of told behind the result, in short and once each, or before what it failed of."""
    with warnings.catch_warnings(record=True) as heard:
        try:
            yield
        finally:
            if heard:
                from trainledger.trace.recorder.source_lines import shown_file

                sys.stdout.flush()
                told = (f"{each.category.__name__} in {shown_file(each.filename)}:{each.lineno}: {each.message}"
                        for each in heard)  # fmt: skip
                print("\n".join(("", *map(wrapped, dict.fromkeys(told)))), file=sys.stderr)


def _trace_code(args: argparse.Namespace) -> int:
    from trainledger.report.traced import document

    problems = []
    if args.set:
        rule = "changes a field of a run file, which code does not have"
        problems.append(Problem("--set", args.set[0], rule, "--input, --dtype, --step or --loss"))
    if args.rank and args.world_size is None:
        problems.append(Problem("--rank", args.rank, "is one of a world, whose size is missing", "--world-size 8"))
    if args.kernels not in (None, *KERNELS):
        rule = f"must be {', '.join(KERNELS[:-1])} or {KERNELS[-1]}"
        problems.append(Problem("--kernels", args.kernels, rule, "cuda"))
    elif args.device in catalog.device_names() and args.kernels is not None:
        own = kernels_of_capability(catalog.device(args.device).compute_capability)
        if args.kernels not in (own, "cuda"):  # an older PyTorch takes CUDA's on any
            problems.append(Problem("--kernels", args.kernels, f"are not those of --device {args.device}", own))
    if problems:
        raise InvalidInput(problems)
    device = None if args.device is None else catalog.device(args.device, "--device")
    args.kernels = args.kernels or ("cpu" if device is None else kernels_of_capability(device.compute_capability))
    from trainledger.trace.command import trace_named

    with redirect_stdout(sys.stderr):  # what the code prints is no part of the result
        asked = {name: getattr(args, name) for name in _OF_CODE if name != "device"}
        ledger, title = trace_named(args.run, hf=args.hf, blocks=args.blocks, **asked)
    _keep(args, ledger)
    timed = on_device(ledger, device) if device is not None and len(ledger) and not ledger.partial else None
    made = document(ledger, title, by=args.by or "", top=args.top, tensors=args.tensors, on_device=timed)
    show(made, as_json=args.json, plot=args.plot)
    return FAILED if ledger.partial else DONE


def _trace_run(args: argparse.Namespace) -> int:
    from trainledger.measure.step import rehearse
    from trainledger.report.agreement import agree, compare, document

    given = [name for name, value in _OF_CODE.items() if getattr(args, name) != value]
    if given:
        flag = "--" + given[0].replace("_", "-")
        rule = "is for your own code (package.module:build) or --hf; a run file says it itself"
        raise InvalidInput([Problem(flag, getattr(args, given[0]), rule)])
    run = resolve(args.run, args.set)
    say_assumed(run)
    if not run.layout.alone:
        rule = "the modules are traced on one device; of a layout the ranks are accounted for by plan and explain"
        raise InvalidInput([Problem("layout", None, f"{rule}; leave [layout] out here")])
    if args.by == "line":
        raise InvalidInput([Problem("--by", "line", "is told of your own code; the closed form has no lines", "path")])
    # Traced operation by operation, blocks and loss run eagerly: so does the closed form that is held against it.
    eager = replace(run, recipe=run.recipe.uncompiled)
    predicted, traced = account(eager), rehearse(eager, blocks=args.blocks)
    _keep(args, traced)
    made = document(run, predicted, traced, by=args.by or "", top=args.top, tensors=args.tensors)
    show(made, as_json=args.json, plot=args.plot)
    return DONE if agree(compare(predicted, traced)) else FAILED


def _keep(args: argparse.Namespace, ledger: Ledger) -> None:
    """Write the files that were asked for."""
    if args.output:
        write_ledger(ledger, args.output)
    if args.memory_viz:
        write_memory_viz(ledger, args.memory_viz)
