"""Self-attention on a tape, multi-head or latent, and its KV cache: as in `engine.nn.attention` and `latent_attention`.

Sizes: B sequences, T new tokens, S tokens that a query sees, D d_model, H query heads, G key-value heads, K head width,
J pairs that rope turns, W value width; of latent attention P query rank, R key-value rank, N width without positions,
Q rotary width, K = N + Q.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.ledger import rules
from trainledger.ledger.core.graph import Array, BlockLeaves, Leaf
from trainledger.ledger.core.sizes import Sizes, added, is_one
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.model.attention_core import attend, broadcast, fused_attention
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.norms import layer_norm, norm, rms_norm, widened
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
    state_nbytes: Int = 0  # of a sequence in all mixers, however long it is

    def token_nbytes(self) -> Int:
        """Bytes that one more token takes while every layer still keeps all tokens."""
        return sum(kind.layers * self._one(kind) for kind in self.kinds)

    def nbytes(self, batch: Int, context: Int) -> Int:
        """Bytes of ``batch`` sequences of ``context`` tokens; a layer with a window keeps no more than that.

        >>> from trainledger.answers.load import model
        >>> kv_cache(model("llama-2-7b"), "bf16").nbytes(1, 1), kv_cache(model("deepseek-v3"), "bf16").nbytes(1, 1)
        (524288, 70272)
        """
        kept = sum(batch * kind.places(context) * kind.layers * self._one(kind) for kind in self.kinds)
        return kept + batch * self.state_nbytes

    def _one(self, kind: LayersCache) -> Int:
        format = CACHE_FORMATS[self.format]
        return sum(format.nbytes(count * width, width) for count, width in kind.heads)


def heads_of(spec: ModelSpec, *, chooses: bool = False) -> tuple[tuple[Int, Int], ...]:
    """(count, width) of a layer's cache for a token: keys and values of the key-value heads, or of latent
    attention the latent and the one rotary key (DeepSeek-AI 2024, DeepSeek-V2, section 2.1.3, table 1)."""
    if spec.latent:
        index = ((1, spec.indexer.head_dim),) if spec.indexer is not None and chooses else ()
        return ((1, spec.latent.kv_rank + spec.rotary_size), *index)
    return ((spec.kv_heads, spec.head_size), (spec.kv_heads, spec.value_size))


def kv_cache(spec: ModelSpec, format: str = "bf16") -> KVCache:
    """The cache of a model, layer by layer kind."""
    layers = [(kind, segment.count) for segment in segments(spec) for kind in segment.kinds]
    counts = added(((kind.window, kind.chooses), count) for kind, count in layers if kind.attends)
    of_kind = {
        (kind.window, kind.chooses): heads_of(spec.of_layers(kind.window), chooses=kind.chooses) for kind, _ in layers
    }
    caches = tuple(LayersCache(count, key[0], of_kind[key]) for key, count in counts.items())
    return KVCache(caches, format, sum(count * kind.mixes for kind, count in layers) * state_nbytes(spec))


def state_nbytes(spec: ModelSpec) -> Int:
    """Bytes of a sequence in a layer's mixer, in fp32: its state, and the last inputs of its convolution."""
    if spec.mixer is None:
        return 0
    sizes = spec.mixer.sizes(spec.d_model)
    return 4 * (sizes.state_size + (spec.mixer.conv_width - 1) * sizes.channels)


Heads = tuple[tuple[Int, Int], ...]


def remember(tape: Tape, sizes: Sizes, window: int | None, heads: Heads, new: Sequence[Array]) -> list[Array]:
    """Write new tokens; what attention reads: these themselves in a prefill, all that the layer still sees later."""
    assert sizes.cache is not None
    kept = sizes.B * rules.keys_seen(sizes.T, window)
    for (count, width), array in zip(heads, new, strict=True):
        part = array.view(kept * count * width)
        tape.emit("copy_", "copy", reads=[part], changes=[_stored(sizes, kept, count, width, array.dtype)])
    if sizes.cached_tokens is None:
        return list(new)
    seen = sizes.B * rules.keys_seen(sizes.cached_tokens, window)
    return [_stored(sizes, seen, *shape, array.dtype) for shape, array in zip(heads, new, strict=True)]


