"""The memory of a step whose blocks are compiled: when each piece that a block's operations made is live.

The tape has followed the blocks operation by operation, as they run eagerly; here the lives of their pieces of memory
are told anew by the rules of `compiled.partition`. What other parts of the step made and hold stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.hooks import Hook
from trainledger.ledger.core.record import BlockRun, Event, Storage
from trainledger.ledger.core.sizes import is_one, same
from trainledger.ledger.memory.compiled.kernels import Kernels
from trainledger.ledger.memory.compiled.lifetimes import Lives
from trainledger.ledger.memory.compiled.partition import Operation, Values, once
from trainledger.ledger.memory.compiled.schedule import Kernel, Schedule, on_demand
from trainledger.ledger.parallel.rank_plan import RankPlan
from trainledger.spec.precision import precision_of

STATES = {"_scaled_dot_product_flash_attention_for_cpu": 5056, "native_dropout": 8}  # a CPU's generator, a seed
COVERED = ("none", "full", "segments", "selective")
WHOLE = ("matmuls", "attention", "mm", "addmm", "bmm", "_scaled_mm", "grouped_mm", "_scaled_grouped_mm", "all_to_all")


def uncovered(rank: RankPlan) -> str:
    """A sentence for a run with compiled blocks whose memory is told as that of eager ones; empty where it is not."""
    recipe, layout, precision = rank.run.recipe, rank.layout, precision_of(rank.run.recipe)
    checkpointing = recipe.activation_checkpointing
    if not is_one(layout.expert):
        why = "expert ranks, whose tokens are counted while they run"
    elif checkpointing == "selective" and (apart := [each for each in recipe.recompute_keep if each not in WHOLE]):
        why = f'recompute_keep = "{apart[0]}", which it takes apart'
    elif checkpointing not in COVERED or (checkpointing == "segments" and rank.gathers):
        why = f'activation_checkpointing = "{checkpointing}"'
    elif precision.float8 is not None and precision.float8.scaling == "block":
        why = f"precision {precision.name}"
    elif precision.float8 is not None and precision.cached is None and not is_one(layout.tensor):
        # Published peaks of such runs (torchtitan, 405B) are 4 to 15 % above even the eager account.
        why = f"precision {precision.name} over tensor ranks"
    elif precision.copies == "gathered" and not rank.gathers:
        why = f"precision {precision.name} of parameters that are not sharded"
    else:
        return ""
    return f"compiled memory is told as eager: what a compiler keeps and frees is not followed for {why}"


def unwitnessed(rank: RankPlan) -> str:
    """A sentence for a run whose compiled memory follows the rules where no compiled program was held against them."""
    layout, spec, precision = rank.layout, rank.run.model, precision_of(rank.run.recipe)
    split = not is_one(layout.tensor)
    what = {
        'sequence_gather = "again"': layout.gathers_again,
        "context ranks": not is_one(layout.context),
        f"precision {precision.name} over tensor ranks": precision.float8 is not None and split,
        "latent attention over tensor ranks": spec.latent is not None and split,
        "experts over tensor ranks": spec.experts is not None and split,
    }
    named = " and ".join(name for name, has in what.items() if has)
    return f"compiled memory goes by the compiler's rules, which torch cannot show for {named}" if named else ""


def hooks_of(rank: RankPlan) -> tuple[tuple[Hook, ...], str]:
    """What follows the step of a rank whose blocks are compiled, and a sentence on what it does not cover."""
    as_eager = uncovered(rank)
    if as_eager:
        return (Kernels(),), as_eager
    inside = rank.run.recipe.activation_checkpointing == "selective"
    return (Kernels(), Lifetimes(inside=inside)), unwitnessed(rank)


class Unit:
    """A compiled block: its operations forward, in the second run of a checkpointed one, and backward.

    ``inside`` says that the checkpoint stands inside of what is compiled, ``recalled`` what its policy keeps; ``sums``
    add its gradients to those of earlier micro-batches, when all of it is through.
    """

    def __init__(self, run: BlockRun, *, inside: bool) -> None:
        self.inside = inside and run.checkpointed
        self.recalled = run.recalled
        self.forward: list[Operation] = []
        self.again: list[Operation] = []
        self.backward: list[Operation] = []
        self.sums: list[Operation] = []


class Lifetimes(Hook):
    """Follows the compiled blocks of a step and tells the lives of their memory anew.

    ``inside`` says that checkpoints stand inside of what is compiled.
    """

    def __init__(self, *, inside: bool) -> None:
        self._inside = inside
        self._units: dict[BlockRun, Unit] = {}
        self._maker: dict[int, Unit] = {}
        self._outside: set[int] = set()

    def emitted(
        self,
        event: Event,
        at: int,
        block: BlockRun | None,
        reads: Sequence[Array],
        changes: Sequence[Array],
        made: Sequence[Array],
    ) -> None:
        """An operation has run."""
        phase = event.facts["phase"]
        unit = None
        if block is not None:
            unit = self._units.get(block) or self._units.setdefault(block, Unit(block, inside=self._inside))
        operation = Operation(event, at, [*changes, *reads])
        adds_up = phase == "backward" and event.facts["name"] == "add_"  # to a gradient, when the block is through
        if unit is not None and adds_up:
            unit.sums.append(operation)
        if adds_up or event.facts["kind"] == "allocate" or event.facts["name"] in ("send", "recv"):
            unit = None  # a ring has its buffers whatever is compiled around it
        for each in operation.reads:
            if unit is None or self._maker.get(id(each)) is not unit:
                self._outside.add(id(each))
        if unit is not None:
            self._maker.update((id(each), unit) for each in operation.made)
            {"forward": unit.forward, "recompute": unit.again}.get(phase, unit.backward).append(operation)

    def finished(self, events: list[Event]) -> None:
        """Tell the lives of what the blocks made anew."""
        units = [each for each in self._units.values() if each.forward and each.backward]
        results = {each.forward[-1].event.facts["loop"]: each.forward[-1].made[0] for each in units}
        blocks = [_Block(each, results[each.forward[-1].event.facts["loop"]], self._outside, events) for each in units]
        lives = Lives(events)
        for each in blocks:
            each.tell(lives)
        lives.write()


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

    def __init__(self, unit: Unit, result: Storage, outside: set[int], events: list[Event]) -> None:
        self.lives: Lives
        self.result = result  # of the last block in the loop
        runs = (unit.forward, unit.again, unit.backward)
        if unit.inside:
            runs = (unit.forward, [], on_demand(unit.again, unit.backward))
        duplicates: dict[int, Storage] = {}
        self.forward, self.again, self.backward = (once(each, duplicates) for each in runs)
        runs = (unit.forward, unit.again, unit.backward)
        made = [each for one in chain(*runs) for each in one.made]
        run = {id(each) for operations in (self.forward, self.again, self.backward) for each in operations}
        self.never = [each for one in chain(*runs) if id(one) not in run for each in one.made]
        self.leaving = {id(each) for each in made if id(each) in outside or each.category == "gradients"}
        self.recalled = unit.recalled
        self.schedule = self._scheduled(unit, events) if unit.inside else None

    def tell(self, lives: Lives) -> None:
        """Say when each piece of memory is live."""
        self.lives = lives
        for each in self.never:
            lives.remove(each)
        if self.schedule is not None:
            self._tell_inside(self.schedule)
            return
        model = self.again or self.forward
        values = Values(model)
        kept = values.kept(self.backward)
        back = _Run(self.backward, self.leaving, _Kept(values, kept))
        until = {each: back.last[each].at for each in kept if each in back.last}
        forward = _Run(self.forward, self._in_first_run(kept) | self.leaving)
        self._tell_masks(model, kept)
        if self.again:
            # Checkpointing lets go of what the graph of the forward hands out when that is over.
            self._tell_run(forward, dict.fromkeys(self._in_first_run(kept), self.forward[-1].at), keeps=False)
            self._tell_run(_Run(self.again, kept), until, keeps=False)
        else:
            self._tell_run(forward, until, keeps=True)
        self._tell_run(back, {}, keeps=False)
        self._tell_inputs(forward.last, back.last)

    def _scheduled(self, unit: Unit, events: list[Event]) -> Schedule:
        """The kernels of a backward with what it makes again, in whose order the events are put."""
        held = self.leaving | {id(each) for one in self.backward for each in one.small}
        schedule = Schedule(self.backward, _Run(self.backward, held).held, self.leaving)
        run = {id(each) for each in self.backward}
        schedule.write([each for each in (*unit.again, *unit.backward) if id(each) not in run], unit.sums, events)
        return schedule

    def _tell_inside(self, schedule: Schedule) -> None:
        """Checkpointed inside: kept is what the policy says of all that backward, or what it makes again, reads."""
        last = {key: each.operations[-1] for key, each in schedule.last.items()}
        until = {id(each): last[id(each)].at for one in self.forward for each in one.made if id(each) in last}
        # What ranks send each other counts as needed until backward is put in order, and what it reads stays an input.
        values = Values(self.forward)
        sent = [each for one in self.forward if one.event.facts["kind"] == "collective" for each in one.reads]
        for key in (id(source) for one in sent for source in values.sources(one, self.recalled)):
            if key in self.recalled:
                until.setdefault(key, schedule.ends)
        forward = _Run(self.forward, until.keys() | self.leaving)
        self._tell_run(forward, until, keeps=True)
        before: int | None = None
        for kernel in schedule.kernels:
            begins, ends = kernel.operations[0].at, kernel.operations[-1].at
            for each in (made for one in kernel.operations for made in one.made if id(made) not in self.leaving):
                each.kept = False
                if each.category == "activations":
                    each.category = "scratch"
                if id(each) not in kernel.writes:
                    self.lives.remove(each)
                else:
                    self.lives.change(each, begins, last[id(each)].at if id(each) in last else ends)
            if before is not None:
                self._take_places(kernel, schedule, before)
            before = ends
        self._tell_inputs(forward.last, last)
        self._tell_states(schedule)

    def _tell_states(self, schedule: Schedule) -> None:
        """What draws numbers draws the same again: it keeps what it drew them with, on CPUs attention as well."""
        again = [one for each in schedule.kernels for one in each.operations if one.event.facts["phase"] == "recompute"]
        for name, nbytes in STATES.items():
            first, second = ([each for each in run if each.name == name] for run in (self.forward, again))
            for one, two in zip(first, second, strict=False):
                state = Storage(nbytes, "forward", "activations", one.event.facts["loop"])
                state.kept = True
                self.lives.change(state, one.at, two.at)

    def _take_places(self, kernel: Kernel, schedule: Schedule, before: int) -> None:
        """A result takes the place of something as large that its own operation alone reads, and nothing after it."""
        for made, operation in kernel.writes.values() if kernel.fused else ():
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

    def _tell_inputs(self, forward: dict[int, Operation], back: dict[int, Operation]) -> None:
        """What comes from outside and has died in the block dies when it is read last, in backward if it is kept."""
        runs = (self.forward, self.again, self.backward)
        own = {id(made) for run in runs for each in run for made in each.made}
        given = {id(each): each for run in runs for operation in run for each in operation.reads}
        for key, storage in given.items():
            died = self.lives.died.get(key)
            if key in own or died is None or (self.again and key in forward):
                continue  # of a checkpointed block, checkpointing itself holds the input
            if not any(run and run[0].at <= died <= run[-1].at for run in runs):
                continue
            reader = back.get(key) or forward.get(key)
            if reader is not None:
                self.lives.end(storage, reader.at)
                if storage.phase == "forward":
                    self._tell_kept(storage, key in back)

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
