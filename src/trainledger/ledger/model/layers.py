"""The blocks of a model on a tape, in runs of equal ones, with what is recomputed in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.leaves import BlockLeaves, ModelLeaves, SegmentLeaves
from trainledger.ledger.core.sizes import Sizes
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.memory.checkpointing import Offload, checkpointed, recompute_from_input
from trainledger.ledger.model.block import block
from trainledger.ledger.model.mask import Masks
from trainledger.ledger.model.self_attention import Angles, Shared
from trainledger.spec.layers import angles_of
from trainledger.spec.recipe import Recipe

Members = tuple[tuple[BlockLeaves, Shared], ...]  # blocks, each with what it shares with others of its kind


def run_layers(
    tape: Tape, sizes: Sizes, leaves: ModelLeaves, x: Array, angles: dict[str, Angles], masks: Masks, recipe: Recipe
) -> Array:
    """All blocks one after the other; ``angles`` are the rotary ones by the module that has them, masks by window."""

    def with_shared(blocks: tuple[BlockLeaves, ...]) -> Members:
        names = [angles_of(sizes.spec, each.kind) for each in blocks]
        turned = [None if name is None else angles[name] for name in names]
        return tuple((each, (some, masks[each.kind.window])) for each, some in zip(blocks, turned, strict=True))

    first = [x]  # no name here keeps it alive while the blocks run
    del x
    run = partial(_run, tape, sizes)  # a recomputed group keeps what its own blocks share, and nothing else
    if recipe.activation_checkpointing == "offload":
        shared = [*chain(*angles.values()), *(each for each in masks.values() if each is not None)]
        with tape.hooked(Offload(tape, shared)):
            return _run_groups(tape, leaves, first.pop(), run, with_shared, ())
    if recipe.activation_checkpointing == "from-start":
        rounds = [one for each in leaves.segments for one in each.rounds("layers")]
        return recompute_from_input(tape, rounds, first.pop(), lambda x, blocks: run(x, with_shared(blocks)))
    keep = recipe.recompute_keep if recipe.activation_checkpointing == "selective" else ()
    return _run_groups(tape, leaves, first.pop(), run, with_shared, keep)


def _run(tape: Tape, sizes: Sizes, x: Array, members: Members) -> Array:
    for leaves, shared in members:
        x = tape.block_input(leaves, x)
        x = block(tape, sizes, leaves, x, shared)
        x = tape.block_output(leaves, x)
    return x


def _run_groups(
    tape: Tape, leaves: ModelLeaves, x: Array, run: Callable[[Array, Members], Array],
    with_shared: Callable[[tuple[BlockLeaves, ...]], Members], keep: tuple[str, ...],
) -> Array:  # fmt: skip
    for index, segment in enumerate(leaves.segments):
        for name, count, blocks in segment.rounds(f"layers {index}"):
            with tape.loop(name, count):
                for again, group in _groups(segment, blocks):
                    if again:
                        x = checkpointed(tape, partial(_swapped, run, with_shared(group)), x, keep=keep)
                    else:
                        x = run(x, with_shared(group))
    return x


def _swapped(run: Callable[[Array, Members], Array], members: Members, x: Array) -> Array:
    return run(x, members)


def _groups(segment: SegmentLeaves, blocks: tuple[BlockLeaves, ...]) -> Iterator[tuple[bool, tuple[BlockLeaves, ...]]]:
    first = 0
    for each in segment.groups:
        yield each.again, blocks[first : first + each.size]
        first += each.size
