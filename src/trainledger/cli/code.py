"""Verbs of your own code: its step traced, its lines annotated, its costs locked and checked."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Unpack

from trainledger import catalog
from trainledger.answers.budgets.target import OfStep
from trainledger.answers.load import resolve
from trainledger.answers.pages import agreement, traced
from trainledger.answers.pages import annotate as annotated
from trainledger.answers.pages.memory_viz import write_memory_viz
from trainledger.answers.pages.traced import LONGEST, SPLITS
from trainledger.answers.question import choice, count, output, question, question_of, text, word
from trainledger.cli.arguments import DONE, FAILED, INTERRUPTED, RUN_OR_MODEL, Outcome, flag_of
from trainledger.cli.asking import say, say_assumed, while_searching
from trainledger.forecast.predict.step import on_device
from trainledger.ledger.ledger import Ledger, write_ledger
from trainledger.ledger.step import account
from trainledger.report.html import parts, whole_page
from trainledger.spec.code import as_target, defined_in
from trainledger.spec.device import KERNELS, kernels_of_capability
from trainledger.spec.plain import replace_file
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import Overrides

TERMINATED = 143  # 128 and the number of SIGTERM, as a shell has it
_NARROWEST = 60  # characters of an annotated line

Assume = Annotated[
    Sequence[str],
    text(
        "how many elements nonzero, torch.where and x[mask] find: a share or a count, such as nonzero=1/8, or for one "
        "line nonzero@model.py:14=1/8; may be repeated (all of them)",
        several=True,
        metavar="NAME=AMOUNT",
    ),
]


class OfCode(OfStep, total=False):
    """Your own code: of a module, of a configuration's class, or of a script that is a rank."""

    hf: Annotated[str, text("a Hugging Face config.json: its class, without weights", metavar="CONFIG")]
    device: Annotated[
        str, text("also the time of a step on a device of the catalog, and whether it fits there", metavar="NAME")
    ]
    args: Annotated[str, text('arguments of a script, in one text, such as --args "--batch_size 8"')]
    assume: Assume


@question()
def trace(
    run: Annotated[str, word(f"{RUN_OR_MODEL}, or package.module:build", metavar="RUN")] = "run.toml",
    overrides: Overrides = (),
    *,
    blocks: Annotated[
        str,
        choice(
            "trace all equal blocks, or few and multiply (auto: few where there are 8 and no --tensors)",
            ("auto", "once", "all"),
        ),
    ] = "auto",
    by: Annotated[str, choice("split the FLOPs and bytes; by category: the most bytes of each", SPLITS)] = "",
    top: Annotated[int, count("rows of a split")] = LONGEST,
    tensors: Annotated[bool, text("the tensors that make up the peak")] = False,
    memory_viz: Annotated[str | None, output("a snapshot for PyTorch's memory viewer (out.pickle)", ".pickle")] = None,
    output: Annotated[str | None, output("write the traced ledger to a file", ".json.gz", flag="-o --output")] = None,
    **code: Unpack[OfCode],
) -> Outcome:
    """Account for one training step by running its code on fake tensors: nothing is computed, every size fits here.

    RUN is a run file or a model of the catalog, whose trace is compared with the closed form; or your own code, as
    package.module:build, a function (or class) that makes an nn.Module or a trainledger.TrainingStep; or, with --hf, a
    Hugging Face config.json, whose class is built without weights. Only what is named is imported. With --world-size it
    may be a script, run as torchrun would run it (train.py).

    Exit code 1 where closed form and trace differ in parameters, matmul or attention FLOPs, or kept bytes, and where
    your code could not be followed to its end.
    """
    if blocks == "auto" and (tensors or memory_viz):
        blocks = "all"  # what is multiplied has no tensors one by one
    is_script = "hf" not in code and run.endswith(".py") and Path(run).is_file()
    if is_script and "world_size" not in code:
        rule = "is a file of code, of which a function or class is traced by its name, or with --world-size a rank"
        near = f"trainledger annotate {run}"
        near = f"{as_target(run)}, or {near}" if defined_in(run) else near
        raise InvalidInput([Problem("RUN", run, rule, near)])
    shown: dict[str, Any] = {"by": by, "top": top, "tensors": tensors}
    files = memory_viz, output
    if "hf" not in code and not is_script and (":" not in run or Path(run).exists()):
        return _trace_run(run, overrides, blocks, code, files, shown)
    if overrides:
        rule = "changes a field of a run file, which code does not have"
        raise InvalidInput([Problem("--set", next(iter(overrides)), rule, "--input, --dtype, --step or --loss")])
    with warnings.catch_warnings(record=True) as caught:
        try:
            outcome = _trace_code(run, blocks, code, files, shown)
        except BaseException:
            for warning in _heard(caught):
                say(warning, wrap=True)
            raise
    return replace(outcome, remarks=_heard(caught))


