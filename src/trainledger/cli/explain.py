"""Where the numbers of a plan come from: every line with its formula, rules of thumb, and why two plans differ."""

from __future__ import annotations

from argparse import Namespace

import trainledger as tl
from trainledger.answers.load import resolve
from trainledger.answers.machine import device_of, kernels_of, machine_of
from trainledger.answers.pages import compare as compared
from trainledger.answers.pages import rules as of_thumb
from trainledger.answers.pages.explain import envelope_document, page, time_document
from trainledger.answers.plan import plan
from trainledger.cli.arguments import CLUSTER, PLOT, RUN, count, option, quantity, settings, takes
from trainledger.cli.asking import asked, run_asked, say_assumed, while_searching
from trainledger.forecast.explain import account as explained
from trainledger.forecast.explain.envelope import envelope
from trainledger.forecast.explain.symbols import MEANINGS, symbolic
from trainledger.forecast.predict.device_memory import memory_of_device
from trainledger.forecast.predict.parallel_step import layout_time
from trainledger.forecast.predict.roofline import roofline_table
from trainledger.ledger.model.parameters import leaves_of
from trainledger.ledger.ranks import accounts, heaviest
from trainledger.report.document import Document
from trainledger.spec.device import ErrorModel
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.spec.units import parse_nbytes

LONGEST = 15  # operations and collectives of a step


@takes(
    option("what", "which account", choices=("memory", "flops", "parameters", "time")),
    *RUN,
    option("--symbolic SIZE", "leave a size free: B sequences of a micro-batch, T tokens, A, L, D, F or V"),
    quantity(
        "--memory BYTES",
        "memory for the tensors at the peak, such as 80GB; absent: that of the device, less what is outside them",
        parse_nbytes,
        least=1,
    ),
    count("--stage N", "the stage of a pipeline, counted from 0 (of memory the one that needs most, else 0)", least=0),
    count("--top N", f"of time: so many of the longest operations and collectives ({LONGEST})"),
)
def explain(args: Namespace) -> Document:
    """Every line of an account: its formula, the formula with numbers, its basis and its source.

    With --symbolic one size stays free: the memory as expressions in it, and the largest that fits.
    """
    run = run_asked(args)
    stage = _stage(args, run)
    if "top" in args and args.what != "time":
        raise InvalidInput([Problem("--top", args.top, f"is of time; of {args.what} every line is printed")])
    if "symbolic" in args:
        return _envelope(args, run, stage)
    if "memory" in args:
        raise InvalidInput([Problem("--memory", args.memory, "goes with --symbolic")])
    if args.what == "time":
        return _time(args, run)
    found = symbolic(run, backend=kernels_of(run), stage=stage)
    parts, held = getattr(explained, args.what)(found), None
    if args.what == "memory" and (device := device_of(run)) is not None:
        reserved = tuple((name, found.number(nbytes)) for name, nbytes in found.ledger.reserved)
        held = memory_of_device(run, int(parts[-1].total), device, reserved)
        if not held.tensors_alone:
            parts += (explained.outside_tensors(held),)
    legend = {str(each): (value, MEANINGS[str(each)]) for each, value in found.values.items() if str(each) in MEANINGS}
    return page(run, kernels_of(run), args.what, parts, symbols=legend, stage=stage, held=held, errors=_errors(run))


def _stage(args: Namespace, run: Run) -> int:
    """The stage that is asked for; without one the first, of memory the first that needs the most."""
    if "stage" not in args:
        if args.what != "memory" or run.layout.pipeline == 1:
            return 0
        return heaviest(accounts(run, backend=kernels_of(run))).stage
    if args.stage >= run.layout.pipeline:
        rule = f"must be below layout.pipeline = {run.layout.pipeline}, counted from 0"
        raise InvalidInput([Problem("--stage", args.stage, rule, run.layout.pipeline - 1)])
    return int(args.stage)


def _errors(run: Run) -> ErrorModel | None:
    """What predictions for the run's device are off by; None of this machine."""
    device = device_of(run)
    return None if device is None else device.errors


def _time(args: Namespace, run: Run) -> Document:
    """The step by cause, its roofline by kind, and its operations."""
    if "stage" in args and args.stage:
        rule = "with time the slowest stage is explained, whichever that is"
        raise InvalidInput([Problem("--stage", args.stage, rule, 0)])
    machine = machine_of(run)
    if machine is None:
        rule = "was not measured yet, so there are no times to explain; run `trainledger measure machine` once"
        raise InvalidInput([Problem("cluster.device", run.cluster.device, rule)])
    tensors = leaves_of(run.model, run.recipe).trained().tensors
    step = layout_time(accounts(run, backend=kernels_of(run)), machine, tensors=tensors)
    if step.seconds is None:
        raise InvalidInput([Problem("cluster.device", run.cluster.device, "; ".join(step.notes))])
    parts, rows = explained.time(step), roofline_table(step.entries, machine)
    return time_document(run, kernels_of(run), parts, rows, top=vars(args).get("top", LONGEST), errors=_errors(run))


def _envelope(args: Namespace, run: Run, stage: int) -> Document:
    """The memory over one size, and the largest that fits."""
    if args.what != "memory":
        raise InvalidInput([Problem("--symbolic", args.symbolic, f"explains memory, not {args.what}", "memory")])
    memory, holds, device = vars(args).get("memory"), None, None
    if memory is None and (device := device_of(run)) is not None:
        memory = device.capacity_nbytes

        def holds(nbytes: int) -> bool:
            return memory_of_device(run, nbytes, device).fits is not False

    found = envelope(run, args.symbolic, backend=kernels_of(run), memory_nbytes=memory, stage=stage, holds=holds)
    return envelope_document(run, kernels_of(run), found, MEANINGS[args.symbolic], stage=stage)


@takes(*RUN)
def rules(args: Namespace) -> Document:
    """Rules of thumb and the ledger of a run: each rule's error and what it leaves out; and the FLOPs of a step by
    each convention in use."""
    made = asked(plan, args)
    return of_thumb.page(made, kernels_of(made.run))


@takes(
    option("a A", "the first plan (run.toml)", nargs="?", default="run.toml"),
    option("b B", "the second; absent = A again", nargs="?"),
    settings("--set", " of both"),
    settings("--set-a", " of A"),
    settings("--set-b", " of B"),
    *CLUSTER,
    PLOT,
)
def compare(args: Namespace) -> Document:
    """Two plans side by side: which fields differ, what each costs, and which causes make up the difference.

    A and B are run files, models of the catalog or Hugging Face config.json files. Without B it is A again, changed by
    --set-b: trainledger compare run.toml --set-b recipe.activation_checkpointing=full
    """
    if "b" not in args and not args.set_a and not args.set_b:
        rule = "there is nothing to compare with: name a second plan, or change this one with --set-b"
        raise InvalidInput([Problem("B", None, rule)])
    names, sets = (args.a, vars(args).get("b", args.a)), (args.set_a, args.set_b)
    progress = while_searching()
    a, b = (resolve(name, args.set + changes, progress=progress) for name, changes in zip(names, sets, strict=True))
    found = tl.compare(a, b)
    for run in dict.fromkeys((found.a, found.b)):
        say_assumed(run)
    titles = [" ".join([name, *changes]) for name, changes in zip(names, sets, strict=True)]
    return compared.page(found, names=titles)
