"""The memory of the heaviest rank of a run, exactly as a plan states it, and what of it is known without an account."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import field

from trainledger.forecast.plan.changes import ROUNDING, Change, made
from trainledger.forecast.predict.device_memory import memory_of_device
from trainledger.forecast.predict.interval import chance_on, kept_free
from trainledger.forecast.predict.roofline import Machine
from trainledger.ledger.entry import Amounts
from trainledger.ledger.parallel.rank_plan import rank_plan
from trainledger.ledger.ranks import account_of_stage, heaviest_stages, static_memory
from trainledger.spec.device import Device
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.spec.run_text import as_override
from trainledger.spec.units import format_nbytes


@frozen
class MemoryUse:
    """Bytes of the heaviest rank at the peak of a step, and what a process gets of the device's memory.

    ``nbytes`` includes the driver's context, communicators and the allocator's waste (`predict.device_memory`);
    ``by_category`` sums to ``peak_nbytes``, the tensors alone. ``stage`` is counted from 0 of ``stages``. ``chance`` is
    that of fitting; None where it is not known.
    """

    nbytes: int
    usable_nbytes: int
    peak_nbytes: int
    by_category: dict[str, int]
    stage: int
    stages: int
    moment: str
    reserved: Amounts = ()
    chance: float | None = None

    @property
    def fits(self) -> bool:
        return self.nbytes <= self.usable_nbytes

    @property
    def tensors_alone(self) -> bool:
        """Whether nothing beyond the tensors is counted, as nothing else is known of the device."""
        return self.nbytes == self.peak_nbytes

    @property
    def category(self) -> str:
        """The largest category of the tensors at the peak."""
        return max(self.by_category, key=lambda each: self.by_category[each])

    @property
    def rank(self) -> str:
        """Whose peak it is."""
        return "every rank" if self.stages == 1 else f"stage {self.stage + 1} of {self.stages}"


@frozen
class MemoryModel:
    """Memory of runs on one kind of device, exactly as a plan states it.

    A run fits where the chance of it is at least ``chance``, or beside its own margin; with 0 where as many bytes are
    usable as are counted.
    """

    machine: Machine
    backend: str
    usable_nbytes: int
    chance: float
    heaviest: dict[int, int] = field(default_factory=dict)  # the heaviest stage so far, by number of stages
    uses: dict[tuple[Run, int], MemoryUse] = field(default_factory=dict)  # of stages that were accounted for

    def nbytes(self, run: Run, stage: int) -> int:
        """Bytes that a rank of a stage needs in all; of ranks with uneven shards the one with the largest."""
        return self._use_of_stage(run, stage).nbytes

    def fits(self, run: Run) -> bool:
        """Whether every stage fits; the stage that was heaviest before is checked first."""
        return self._over(run, heaviest_stages(run)) <= 0

    def likely(self, run: Run) -> bool:
        """Whether the first and the last stage fit, and the one that was heaviest before: false is certain."""
        return self.over(run) <= 0

    def over(self, run: Run) -> int:
        """The bytes that these stages lack; where the static memory alone is too much, those that it lacks."""
        return self._over(run, {0, run.layout.pipeline - 1})

    def never_fits(self, run: Run) -> bool:
        """Whether what no further rank would shard is too much: activations and logits at the peak."""
        kept = sum(self.use_of(run).by_category.get(name, 0) for name in ("activations", "logits and loss"))
        return self._in_all(run, kept) > self._room(run)

    def _over(self, run: Run, of: Iterable[int]) -> int:
        stages, over = run.layout.pipeline, -self.usable_nbytes
        for stage in dict.fromkeys((self.heaviest.get(stages, 0), *of)):
            over = max(over, self._over_of_stage(run, stage))
            if over > 0:
                self.heaviest[stages] = stage
                return over
        return over

    def _over_of_stage(self, run: Run, stage: int) -> int:
        room = self._room(run)
        if (run, stage) not in self.uses:
            static = static_memory(rank_plan(run, stage), backend=self.backend)
            least = self._in_all(run, static.resident + static.gradients)
            if least > room:
                return least - room
        return self.nbytes(run, stage) - room

    def _room(self, run: Run) -> int:
        """The usable bytes less those that are kept free for the chance."""
        kept = kept_free(run, self.machine, self.chance) if self.chance and isinstance(self.machine, Device) else 0
        return self.usable_nbytes - kept

    def use_of(self, run: Run) -> MemoryUse:
        """The heaviest rank of a run, in full."""
        use = max((self._use_of_stage(run, stage) for stage in heaviest_stages(run)), key=lambda each: each.nbytes)
        self.heaviest[run.layout.pipeline] = use.stage
        return use

    def _use_of_stage(self, run: Run, stage: int) -> MemoryUse:
        """The rank of a stage, accounted for once."""
        if (run, stage) in self.uses:
            return self.uses[run, stage]
        ledger = account_of_stage(run, stage, backend=self.backend)
        peak = ledger.peak()
        nbytes = self._in_all(run, peak.nbytes, ledger.reserved)
        device = self.machine if isinstance(self.machine, Device) and nbytes != peak.nbytes else None
        use = self.uses[run, stage] = MemoryUse(
            nbytes=nbytes,
            usable_nbytes=self.usable_nbytes,
            peak_nbytes=peak.nbytes,
            by_category=peak.by_category,
            stage=stage,
            stages=run.layout.pipeline,
            moment=f"{peak.entry.name} of {peak.entry.path or 'the update'}, {peak.entry.phase}",
            reserved=ledger.reserved,
            chance=chance_on(run, device, nbytes, self.usable_nbytes),
        )
        return use

    def _in_all(self, run: Run, peak_nbytes: int, reserved: Amounts = ()) -> int:
        return int(memory_of_device(run, peak_nbytes, self.machine, reserved).nbytes)


def memory_model(machine: Machine | None, *, backend: str, chance: float = 0) -> MemoryModel:
    """The memory of a catalog device or a measured machine; raises InvalidInput where it is not known."""
    if machine is None:
        rule = "was not measured yet, so its memory is not known; run `trainledger measure machine` once"
        raise InvalidInput([Problem("cluster.device", "this-machine", rule, "h100-sxm")])
    usable = machine.memory_nbytes
    if isinstance(machine, Device) and machine.usable_nbytes is not None:
        usable = machine.usable_nbytes
    if usable is None:
        raise InvalidInput([Problem("cluster.device", machine.title, "has no known memory")])
    return MemoryModel(machine, backend, usable, chance)


def refuse_beyond(run: Run, memory_nbytes: int, peak_nbytes: Callable[[Run], int], where: str) -> None:
    """Raise `InvalidInput` where a run's peak is more than the memory of ``where``, with the least change that fits.

    ``peak_nbytes`` is asked for the run and then for runs that need less: smaller micro-batches, then recomputation of
    every block, then both.
    """
    needed = peak_nbytes(run)
    if needed <= memory_nbytes:
        return
    rule = f"needs {format_nbytes(needed)} at the peak of a step, and {where} has {format_nbytes(memory_nbytes)}"
    for change in _smaller_batches(run):
        if peak_nbytes(made(run, change)) <= memory_nbytes:
            nearest = " ".join(as_override(*each) for each in change.fields)
            raise InvalidInput([Problem("recipe.micro_batch", run.device_batch, rule, nearest)])
    raise InvalidInput([Problem("model", run.model.name, f"{rule}; no micro-batch is small enough")])


def _smaller_batches(run: Run) -> Iterator[Change]:
    """Micro-batches of about half and half again, then the same with full recomputation; the least changed first."""
    batch, recipe = run.device_batch, run.recipe
    sizes = [size for size in range(batch, 0, -1) if not recipe.global_batch % size] if batch <= 2**16 else [1]
    halves = sizes[:1]
    for size in sizes[1:]:
        if size == sizes[-1] or 2 * size <= halves[-1]:
            halves.append(size)
    for kind in dict.fromkeys((recipe.activation_checkpointing.kind, "full")):
        for size in halves:
            wanted = (
                ("recipe.micro_batch", size, batch),
                ("recipe.activation_checkpointing", kind, recipe.activation_checkpointing.kind),
            )
            fields = tuple((field, value) for field, value, now in wanted if value != now)
            if fields:
                yield Change(f"micro-batches of {size}, recomputation {kind}", fields, ROUNDING)
