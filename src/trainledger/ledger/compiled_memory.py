"""The memory of a step whose blocks are compiled: when each piece that a block's operations made is live.

The tape has followed the blocks operation by operation, as they run eagerly; here the lives of their pieces of memory
are told anew by the rules of `ledger.partition`. What other parts of the step made and hold stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

from trainledger.ledger.array import Array
from trainledger.ledger.operations import is_one
from trainledger.ledger.partition import Operation, Values, once, same
from trainledger.ledger.record import Event, Storage
from trainledger.spec.precision import precision_of

if TYPE_CHECKING:
    from trainledger.ledger.checkpointing import Frame
    from trainledger.ledger.rank import Rank


def uncovered(rank: Rank) -> str:
    """A sentence for a run with compiled blocks whose memory is told as that of eager ones; empty where it is not."""
    spec, recipe, layout, precision = rank.run.model, rank.run.recipe, rank.layout, precision_of(rank.run.recipe)
    checkpointing = recipe.activation_checkpointing
    if spec.n_experts or not is_one(layout.expert):
        why = "experts, whose tokens are counted while they run"
    elif spec.latent:
        why = "latent attention"
    elif not is_one(layout.context):
        why = "context ranks"
    elif layout.gathers_again:
        why = 'sequence_gather = "again"'
    elif checkpointing not in ("none", "full", "segments") or (checkpointing == "segments" and rank.gathers):
        why = f'activation_checkpointing = "{checkpointing}"'
    elif precision.float8 is not None:
        why = f"precision {precision.name}"
    elif precision.copies == "gathered" and not rank.gathers:
        why = f"precision {precision.name} of parameters that are not sharded"
    else:
        return ""
    return f"compiled memory is told as eager: what a compiler keeps and frees is not followed for {why}"


class Unit:
    """A compiled block: its operations forward, in the second run of a checkpointed one, and backward."""

    def __init__(self) -> None:
        self.forward: list[Operation] = []
        self.again: list[Operation] = []
        self.backward: list[Operation] = []


class Units:
    """The compiled blocks of a step, as the tape comes by them."""

    def __init__(self) -> None:
        self.now: Unit | None = None
        self._units: list[Unit] = []
        self._maker: dict[int, Unit] = {}
        self._outside: set[int] = set()

    @contextmanager
    def block(self, frame: Frame | None) -> Iterator[None]:
        """Inside, a block runs: for the first time, or again for its backward."""
        before = self.now
        if frame is not None and frame.collecting:
            self.now = next(each for each in frame.units if not each.again)
        else:
            self.now = Unit()
            self._units.append(self.now)
            if frame is not None:
                frame.units.append(self.now)
        try:
            yield
        finally:
            self.now = before

    def notice(self, event: Event, at: int, reads: Sequence[Array], changes: Sequence[Array]) -> None:
        """An operation has run, the step's with this index."""
        unit, phase = self.now, event.facts["phase"]
        operation = Operation(event, at, [*changes, *reads])
        adds_up = phase == "backward" and event.facts["name"] == "add_"  # to a gradient, when the block is through
        if unit is None or adds_up or event.facts["kind"] == "allocate":
            unit = None
        for each in operation.reads:
            if unit is None or self._maker.get(id(each)) is not unit:
                self._outside.add(id(each))
        if unit is not None:
            self._maker.update((id(each), unit) for each in operation.made)
            {"forward": unit.forward, "recompute": unit.again}.get(phase, unit.backward).append(operation)

    def finish(self, events: list[Event]) -> None:
        """Tell the lives of what the blocks made anew."""
        lives = Lives(events)
        units = [each for each in self._units if each.forward and each.backward]
        results = {each.forward[-1].event.facts["loop"]: each.forward[-1].made[0] for each in units}
        for each in units:
            _Block(each, results[each.forward[-1].event.facts["loop"]], lives, self._outside).tell()
        lives.write()


