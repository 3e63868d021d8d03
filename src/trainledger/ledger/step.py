"""The account of one optimizer step in closed form: no torch, no values, only sizes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from trainledger.ledger import operations as op
from trainledger.ledger.array import Array
from trainledger.ledger.entry import Int, Ledger
from trainledger.ledger.forward import forward, loss
from trainledger.ledger.parameters import ModelLeaves, leaves_of
from trainledger.ledger.sizes import Sizes, sizes_of
from trainledger.ledger.tape import Tape
from trainledger.ledger.update import clip, state_nbytes, update
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run


def account(run: Run, *, backend: str = "cpu") -> Ledger:
    """The ledger of one steady-state optimizer step of one device.

    Steady state: the optimizer's state exists, gradients do not. ``backend`` (cpu or cuda) says which kernels
    run; the CPU's are witnessed by the trace operation by operation. Left out: the allocator's rounding, library
    workspaces, and everything that the device's context takes.

    The spec's and the recipe's sizes may be arrays (one account for each element) or symbols (formulas), head counts
    excepted: they decide which operations run. So do a single micro-batch and, in written-out attention, a batch of
    one: symbols, and arrays that hold other elements too, stand there for two and more; symbols for two blocks as well.
    """
    spec, recipe = run.model, run.recipe
    leaves = leaves_of(spec)
    tape = Tape("bf16" if recipe.precision == "bf16-mixed" else "fp32")
    sizes = sizes_of(spec, recipe, backend)
    total = _micro_batch(tape, sizes, leaves, recipe, None)
    if not op.is_one(recipe.grad_accum):
        with tape.loop("micro-batches", recipe.grad_accum - 1):
            total = _micro_batch(tape, sizes, leaves, recipe, total)
    held: list[Array] = []
    if recipe.grad_clip is not None:
        with tape.during("clip"):
            held = clip(tape, leaves, foreach=backend != "cpu")
    with tape.during("optimizer"):
        update(tape, leaves, recipe)
    del total, held
    parameters = leaves.elements()
    resident = [
        ("parameters", 4 * parameters),
        ("optimizer state", state_nbytes(leaves, recipe)),
        ("batch", 16 * recipe.device_batch * recipe.grad_accum * recipe.seq_len),
    ]
    if spec.positions == "rope":
        resident.append(("buffers", 2 * 4 * spec.max_seq_len * (spec.head_size // 2)))
    return tape.ledger(
        resident=tuple((name, nbytes) for name, nbytes in resident if not _is_zero(nbytes)),
        parameters=parameters,
        tokens=recipe.device_batch * recipe.grad_accum * recipe.seq_len,
        micro_batches=recipe.grad_accum,
    )


def _micro_batch(tape: Tape, sizes: Sizes, leaves: ModelLeaves, recipe: Recipe, total: Array | None) -> Array:
    """Forward and backward of one micro-batch; the loss so far comes in and goes out."""
    ids = Array(sizes.rows, "int64", None)
    autocast: AbstractContextManager[None] = tape.autocast() if tape.compute_dtype != "fp32" else nullcontext()
    checkpointing = recipe.activation_checkpointing == "full"
    with autocast:
        value = loss(tape, forward(tape, sizes, leaves, ids, checkpointing=checkpointing), ids)
        if not op.is_one(recipe.grad_accum):
            with tape.at("loss"):
                value = op.divide_by_number(tape, value)
    _backward(tape, value)
    value.node = None
    if total is None:
        return value
    with tape.during("other"), tape.at("loss"):
        (summed,) = tape.emit("add", "elementwise", reads=[total, value], makes=[(1, "fp32")], flops=1)
    return summed


def _backward(tape: Tape, value: Array) -> None:
    with tape.during("backward"):
        with tape.at("loss"):
            (seed,) = tape.emit("ones_like", "copy", reads=[value], makes=[(1, "fp32")])
        tape.start(value, seed)
        tape.backward()  # autograd holds the seed to the end, and so does its name here


def _is_zero(amount: Int) -> bool:
    return isinstance(amount, int) and amount == 0
