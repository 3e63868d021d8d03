"""What follows the gradients: joint clipping, and the optimizer's update."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.leaves import ModelLeaves
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.optimizers.adafactor import adafactor_foreach, adafactor_loop
from trainledger.ledger.optimizers.adam_8bit import adam_8bit_fused, adam_8bit_loop
from trainledger.ledger.optimizers.groups import Group, groups_of, norms
from trainledger.ledger.optimizers.muon import muon
from trainledger.ledger.optimizers.states import state_nbytes as state_nbytes
from trainledger.ledger.optimizers.update_rules import foreach, fused, loop
from trainledger.spec.recipe import Recipe


def update(tape: Tape, leaves: ModelLeaves, recipe: Recipe) -> None:
    """The optimizer's step over all its groups."""
    for group in groups_of(leaves, recipe):
        _update(tape, group, recipe)


def _update(tape: Tape, group: Group, recipe: Recipe) -> None:
    """By the rule's lines, or as an optimizer does that is more than lines."""
    way = recipe.optimizer_implementation
    if group.rule == "muon":
        muon(tape, group, recipe)
    elif group.rule in ("adam-8bit", "adamw-8bit"):
        (adam_8bit_fused if way == "fused" else adam_8bit_loop)(tape, group, recipe)
    elif group.rule == "adafactor":
        (adafactor_foreach if way == "foreach" else adafactor_loop)(tape, group)
    else:
        {"fused": fused, "foreach": foreach, "loop": loop}[way](tape, group, recipe)


def clip(tape: Tape, leaves: ModelLeaves, *, foreach: bool, dtype: str | None = None) -> list[Array]:
    """The joint L2 norm of all gradients, and all gradients scaled by it (Pascanu et al. 2013).

    ``dtype`` is the format of the gradients; absent, as the precision has them.
    """
    group = leaves.trained()
    dtype = tape.precision.gradients if dtype is None else dtype
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
