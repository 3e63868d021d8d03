"""Losses beside the next-token loss on a tape: the same expressions as in `nn.extra_loss`."""

from __future__ import annotations

from trainledger.ledger.core.graph import Array, Gradients
from trainledger.ledger.core.tape import Tape


def with_loss(tape: Tape, y: Array, loss: Array) -> Array:
    """y as it is; its backward also starts that of the loss."""

    def backward(g: Array) -> Gradients:
        if tape.precision.loss_scaling:
            scale = Array(1, "fp32", None)
            return [g, *tape.emit("div", "elementwise", reads=[scale], makes=[(1, "fp32")], flops=1)]
        return [g, *tape.emit("full", "copy", makes=[(1, "fp32")])]

    return y.view(node=tape.node([y.node, loss.node], (), backward))