def _stored(sizes: Sizes, tokens: Int, count: Int, width: Int, dtype: str) -> Array:
    """So many tokens of the cache, in its bytes; a kernel widens them as it reads."""
    assert sizes.cache is not None
    elements = tokens * count * width
    return Array(elements, dtype, None, nbytes=CACHE_FORMATS[sizes.cache].nbytes(elements, width))


def absorbed(tape: Tape, sizes: Sizes, q: Array, joint: Array, weight: Leaf, chosen: Array | None) -> Array:
    """One query of each sequence against the latents themselves, [B, H W] (DeepSeek-V2, section 2.1.2)."""
    # An accelerator runs scores and mixture as one kernel, which reads each latent once for both; on a CPU they are
    # unfused.
    spec, latent, B = sizes.spec, sizes.spec.latent, sizes.B
    assert latent is not None
    H, N, Q, W, R = latent.n_heads, latent.nope_head_dim, spec.rotary_size, spec.value_size, latent.kv_rank
    assert sizes.cached_tokens is not None
    S, C = sizes.cached_tokens, R + Q
    if spec.indexer is not None:
        assert chosen is not None
        S = rules.keys_seen(S, spec.indexer.top_k)
        index = op.cast(tape, chosen, "int64")
        rows = _stored(sizes, B * S, 1, C, joint.dtype)
        joint = tape.make("gather", "embedding", rows, index, elements=B * S * C, dtype=q.dtype)
        del index
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


