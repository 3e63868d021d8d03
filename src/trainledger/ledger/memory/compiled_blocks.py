"""The memory of a step whose blocks are compiled: when each piece that a block's operations made is live.

The tape follows the blocks operation by operation, as they run eagerly. Afterwards the lifetimes of their memory are
set by the rules of `compiled_graph`; what other parts of the step make is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.recording import Hook
from trainledger.ledger.core.sizes import is_one, same
from trainledger.ledger.entry import BlockRun, Event, Storage
from trainledger.ledger.memory.compiled_graph import Operation, Values, once
from trainledger.ledger.memory.compiled_schedule import Kernel, Kernels, Schedule, on_demand
from trainledger.ledger.parallel.rank_plan import RankPlan
from trainledger.spec.savings import LINEAR, Selective

STATES = {"_scaled_dot_product_flash_attention_for_cpu": 5056, "native_dropout": 8}  # a CPU's generator, a seed
COVERED = ("none", "full", "segments", "selective")
WHOLE = ("matmuls", "attention", "mm", "addmm", "bmm", "_scaled_mm", "grouped_mm", "_scaled_grouped_mm", "all_to_all")


def uncovered(rank: RankPlan) -> str:
    """A sentence for a run with compiled blocks whose memory is accounted as eager; empty where it is not."""
    recipe, layout, precision = rank.run.recipe, rank.layout, rank.run.recipe.precision
    again = recipe.activation_checkpointing
    if not is_one(layout.expert):
        why = "expert ranks, whose tokens are counted while they run"
    elif isinstance(again, Selective) and (
        apart := [name for name in again.keep or () if name not in (*WHOLE, *LINEAR)]
    ):
        why = f'activation_checkpointing.keep = "{apart[0]}", which it decomposes'
    elif again.inputs == "host" and not rank.run.recipe.of_xla:
        why = 'activation_checkpointing.inputs = "host"'
    elif again.kind not in COVERED or (again.kind == "segments" and rank.gathers):
        why = f'activation_checkpointing = "{again.kind}"'
    elif precision.float8 is not None and precision.float8.blocked:
        why = f"precision {precision.kind}"
    elif precision.float8 is not None and precision.cached is None and not is_one(layout.tensor):
        # Published peaks of such runs (torchtitan, 405B) are 4 to 15 % above even the eager account.
        why = f"precision {precision.kind} over tensor ranks"
    elif precision.copies == "gathered" and not rank.gathers:
        why = f"precision {precision.kind} of parameters that are not sharded"
    else:
        return ""
    return f"compiled memory is counted as eager: what a compiler keeps and frees is not modelled for {why}"


def unwitnessed(rank: RankPlan) -> str:
    """A sentence for a run whose compiled memory follows the rules where no compiled program was compared with them."""
    layout, spec, precision = rank.layout, rank.run.model, rank.run.recipe.precision
    split = not is_one(layout.tensor)
    what = {
        'sequence_gather = "again"': layout.gathers_again,
        "context ranks": not is_one(layout.context),
        f"precision {precision.kind} over tensor ranks": precision.float8 is not None and split,
        "latent attention over tensor ranks": spec.latent is not None and split,
        "experts over tensor ranks": spec.experts is not None and split,
    }
    named = " and ".join(name for name, has in what.items() if has)
    return (
        f"compiled memory follows the compiler's rules, which were compared with no compiled program for {named}"
        if named
        else ""
    )


def hooks_of(rank: RankPlan) -> tuple[tuple[Hook, ...], str]:
    """The hooks of a rank whose blocks are compiled, and a sentence on what they do not cover."""
    # Megatron-LM's fused kernels take the time of a compiler's; what its operations keep is not changed.
    if rank.run.recipe.of_megatron:
        return (Kernels(),), ""
    as_eager = uncovered(rank)
    if as_eager:
        return (Kernels(),), as_eager
    inside = rank.run.recipe.activation_checkpointing.kind == "selective"
    return (Kernels(), Lifetimes(inside=inside)), unwitnessed(rank)


class Lifetimes(Hook):
    """Follows the compiled blocks of a step and sets the lifetimes of their memory at its end.

    ``inside`` says that checkpoints are inside of what is compiled, ``in_place`` that a kernel's output may take the
    memory of what it reads last.
    """

    def __init__(self, *, inside: bool, in_place: bool = True) -> None:
        self._inside, self._in_place = inside, in_place
        self._blocks: dict[BlockRun, Block] = {}
        self._maker: dict[int, Block] = {}
        self._outside: set[int] = set()

    def emitted(self, event: Event, reads: Sequence[Array], changes: Sequence[Array], made: Sequence[Array]) -> None:
        """An operation has run."""
        phase, name, run = event.facts["phase"], event.facts["name"], event.block
        block = None
        if run is not None:
            block = self._blocks.get(run) or self._blocks.setdefault(
                run, Block(run, inside=self._inside, in_place=self._in_place)
            )
        operation = Operation(event, [*changes, *reads])
        adds_up = phase == "backward" and name == "add_"  # to a gradient, when the block is through
        if block is not None and adds_up:
            block.sums.append(operation)
        if adds_up or event.facts["kind"] in ("allocate", "transfer") or name in ("send", "recv"):
            block = None  # a ring has its buffers even if the code around it is compiled
        self._outside.update(
            id(read) for read in operation.reads if self._maker.get(id(read)) is not block or not block
        )
        if block is not None:
            self._maker.update((id(storage), block) for storage in operation.made)
            {"forward": block.forward, "recompute": block.again}.get(phase, block.backward).append(operation)

    def finished(self, events: list[Event]) -> None:
        """Set the lifetimes of the blocks' memory."""
        blocks = [block for block in self._blocks.values() if block.forward and block.backward]
        results = {block.forward[-1].event.facts["loop"]: block.forward[-1].made[0] for block in blocks}
        for block in blocks:
            block.prepare(results[block.forward[-1].event.facts["loop"]], self._outside, events)
        lives = Lives(events)
        for block in blocks:
            block.settle(lives)
        lives.write()