def _heard(caught: list[warnings.WarningMessage]) -> tuple[str, ...]:
    """What code warned of, shortened and once each."""
    from trainledger.trace.recorder.source_lines import shown_file

    texts = (
        f"{each.category.__name__} in {shown_file(each.filename)}:{each.lineno}: {each.message}" for each in caught
    )
    return ("", *dict.fromkeys(texts)) if caught else ()


def _trace_code(
    run: str, blocks: str, code: OfCode, files: tuple[str | None, str | None], shown: dict[str, Any]
) -> Outcome:
    problems = []
    if code.get("rank") and "world_size" not in code:
        problems.append(Problem("--rank", code["rank"], "is a rank of a world whose size is missing", "--world-size 8"))
    given: dict[str, Any] = dict(code)
    name, kernels = given.pop("device", None), given.get("kernels")
    if kernels not in (None, *KERNELS):
        rule = f"must be {', '.join(KERNELS[:-1])} or {KERNELS[-1]}"
        problems.append(Problem("--kernels", kernels, rule, "cuda"))
    elif name in catalog.device_names() and kernels is not None:
        own = kernels_of_capability(catalog.device(name).compute_capability)
        if kernels != own and (kernels != "cuda" or own == "sm70"):  # an older PyTorch has CUDA's alone, from 8.0 on
            problems.append(Problem("--kernels", kernels, f"are not those of --device {name}", own))
    if problems:
        raise InvalidInput(problems)
    device = None if name is None else catalog.device(name, "--device")
    if kernels is None:
        given["kernels"] = "cpu" if device is None else kernels_of_capability(device.compute_capability)
    from trainledger.trace.command import trace_named

    with redirect_stdout(sys.stderr):  # what the code prints is no part of the result
        ledger, title = trace_named(run, blocks=blocks, **given)
    _write(ledger, *files)
    timed = on_device(ledger, device) if device is not None and len(ledger) and not ledger.partial else None
    return Outcome(
        traced.page(ledger, title, on_device=timed, assumed_cpu=kernels is None and device is None, **shown),
        FAILED if ledger.partial else DONE,
    )


def _trace_run(
    named: str,
    overrides: Overrides,
    blocks: str,
    code: OfCode,
    files: tuple[str | None, str | None],
    shown: dict[str, Any],
) -> Outcome:
    from trainledger.observe.measure.step import rehearse

    for name, value in code.items():
        rule = "is for your own code (package.module:build) or --hf; a run file says it itself"
        raise InvalidInput([Problem("--" + name.replace("_", "-"), value, rule)])
    run = resolve(named, overrides, progress=while_searching())
    say_assumed(run)
    if not run.layout.alone:
        rule = "the modules are traced on one device; of a layout the ranks are accounted for by plan and explain"
        raise InvalidInput([Problem("layout", None, f"{rule}; leave [layout] out here")])
    if shown["by"] == "line":
        raise InvalidInput([Problem("--by", "line", "is of your own code; the closed form has no lines", "path")])
    # Traced operation by operation, blocks and loss run eagerly: so does the closed form that it is compared with.
    eager = replace(run, recipe=run.recipe.uncompiled)
    predicted, ledger = account(eager), rehearse(eager, blocks=blocks)
    _write(ledger, *files)
    agree = agreement.agree(agreement.compare(predicted, ledger))
    return Outcome(agreement.page(run, predicted, ledger, **shown), DONE if agree else FAILED)


