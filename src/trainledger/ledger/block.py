"""One block on a tape: the same expressions as in `nn.transformer`."""

from __future__ import annotations

from collections.abc import Mapping

from trainledger.ledger import operations as op
from trainledger.ledger.array import Array, Leaf
from trainledger.ledger.feed_forward import mlp
from trainledger.ledger.norms import layer_norm, rms_norm
from trainledger.ledger.parameters import BlockLeaves
from trainledger.ledger.self_attention import Angles, attention
from trainledger.ledger.sizes import Sizes
from trainledger.ledger.tape import Tape


def norm(tape: Tape, sizes: Sizes, x: Array, leaves: Mapping[str, Leaf], name: str) -> Array:
    """The spec's normalization over the residual stream, with the weight and bias of this name."""
    w, b = leaves[f"{name}.weight"], leaves.get(f"{name}.bias")
    with tape.at(name):
        if sizes.spec.norm == "layernorm":
            return layer_norm(tape, x, w, b, sizes.rows, sizes.spec.d_model)
        return rms_norm(tape, x, w, sizes.rows, sizes.spec.d_model, fused=sizes.fused_kernels)


def block(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, angles: Angles | None) -> Array:
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    with tape.at("layers.*"):
        x = op.add(tape, x, residual(tape, sizes, _attention_branch(tape, sizes, leaves, x, angles)))
        return op.add(tape, x, residual(tape, sizes, _mlp_branch(tape, sizes, leaves, x)))


def _attention_branch(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, angles: Angles | None) -> Array:
    normed = norm(tape, sizes, x, leaves.named, "input_layernorm")
    with tape.at("self_attn"):
        return attention(tape, sizes, leaves, normed, angles)


def _mlp_branch(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array) -> Array:
    normed = norm(tape, sizes, x, leaves.named, "post_attention_layernorm")
    with tape.at("mlp"):
        return mlp(tape, sizes, leaves, normed)


def residual(tape: Tape, sizes: Sizes, x: Array) -> Array:
    """What a branch adds to the stream, after dropout."""
    with tape.at("dropout"):
        return op.dropout(tape, x, sizes.dropout)