class Lives:
    """When each piece of memory of a step is allocated and freed, by the index of the event."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._changed: dict[int, tuple[Storage, int | None, int | None]] = {}
        self.counted: set[int] = set()  # results of loops that are kept in the place of what goes into them
        self.died = {id(storage): at for at, event in enumerate(events) for storage, _ in event.freed}

    def change(self, storage: Storage, born: int, died: int) -> None:
        """A piece of memory is live from one event to another."""
        self._changed[id(storage)] = storage, born, died

    def ends(self, storage: Storage, died: int) -> bool:
        """Whether a piece of memory that was told anew dies with this event."""
        _, born, until = self._changed.get(id(storage), (storage, None, None))
        return born is not None and until == died

    def end_sooner(self, storage: Storage, died: int) -> bool:
        """Let a piece of memory that was told anew die before, if it lives by then."""
        _, born, _ = self._changed[id(storage)]
        if born is None or born > died:
            return False
        self._changed[id(storage)] = storage, born, died
        return True

    def end(self, storage: Storage, died: int) -> None:
        """A piece of memory is live until this event."""
        self._changed[id(storage)] = storage, None, died

    def remove(self, storage: Storage) -> None:
        """There never is such a piece of memory."""
        self._changed[id(storage)] = storage, -1, None

    def write(self) -> None:
        """Tell the events."""
        kept_birth = {key for key, (_, born, _) in self._changed.items() if born is None}
        for event in self._events:
            changed = self._changed
            event.allocated = [each for each in event.allocated if id(each) not in changed or id(each) in kept_birth]
            event.freed = [(each, copies) for each, copies in event.freed if id(each) not in changed]
        for storage, born, died in self._changed.values():
            if born is not None and born >= 0:
                self._events[born].allocated.append(storage)
            if died is not None:
                self._events[died].freed.append((storage, 1))


class _Run:
    """One run of a block's operations: what of it is in memory, and which operation reads each piece of memory last.

    Backward reads what the run ``before`` has ``kept``, or what it computes of that again.
    """

    def __init__(self, operations: Sequence[Operation], held: set[int], before: _Kept | None = None) -> None:
        self.operations = operations
        self.values = Values(operations)
        self.held = set(held)
        for each in operations:
            if not each.fused:
                self.held.update(id(storage) for storage in (*each.made, *each.reads))
        self.last: dict[int, Operation] = {}
        self._read: dict[int, list[Storage]] = {}
        for each in operations:
            if not each.fused or any(id(made) in self.held for made in each.made):
                for read in each.reads:
                    for source in self.values.sources(read, self.held):
                        for one in (source,) if before is None else before.sources(source):
                            self.last[id(one)] = each
                            self._read.setdefault(id(each), []).append(one)

    def read_last(self, operation: Operation) -> list[Storage]:
        """The pieces of memory that this operation is the last to read."""
        read = {id(each): each for each in self._read.get(id(operation), ())}
        return [each for key, each in read.items() if self.last[key] is operation]


class _Kept:
    """What a run of a block has kept for its backward, and how everything else is made of that."""

    def __init__(self, run: Values, kept: set[int]) -> None:
        self._run = run
        self._kept = kept

    def sources(self, value: Storage) -> Iterator[Storage]:
        return self._run.sources(value, self._kept)


class _Block:
    """The memory of one block."""

    def __init__(self, unit: Unit, result: Storage, lives: Lives, outside: set[int]) -> None:
        self.lives = lives
        self.result = result  # of the last block in the loop
        runs = (unit.forward, unit.again, unit.backward)
        duplicates: dict[int, Storage] = {}
        self.forward, self.again, self.backward = (once(each, duplicates) for each in runs)
        made = [each for run in runs for operation in run for each in operation.made]
        self.never = [each for each in made if id(each) in duplicates]
        self.leaving = {id(each) for each in made if id(each) in outside or each.category == "gradients"}

    def tell(self) -> None:
        """Say when each piece of memory is live."""
        model = self.again or self.forward
        values = Values(model)
        kept = values.kept(self.backward)
        back = _Run(self.backward, self.leaving, _Kept(values, kept))
        until = {each: back.last[each].at for each in kept if each in back.last}
        forward = _Run(self.forward, self._in_first_run(kept) | self.leaving)
        for each in self.never:
            self.lives.remove(each)
        self._tell_masks(model, kept)
        if self.again:
            # Checkpointing lets go of what the graph of the forward hands out when that is over.
            self._tell_run(forward, dict.fromkeys(self._in_first_run(kept), self.forward[-1].at), keeps=False)
            self._tell_run(_Run(self.again, kept), until, keeps=False)
        else:
            self._tell_run(forward, until, keeps=True)
        self._tell_run(back, {}, keeps=False)
        self._tell_inputs(forward, back)

    def _in_first_run(self, kept: set[int]) -> set[int]:
        """The same values in the forward, where they are those of a second run of it."""
        if not self.again:
            return kept
        pairs = zip(self.forward, self.again, strict=False)
        return {id(a) for one, two in pairs for a, b in zip(one.made, two.made, strict=True) if id(b) in kept}

    def _tell_run(self, run: _Run, until: dict[int, int], *, keeps: bool) -> None:
        """Pieces of memory are live from the operation that makes them to ``until``, or to the last that reads them."""
        lives: dict[int, tuple[Storage, int, int]] = {}
        for operation in run.operations:
            for each in operation.made:
                if id(each) in self.leaving:
                    continue
                each.kept = keeps and id(each) in until
                if each.category in ("activations", "scratch"):
                    each.category = "activations" if id(each) in until else "scratch"
                if id(each) in run.held:
                    last = run.last.get(id(each), operation).at
                    lives[id(each)] = each, operation.at, until.get(id(each), last)
                else:
                    self.lives.remove(each)
        for storage, born, died in lives.values():
            self.lives.change(storage, born, died)
        self._overwrite(run)

    def _overwrite(self, run: _Run) -> None:
        """What a fused kernel writes takes the place of something as large of this block that it reads last."""
        for before, operation in pairwise(run.operations):
            free = [each for each in run.read_last(operation) if self.lives.ends(each, operation.at)]
            for made in operation.made if operation.fused else ():
                if id(made) not in run.held:
                    continue
                place = next((each for each in free if same(each.nbytes, made.nbytes)), None)
                if place is not None and self.lives.end_sooner(place, before.at):
                    free.remove(place)

    def _tell_masks(self, model: Sequence[Operation], kept: set[int]) -> None:
        """Of a ReLU whose result a product reads in backward its derivative is kept beside it, a byte for each element.

        What is kept is a view of the result, by which the partitioner does not know the result itself.
        """
        for back in self.backward:
            made = {id(each.made[0]): each for each in model if each.name == "relu"}
            relu = next((made[id(read)] for read in back.reads if id(read) in made), None)
            if back.name != "threshold_backward" or relu is None or id(relu.made[0]) not in kept:
                continue
            facts = relu.event.facts
            mask = Storage(facts["flops"], facts["phase"], "scratch", facts["loop"])
            mask.kept = not self.again
            mask.category = "scratch" if self.again else "activations"
            self.lives.change(mask, relu.at, back.at)

    def _tell_inputs(self, forward: _Run, back: _Run) -> None:
        """What comes from outside and has died in the block dies when it is read last, in backward if it is kept."""
        runs = (self.forward, self.again, self.backward)
        own = {id(made) for run in runs for each in run for made in each.made}
        given = {id(each): each for run in runs for operation in run for each in operation.reads}
        for key, storage in given.items():
            died = self.lives.died.get(key)
            if key in own or died is None or (self.again and key in forward.last):
                continue  # of a checkpointed block, checkpointing itself holds the input
            if not any(run and run[0].at <= died <= run[-1].at for run in runs):
                continue
            reader = back.last.get(key) or forward.last.get(key)
            if reader is not None:
                self.lives.end(storage, reader.at)
                if storage.phase == "forward":
                    self._tell_kept(storage, key in back.last)

    def _tell_kept(self, given: Storage, kept: bool) -> None:
        """Whether the block's input is kept.

        What goes into a loop of blocks stands for what goes from one of them to the next, as their last result stands
        for what leaves the loop: where nothing else keeps that, it is counted in the place of what goes in.
        """
        counted = self.lives.counted
        if kept and given.loop != self.result.loop and not self.result.kept:
            self.result.kept = True
            counted.add(id(self.result))
            given.kept = id(given) in counted
        else:
            given.kept = kept or id(given) in counted
        for each in (given, self.result):
            if kept and each.category == "scratch":
                each.category = "activations"
