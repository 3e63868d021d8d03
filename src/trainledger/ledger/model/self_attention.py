"""Self-attention on a tape: the same expressions as in `nn.attention`, with sizes instead of tensors.

Sizes: B sequences, T tokens, D d_model, H query heads, G key-value heads, K head width, J pairs that rope turns.
"""

from __future__ import annotations

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.leaves import BlockLeaves
from trainledger.ledger.core.sizes import Sizes
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.model.attention_core import attend
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.norms import norm
from trainledger.ledger.serving.kv_cache import remember

Angles = tuple[Array, Array]
Shared = tuple[Angles | None, Array | None]  # what all layers of a kind share: rotary angles, and a mask


def attention(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, shared: Shared) -> Array:
    """Self-attention with its four projections."""
    spec, rows = sizes.spec, sizes.rows
    D, H, G, K = spec.d_model, spec.attention.n_heads, spec.kv_heads, spec.head_size
    angles, mask = shared

    def heads(name: str, count: Int, *, normed: bool) -> Array:
        y = project(tape, sizes, leaves, f"{name}_proj", x, D, count * K)
        if not normed or spec.attention.qk_norm is None:
            return y
        per, width = (1, count * K) if spec.attention.qk_norm == "width" else (count, K)
        normal = norm(tape, sizes, y, leaves.named, f"self_attn.{name}_norm", rows=rows * per, width=width)
        return op.cast(tape, normal, y.dtype)

    q = heads("q", H, normed=True)
    k = heads("k", G, normed=True)
    v = heads("v", G, normed=False)
    if angles is not None:
        q = rotate(tape, sizes, q, H, angles, after=K - spec.rotary_size)
        k = rotate(tape, sizes, k, G, angles, after=K - spec.rotary_size)
    if sizes.cache is not None:
        k, v = remember(tape, sizes, leaves.kind.window, ((G, K), (G, K)), (k, v))
    y = attend(tape, sizes, q, k, v, mask, leaves.kind.window, leaves.get("self_attn.sinks"))
    return project(tape, sizes, leaves, "o_proj", y, H * K, D)


def project(tape: Tape, sizes: Sizes, leaves: BlockLeaves, name: str, x: Array, d_in: Int, d_out: Int) -> Array:
    """One of the linear projections."""
    w, b = leaves[f"self_attn.{name}.weight"], leaves.get(f"self_attn.{name}.bias")
    with tape.at(name):
        return op.linear(tape, x, w, b, sizes.rows, d_in, d_out)


def rotate(tape: Tape, sizes: Sizes, x: Array, heads: Int, angles: Angles, *, before: Int = 0, after: Int = 0) -> Array:
    """Rotary positions: two products each for cosine and sine; what stands before and after them is copied along."""
    cos, sin = angles
    count = sizes.rows * heads
    half = count * (sizes.spec.rotary_size // 2)
    interleaved = sizes.spec.rope is not None and sizes.spec.rope.interleaved
    turned = [2 * half] if interleaved else [half, half]
    at = 1 if before else 0
    parts = op.parts(tape, x, [*[count * before][:at], *turned, *([count * after] if after else [])])
    if interleaved:
        parts[at : at + 1] = op.parts(tape, parts[at], [half, half], name="stack")
    a, b = parts[at : at + 2]
    parts[at : at + 2] = (
        op.subtract(tape, op.times_constant(tape, a, cos), op.times_constant(tape, b, sin)),
        op.add(tape, op.times_constant(tape, b, cos), op.times_constant(tape, a, sin)),
    )
    return op.concatenate(tape, parts)