class Choice:
    """The keys that a layer chose, to which the layers behind it attend too."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: Array | None = None


Angles = tuple[Array, Array]
# What all layers of a kind share: rotary angles, and a mask, or what layers choose for those behind them.
Shared = tuple[Angles | None, Array | Choice | None]


def attention(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, shared: Shared) -> Array:
    """Self-attention with its four projections."""
    spec, rows = sizes.spec, sizes.rows
    D, H, G, K, W = spec.d_model, spec.attention.n_heads, spec.kv_heads, spec.head_size, spec.value_size
    angles, mask = shared
    assert not isinstance(mask, Choice)

    def normed(name: str, count: Int, y: Array) -> Array:
        if spec.attention.qk_norm not in ("head", "width"):
            return y
        per, width = (1, count * K) if spec.attention.qk_norm == "width" else (count, K)
        normal = norm(tape, sizes, y, leaves.named, f"self_attn.{name}_norm", rows=rows * per, width=width)
        return op.cast(tape, normal, y.dtype)

    gate = None
    if spec.attention.gated:
        both = project(tape, sizes, leaves, "q_proj", x, D, 2 * H * K)
        q, gate = op.parts(tape, both, [rows * H * K, rows * H * K])
        del both
        q = op.contiguous(tape, q, forward=spec.attention.qk_norm == "width", backward=False)
        q = normed("q", H, q)
    else:
        q = normed("q", H, project(tape, sizes, leaves, "q_proj", x, D, H * K))
    k = project(tape, sizes, leaves, "k_proj", x, D, G * K)
    v = k if spec.attention.keys_as_values else None
    k = normed("k", G, k if v is None or spec.attention.qk_norm == "width" else _as_heads(tape, k))
    v = project(tape, sizes, leaves, "v_proj", x, D, G * W) if v is None else _as_heads(tape, v)
    if spec.attention.value_norm:
        v = op.cast(tape, rms_norm(tape, widened(tape, v), None, rows * G, W), v.dtype)
    if spec.attention.value_scale != 1:
        v = op.times_number(tape, v)
    if angles is not None:
        q = rotate(tape, sizes, q, H, angles, after=K - spec.rotary_size)
        k = rotate(tape, sizes, k, G, angles, after=K - spec.rotary_size)
        if spec.attention.qk_norm == "turned":
            q = op.cast(tape, rms_norm(tape, widened(tape, q), None, rows * H, K), q.dtype)
            k = op.cast(tape, rms_norm(tape, widened(tape, k), None, rows * G, K), k.dtype)
    if sizes.cache is not None:
        k, v = remember(tape, sizes, leaves.kind.window, ((G, K), (G, W)), (k, v))
    y = attend(tape, sizes, leaves, q, k, v, mask)
    if gate is not None:
        y = op.multiply(tape, y, op.sigmoid(tape, gate))
    del gate
    return project(tape, sizes, leaves, "o_proj", y, H * W, D)


def _as_heads(tape: Tape, x: Array) -> Array:
    """The same memory, whose gradients are added up before they join those of other views."""
    return x.view(node=tape.node([x.node], (), lambda g: [g]))


def project(tape: Tape, sizes: Sizes, leaves: BlockLeaves, name: str, x: Array, d_in: Int, d_out: Int) -> Array:
    """One of the linear projections."""
    w, b = leaves[f"self_attn.{name}.weight"], leaves.get(f"self_attn.{name}.bias")
    with tape.at(name.rpartition(".")[2]):
        return op.linear(tape, x, w, b, sizes.rows, d_in, d_out)


def rotate(
    tape: Tape,
    sizes: Sizes,
    x: Array,
    heads: Int,
    angles: Angles,
    *,
    before: Int = 0,
    after: Int = 0,
    interleaved: bool | None = None,
) -> Array:
    """Rotary positions: two products each for cosine and sine; the dims before and after them are copied along."""
    cos, sin = angles
    count = sizes.rows * heads
    half = count * (sizes.spec.rotary_size // 2)
    if interleaved is None:
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


def latent_attention(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, shared: Shared) -> Array:
    """Attention whose keys and values come from one latent."""
    spec, rows = sizes.spec, sizes.rows
    angles, mask = shared
    assert spec.latent is not None
    D, H, W, Q = spec.d_model, spec.latent.n_heads, spec.value_size, spec.rotary_size
    R, N = spec.latent.kv_rank, spec.latent.nope_head_dim
    q, chosen = _queries(tape, sizes, leaves, x, angles)
    if isinstance(mask, Choice):
        mask.array = mask.array if chosen is None else chosen
        chosen = mask.array
    mask = chosen if spec.indexer is not None else mask
    del chosen
    assert not isinstance(mask, Choice)
    if angles is not None:
        q = rotate(tape, sizes, q, H, angles, before=N)
    joint = project(tape, sizes, leaves, "kv_a_proj_with_mqa", x, D, R + Q)
    latent, turning = op.parts(tape, joint, [rows * R, rows * Q])
    del joint
    if sizes.cache is not None:
        return _remembering(tape, sizes, leaves, q, latent, turning, angles, mask)
    kv = _normed(tape, sizes, leaves, "kv_a_layernorm", latent, R)
    kv = project(tape, sizes, leaves, "kv_b_proj", kv, R, H * (N + W))
    plain, v = op.parts(tape, kv, [rows * H * N, rows * H * W])
    del kv
    turned = turning if angles is None else rotate(tape, sizes, turning, 1, angles)
    k = op.concatenate(tape, (plain, broadcast(tape, turned, rows * H * Q, same=is_one(H))))
    del plain, turned, latent, turning
    # Megatron-LM copies the values, so that the matmul's output is not kept (multi_latent_attention.py).
    v = op.contiguous(tape, v, forward=sizes.of_megatron, backward=False)
    y = attend(tape, sizes, leaves, q, k, v, mask)
    return project(tape, sizes, leaves, "o_proj", y, H * W, D)


def _remembering(
    tape: Tape, sizes: Sizes, leaves: BlockLeaves, q: Array, latent: Array, turning: Array,
    angles: Angles | None, mask: Array | None,
) -> Array:  # fmt: skip
    """The same with a cache, of which one query reads the latents alone."""
    spec, rows = sizes.spec, sizes.rows
    assert spec.latent is not None
    H, W, Q = spec.latent.n_heads, spec.value_size, spec.rotary_size
    R, N = spec.latent.kv_rank, spec.latent.nope_head_dim
    latent = _normed(tape, sizes, leaves, "kv_a_layernorm", latent, R)
    turned = turning if angles is None else rotate(tape, sizes, turning, 1, angles)
    new = op.concatenate(tape, (latent, turned))
    (seen,) = remember(tape, sizes, leaves.kind.window, ((1, R + Q),), (new,))
    if sizes.cached_tokens is not None:
        del latent, turning, turned, new
        y = absorbed(tape, sizes, q, seen, leaves["self_attn.kv_b_proj.weight"], mask)
    else:
        kv = project(tape, sizes, leaves, "kv_b_proj", latent, R, H * (N + W))
        plain, v = op.parts(tape, kv, [rows * H * N, rows * H * W])
        k = op.concatenate(tape, (plain, broadcast(tape, turned, rows * H * Q, same=is_one(H))))
        del kv, plain, turned, latent, turning, new, seen
        y = attend(tape, sizes, leaves, q, k, v, mask)
    return project(tape, sizes, leaves, "o_proj", y, H * W, spec.d_model)


def _queries(
    tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, angles: Angles | None
) -> tuple[Array, Array | None]:
    """The queries, and the places of the keys that are chosen for each."""
    spec = sizes.spec
    assert spec.latent is not None
    D, P, out = spec.d_model, spec.latent.q_rank, spec.latent.n_heads * spec.head_size
    if P is None:
        return project(tape, sizes, leaves, "q_proj", x, D, out), None
    low = project(tape, sizes, leaves, "q_a_proj", x, D, P)
    low = _normed(tape, sizes, leaves, "q_a_layernorm", low, P)
    chosen = None
    if leaves.kind.chooses and angles is not None:
        with tape.at("indexer"):
            chosen = _choose(tape, sizes, leaves, x.view(), low.view(), angles)
    return project(tape, sizes, leaves, "q_b_proj", low, P, out), chosen


def _choose(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, low: Array, angles: Angles) -> Array:
    """The best keys of each query, by their places; nothing here has a gradient."""
    spec, rows, part = sizes.spec, sizes.rows, sizes.spec.indexer
    assert part is not None
    assert spec.latent is not None
    H, K, own = part.n_heads, part.head_dim, "indexer."
    after, pairs = K - spec.rotary_size, part.interleaved
    q = project(tape, sizes, leaves, f"{own}wq_b", low, spec.latent.q_rank, H * K)
    q = rotate(tape, sizes, q, H, angles, after=after, interleaved=pairs)
    k = project(tape, sizes, leaves, f"{own}wk", x, spec.d_model, K)
    w, b = (leaves[f"self_attn.indexer.k_norm.{name}"] for name in ("weight", "bias"))
    with tape.at("k_norm"):
        normed = layer_norm(tape, widened(tape, k), w, b, rows, K)
    k = op.cast(tape, normed, k.dtype)
    del normed
    k = rotate(tape, sizes, k, 1, angles, after=after, interleaved=pairs)
    weights = project(tape, sizes, leaves, f"{own}weights_proj", x, spec.d_model, H)
    if sizes.cache is not None:
        (k,) = remember(tape, sizes, None, ((1, K),), (k,))
    keys = sizes.T if sizes.cached_tokens is None else sizes.cached_tokens
    flops = rules.index_flops(sizes.B, H, sizes.T, keys, K)
    elements = rows * rules.keys_seen(keys, part.top_k)
    return tape.make(
        "choose_keys", "matmul", q, k, weights, elements=elements, dtype="int32", flops=flops, model_flops=flops
    )


def _normed(tape: Tape, sizes: Sizes, leaves: BlockLeaves, name: str, x: Array, width: Int) -> Array:
    """The RMSNorm of a latent."""
    with tape.at(name):
        w = leaves[f"self_attn.{name}.weight"]
        return rms_norm(tape, widened(tape, x), w, sizes.rows, width)
