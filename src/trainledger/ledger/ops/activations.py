"""Nonlinearities on a tape: the same expressions as in `nn.mlp` and `nn.transformer`."""

from __future__ import annotations

from trainledger.ledger.core.graph import Array, Gradients
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.ops import operations as op

COMPARED = ("ge", "le")  # how a clamp's backward asks what lay between the bounds; since torch 2.14 "gt" and "lt"


def activate(tape: Tape, x: Array, name: str) -> Array:
    """SiLU, GELU (exact or in its tanh form), ReLU, or the square of ReLU."""
    if name == "relu":
        return relu(tape, x)
    if name == "relu2":
        y = relu(tape, x)
        return op.multiply(tape, y, y)
    return op.activation(tape, x, name)


def gated(tape: Tape, gate: Array, up: Array, name: str) -> Array:
    """act(gate) * up, or gpt-oss's (up + 1) * gate * sigmoid(1.702 gate) of a gate and an up that are cut off."""
    if name != "clamped_swish":
        return op.multiply(tape, activate(tape, gate, name), up)
    gate = clamp(tape, gate, sides=1)
    up = clamp(tape, up, sides=2)
    shifted = plus_number(tape, up)
    return op.multiply(tape, shifted, op.multiply(tape, gate, sigmoid(tape, op.times_number(tape, gate))))


def softcap(tape: Tape, x: Array) -> Array:
    """cap tanh(x / cap): keeps the tanh."""
    return op.times_number(tape, tanh(tape, op.divide_by_number(tape, x)))


def relu(tape: Tape, x: Array) -> Array:
    """max(x, 0): keeps its result."""
    return _by_result(tape, x, "relu", "threshold_backward")


def sigmoid(tape: Tape, x: Array) -> Array:
    """1 / (1 + exp(-x)): keeps its result."""
    return _by_result(tape, x, "sigmoid", "sigmoid_backward")


def tanh(tape: Tape, x: Array) -> Array:
    """The hyperbolic tangent: keeps its result."""
    return _by_result(tape, x, "tanh", "tanh_backward")


def plus_number(tape: Tape, x: Array) -> Array:
    """x plus a Python number."""
    (y,) = tape.emit("add", "elementwise", reads=[x], makes=[(x.elements, x.dtype)], flops=x.elements)
    y.node = tape.node([x.node], (), lambda g: [g])
    return y


def clamp(tape: Tape, x: Array, *, sides: int) -> Array:
    """x cut off above, or (``sides`` 2) below and above: keeps its input, asked again in backward."""
    size = x.elements

    def backward(g: Array, x: Array) -> Gradients:
        def asked(name: str) -> Array:
            return tape.emit(name, "elementwise", reads=[x], makes=[(size, "bool")], flops=size)[0]

        zero = tape.emit("scalar_tensor", "copy", makes=[(1, g.dtype)])
        from_below, from_above = COMPARED
        inside = asked(from_below if sides == 2 else from_above)
        if sides == 2:
            below = asked(from_above)
            tape.emit("logical_and_", "elementwise", reads=[below], changes=[inside], flops=size)
        return list(tape.emit("where", "elementwise", reads=[inside, g, *zero], makes=[(size, g.dtype)], flops=size))

    node = tape.node([x.node], (x,), backward)
    (y,) = tape.emit("clamp", "elementwise", reads=[x], makes=[(size, x.dtype)], flops=size)
    y.node = node
    return y


def _by_result(tape: Tape, x: Array, name: str, name_backward: str) -> Array:
    """A function whose derivative follows from its result."""
    size = x.elements

    def backward(g: Array, y: Array) -> Gradients:
        return list(tape.emit(name_backward, "elementwise", reads=[g, y], makes=[(size, y.dtype)], flops=size))

    (y,) = tape.emit(name, "elementwise", reads=[x], makes=[(size, x.dtype)], flops=size)
    y.node = tape.node([x.node], (y.view(),), backward)
    return y
