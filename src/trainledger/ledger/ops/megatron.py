"""What Megatron-LM's own functions keep and make, where they are not PyTorch's: its loss, and its fused parts.

Sizes: N tokens of a micro-batch, V rows of the embedding on this rank.
"""

from __future__ import annotations

from trainledger.ledger.core.graph import Array, Gradients
from trainledger.ledger.core.record import Group
from trainledger.ledger.core.sizes import is_one
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ops import operations as op
from trainledger.ledger.rules import FLOPS_PER_ELEMENT


def cross_entropy(tape: Tape, logits: Array, targets: Array, group: Group, *, compiled: bool) -> Array:
    """Mean cross entropy of [N, V] logits whose columns may be on several ranks.

    An fp32 copy of the logits becomes their exponentials, their softmax and their gradient in place, one after the
    other; the logits themselves live to the end of the forward (Megatron-LM, core/tensor_parallel/cross_entropy.py).
    ``compiled`` (--cross-entropy-loss-fusion): the compiler writes the exponentials to separate memory, and gives
    the gradient in the logits' format (core/fusions/fused_cross_entropy.py).
    """
    rows, size = targets.elements, logits.elements

    def over_ranks(x: Array) -> Array:
        tape.all_reduce(group, x)
        return x

    wide = tape.cast(logits, "fp32")
    largest = over_ranks(tape.make("max", "reduction", wide, elements=rows, flops=size))
    tape.change("sub_", wide, largest)
    del largest
    others = tape.pointwise("bitwise_or", elements=rows, dtype="bool")
    places = tape.make("sub", "elementwise", targets, elements=rows, flops=rows)
    predicted = over_ranks(tape.make("index", "embedding", Array(rows, "fp32", None), places, elements=rows))
    if compiled:
        wide = tape.pointwise("exp", wide)
    else:
        tape.change("exp_", wide)
    sums = over_ranks(tape.sum(wide, rows))
    logarithm = tape.pointwise("log", sums)
    tape.change("div_", wide, sums)
    losses = tape.pointwise("sub", logarithm, predicted)
    del logarithm, predicted, sums
    dtype = logits.dtype

    def backward(g: Array, wide: Array, others: Array, places: Array) -> Gradients:
        tape.emit("index_put_", "embedding", reads=[places, others], changes=[wide.view(rows)])
        if compiled:
            return [tape.pointwise("mul", wide, g, dtype=dtype)]
        tape.change("mul_", wide, g)
        return [wide]

    losses.node = tape.node([logits.node], (wide, others, places), backward, formats=() if compiled else [dtype])
    del wide, others, places, logits
    return _mean(tape, losses, rows)


def cross_entropy_in_place(tape: Tape, logits: Array, targets: Array, group: Group) -> Array:
    """The same by Transformer Engine's kernels, which write the gradient over the logits, in their dtype.

    (transformer_engine/common/triton/cross_entropy.py.) The ranks combine three numbers of each row.
    """
    rows, size = targets.elements, logits.elements
    counted = FLOPS_PER_ELEMENT["softmax"] * size
    (found,) = tape.emit("online_softmax", "softmax", reads=[logits, targets], makes=[(3 * rows, "fp32")],
                         flops=counted, basis="assumed")  # fmt: skip
    if not is_one(group.ranks):
        makes = [(found.elements * group.ranks, "fp32")]
        (found,) = tape.collective("all_gather", group, found.nbytes * group.ranks, reads=[found], makes=makes)
    (losses,) = tape.emit("cross_entropy", "softmax", reads=[found, targets], changes=[logits], makes=[(rows, "fp32")],
                          flops=2 * size, basis="assumed")  # fmt: skip
    del found

    def backward(g: Array, logits: Array) -> Gradients:
        tape.change("mul_", logits, g)
        return [logits]

    losses.node = tape.node([logits.node], (logits,), backward)
    del logits
    return _mean(tape, losses, rows)


def swiglu(tape: Tape, gate: Array, up: Array) -> Array:
    """silu(gate) * up in one kernel, which keeps both and nothing between (core/fusions/fused_bias_swiglu.py)."""
    elements = gate.elements

    def backward(g: Array, gate: Array, up: Array) -> Gradients:
        makes = [(elements, gate.dtype), (elements, up.dtype)]
        return list(tape.emit("swiglu_backward", "elementwise", reads=[g, gate, up], makes=makes, flops=8 * elements))

    node = tape.node([gate.node, up.node], (gate, up), backward)
    y = tape.make("swiglu", "elementwise", gate, up, flops=5 * elements)
    y.node = node
    return y


def _mean(tape: Tape, losses: Array, rows: Int) -> Array:
    """The losses of a micro-batch times the mask, over its tokens."""
    value = tape.sum(losses, 1)
    value.node = tape.node([losses.node], (), lambda g: [tape.make("expand", "copy", g, elements=rows)])
    del losses
    return op.divide_by_number(tape, value)
