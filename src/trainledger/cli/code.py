"""Verbs of your own code: its step traced, its lines annotated, its costs locked and checked."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainledger import catalog
from trainledger.answers.pages import agreement, traced
from trainledger.answers.pages import annotate as annotated
from trainledger.answers.pages.memory_viz import write_memory_viz
from trainledger.answers.pages.traced import LONGEST, SPLITS
from trainledger.cli.arguments import (
    DONE,
    FAILED,
    INTERRUPTED,
    JSON,
    PLOT,
    RUN_OR_MODEL,
    SET,
    Outcome,
    count,
    flag,
    group,
    option,
    output,
    run_file,
    takes,
)
from trainledger.cli.asking import run_asked, say
from trainledger.forecast.predict.step import on_device
from trainledger.ledger.ledger import Ledger, write_ledger
from trainledger.ledger.step import account
from trainledger.report.html import parts, whole_page
from trainledger.spec.device import KERNELS, kernels_of_capability
from trainledger.spec.plain import replace_file
from trainledger.spec.problem import InvalidInput, Problem

TERMINATED = 143  # 128 and the number of SIGTERM, as a shell has it
_NARROWEST = 60  # characters of an annotated line

_ASSUME = option(
    "--assume NAME=AMOUNT",
    "how many elements nonzero, torch.where and x[mask] find: a share or a count, such as nonzero=1/8, or for one line "
    "nonzero@model.py:14=1/8; may be repeated (all of them)",
    action="append",
)
_OF_CODE = group(
    "your own code",
    option("--hf CONFIG", "a Hugging Face config.json: its class, without weights"),
    option(
        "--input SHAPE",
        "an input of the model, such as int64[8,2048] or labels=int64[8,2048]; may be repeated",
        action="append",
    ),
    option(
        "--loss LOSS",
        "a part of what the model returns (.loss, .1), package.module:function of it, mean, sum, or a loss of "
        "torch.nn.functional (the output itself or its .loss)",
    ),
    option("--label SHAPE", "what the loss compares the output with, such as int64[8,2048]"),
    option("--step", "forward, backward, or an optimizer such as adamw-fused (adamw)"),
    option("--autocast DTYPE", "run forward under autocast, such as bf16"),
    option("--dtype", "the format of what is built without one (fp32, or the configuration's)"),
    option("--kernels", "whose: cpu, cuda, sm90, sm100 (cpu; the --device's)"),
    option("--device NAME", "also the time of a step on a device of the catalog, and whether it fits there"),
    count("--grad-accum N", "micro-batches in a step (1)"),
    option(
        "--checkpointing PATHS", "recompute modules in backward, such as layers.*; may be repeated", action="append"
    ),
    count("--world-size N", "RUN is a program for torchrun: the step of one rank of N, with its collectives"),
    option("--args ARGS", 'arguments of a script, in one text, such as --args "--batch_size 8"'),
    count("--rank R", "which rank of the world (0)", least=0),
    flag("--first-step", "the step that creates the optimizer's state"),
    _ASSUME,
)
_OUTPUT = group(
    "output",
    option(
        "--blocks",
        "trace all equal blocks, or few and multiply (auto: few where there are 8 and no --tensors)",
        choices=("auto", "once", "all"),
        default="auto",
    ),
    option("--by", "split the FLOPs and bytes; by category: the most bytes of each", choices=SPLITS, default=""),
    count("--top N", f"rows of a split ({LONGEST})", default=LONGEST),
    flag("--tensors", "the tensors that make up the peak"),
    output("--memory-viz FILE", "a snapshot for PyTorch's memory viewer (out.pickle)", suffix=".pickle"),
    output("-o --output FILE", "write the traced ledger to a file", suffix=".json.gz"),
)


@takes(run_file(f"{RUN_OR_MODEL}, or package.module:build"), SET, _OF_CODE, _OUTPUT, PLOT)
def trace(args: Namespace) -> Outcome:
    """Account for one training step by running its code on fake tensors: nothing is computed, every size fits here.

    RUN is a run file or a model of the catalog, whose trace is compared with the closed form; or your own code, as
    package.module:build, a function (or class) that makes an nn.Module or a trainledger.TrainingStep; or, with --hf, a
    Hugging Face config.json, whose class is built without weights. Only what is named is imported. With --world-size it
    may be a script, run as torchrun would run it (train.py).

    Exit code 1 where closed form and trace differ in parameters, matmul or attention FLOPs, or kept bytes, and where
    your code could not be followed to its end.
    """
    if args.blocks == "auto" and (args.tensors or args.memory_viz):
        args.blocks = "all"  # what is multiplied has no tensors one by one
    given = _OF_CODE.given(args)
    is_script = "hf" not in args and args.run.endswith(".py") and Path(args.run).is_file()
    if is_script and "world_size" not in args:
        module = Path(args.run).with_suffix("").as_posix().replace("/", ".")
        rule = "is a file of code, of which a function or class is traced by its name, or with --world-size a rank"
        raise InvalidInput([Problem("RUN", args.run, rule, f"{module}:build, or trainledger annotate {args.run}")])
    if "hf" not in args and not is_script and (":" not in args.run or Path(args.run).exists()):
        return _trace_run(args, given)
    with warnings.catch_warnings(record=True) as caught:
        try:
            made = _trace_code(args, given)
        except BaseException:
            for each in _heard(caught):
                say(each, wrap=True)
            raise
    return replace(made, remarks=_heard(caught))


def _heard(caught: list[warnings.WarningMessage]) -> tuple[str, ...]:
    """What code warned of, shortened and once each."""
    from trainledger.trace.recorder.source_lines import shown_file

    texts = (
        f"{each.category.__name__} in {shown_file(each.filename)}:{each.lineno}: {each.message}" for each in caught
    )
    return ("", *dict.fromkeys(texts)) if caught else ()


def _trace_code(args: Namespace, given: dict[str, Any]) -> Outcome:
    problems = []
    if args.set:
        rule = "changes a field of a run file, which code does not have"
        problems.append(Problem("--set", args.set[0], rule, "--input, --dtype, --step or --loss"))
    if given.get("rank") and "world_size" not in given:
        problems.append(
            Problem("--rank", given["rank"], "is a rank of a world whose size is missing", "--world-size 8")
        )
    name, kernels = given.pop("device", None), given.get("kernels")
    if kernels not in (None, *KERNELS):
        rule = f"must be {', '.join(KERNELS[:-1])} or {KERNELS[-1]}"
        problems.append(Problem("--kernels", kernels, rule, "cuda"))
    elif name in catalog.device_names() and kernels is not None:
        own = kernels_of_capability(catalog.device(name).compute_capability)
        if kernels not in (own, "cuda"):  # an older PyTorch has CUDA's kernels alone, on any device
            problems.append(Problem("--kernels", kernels, f"are not those of --device {name}", own))
    if problems:
        raise InvalidInput(problems)
    device = None if name is None else catalog.device(name, "--device")
    if kernels is None:
        given["kernels"] = "cpu" if device is None else kernels_of_capability(device.compute_capability)
    from trainledger.trace.command import trace_named

    with redirect_stdout(sys.stderr):  # what the code prints is no part of the result
        ledger, title = trace_named(args.run, blocks=args.blocks, **given)
    _write(args, ledger)
    timed = on_device(ledger, device) if device is not None and len(ledger) and not ledger.partial else None
    made = traced.page(ledger, title, by=args.by, top=args.top, tensors=args.tensors, on_device=timed)
    return Outcome(made, FAILED if ledger.partial else DONE)


def _trace_run(args: Namespace, given: dict[str, Any]) -> Outcome:
    from trainledger.observe.measure.step import rehearse

    if given:
        name = next(iter(given))
        rule = "is for your own code (package.module:build) or --hf; a run file says it itself"
        raise InvalidInput([Problem("--" + name.replace("_", "-"), given[name], rule)])
    run = run_asked(args)
    if not run.layout.alone:
        rule = "the modules are traced on one device; of a layout the ranks are accounted for by plan and explain"
        raise InvalidInput([Problem("layout", None, f"{rule}; leave [layout] out here")])
    if args.by == "line":
        raise InvalidInput([Problem("--by", "line", "is of your own code; the closed form has no lines", "path")])
    # Traced operation by operation, blocks and loss run eagerly: so does the closed form that it is compared with.
    eager = replace(run, recipe=run.recipe.uncompiled)
    predicted, found = account(eager), rehearse(eager, blocks=args.blocks)
    _write(args, found)
    made = agreement.page(run, predicted, found, by=args.by, top=args.top, tensors=args.tensors)
    return Outcome(made, DONE if agreement.agree(agreement.compare(predicted, found)) else FAILED)


def _write(args: Namespace, ledger: Ledger) -> None:
    """Write the files that were asked for."""
    if args.output:
        write_ledger(ledger, args.output)
    if args.memory_viz:
        write_memory_viz(ledger, args.memory_viz)


@takes(
    option("script SCRIPT", "the file to run, such as train.py"),
    option("args ARGS", "arguments of the script", nargs=argparse.REMAINDER),
    flag("--fake", "on fake tensors: of any size, nothing is computed"),
    option("--device cuda", "let a script for one GPU run without any: its tensors pass for the GPU's"),
    count("--steps N", "stop after N optimizer steps"),
    option(
        "--files GLOB",
        "whose lines are shown, in addition to the script's; may be repeated (else all modules in its directory)",
        action="append",
    ),
    _ASSUME,
    flag("--shapes", "also the shapes and strides that each line makes"),
    flag("--per-run", "divide by how often each line ran"),
    flag("--busy", "only lines that do something to tensors"),
    count("--width N", "characters to a line (the terminal's, or 80)", least=_NARROWEST, default=0),
    output("--html FILE", "also write the annotation as a page", suffix=".html"),
    usage="[options] SCRIPT [ARGS ...]",
)
def annotate(args: Namespace) -> Outcome:
    """Run a script under the tracer and print what each of its lines costs.

    SCRIPT is run as Python would run it, with the ARGS after its name. What it prints goes to standard error, the
    annotation to standard output. Options of trainledger come before the script's name. Exit code 1 where the script
    failed, 130 where it was interrupted, 143 where SIGTERM ended it: what ran until then is reported all the same.
    """
    from trainledger.trace.annotate.annotate import annotate as run_annotated
    from trainledger.trace.script import compiled

    compiled(args.script)  # what is wrong with its name or its text is said before anything else happens
    given = {
        name: vars(args)[name] for name in ("fake", "device", "files", "steps", "shapes", "assume") if name in args
    }
    with _output_aside():
        found = run_annotated(args.script, args.args, **given)
    found = replace(found, notes=(*found.notes, *_misplaced(args.args, found.outcome)))
    remarks: tuple[str, ...] = ()
    if args.html is not None:
        whole = found.document()
        replace_file(args.html, whole_page(whole.title, parts(whole), {}).encode())
        remarks = (f"wrote {args.html}",)
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = args.width or max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns if is_known else 80)
    code = {"failed": FAILED, "interrupted": INTERRUPTED, "terminated": TERMINATED}.get(found.outcome, DONE)
    made = annotated.page(found, busy=args.busy, per_run=args.per_run)
    return Outcome(made, code, remarks=remarks, width=width)


def _misplaced(given: Sequence[str], outcome: str) -> Iterator[str]:
    """What to try where a script failed that got options of trainledger's after its name."""
    ours = {name for argument in (*annotate.arguments, JSON) for name in getattr(argument, "flags", ())}
    found = list(dict.fromkeys(each.partition("=")[0] for each in given if each.partition("=")[0] in ours))
    if outcome == "failed" and found:
        them = "it" if len(found) == 1 else "them"
        yield (
            f"{', '.join(found)} came after the script's name and went to the script; for trainledger's own put "
            f"{them} before it: trainledger annotate [options] SCRIPT [ARGS ...]"
        )


@contextmanager
def _output_aside() -> Iterator[None]:
    """Let what a script prints go to standard error, also what its libraries and processes print."""
    own = -1
    with suppress(OSError, ValueError, AttributeError):
        if sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2:
            sys.stdout.flush()
            own = os.dup(1)
            os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if own >= 0:
            os.dup2(own, 1)
            os.close(own)
