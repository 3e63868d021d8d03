"""Self-attention on a tape: the same expressions as in `nn.attention`, with sizes instead of tensors.

Sizes: B sequences, T tokens, D d_model, H query heads, G key-value heads, K head width.
"""

from __future__ import annotations

from trainledger.ledger import operations as op
from trainledger.ledger.array import Array
from trainledger.ledger.attention import causal_softmax, fused_attention
from trainledger.ledger.entry import Int
from trainledger.ledger.parameters import BlockLeaves
from trainledger.ledger.sizes import Sizes
from trainledger.ledger.tape import Tape

Angles = tuple[Array, Array]


def rotate(tape: Tape, sizes: Sizes, x: Array, heads: Int, angles: Angles) -> Array:
    """Rotary positions: two half-width products each for cosine and sine."""
    cos, sin = angles
    a, b = op.halves(tape, x, sizes.rows * heads * (sizes.spec.head_size // 2))
    return op.concatenate(
        tape,
        (
            op.subtract(tape, op.times_constant(tape, a, cos), op.times_constant(tape, b, sin)),
            op.add(tape, op.times_constant(tape, b, cos), op.times_constant(tape, a, sin)),
        ),
    )


def attention(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, angles: Angles | None) -> Array:
    """Self-attention with its four projections."""
    spec, rows = sizes.spec, sizes.rows
    D, H, G, K = spec.d_model, spec.n_heads, spec.kv_heads, spec.head_size
    written, turned, grouped = sizes.attention == "math", angles is not None, not op.is_one(H // G)

    def project(name: str, heads: Int, *, copied: bool, heads_copied: bool) -> Array:
        w, b = leaves[f"self_attn.{name}_proj.weight"], leaves.get(f"self_attn.{name}_proj.bias")
        with tape.at(f"{name}_proj"):
            y = op.linear(tape, x, w, b, rows, D, heads * K)
            y = op.contiguous(tape, y, forward=False, backward=copied)
        return op.contiguous(tape, y, forward=False, backward=heads_copied and not op.is_one(heads))

    # Gradients of batched products have heads before tokens, that of the keys (transposed there) tokens last; a
    # reshape must copy them. A rotation's own copy brings heads behind tokens, but keeps tokens last.
    q = project("q", H, copied=False, heads_copied=written and not turned)
    k_copied = written and not grouped and not op.is_one(sizes.B)
    k = project("k", G, copied=k_copied, heads_copied=written and grouped and not turned)
    v = project("v", G, copied=False, heads_copied=written)
    if angles is not None:
        q, k = rotate(tape, sizes, q, H, angles), rotate(tape, sizes, k, G, angles)
    if written:
        y = written_out(tape, sizes, q, k, v)
    else:
        kernel = "flash_attention_for_cpu" if sizes.backend == "cpu" else "flash_attention"
        y = fused_attention(tape, q, k, v, sizes.B, H, sizes.T, K, kernel=kernel)
    # The fused kernels write tokens before heads, batched products heads before tokens.
    apart = written and not op.is_one(H)
    flat = op.contiguous(tape, y, forward=True, backward=False) if apart else y
    with tape.at("o_proj"):
        return op.linear(
            tape, flat, leaves["self_attn.o_proj.weight"], leaves.get("self_attn.o_proj.bias"), rows, H * K, D
        )


def written_out(tape: Tape, sizes: Sizes, q: Array, k: Array, v: Array) -> Array:
    """Attention one operation after the other; copies where a batched product needs heads next to the batch."""
    spec, B, T = sizes.spec, sizes.B, sizes.T
    H, K = spec.n_heads, spec.head_size
    repeats = H // spec.kv_heads
    grouped = not op.is_one(repeats)
    if grouped:
        k, v = op.repeat(tape, k, repeats), op.repeat(tape, v, repeats)
    apart = not op.is_one(B) and not op.is_one(H)  # batch and heads are not neighbours in memory
    (square,) = tape.emit("ones", "copy", makes=[(T * T, "bool")])
    (mask,) = tape.emit("triu", "copy", reads=[square], makes=[(T * T, "bool")])
    del square
    queries = op.contiguous(tape, q, forward=apart, backward=False)
    keys = op.contiguous(tape, k, forward=apart and not grouped, backward=False)
    scores = op.batched_product(tape, queries, keys, B * H, T, T, K)
    del queries, keys
    scores = op.times_number(tape, scores)
    weights = causal_softmax(tape, scores, mask)
    values = op.contiguous(tape, v, forward=apart and not grouped, backward=False)
    y = op.batched_product(tape, weights, values, B * H, T, K, T)
    return op.contiguous(tape, y, forward=False, backward=apart)