class Lives:
    """When each piece of memory of a step is allocated and freed, by the index of the event."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._changed: dict[int, tuple[Storage, int | None, int | None]] = {}
        self.counted: set[int] = set()  # results of loops that are kept in the place of what goes into them
        self.died = {id(storage): at for at, event in enumerate(events) for storage, _ in event.freed}

    def change(self, storage: Storage, born: int | None, died: int | None) -> None:
        """A piece of memory is live from one event (None: as it was) to another (None: it never is)."""
        self._changed[id(storage)] = storage, born, died

    def ends(self, storage: Storage, died: int) -> bool:
        """Whether a piece of memory that was changed dies with this event."""
        _, born, until = self._changed.get(id(storage), (storage, None, None))
        return born is not None and until == died

    def end_sooner(self, storage: Storage, died: int) -> bool:
        """End a changed piece of memory before an event, if it is live then."""
        _, born, _ = self._changed[id(storage)]
        if born is None or born > died:
            return False
        self.change(storage, born, died)
        return True

    def write(self) -> None:
        """Change the events."""
        as_born = {key for key, (_, born, died) in self._changed.items() if born is None and died is not None}
        for event in self._events:
            changed = self._changed
            event.allocated = [each for each in event.allocated if id(each) not in changed or id(each) in as_born]
            event.freed = [(each, copies) for each, copies in event.freed if id(each) not in changed]
        for storage, born, died in self._changed.values():
            if born is not None:
                self._events[born].allocated.append(storage)
            if died is not None:
                self._events[died].freed.append((storage, 1))


class _Run:
    """One run of a block's operations: what of it is in memory, and which operation reads each piece of memory last.

    ``sources`` says of what a run before has kept a value that comes from there is computed.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        held: Iterable[int],
        sources: Callable[[Storage], Iterable[Storage]] = lambda value: (value,),
    ) -> None:
        self.operations = operations
        self.held = set(held)
        for operation in operations:
            if not operation.fused:
                self.held.update(id(storage) for storage in (*operation.made, *operation.reads))
        self.last: dict[int, Operation] = {}
        self._read: dict[int, list[Storage]] = {}
        values = Values(operations)
        for operation in operations:
            if not operation.fused or any(id(made) in self.held for made in operation.made):
                inputs = chain.from_iterable(values.sources(read, self.held) for read in operation.reads)
                self._read[id(operation)] = list(chain.from_iterable(map(sources, inputs)))
                self.last.update((id(one), operation) for one in self._read[id(operation)])

    def read_last(self, operation: Operation) -> list[Storage]:
        """The pieces of memory that this operation is the last to read."""
        read = {id(storage): storage for storage in self._read.get(id(operation), ())}
        return [storage for key, storage in read.items() if self.last[key] is operation]