def _write(ledger: Ledger, memory_viz: str | None, output: str | None) -> None:
    """Write the files that were asked for."""
    if output:
        write_ledger(ledger, output)
    if memory_viz:
        write_memory_viz(ledger, memory_viz)


@question(plots=False, usage="[options] SCRIPT [ARGS ...]")
def annotate(
    script: Annotated[str, word("the file to run, such as train.py")],
    args: Annotated[Sequence[str], word("arguments of the script", nargs=argparse.REMAINDER, metavar="ARGS")] = (),
    *,
    fake: Annotated[bool, text("on fake tensors: of any size, nothing is computed")] = False,
    device: Annotated[
        str | None, text("let a script for one GPU run without any: its tensors pass for the GPU's", metavar="cuda")
    ] = None,
    steps: Annotated[int | None, count("stop after N optimizer steps")] = None,
    files: Annotated[
        Sequence[str],
        text(
            "whose lines are shown, in addition to the script's; may be repeated (else all modules in its directory)",
            several=True,
            metavar="GLOB",
        ),
    ] = (),
    assume: Assume = (),
    assume_asserts: Annotated[bool, text("with --fake: each assert of the script holds")] = False,
    shapes: Annotated[bool, text("also the shapes and strides that each line makes")] = False,
    per_run: Annotated[bool, text("divide by how often each line ran")] = False,
    busy: Annotated[bool, text("only lines that do something to tensors")] = False,
    width: Annotated[int | None, count("characters to a line (the terminal's, or 80)", least=_NARROWEST)] = None,
    html: Annotated[str | None, output("also write the annotation as a page", ".html")] = None,
) -> Outcome:
    """Run a script under the tracer and print what each of its lines costs.

    SCRIPT is run as Python would run it, with the ARGS after its name. What it prints goes to standard error, the
    annotation to standard output. Options of trainledger come before the script's name. Exit code 1 where the script
    failed, 130 where it was interrupted, 143 where SIGTERM ended it: what ran until then is reported all the same.
    """
    from trainledger.trace.annotate.annotate import annotate as run_annotated
    from trainledger.trace.script import compiled

    compiled(script)  # what is wrong with its name or its text is said before anything else happens
    with _output_aside():
        annotation = run_annotated(
            script,
            args,
            fake=fake,
            device=device,
            files=files,
            steps=steps,
            shapes=shapes,
            assume=assume,
            assume_asserts=assume_asserts,
        )
    annotation = replace(annotation, notes=(*annotation.notes, *_misplaced(args, annotation.outcome)))
    remarks: tuple[str, ...] = ()
    if html is not None:
        whole = annotation.document()
        replace_file(html, whole_page(whole.title, parts(whole), {}).encode())
        remarks = (f"wrote {html}",)
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = width or max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns if is_known else 80)
    code = {"failed": FAILED, "interrupted": INTERRUPTED, "terminated": TERMINATED}.get(annotation.outcome, DONE)
    return Outcome(annotated.page(annotation, busy=busy, per_run=per_run), code, remarks=remarks, width=width)


def _misplaced(given: Sequence[str], outcome: str) -> Iterator[str]:
    """What to try where a script failed that got options of trainledger's after its name."""
    ours = {"--json", *map(flag_of, question_of(annotate).options.values())}
    found = list(dict.fromkeys(name.partition("=")[0] for name in given if name.partition("=")[0] in ours))
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
