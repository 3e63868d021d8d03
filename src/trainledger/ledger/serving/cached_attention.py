"""What attention writes into a key-value cache and reads of it, on a tape: as in `nn.cache` and `nn.latent_attention`.

Sizes: B sequences, T new tokens, S tokens that a query sees, H query heads; of latent attention R rank, N width without
positions, Q rotary width, C = R + Q, W value width.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.ledger import rules
from trainledger.ledger.core.graph import Array, Leaf
from trainledger.ledger.core.sizes import Sizes
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.attention_kernels import fused_attention, softmax
from trainledger.spec.serving import CACHE_FORMATS

Heads = tuple[tuple[Int, Int], ...]


def remember(tape: Tape, sizes: Sizes, window: int | None, heads: Heads, new: Sequence[Array]) -> list[Array]:
    """Write new tokens; what attention reads: these themselves in a prefill, all that the layer still sees later."""
    assert sizes.cache is not None
    kept = sizes.B * rules.keys_seen(sizes.T, window)
    for (count, width), each in zip(heads, new, strict=True):
        part = each.view(kept * count * width)
        tape.emit("copy_", "copy", reads=[part], changes=[_stored(sizes, kept, count, width, each.dtype)])
    if sizes.context is None:
        return list(new)
    seen = sizes.B * rules.keys_seen(sizes.context, window)
    return [_stored(sizes, seen, *shape, each.dtype) for shape, each in zip(heads, new, strict=True)]


def _stored(sizes: Sizes, tokens: Int, count: Int, width: Int, dtype: str) -> Array:
    """So many tokens of the cache, in its bytes; a kernel widens them as it reads."""
    assert sizes.cache is not None
    elements = tokens * count * width
    return Array(elements, dtype, None, nbytes=CACHE_FORMATS[sizes.cache].nbytes(elements, width))


def absorbed(tape: Tape, sizes: Sizes, q: Array, joint: Array, weight: Leaf) -> Array:
    """One query of each sequence against the latents themselves, [B, H W] (DeepSeek-V2, section 2.1.2).

    An accelerator runs scores and mixture as one kernel, which reads each latent once for both; a CPU writes them out.
    """
    spec, latent, B = sizes.spec, sizes.spec.latent, sizes.B
    assert latent is not None
    H, N, Q, W, R = latent.n_heads, latent.nope_head_dim, spec.rotary_size, spec.value_size, latent.kv_rank
    assert sizes.context is not None
    S, C = sizes.context, R + Q
    inward, outward = _parts_of_weight(weight, H, N, W, R)
    q_low = op.batched_product(tape, q.view(B * H * N), inward, H, B, R, N)
    q_joint = op.concatenate(tape, (q_low, q.view(B * H * Q)))
    del q_low
    if sizes.backend == "cpu":
        scores = op.times_number(tape, op.batched_product(tape, q_joint, joint, B, H, S, C))
        weights = softmax(tape, scores, "_softmax")
        y = op.batched_product(tape, weights, joint.view(B * S * R), B, H, R, S)
    else:
        nothing = Array(0, joint.dtype, None)  # the values are the latents, read already
        y = fused_attention(tape, q_joint, joint, nothing, (B, H, 1, S, C, R), kernel="flash_attention")
    y = op.batched_product(tape, y, outward, H, B, W, R)
    return op.contiguous(tape, y, forward=True, backward=False)


def _parts_of_weight(weight: Leaf, H: Int, N: Int, W: Int, R: Int) -> tuple[Array, Array]:
    """What of kv_b_proj makes keys and what makes values, each with its part of the bytes."""
    whole = weight.array()

    def part(width: Int) -> Array:
        return Array(H * width * R, whole.dtype, None, nbytes=whole.nbytes * width // (N + W))

    return part(N), part(W)
