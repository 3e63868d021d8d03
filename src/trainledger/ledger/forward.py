"""The whole model on a tape: embedding, blocks, head and loss, as in `nn.transformer`.

Sizes: B sequences, T tokens, D d_model, H query heads, G key-value heads, K head width, F d_ff, V vocab_size.
"""

from __future__ import annotations

from trainledger.ledger import operations as op
from trainledger.ledger.array import Array
from trainledger.ledger.attention import softmax
from trainledger.ledger.block import block, norm
from trainledger.ledger.parameters import BlockLeaves, ModelLeaves
from trainledger.ledger.self_attention import Angles
from trainledger.ledger.sizes import Sizes
from trainledger.ledger.tape import Frame, Tape


def forward(tape: Tape, sizes: Sizes, leaves: ModelLeaves, ids: Array, *, checkpointing: bool) -> Array:
    """Token ids to logits."""
    spec = sizes.spec
    with tape.at("embed_tokens"):
        x = op.embedding(tape, ids, leaves.before["embed_tokens.weight"], spec.d_model)
    if spec.positions == "learned":
        x = op.add_positions(tape, x, leaves.before["embed_positions.weight"], sizes.T, spec.d_model)
    with tape.at("dropout"):
        x = op.dropout(tape, x, sizes.dropout)
    angles = rotary(tape, sizes) if spec.positions == "rope" else None
    if angles is not None:
        # All blocks read the same angles: they live until the backward of the first block is over.
        x.node = tape.node([x.node], angles, lambda g, *_: [g])
    for segment in leaves.segments:
        with tape.loop("layers", segment.count):
            for each in segment.blocks:
                if checkpointing:
                    x = _checkpointed(tape, sizes, each, x, angles)
                else:
                    x = block(tape, sizes, each, x, angles)
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
    normed = norm(tape, sizes, x, leaves.after, "norm")
    with tape.at("lm_head"):
        logits = op.linear(tape, normed, leaves.head, None, sizes.rows, spec.d_model, spec.padded_vocab)
    assert logits.memory is not None
    logits.memory.record.category = "logits and loss"
    return logits


def loss(tape: Tape, logits: Array, targets: Array) -> Array:
    """Mean cross entropy in fp32."""
    with tape.at("loss"):
        wide = op.cast(tape, logits, "fp32")
        return op.negative_log_likelihood(tape, softmax(tape, wide, "_log_softmax"), targets)
