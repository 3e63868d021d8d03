"""The KV cache: the elements that a token leaves in each layer, the tokens a layer keeps, and attention over it.

Sizes: B sequences, T new tokens, S tokens that a query sees, H query heads, G key-value heads, K width of keys, W of
values; of latent attention R rank, N width without positions, Q rotary width, C = R + Q.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.ledger import rules
from trainledger.ledger.core.graph import Array, Leaf
from trainledger.ledger.core.sizes import Sizes
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.model.attention_core import fused_attention
from trainledger.ledger.ops import operations as op
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import segments
from trainledger.spec.model import ModelSpec
from trainledger.spec.serving import CACHE_FORMATS


@frozen
class LayersCache:
    """The cache of so many layers of a kind: ``heads`` are (count, width) pairs of a token, ``window`` their reach."""

    layers: Int
    window: int | None
    heads: tuple[tuple[Int, Int], ...]

    def places(self, context: Int) -> Int:
        """Tokens of a sequence that a layer keeps."""
        return rules.keys_seen(context, self.window)


@frozen
class KVCache:
    """The cache of a model in a format."""

    kinds: tuple[LayersCache, ...]
    format: str

    def token_nbytes(self) -> Int:
        """Bytes that one more token takes while every layer still keeps all tokens."""
        return sum(each.layers * self._one(each) for each in self.kinds)

    def nbytes(self, batch: Int, context: Int) -> Int:
        """Bytes of ``batch`` sequences of ``context`` tokens; a layer with a window keeps no more than that.

        >>> from trainledger.answers.load import model
        >>> kv_cache(model("llama-2-7b"), "bf16").nbytes(1, 1), kv_cache(model("deepseek-v3"), "bf16").nbytes(1, 1)
        (524288, 70272)
        """
        return sum(batch * each.places(context) * each.layers * self._one(each) for each in self.kinds)

    def _one(self, kind: LayersCache) -> Int:
        format = CACHE_FORMATS[self.format]
        return sum(format.nbytes(count * width, width) for count, width in kind.heads)


def heads_of(spec: ModelSpec) -> tuple[tuple[Int, Int], ...]:
    """(count, width) of a layer's cache for a token: keys and values of the key-value heads, or of latent
    attention the latent and the one rotary key (DeepSeek-AI 2024, DeepSeek-V2, section 2.1.3, table 1)."""
    if spec.latent:
        return ((1, spec.latent.kv_rank + spec.rotary_size),)
    return ((spec.kv_heads, spec.head_size), (spec.kv_heads, spec.value_size))


def kv_cache(spec: ModelSpec, format: str = "bf16") -> KVCache:
    """The cache of a model, layer by layer kind."""
    counts: dict[int | None, Int] = {}
    for segment in segments(spec):
        for kind in segment.kinds:
            counts[kind.window] = counts.get(kind.window, 0) + segment.count
    return KVCache(tuple(LayersCache(count, window, heads_of(spec)) for window, count in counts.items()), format)


Heads = tuple[tuple[Int, Int], ...]


def remember(tape: Tape, sizes: Sizes, window: int | None, heads: Heads, new: Sequence[Array]) -> list[Array]:
    """Write new tokens; what attention reads: these themselves in a prefill, all that the layer still sees later."""
    assert sizes.cache is not None
    kept = sizes.B * rules.keys_seen(sizes.T, window)
    for (count, width), each in zip(heads, new, strict=True):
        part = each.view(kept * count * width)
        tape.emit("copy_", "copy", reads=[part], changes=[_stored(sizes, kept, count, width, each.dtype)])
    if sizes.cached_tokens is None:
        return list(new)
    seen = sizes.B * rules.keys_seen(sizes.cached_tokens, window)
    return [_stored(sizes, seen, *shape, each.dtype) for shape, each in zip(heads, new, strict=True)]


def _stored(sizes: Sizes, tokens: Int, count: Int, width: Int, dtype: str) -> Array:
    """So many tokens of the cache, in its bytes; a kernel widens them as it reads."""
    assert sizes.cache is not None
    elements = tokens * count * width
    return Array(elements, dtype, None, nbytes=CACHE_FORMATS[sizes.cache].nbytes(elements, width))


def absorbed(tape: Tape, sizes: Sizes, q: Array, joint: Array, weight: Leaf) -> Array:
    """One query of each sequence against the latents themselves, [B, H W] (DeepSeek-V2, section 2.1.2).

    An accelerator runs scores and mixture as one kernel, which reads each latent once for both; on a CPU they are
    unfused.
    """
    spec, latent, B = sizes.spec, sizes.spec.latent, sizes.B
    assert latent is not None
    H, N, Q, W, R = latent.n_heads, latent.nope_head_dim, spec.rotary_size, spec.value_size, latent.kv_rank
    assert sizes.cached_tokens is not None
    S, C = sizes.cached_tokens, R + Q
    inward, outward = _parts_of_weight(weight, H, N, W, R)
    q_low = op.batched_matmul(tape, q.view(B * H * N), inward, H, B, R, N)
    q_joint = op.concatenate(tape, (q_low, q.view(B * H * Q)))
    del q_low
    if sizes.backend == "cpu":
        scores = op.times_number(tape, op.batched_matmul(tape, q_joint, joint, B, H, S, C))
        weights = op.softmax(tape, scores, "_softmax")
        y = op.batched_matmul(tape, weights, joint.view(B * S * R), B, H, R, S)
    else:
        nothing = Array(0, joint.dtype, None)  # the values are the latents, read already
        y = fused_attention(tape, q_joint, joint, nothing, (B, H, 1, S, C, R), kernel="flash_attention")
    y = op.batched_matmul(tape, y, outward, H, B, W, R)
    return op.contiguous(tape, y, forward=True, backward=False)


def _parts_of_weight(weight: Leaf, H: Int, N: Int, W: Int, R: Int) -> tuple[Array, Array]:
    """What of kv_b_proj makes keys and what makes values, each with its part of the bytes."""
    whole = weight.array()

    def part(width: Int) -> Array:
        return Array(H * width * R, whole.dtype, None, nbytes=whole.nbytes * width // (N + W))

    return part(N), part(W)