class Block:
    """A compiled block: its operations forward, in the second run of a checkpointed one, and backward.

    ``inside`` says that the checkpoint is inside of what is compiled, ``recalled`` what its policy keeps; ``sums``
    add its gradients to those of earlier micro-batches, when all of it is through.
    """

    lives: Lives
    result: Storage  # of the last block in the loop
    schedule: Schedule | None = None

    def __init__(self, run: BlockRun, *, inside: bool, in_place: bool) -> None:
        self.inside = inside and run.checkpointed
        self.in_place = in_place
        self.recalled = run.recalled
        self.forward: list[Operation] = []
        self.again: list[Operation] = []
        self.backward: list[Operation] = []
        self.sums: list[Operation] = []

    def prepare(self, result: Storage, outside: set[int], events: list[Event]) -> None:
        """Remove the operations that a compiler removes; order the events of a backward with a second run."""
        self.result = result
        every = [*self.forward, *self.again, *self.backward]
        self.leaving = {
            id(storage)
            for one in every
            for storage in one.made
            if id(storage) in outside or storage.category == "gradients"
        }
        if self.inside:
            self.again, self.backward = [], on_demand(self.again, self.backward)
        duplicates: dict[int, Storage] = {}
        self.forward, self.again, self.backward = (
            once(each, duplicates) for each in (self.forward, self.again, self.backward)
        )
        self.run = [*self.forward, *self.again, *self.backward]
        run = {id(operation) for operation in self.run}
        unneeded = [operation for operation in every if id(operation) not in run]
        self.never = [storage for one in unneeded for storage in one.made]
        if self.inside:
            held = self.leaving | {id(storage) for one in self.backward for storage in one.small}
            self.schedule = Schedule(self.backward, _Run(self.backward, held).held, self.leaving)
            self.schedule.write(
                [operation for operation in unneeded if operation.event.facts["phase"] != "forward"], self.sums, events
            )

    def settle(self, lives: Lives) -> None:
        """Set when each piece of memory is live."""
        self.lives = lives
        for storage in self.never:
            lives.change(storage, None, None)
        if self.schedule is not None:
            self._settle_inside(self.schedule)
            return
        model = self.again or self.forward
        values = Values(model)
        kept = values.kept(self.backward)
        back = _Run(self.backward, self.leaving, lambda value: values.sources(value, kept))
        until = {each: back.last[each].at for each in kept if each in back.last}
        in_first = self._in_first_run(kept)
        forward = _Run(self.forward, in_first | self.leaving)
        self._settle_masks(model, kept)
        if self.again:
            # Checkpointing frees what the graph of the forward hands out when that is over.
            self._settle_run(forward, dict.fromkeys(in_first, self.forward[-1].at), keeps=False)
            self._settle_run(_Run(self.again, kept), until, keeps=False)
        else:
            self._settle_run(forward, until, keeps=True)
        self._settle_run(back, {}, keeps=False)
        self._settle_inputs(forward.last, back.last)

    def _settle_inside(self, schedule: Schedule) -> None:
        """Checkpointed inside: kept is what the policy says of all that backward, or what it makes again, reads."""
        last = {key: each.operations[-1] for key, each in schedule.last.items()}
        until = {
            id(storage): last[id(storage)].at for one in self.forward for storage in one.made if id(storage) in last
        }
        # What ranks send each other counts as needed until backward is put in order, and what it reads stays an input.
        values = Values(self.forward)
        sent = [read for one in self.forward if one.kind == "collective" for read in one.reads]
        for key in (id(source) for one in sent for source in values.sources(one, self.recalled)):
            if key in self.recalled:
                until.setdefault(key, schedule.ends)
        forward = _Run(self.forward, until.keys() | self.leaving)
        self._settle_run(forward, until, keeps=True)
        before: int | None = None
        for kernel in schedule.kernels:
            begins, ends = kernel.operations[0].at, kernel.operations[-1].at
            for storage in (made for one in kernel.operations for made in one.made if id(made) not in self.leaving):
                storage.kept = False
                if storage.category == "activations":
                    storage.category = "scratch"
                if id(storage) not in kernel.writes:
                    self.lives.change(storage, None, None)
                else:
                    self.lives.change(storage, begins, last[id(storage)].at if id(storage) in last else ends)
            if before is not None:
                self._take_places(kernel, schedule, before)
            before = ends
        self._settle_inputs(forward.last, last)
        self._settle_states(schedule)

    def _settle_states(self, schedule: Schedule) -> None:
        """Random operations draw the same numbers again: they keep their seed, on CPUs attention as well."""
        again = [
            one for kernel in schedule.kernels for one in kernel.operations if one.event.facts["phase"] == "recompute"
        ]
        for name, nbytes in STATES.items():
            first, second = (
                [operation for operation in run if operation.name == name] for run in (self.forward, again)
            )
            for one, two in zip(first, second, strict=False):
                state = Storage(nbytes, "forward", "activations", one.event.facts["loop"])
                state.kept = True
                self.lives.change(state, one.at, two.at)

    def _take_places(self, kernel: Kernel, schedule: Schedule, before: int) -> None:
        """A result reuses the memory of an equally large tensor that only its operation reads."""
        for made, operation in kernel.writes.values() if kernel.fused and self.in_place else ():
            for key, (read, readers) in kernel.reads.items():
                alone = readers == [operation] and schedule.last[key] is kernel and same(read.nbytes, made.nbytes)
                ends = alone and self.lives.ends(read, kernel.operations[-1].at)
                if ends and self.lives.end_sooner(read, before):
                    break

    def _in_first_run(self, kept: set[int]) -> set[int]:
        """The same values in the forward, where they are those of a second run of it."""
        if not self.again:
            return kept
        pairs = zip(self.forward, self.again, strict=False)
        return {id(a) for one, two in pairs for a, b in zip(one.made, two.made, strict=True) if id(b) in kept}

    def _settle_run(self, run: _Run, until: dict[int, int], *, keeps: bool) -> None:
        """Pieces of memory are live from the operation that makes them to ``until``, or to the last that reads them."""
        # A fused kernel's output reuses the memory of an equally large tensor of this block that it reads last.
        for operation in run.operations:
            for storage in operation.made:
                if id(storage) in self.leaving:
                    continue
                storage.kept = keeps and id(storage) in until
                if storage.category in ("activations", "scratch"):
                    storage.category = "activations" if id(storage) in until else "scratch"
                if id(storage) in run.held:
                    last = run.last.get(id(storage), operation).at
                    self.lives.change(storage, operation.at, until.get(id(storage), last))
                else:
                    self.lives.change(storage, None, None)
        for before, operation in pairwise(run.operations):
            free = [storage for storage in run.read_last(operation) if self.lives.ends(storage, operation.at)]
            for made in operation.made if operation.fused and self.in_place else ():
                place = next((storage for storage in free if same(storage.nbytes, made.nbytes)), None)
                if id(made) in run.held and place is not None and self.lives.end_sooner(place, before.at):
                    free.remove(place)

    def _settle_masks(self, model: Sequence[Operation], kept: set[int]) -> None:
        """A ReLU whose result a matmul reads in backward also keeps its derivative, a byte for each element."""
        # What is kept is a view of the result, by which the partitioner does not know the result itself.
        made = {id(operation.made[0]): operation for operation in model if operation.name == "relu"}
        for back in self.backward:
            relu = next((made[id(read)] for read in back.reads if id(read) in made), None)
            if back.name != "threshold_backward" or relu is None or id(relu.made[0]) not in kept:
                continue
            facts = relu.event.facts
            mask = Storage(facts["flops"], facts["phase"], "scratch" if self.again else "activations", facts["loop"])
            mask.kept = not self.again
            self.lives.change(mask, relu.at, back.at)

    def _settle_inputs(self, forward: dict[int, Operation], back: dict[int, Operation]) -> None:
        """What comes from outside and has died in the block dies when it is read last, in backward if it is kept."""
        own = {id(made) for operation in self.run for made in operation.made}
        given = {id(read): read for operation in self.run for read in operation.reads}
        spans = [(run[0].at, run[-1].at) for run in (self.forward, self.again, self.backward) if run]
        for key, storage in given.items():
            died = self.lives.died.get(key)
            if key in own or died is None or (self.again and key in forward):
                continue  # of a checkpointed block, checkpointing itself holds the input
            reader = back.get(key) or forward.get(key)
            if reader is not None and any(begins <= died <= ends for begins, ends in spans):
                self.lives.change(storage, None, reader.at)
                if storage.phase == "forward":
                    self._settle_input(storage, key in back)

    def _settle_input(self, given: Storage, kept: bool) -> None:
        """Whether the block's input is kept."""
        # What goes into a loop of blocks stands for what goes from one of them to the next, as their last result stands
        # for what leaves the loop: where nothing else keeps that, it is counted in the place of what goes in.
        counted = self.lives.counted
        if kept and given.loop != self.result.loop and not self.result.kept:
            self.result.kept = True
            counted.add(id(self.result))
            given.kept = id(given) in counted
        else:
            given.kept = kept or id(given) in counted
        for storage in (given, self.result):
            if kept and storage.category == "scratch":
                storage.category = "activations"
