"""The blocks of a model on a tape, in runs of equal ones, with what is recomputed in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from trainledger.ledger.array import Array
from trainledger.ledger.block import block
from trainledger.ledger.checkpointing import Offload, checkpointed
from trainledger.ledger.from_start import from_start
from trainledger.ledger.mask import Masks
from trainledger.ledger.parameters import BlockLeaves, ModelLeaves, SegmentLeaves
from trainledger.ledger.self_attention import Angles
from trainledger.ledger.sizes import Sizes
from trainledger.ledger.tape import Tape
from trainledger.spec.layers import angles_of
from trainledger.spec.recipe import Recipe


def run_layers(
    tape: Tape, sizes: Sizes, leaves: ModelLeaves, x: Array, angles: dict[str, Angles], masks: Masks, recipe: Recipe
) -> Array:
    """All blocks one after the other; ``angles`` are the rotary ones by the module that has them, masks by window."""

    def run(x: Array, blocks: tuple[BlockLeaves, ...]) -> Array:
        for each in blocks:
            name = angles_of(sizes.spec, each.kind)
            if tape.sharded is not None:
                x = tape.sharded.entering(each, x)
            x = block(tape, sizes, each, x, (None if name is None else angles[name], masks[each.kind.window]))
            if tape.sharded is not None:
                x = tape.sharded.leaving(each, x)
        return x

    first = [x]  # no name here keeps it alive while the blocks run
    del x
    if recipe.activation_checkpointing == "offload":
        shared = [*chain(*angles.values()), *(each for each in masks.values() if each is not None)]
        with tape.offloading(Offload(tape, shared)):
            return _run_layers(tape, leaves, first.pop(), run, ())
    if recipe.activation_checkpointing == "from-start":
        return from_start(tape, [one for each in leaves.segments for one in each.rounds("layers")], first.pop(), run)
    keep = recipe.recompute_keep if recipe.activation_checkpointing == "selective" else ()
    return _run_layers(tape, leaves, first.pop(), run, keep)


def _run_layers(
    tape: Tape, leaves: ModelLeaves, x: Array, run: Callable[[Array, tuple[BlockLeaves, ...]], Array],
    keep: tuple[str, ...],
) -> Array:  # fmt: skip
    for index, segment in enumerate(leaves.segments):
        for name, count, blocks in segment.rounds(f"layers {index}"):
            with tape.loop(name, count):
                for again, group in _groups(segment, blocks):
                    if again:
                        x = checkpointed(tape, lambda x, group=group: run(x, group), x, keep=keep)
                    else:
                        x = run(x, group)
    return x


def _groups(segment: SegmentLeaves, blocks: tuple[BlockLeaves, ...]) -> Iterator[tuple[bool, tuple[BlockLeaves, ...]]]:
    first = 0
    for each in segment.groups:
        yield each.again, blocks[first : first + each.size]
        first += each.size
