"""What follows the gradients: joint clipping, and the optimizer's update."""

from __future__ import annotations

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.leaves import ModelLeaves
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.optimizers.adafactor import adafactor_foreach, adafactor_loop
from trainledger.ledger.optimizers.adam_8bit import adam_8bit_fused, adam_8bit_loop
from trainledger.ledger.optimizers.groups import Group, groups_of, remains
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
    norms: list[Array] = []
    if foreach:
        norms += tape.emit("_foreach_norm", "reduction", reads=[everything], makes=[(tensors, dtype)], flops=elements)
    else:
        for leaf in tape.each_parameter(group):
            gradient = Array(leaf.elements, dtype, None)
            makes = [(1, dtype)]
            made = tape.emit("linalg_vector_norm", "reduction", reads=[gradient], makes=makes, flops=leaf.elements)
            norms.append(remains(made.pop()))
    stacked = tape.emit("stack", "copy", reads=[Array(tensors, dtype, None)], makes=[(tensors, dtype)])
    total = tape.emit("linalg_vector_norm", "reduction", reads=stacked, makes=[(1, dtype)], flops=tensors)
    norms.clear()
    del stacked
    shifted = tape.emit("add", "elementwise", reads=total, makes=[(1, dtype)], flops=1)
    inverse = tape.emit("reciprocal", "elementwise", reads=shifted, makes=[(1, dtype)], flops=1)
    scale = tape.emit("mul", "elementwise", reads=inverse, makes=[(1, dtype)], flops=1)
    del shifted, inverse
    clamped = tape.emit("clamp", "elementwise", reads=scale, makes=[(1, dtype)], flops=1)
    if foreach:
        tape.emit("_foreach_mul_", "elementwise", reads=clamped, changes=[everything], flops=elements)
    else:
        for leaf in tape.each_parameter(group):
            gradient = Array(leaf.elements, dtype, None)
            tape.emit("mul_", "elementwise", reads=clamped, changes=[gradient], flops=leaf.elements)
    return total
