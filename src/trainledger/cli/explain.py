"""Every line of an account: its formula, the numbers put in, its basis and its source.

With --symbolic one size stays free: the memory as expressions in it, and the largest that fits.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trainledger.api.load import resolve
from trainledger.api.machine import device_of, kernels_of, machine_of
from trainledger.cli.arguments import (
    RUN_OR_MODEL,
    add_cluster,
    add_count,
    add_json,
    add_run,
    say_assumed,
    while_searching,
)
from trainledger.explain import account as explain
from trainledger.explain.account import time
from trainledger.explain.envelope import envelope
from trainledger.explain.symbols import MEANINGS, symbolic
from trainledger.ledger.model.parameters import leaves_of
from trainledger.ledger.ranks import accounts
from trainledger.plan.plan import memory_of_device
from trainledger.predict.parallel_step import layout_time
from trainledger.predict.utilization import roofline_table
from trainledger.report.explain import document, envelope_document, time_document
from trainledger.report.show import show
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.units import NotAQuantity, parse_nbytes

if TYPE_CHECKING:
    from trainledger.spec.run import Run

WHAT = ("memory", "flops", "parameters", "time")
LONGEST = 15  # operations and collectives of a step


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=WHAT, help="which account")
    add_run(parser, help=RUN_OR_MODEL)
    add_cluster(parser)
    parser.add_argument(
        "--symbolic", metavar="SIZE", help="leave a size free: B sequences of a micro-batch, T tokens, A, L, D, F or V"
    )
    parser.add_argument(
        "--memory",
        metavar="BYTES",
        help="what must hold the tensors at the peak, such as 80GB; absent: the device, with what stands around them",
    )
    add_count(
        parser, "--stage", least=0, default=0, metavar="N", help="whose rank of a pipeline, counted from 0 (0)"
    )  # fmt: skip
    add_count(
        parser, "--top", metavar="N", help=f"of time: so many of the longest operations and collectives ({LONGEST})"
    )  # fmt: skip
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    run = resolve(args.run, args.set, progress=while_searching())
    say_assumed(run)
    if args.stage >= run.layout.pipeline:
        rule = f"must be below layout.pipeline = {run.layout.pipeline}, counted from 0"
        raise InvalidInput([Problem("--stage", args.stage, rule, run.layout.pipeline - 1)])
    if args.top is not None and args.what != "time":
        raise InvalidInput([Problem("--top", args.top, f"is of time; of {args.what} every line is printed")])
    if args.symbolic is None:
        if args.memory is not None:
            raise InvalidInput([Problem("--memory", args.memory, "goes with --symbolic")])
        return _account(args, run)
    if args.what != "memory":
        raise InvalidInput([Problem("--symbolic", args.symbolic, f"explains memory, not {args.what}", "memory")])
    return _envelope(args, run)


def _account(args: argparse.Namespace, run: Run) -> int:
    if args.what == "time":
        return _times(args, run)
    found = symbolic(run, backend=kernels_of(run), stage=args.stage)
    parts = getattr(explain, args.what)(found)
    used = {str(symbol): value for symbol, value in found.values.items() if str(symbol) in MEANINGS}
    legend = {name: (value, MEANINGS[name]) for name, value in used.items()}

    show(document(run, kernels_of(run), args.what, parts, symbols=legend, stage=args.stage), as_json=args.json)
    return 0


def _times(args: argparse.Namespace, run: Run) -> int:
    """The step by cause, its roofline by kind, and its operations."""
    if args.stage:
        rule = "with time the slowest stage is explained, whichever that is"
        raise InvalidInput([Problem("--stage", args.stage, rule, 0)])
    machine = machine_of(run)
    if machine is None:
        rule = "was not measured yet (trainledger measure machine does it, once), so there are no times to explain"
        raise InvalidInput([Problem("cluster.device", run.cluster.device, rule)])
    tensors = leaves_of(run.model, run.recipe).trained().tensors
    step = layout_time(run, accounts(run, backend=kernels_of(run)), machine, tensors=tensors)
    if step.seconds is None:
        raise InvalidInput([Problem("cluster.device", run.cluster.device, "; ".join(step.notes))])
    parts, rows = time(step), roofline_table(step.entries, machine)
    show(time_document(run, kernels_of(run), parts, rows, top=args.top or LONGEST), as_json=args.json)
    return 0


def _envelope(args: argparse.Namespace, run: Run) -> int:
    memory, holds = _memory(args.memory) if args.memory is not None else None, None
    if memory is None and (device := device_of(run)) is not None:
        memory = device.usable_nbytes or device.memory_nbytes

        def holds(nbytes: int) -> bool:
            held = memory_of_device(run, nbytes, device)
            return held is None or held.fits is not False

    found = envelope(
        run, args.symbolic, backend=kernels_of(run), memory_nbytes=memory, stage=args.stage, holds=holds
    )  # fmt: skip
    made = envelope_document(run, kernels_of(run), found, MEANINGS[args.symbolic], stage=args.stage)
    show(made, as_json=args.json)
    return 0


def _memory(text: str) -> int:
    try:
        nbytes = parse_nbytes(text)
    except NotAQuantity as error:
        raise InvalidInput([Problem("--memory", text, error.rule, error.nearest)]) from None
    if nbytes < 1:
        raise InvalidInput([Problem("--memory", text, "must be at least one byte", "80GB")])
    return nbytes
