"""Attention kernels and softmax on a tape."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.ledger import rules
from trainledger.ledger.core.graph import Array, Gradients, Leaf
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int

# Rows of the logsumexp of the memory-efficient kernel are padded to a multiple of this (PyTorch,
# aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h, kAlignLSE).
EFFICIENT_ROWS = 32
# Numbers of 8 bytes that a kernel keeps of the random generator's state, with dropout or without.
GENERATOR_STATE = {"flash_attention": 3, "efficient_attention": 2, "cudnn_attention": 2}


def fused_attention(
    tape: Tape,
    q: Array,
    k: Array,
    v: Array,
    sizes: tuple[Int, Int, Int, Int, Int, Int],
    *,
    kernel: str,
    given: Sequence[Array] = (),
    learned: Leaf | None = None,
) -> Array:
    """Attention in one kernel: keeps q, k, v, its output and a logsumexp per query in fp32 (Dao et al. 2022).

    ``sizes`` are those of `rules.attention_flops`. ``given`` is a mask that both directions read, ``learned`` the
    sinks, which have a gradient. A kernel of accelerators also keeps its generator's state, of which its backward makes
    the mask of dropout again.
    """
    batch, heads, queries, keys, head_dim, width = sizes
    rows = batch * heads * queries
    padded = rows
    if kernel == "efficient_attention":
        padded = batch * heads * (-(-queries // EFFICIENT_ROWS) * EFFICIENT_ROWS)
    name = f"_scaled_dot_product_{kernel}"
    flops = rules.attention_flops(*sizes)
    shape = (batch * heads, queries, keys, head_dim, width, 0 if given else 1)
    sinks = [] if learned is None else [learned.array()]
    state = [(GENERATOR_STATE[kernel], "int64")] if kernel in GENERATOR_STATE else []
    y, *beside = tape.emit(
        name,
        "attention",
        reads=[q, k, v, *given, *sinks],
        makes=[(rows * width, q.dtype), (padded, "fp32"), *state],
        flops=flops,
        model_flops=flops,
        shape=shape,
    )

    def backward(g: Array, q: Array, k: Array, v: Array, y: Array, *rest: Array) -> Gradients:
        return list(
            tape.emit(
                f"{name}_backward", "attention", reads=[g, q, k, v, y, *rest, *sinks],
                makes=[(each.elements, each.dtype) for each in (q, k, v, *sinks)],
                flops=rules.attention_backward_flops(*sizes), model_flops=rules.attention_backward_model_flops(*sizes),
                shape=shape,
            )
        )  # fmt: skip

    targets = [q.node, k.node, v.node, *(each.node for each in sinks)]
    y.node = tape.node(targets, (q, k, v, y.view(), *beside, *given), backward)
    return y


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
