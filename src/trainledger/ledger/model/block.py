"""One block on a tape: attention or a mixer, then an MLP or experts, with norms where the model has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainledger.ledger.core.graph import Array, BlockLeaves
from trainledger.ledger.core.sizes import Sizes
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.model.attention import Shared, attention, latent_attention
from trainledger.ledger.model.feed_forward import experts, mlp
from trainledger.ledger.model.mixers import mix
from trainledger.ledger.model.parameters import NORMS
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.norms import norm
from trainledger.ledger.parallel.tensor import enter, leave


def block(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, shared: Shared) -> Array:
    """One of the model's layers."""
    with tape.at("layers.*"), op.gathered(tape, list(leaves.all())), tape.block():
        return compose(tape, sizes, leaves, x, shared)


def compose(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, shared: Shared) -> Array:
    """x + attention, then x + MLP, or x + (attention + MLP); norms are where the spec says."""
    spec = sizes.spec
    if spec.block != "serial":
        return _both(tape, sizes, leaves, x, shared)
    kind, (first, second) = leaves.kind, NORMS[spec.norm_place]
    if kind.attends or kind.mixes:
        mixed = _mix(tape, sizes, leaves, _normed(tape, sizes, x, leaves, first[0]), shared)
        x = _joined(tape, sizes, leaves, x, mixed, first[1])
        del mixed
    if not kind.feeds:
        return x
    own = kind.experts and spec.experts is not None and spec.experts.own_norms
    fed = _feed(tape, sizes, leaves, x if own else _normed(tape, sizes, x, leaves, second[0]))
    return _joined(tape, sizes, leaves, x, fed, second[1])


def _both(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, shared: Shared) -> Array:
    """Attention and MLP side by side, through one norm or through two."""
    normed = _normed(tape, sizes, x, leaves, "input_layernorm")
    attended = residual(tape, sizes, _attend(tape, sizes, leaves, normed, shared))
    if sizes.spec.block == "parallel-two-norms":
        normed = _normed(tape, sizes, x, leaves, "post_attention_layernorm")
    return op.add(tape, x, op.add(tape, attended, residual(tape, sizes, _feed(tape, sizes, leaves, normed))))


def _joined(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, branch: Array, name: str | None) -> Array:
    """The stream and a branch's output, with the norm after the branch."""
    if sizes.spec.norm_place == "after-add":
        return _normed(tape, sizes, op.add(tape, x, residual(tape, sizes, branch)), leaves, name)
    return op.add(tape, x, residual(tape, sizes, _normed(tape, sizes, branch, leaves, name)))


def _normed(tape: Tape, sizes: Sizes, x: Array, leaves: BlockLeaves, name: str | None) -> Array:
    return x if name is None else norm(tape, sizes, x, leaves.named, name)


def _mix(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, shared: Shared) -> Array:
    """What a block mixes tokens by: attention, a mixer, or the sum of both."""
    if not leaves.kind.mixes:
        return _attend(tape, sizes, leaves, x, shared)
    attended = _attend(tape, sizes, leaves, x, shared) if leaves.kind.attends else None
    with tape.at("mixer"):
        mixed = mix(tape, sizes, leaves, x)
    return mixed if attended is None else op.add(tape, attended, mixed)


def _attend(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, shared: Shared) -> Array:
    run = latent_attention if sizes.spec.latent else attention
    if (spec := sizes.spec.of_layers(leaves.kind.window)) is not sizes.spec:
        sizes = replace(sizes, spec=spec)
    with tape.at("self_attn"):
        return leave(tape, sizes, run(tape, sizes, leaves, enter(tape, sizes, x), shared))


def _feed(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array) -> Array:
    run: Callable[[Tape, Sizes, BlockLeaves, Array], Array] = experts if leaves.kind.experts else mlp
    with tape.at("mlp"):
        if leaves.kind.experts and sizes.routes_own:
            return experts(tape, sizes, leaves, x)
        return leave(tape, sizes, run(tape, sizes, leaves, enter(tape, sizes, x)))


def residual(tape: Tape, sizes: Sizes, x: Array) -> Array:
    """The output that a branch adds to the residual stream, after dropout."""
    with tape.at("dropout"):
        return op.dropout(tape, x, sizes.dropout)
