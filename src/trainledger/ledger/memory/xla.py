"""The memory of a sharded step that XLA compiles whole, as MaxText trains: when each piece of it is live.

The tape follows operations in PyTorch's order with FSDP's gathers and reductions. At the end lifetimes are set to what
the TPU's compiler assigned in the programs of ``bench/tpu_oracle.py`` (libtpu 0.0.52; docs/tables/tpu_oracle.csv).
Inside of blocks they follow `compiled_graph`; beside that

- a layer's parameters are gathered one matrix at a time, the next while one is in use, and none is copied;
- sharded parameters are cast before the loop over layers, those of all layers at once (loop-invariant code motion);
- a loop's results exist whole from its first round on: so do the gradients of all layers, when backward begins;
- a layer's gradient is reduced matrix by matrix; those of embedding and head stay whole to the end of backward;
- the gradient of the logits is computed where a matmul reads it;
- over 8 to 32 shards the partitioner multiplies embedding and head window by window (its windowed einsum): they are
  never whole, the head's gradient comes last, and the gradient of the logits stays until then; kernels in such loops
  write nothing in place.

What is left out: that the scheduler holds more where memory is free, and temporaries of kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

from trainledger.ledger.core.graph import Leaf
from trainledger.ledger.core.sizes import greater, same
from trainledger.ledger.entry import COMMUNICATION, Event, Int, Loop, Storage
from trainledger.ledger.memory.compiled_blocks import Lifetimes, Lives
from trainledger.ledger.parallel.rank_plan import RankPlan
from trainledger.spec.dtypes import nbytes_in

ENDS = ("embed_tokens", "lm_head")
WINDOWED = range(8, 33)  # shards; on 4, and on 64 and 128, the compiler gathers the head


class WholeStep(Lifetimes):
    """Follows a step and sets the lifetimes of its memory at its end, outside of its blocks too."""

    def __init__(self, rank: RankPlan) -> None:
        ranks = rank.group.ranks
        self._windows = rank.gathers and isinstance(ranks, int) and ranks in WINDOWED
        inside = rank.run.recipe.activation_checkpointing.kind == "selective"
        super().__init__(inside=inside, in_place=not self._windows)
        self._rank = rank

    def finished(self, events: list[Event]) -> None:
        """Set the lifetimes of blocks, then of logits, of what is gathered and of gradients."""
        super().finished(events)
        lives = Lives(events)
        self._loss(lives, events)
        if self._rank.gathers:
            self._gather_by_matrix(lives, events)
            self._reduce_by_matrix(lives, events)
        lives.write()

    def _loss(self, lives: Lives, events: Sequence[Event]) -> None:
        made = {id(storage): event.at for event in events for storage in event.allocated}
        for event in events:
            if event.facts["name"] != "cross_entropy_backward":
                continue
            gradient = event.allocated[0]
            # In windows the head's weight gradient is scheduled last, and reads this (cases of 8, 16 and 32 chips).
            if self._windows:
                lives.change(gradient, event.at, self._ends(events, event.facts["loop"]))
                continue
            for storage, _ in event.freed:
                if same(storage.nbytes, gradient.nbytes):
                    lives.change(storage, made[id(storage)], event.at - 1)

    def _ends(self, events: Sequence[Event], loop: Loop) -> int:
        """The last event of backward in a loop."""
        return max(
            event.at for event in events if event.facts["phase"] == "backward" and _are_one(event.facts["loop"], loop)
        )

    def _gather_by_matrix(self, lives: Lives, events: Sequence[Event]) -> None:
        dtype = self._rank.run.recipe.precision.arriving
        sizes = [leaf.elements for leaf, _ in self._leaves_of_layers()]
        two = nbytes_in(2 * reduce(greater, sizes, 0), dtype)
        for event in events:
            in_use = event.facts["name"] == "split_with_sizes_copy" and _of_layers(event)
            for storage in event.allocated:
                if storage.category == COMMUNICATION and in_use:
                    storage.nbytes = two  # its bytes in flight, which are of the whole layer, stay the entry's payload
                elif storage.category == COMMUNICATION:
                    lives.change(storage, None, None)
        for chunk in self._rank.chunks:
            embedding = chunk.leaves.before.get("embed_tokens.weight")
            for path, leaf in zip(ENDS, (embedding, chunk.leaves.head), strict=True):
                uses = [
                    event.at
                    for event in events
                    if event.facts["path"].startswith(path) and event.facts["kind"] != "collective"
                ]
                loops = [events[at].facts["loop"] for at in uses]
                if leaf is not None and uses and all(_are_one(loop, loops[0]) for loop in loops):
                    last = uses[-1] if path == "lm_head" else uses[0]
                    lives.change(Storage(nbytes_in(leaf.elements, dtype), "forward", COMMUNICATION), uses[0], last)

    def _reduce_by_matrix(self, lives: Lives, events: Sequence[Event]) -> None:
        precision = self._rank.run.recipe.precision
        own: Int = sum(self._rank.piece(leaf) * count for leaf, count in self._leaves_of_layers())
        outside = [leaf for chunk in self._rank.chunks for leaf in chunk.leaves.outside]
        whole = [nbytes_in(leaf.elements, precision.arriving) for leaf in outside]
        for event in events:
            of_ends = self._windows and event.facts["phase"] == "backward" and event.facts["path"] in ENDS
            for storage in event.allocated if of_ends else ():
                if any(same(storage.nbytes, nbytes) for nbytes in whole):
                    storage.nbytes = storage.nbytes // self._rank.group.ranks
            for storage in event.allocated if _of_layers(event) else ():
                if storage.category == "gradients":
                    reduced = event.facts["name"] == "reduce_scatter"
                    lives.change(storage, None if reduced else event.at, None if reduced else event.at)
        # Gradients of several micro-batches are added to those of the first, which live to the end of the step.
        for begins, ends, outermost in _rounds_of_micro_batches(events):
            loop = events[begins].facts["loop"]
            gradients = Storage(nbytes_in(own, precision.gradients), "backward", "gradients", loop)
            lives.change(gradients, begins, len(events) - 1 if outermost else ends)
            if precision.arriving != precision.parameters:
                first = next(event.at for event in events if _are_one(event.facts["loop"], loop))
                cast = Storage(nbytes_in(own, precision.arriving), "forward", COMMUNICATION, loop)
                lives.change(cast, first, ends)

    def _leaves_of_layers(self) -> Iterator[tuple[Leaf, Int]]:
        """The parameters of layers, each with how many layers have it."""
        for chunk in self._rank.chunks:
            for segment in chunk.leaves.segments:
                for block in segment.blocks:
                    yield from ((leaf, segment.count) for leaf in block.all())


def _of_layers(event: Event) -> bool:
    path: str = event.facts["path"]
    return path.startswith("layers")


def _are_one(one: Loop, other: Loop) -> bool:
    """Whether two loops are one; how often each runs may be arrays."""
    return len(one) == len(other) and all(
        name == other_name and same(times, other_times)
        for (name, times), (other_name, other_times) in zip(one, other, strict=True)
    )


def _rounds_of_micro_batches(events: Sequence[Event]) -> Iterator[tuple[int, int, bool]]:
    """Of each loop around the layers' backward the events before and after it, and whether it is the outermost."""
    backward = [event for event in events if event.facts["phase"] == "backward" and _of_layers(event)]
    outers: list[Loop] = []
    for event in backward:
        if not any(_are_one(event.facts["loop"][:-1], outer) for outer in outers):
            outers.append(event.facts["loop"][:-1])
    for outer in outers:
        inside = [event.at for event in backward if _are_one(event.facts["loop"][:-1], outer)]
        around = [event.at for event in events if _are_one(event.facts["loop"], outer)]
        before, after = [at for at in around if at < inside[0]], [at for at in around if at > inside[-1]]
        yield (before or around)[-1], (after or around)[0], not outer
