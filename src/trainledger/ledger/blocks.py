"""The model on a tape: the same expressions as in `nn`, with sizes instead of tensors.

Sizes: B sequences, T tokens, D d_model, H query heads, G key-value heads, K head width, F d_ff, V vocab_size.
"""

from __future__ import annotations

from trainledger.frozen import frozen
from trainledger.ledger import operations as op
from trainledger.ledger.array import Array, Leaf
from trainledger.ledger.attention import causal_softmax, fused_attention, softmax
from trainledger.ledger.entry import Int
from trainledger.ledger.norms import layer_norm, rms_norm
from trainledger.ledger.parameters import BlockLeaves, ModelLeaves
from trainledger.ledger.tape import Frame, Tape
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe

Angles = tuple[Array, Array]


@frozen
class Sizes:
    """The sizes of one forward, and which kernels run it."""

    spec: ModelSpec
    B: Int
    T: Int
    attention: str
    dropout: float
    backend: str

    @property
    def rows(self) -> Int:
        return self.B * self.T

    @property
    def fused_kernels(self) -> bool:
        """Whether norms are one kernel: so on accelerators, while a CPU runs RMSNorm as six operations."""
        return self.backend != "cpu"


def norm(tape: Tape, sizes: Sizes, x: Array, w: Leaf, b: Leaf | None, path: str) -> Array:
    """The spec's normalization."""
    with tape.at(path):
        if sizes.spec.norm == "layernorm":
            return layer_norm(tape, x, w, b, sizes.rows, sizes.spec.d_model)
        return rms_norm(tape, x, w, sizes.rows, sizes.spec.d_model, fused=sizes.fused_kernels)


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
    q_bias, k_bias, v_bias, o_bias = leaves.attention_biases
    written, turned, grouped = sizes.attention == "math", angles is not None, not op.is_one(H // G)

    def project(name: str, w: Leaf, b: Leaf | None, heads: Int, *, copied: bool, heads_copied: bool) -> Array:
        with tape.at(f"{name}_proj"):
            y = op.linear(tape, x, w, b, rows, D, heads * K)
            y = op.contiguous(tape, y, forward=False, backward=copied)
        return op.contiguous(tape, y, forward=False, backward=heads_copied and not op.is_one(heads))

    # Gradients of batched products have heads before tokens, that of the keys (transposed there) tokens last; a
    # reshape must copy them. A rotation's own copy brings heads behind tokens, but keeps tokens last.
    q = project("q", leaves.q, q_bias, H, copied=False, heads_copied=written and not turned)
    k_copied = written and not grouped and not op.is_one(sizes.B)
    k = project("k", leaves.k, k_bias, G, copied=k_copied, heads_copied=written and grouped and not turned)
    v = project("v", leaves.v, v_bias, G, copied=False, heads_copied=written)
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
        return op.linear(tape, flat, leaves.o, o_bias, rows, H * K, D)


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


def mlp(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array) -> Array:
    """The feed-forward part, plain or gated."""
    D, F, rows = sizes.spec.d_model, sizes.spec.d_ff, sizes.rows
    gate_bias, up_bias, down_bias = leaves.mlp_biases

    def project(name: str, x: Array, w: Leaf, b: Leaf | None, d_in: Int, d_out: Int) -> Array:
        with tape.at(name):
            return op.linear(tape, x, w, b, rows, d_in, d_out)

    if leaves.gate is None:
        h = op.activation(tape, project("up_proj", x, leaves.up, up_bias, D, F), sizes.spec.activation)
    else:
        h = op.multiply(
            tape,
            op.activation(tape, project("gate_proj", x, leaves.gate, gate_bias, D, F), sizes.spec.activation),
            project("up_proj", x, leaves.up, up_bias, D, F),
        )
    return project("down_proj", h, leaves.down, down_bias, F, D)


def block(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, angles: Angles | None) -> Array:
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    with tape.at("layers.*"):
        x = op.add(tape, x, residual(tape, sizes, _attention_branch(tape, sizes, leaves, x, angles)))
        return op.add(tape, x, residual(tape, sizes, _mlp_branch(tape, sizes, leaves, x)))


def _attention_branch(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, angles: Angles | None) -> Array:
    normed = norm(tape, sizes, x, leaves.norm1, leaves.norm1_bias, "input_layernorm")
    with tape.at("self_attn"):
        return attention(tape, sizes, leaves, normed, angles)


def _mlp_branch(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array) -> Array:
    normed = norm(tape, sizes, x, leaves.norm2, leaves.norm2_bias, "post_attention_layernorm")
    with tape.at("mlp"):
        return mlp(tape, sizes, leaves, normed)


def residual(tape: Tape, sizes: Sizes, x: Array) -> Array:
    """What a branch adds to the stream, after dropout."""
    with tape.at("dropout"):
        return op.dropout(tape, x, sizes.dropout)


def forward(tape: Tape, sizes: Sizes, leaves: ModelLeaves, ids: Array, *, checkpointing: bool) -> Array:
    """Token ids to logits."""
    spec = sizes.spec
    with tape.at("embed_tokens"):
        x = op.embedding(tape, ids, leaves.tokens, spec.d_model)
    if leaves.positions is not None:
        x = op.add_positions(tape, x, leaves.positions, sizes.T, spec.d_model)
    with tape.at("dropout"):
        x = op.dropout(tape, x, sizes.dropout)
    angles = rotary(tape, sizes) if spec.positions == "rope" else None
    if angles is not None:
        # All blocks read the same angles: they live until the backward of the first block is over.
        x.node = tape.node([x.node], angles, lambda g, *_: [g])
    with tape.loop("layers", spec.n_layers):
        if checkpointing:
            x = _checkpointed(tape, sizes, leaves.block, x, angles)
        else:
            x = block(tape, sizes, leaves.block, x, angles)
    return head(tape, sizes, leaves, x)


def _checkpointed(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, angles: Angles | None) -> Array:
    frame = Frame(tape, lambda: block(tape, sizes, leaves, x, angles))
    with tape.checkpointing(frame):
        return block(tape, sizes, leaves, x, angles)


def rotary(tape: Tape, sizes: Sizes) -> Angles:
    """Cosines and sines of the positions in the format of the products; in fp32 they are the model's buffers."""
    count = sizes.T * (sizes.spec.head_size // 2)
    with tape.at("rotary"):
        buffers = (Array(count, "fp32", None), Array(count, "fp32", None))
        return op.cast(tape, buffers[0], tape.compute_dtype), op.cast(tape, buffers[1], tape.compute_dtype)


def head(tape: Tape, sizes: Sizes, leaves: ModelLeaves, x: Array) -> Array:
    """The final norm and the logits."""
    spec = sizes.spec
    normed = norm(tape, sizes, x, leaves.norm, leaves.norm_bias, "norm")
    with tape.at("lm_head"):
        logits = op.linear(tape, normed, leaves.head, None, sizes.rows, spec.d_model, spec.vocab_size)
    assert logits.memory is not None
    logits.memory.record.category = "logits and loss"
    return logits


def loss(tape: Tape, logits: Array, targets: Array) -> Array:
    """Mean cross entropy in fp32."""
    with tape.at("loss"):
        wide = op.cast(tape, logits, "fp32")
        return op.negative_log_likelihood(tape, softmax(tape, wide, "_log_softmax"), targets)


def sizes_of(spec: ModelSpec, recipe: Recipe, backend: str) -> Sizes:
    """The sizes of one micro-batch of a recipe."""
    return Sizes(spec, recipe.device_batch, recipe.seq_len, recipe.attention, recipe.dropout, backend)
