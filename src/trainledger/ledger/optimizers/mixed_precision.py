"""What low precision adds to a step on a tape: master copies, gradient buffers and loss scaling.

The same operations as in `engine.train.precision`.
"""

from __future__ import annotations

from functools import partial

from trainledger.ledger.core.graph import Array, Leaf, ModelLeaves
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ops.linear import float8_linear
from trainledger.spec.precision import Float8, Precision

_IN_16_BITS = ("router", "shared_expert_gate")


def set_formats(leaves: ModelLeaves, precision: Precision, *, keeps_copies: bool = False) -> None:
    """Give every parameter its storage dtype; ``keeps_copies`` as of `ops.linear.float8_linear`."""
    for segment in leaves.segments:
        for block in (*segment.first, *segment.blocks, *segment.last):
            for name, leaf in block.named.items():
                if precision.float8 is not None and _in_8_bits(name, leaf, precision.float8):
                    leaf.float8 = True
                    if len(leaf.shape) == 2 and leaf.linear is None:
                        leaf.linear = partial(float8_linear, keeps_copy=True) if keeps_copies else float8_linear
    for each in leaves.every():
        each.dtype = precision.parameters
        if precision.gradient_buffers:
            each.buffer = Array(each.elements, precision.gradients, None)


def _in_8_bits(name: str, leaf: Leaf, float8: Float8) -> bool:
    """Whether a block's parameter is the matrix of a linear layer that may multiply in 8 bits (`engine.nn.float8`)."""
    # By block those of experts do too, which are held together.
    if len(leaf.shape) == 3:
        return float8.scaling == "block"
    module, _, part = name.rpartition(".")
    return part == "weight" and len(leaf.shape) == 2 and module.rpartition(".")[2] not in _IN_16_BITS


def own_nbytes(leaves: ModelLeaves, precision: Precision) -> Int:
    """Bytes in addition to the optimizer's states: the master copy; the loss scale and its count of good steps."""
    master = 4 * leaves.trained().elements if precision.master else 0
    return master + (8 if precision.loss_scaling else 0)


# Gradient buffers and master copies


def empty_buffers(tape: Tape, leaves: ModelLeaves) -> None:
    """The buffers that gradients are added to begin at zero."""
    with tape.during("optimizer"):
        buffers = Array(leaves.trained().elements, tape.precision.gradients, None)
        tape.emit("_foreach_zero_", "copy", changes=[buffers])


def main_gradients(tape: Tape, leaves: ModelLeaves, *, whole: bool) -> list[Array]:
    """Gradients in the master copy's format: all at once, or ``whole`` ones each freed as soon as it is copied."""
    master = tape.precision.master
    assert master is not None
    wide: list[Array] = []
    copied: list[Leaf] = []
    with tape.during("optimizer"):
        if not whole:
            return [tape.cast(Array(leaves.elements(), tape.precision.gradients, None), master)]
        for leaf in tape.each_parameter(leaves.trained()):
            gradient = leaf.gradient
            assert gradient is not None
            wide.append(tape.cast(gradient, master).of_each_round())
            tape.free(gradient)
            copied.append(leaf)
            del gradient
    for leaf in copied:
        leaf.gradient = None
    return wide


def round_back(tape: Tape, leaves: ModelLeaves) -> None:
    """The master copy rounded into the parameters."""
    precision, elements = tape.precision, leaves.trained().elements
    assert precision.master is not None
    parameters, masters = Array(elements, precision.parameters, None), Array(elements, precision.master, None)
    tape.emit("_foreach_copy_", "copy", reads=[masters], changes=[parameters])


# Loss scaling


def unscale(tape: Tape, leaves: ModelLeaves) -> Array:
    """All gradients over the scale, with a check for overflow, whose result is returned."""
    elements = leaves.trained().elements
    scale = Array(1, "fp32", None)
    with tape.during("optimizer"):
        # torch/amp/grad_scaler.py (2.13): self._scale.double().reciprocal().float().
        wide = tape.cast(scale, "fp64")
        inverse = tape.pointwise("reciprocal", wide)
        del wide
        narrow = tape.cast(inverse, "fp32")
        del inverse
        found = tape.make("full", "copy", elements=1, dtype="fp32")
        gradients = Array(elements, tape.precision.updating, None)
        name = "_amp_foreach_non_finite_check_and_unscale_"
        tape.emit(name, "elementwise", reads=[narrow], changes=[gradients, found], flops=elements)
    return found


def read_overflow(tape: Tape, found: Array) -> None:
    """The host reads whether the step must be skipped."""
    tape.emit("_local_scalar_dense", "transfer", reads=[found])


def adapt_scale(tape: Tape, found: Array) -> None:
    """The scale falls after an overflow and grows after many steps without one."""
    scale, good_steps = Array(1, "fp32", None), Array(1, "int32", None)
    tape.emit("_amp_update_scale_", "elementwise", reads=[found], changes=[scale, good_steps], flops=1)
