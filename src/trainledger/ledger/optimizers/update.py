"""What follows the gradients: joint clipping, and the optimizer's update, Muon's matrix by matrix."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.leaves import ModelLeaves
from trainledger.ledger.core.record import Group as Ranks
from trainledger.ledger.core.sizes import share
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.optimizers.adafactor import adafactor_foreach, adafactor_loop
from trainledger.ledger.optimizers.adam_8bit import adam_8bit_fused, adam_8bit_loop
from trainledger.ledger.optimizers.states import state_nbytes as state_nbytes
from trainledger.ledger.optimizers.update_rules import (
    Group,
    foreach,
    fused,
    groups_of,
    loop,
    norms,
    weight_gradient_moment,
    widest,
)
from trainledger.ledger.rules import matmul_flops
from trainledger.spec.recipe import Recipe


def update(tape: Tape, leaves: ModelLeaves, recipe: Recipe, sharing: Ranks | None = None) -> None:
    """The optimizer's step over all its groups, and the average of the weights after it; ``sharing`` are the ranks that
    have rows of each parameter."""
    for group in groups_of(leaves, recipe):
        _update(tape, group, recipe, sharing)
    if recipe.ema is not None:
        average, weights = (Array(leaves.trained().elements, tape.precision.updated, None) for _ in range(2))
        tape.change("_foreach_lerp_", average, weights)


def _update(tape: Tape, group: Group, recipe: Recipe, sharing: Ranks | None) -> None:
    """By the rule's lines, or by the code of an optimizer without lines."""
    way = recipe.optimizer.implementation
    if group.rule == "muon":
        muon(tape, group, sharing)
    elif group.rule in ("adam-8bit", "adamw-8bit"):
        (adam_8bit_fused if way == "fused" else adam_8bit_loop)(tape, group, recipe)
    elif group.rule == "adafactor":
        (adafactor_foreach if way == "foreach" else adafactor_loop)(tape, group)
    else:
        {"fused": fused, "foreach": foreach, "loop": loop}[way](tape, group, recipe)


def clip(tape: Tape, leaves: ModelLeaves, *, foreach: bool) -> list[Array]:
    """The joint L2 norm of all gradients, and all gradients scaled by it (Pascanu et al. 2013)."""
    group = leaves.trained()
    dtype = tape.precision.updating
    elements, tensors = group.elements, group.tensors
    everything = Array(elements, dtype, None)
    found: list[Array] = []
    if foreach:
        found += tape.emit("_foreach_norm", "reduction", reads=[everything], makes=[(tensors, dtype)], flops=elements)
    else:
        found += [norms(tape, each, 1).of_each_round() for each in _gradients(tape, leaves, dtype)]
    stacked = tape.make("stack", "copy", Array(tensors, dtype, None))
    total = norms(tape, stacked, 1)
    found.clear()
    del stacked
    shifted = tape.pointwise("add", total)
    inverse = tape.pointwise("reciprocal", shifted)
    scale = tape.pointwise("mul", inverse)
    del shifted, inverse
    clamped = tape.pointwise("clamp", scale)
    if foreach:
        tape.change("_foreach_mul_", everything, clamped)
    else:
        for each in _gradients(tape, leaves, dtype):
            tape.change("mul_", each, clamped)
    return [total]


def _gradients(tape: Tape, leaves: ModelLeaves, dtype: str) -> Iterator[Array]:
    return (Array(leaf.elements, dtype, None) for leaf in tape.each_parameter(leaves.trained()))


COPIES_BF16 = False  # whether an update that is in bf16 already is copied first: torch does so since 2.15
ITERATIONS = 5  # torch.optim.Muon's ns_steps (Jordan et al. 2024, Muon: An optimizer for hidden layers)


def muon(tape: Tape, group: Group, sharing: Ranks | None = None) -> None:
    """Momentum with Nesterov's look ahead, orthogonalized in bf16; the decay's matmul runs even where it is 1.

    A matrix whose rows are on several ranks is gathered whole in bf16 on each, and orthogonalized.
    """
    update: Array | None = None
    for leaf in tape.each_parameter(group):
        w, g, m = weight_gradient_moment(tape, leaf.elements)
        tape.change("lerp_", m, g)
        update = tape.pointwise("lerp", g, m, dtype=widest(g, m))
        rows, columns = leaf.shape if leaf.whole is None else leaf.whole
        if sharing is not None:
            update = _gathered(tape, update, sharing, rows, columns)
        update = _orthogonal(tape, update, (rows + columns - abs(rows - columns)) // 2)
        tape.change("mul_", w)
        tape.change("add_", w, update.view(w.elements))
    del update


def _gathered(tape: Tape, update: Array, sharing: Ranks, rows: Int, columns: Int) -> Array:
    """A whole matrix from the ranks' rows, padded to as many on each."""
    part = tape.cast(update, "bf16")
    elements = share(rows, sharing.ranks) * columns
    payload = Array(elements * sharing.ranks, "bf16", None).nbytes
    makes = [(elements * sharing.ranks, "bf16")]
    (whole,) = tape.collective("all_gather", sharing, payload, reads=[part], makes=makes)
    return whole.view(rows * columns)


def _orthogonal(tape: Tape, g: Array, short: Int) -> Array:
    """Five times X -> a X + (b A + c A A) X with A = X X^T, of the matrix or its transpose, whichever is wide."""
    n = g.elements
    long = n // short
    as_it_is = g.dtype == "bf16" and not COPIES_BF16
    x = g if as_it_is else tape.cast(g, "bf16")
    norm = norms(tape, x, 1)
    norm = tape.pointwise("clamp", norm)
    tape.change("div_", x, norm)
    del norm
    square = short * short
    gram: Array | None = None
    polynomial: Array | None = None
    for _ in range(ITERATIONS):
        gram = _matmul(tape, "mm", (short, short, long), [x, x], square)
        polynomial = _matmul(tape, "addmm", (short, short, short), [gram, gram, gram], square)
        x = _matmul(tape, "addmm", (short, long, short), [x, polynomial, x], n)
    return x


def _matmul(tape: Tape, name: str, sizes: tuple[Int, Int, Int], reads: list[Array], elements: Int) -> Array:
    return tape.make(name, "matmul", *reads, elements=elements, flops=matmul_flops(*sizes), shape=(1, *sizes))
