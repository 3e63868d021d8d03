"""Attention and softmax on a tape."""

from __future__ import annotations

from trainledger.ledger import rules
from trainledger.ledger.array import Array
from trainledger.ledger.entry import Int
from trainledger.ledger.tape import Gradients, Tape


def fused_attention(
    tape: Tape, q: Array, k: Array, v: Array, batch: Int, heads: Int, tokens: Int, width: Int, *, kernel: str
) -> Array:
    """Attention in one kernel: keeps q, k, v, its output and a logsumexp per query in fp32 (Dao et al. 2022)."""
    sizes = (batch, heads, tokens, tokens, width, width)
    rows = batch * heads * tokens
    name = f"_scaled_dot_product_{kernel}"
    flops = rules.attention_flops(*sizes)
    y, logsumexp = tape.emit(
        name,
        "attention",
        reads=[q, k, v],
        makes=[(q.elements, q.dtype), (rows, "fp32")],
        flops=flops,
        model_flops=flops,
    )

    def backward(g: Array, q: Array, k: Array, v: Array, y: Array, logsumexp: Array) -> Gradients:
        return list(
            tape.emit(
                f"{name}_backward", "attention", reads=[g, q, k, v, y, logsumexp],
                makes=[(each.elements, each.dtype) for each in (q, k, v)], flops=rules.attention_backward_flops(*sizes),
                model_flops=rules.attention_backward_model_flops(*sizes),
            )
        )  # fmt: skip

    y.node = tape.node([q.node, k.node, v.node], (q, k, v, y.view(), logsumexp), backward)
    return y


def causal_softmax(tape: Tape, scores: Array, mask: Array) -> Array:
    """Scores with the later keys masked, as probabilities; keeps the mask and the probabilities."""

    def fill(x: Array, mask: Array) -> Array:
        makes = [(x.elements, x.dtype)]
        return tape.emit("masked_fill", "elementwise", reads=[x, mask], makes=makes, flops=x.elements)[0]

    masked_node = tape.node([scores.node], (mask,), lambda g, mask: [fill(g, mask)])
    masked = fill(scores, mask)
    masked.node = masked_node
    return softmax(tape, masked, "_softmax")


def softmax(tape: Tape, x: Array, name: str) -> Array:
    """Softmax or log-softmax over the last dim; keeps its result."""
    makes = [(x.elements, x.dtype)]
    count = rules.FLOPS_PER_ELEMENT
    (y,) = tape.emit(name, "softmax", reads=[x], makes=makes, flops=count["softmax"] * x.elements, basis="assumed")

    def backward(g: Array, y: Array) -> Gradients:
        flops = count["softmax backward"] * y.elements
        return list(
            tape.emit(f"{name}_backward_data", "softmax", reads=[g, y], makes=makes, flops=flops, basis="assumed")
        )

    y.node = tape.node([x.node], (y.view(),), backward)
    return y
