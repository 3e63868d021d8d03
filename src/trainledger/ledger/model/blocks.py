"""The blocks of a model on a tape, in runs of equal ones, with what backward recomputes: as in `nn.transformer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.leaves import BlockLeaves, ModelLeaves, SegmentLeaves
from trainledger.ledger.core.sizes import Sizes
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.memory.checkpointing import Offload, checkpointed, recompute_from_input
from trainledger.ledger.model.attention import Angles, Shared, attention, latent_attention
from trainledger.ledger.model.feed_forward import experts, mlp
from trainledger.ledger.model.mask import Masks
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.norms import norm
from trainledger.ledger.parallel.tensor import enter, leave
from trainledger.spec.layers import angles_of
from trainledger.spec.recipe import Recipe
from trainledger.spec.savings import Selective

# The norms before and after each of the two branches of a serial block.
NORMS: dict[str, tuple[tuple[str | None, str | None], tuple[str | None, str | None]]] = {
    "pre": (("input_layernorm", None), ("post_attention_layernorm", None)),
    "post": ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")),
    "after-add": ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")),
    "sandwich": (
        ("input_layernorm", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
}


def block(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, shared: Shared) -> Array:
    """One of the model's layers."""
    with tape.at("layers.*"), op.gathered(tape, list(leaves.all())), tape.block():
        return compose(tape, sizes, leaves, x, shared)


def compose(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, shared: Shared) -> Array:
    """x + attention, then x + MLP, or x + (attention + MLP); norms are where the spec says."""
    spec = sizes.spec
    if spec.block != "serial":
        return _both(tape, sizes, leaves, x, shared)
    (before_attention, after_attention), (before_mlp, after_mlp) = NORMS[spec.norm_place]
    x = _joined(
        tape, sizes, leaves, x,
        _attend(tape, sizes, leaves, _normed(tape, sizes, x, leaves, before_attention), shared), after_attention,
    )  # fmt: skip
    return _joined(
        tape, sizes, leaves, x, _feed(tape, sizes, leaves, _normed(tape, sizes, x, leaves, before_mlp)), after_mlp
    )


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


def _attend(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, shared: Shared) -> Array:
    run = latent_attention if sizes.spec.latent else attention
    with tape.at("self_attn"):
        return leave(tape, sizes, run(tape, sizes, leaves, enter(tape, sizes, x), shared))


def _feed(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array) -> Array:
    run: Callable[[Tape, Sizes, BlockLeaves, Array], Array] = experts if leaves.kind.experts else mlp
    with tape.at("mlp"):
        return leave(tape, sizes, run(tape, sizes, leaves, enter(tape, sizes, x)))


def residual(tape: Tape, sizes: Sizes, x: Array) -> Array:
    """The output that a branch adds to the residual stream, after dropout."""
    with tape.at("dropout"):
        return op.dropout(tape, x, sizes.dropout)


Members = tuple[tuple[BlockLeaves, Shared], ...]  # blocks, each with what it shares with others of its kind


def run_layers(
    tape: Tape, sizes: Sizes, leaves: ModelLeaves, x: Array, angles: dict[str, Angles], masks: Masks, recipe: Recipe
) -> Array:
    """All blocks one after the other; ``angles`` are the rotary ones by the module that has them, masks by window."""

    def run_of(blocks: tuple[BlockLeaves, ...]) -> Callable[[Array], Array]:
        """A function that runs these blocks: it keeps only what they share with others of their kind."""
        names = [angles_of(sizes.spec, each.kind) for each in blocks]
        turned = [None if name is None else angles[name] for name in names]
        shared = [(some, masks[each.kind.window]) for each, some in zip(blocks, turned, strict=True)]
        return partial(_run, tape, sizes, tuple(zip(blocks, shared, strict=True)))

    first = [x]  # no name here keeps it alive while the blocks run
    del x
    again = recipe.activation_checkpointing
    if again.kind == "offload":
        shared = [*chain(*angles.values()), *(each for each in masks.values() if each is not None)]
        with tape.hooked(Offload(tape, shared)):
            return _run_groups(tape, leaves, first.pop(), run_of, ())
    if again.kind == "from-start":
        rounds = [one for each in leaves.segments for one in each.rounds("layers")]
        return recompute_from_input(tape, rounds, first.pop(), lambda x, blocks: run_of(blocks)(x))
    keep = again.keep if isinstance(again, Selective) else ()
    return _run_groups(tape, leaves, first.pop(), run_of, keep)


def _run(tape: Tape, sizes: Sizes, members: Members, x: Array) -> Array:
    for leaves, shared in members:
        x = tape.block_input(leaves, x)
        x = block(tape, sizes, leaves, x, shared)
        x = tape.block_output(leaves, x)
    return x


def _run_groups(
    tape: Tape, leaves: ModelLeaves, x: Array, run_of: Callable[[tuple[BlockLeaves, ...]], Callable[[Array], Array]],
    keep: tuple[str, ...],
) -> Array:  # fmt: skip
    for index, segment in enumerate(leaves.segments):
        for name, count, blocks in segment.rounds(f"layers {index}"):
            with tape.loop(name, count):
                for again, group in _groups(segment, blocks):
                    run = run_of(group)
                    x = checkpointed(tape, run, x, keep=keep) if again else run(x)
    return x


def _groups(segment: SegmentLeaves, blocks: tuple[BlockLeaves, ...]) -> Iterator[tuple[bool, tuple[BlockLeaves, ...]]]:
    first = 0
    for each in segment.groups:
        yield each.again, blocks[first : first + each.size]
        first += each.size
