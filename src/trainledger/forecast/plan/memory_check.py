"""Peak memory of the heaviest rank of a run, and whether it fits: what every search of sizes and layouts asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field

from trainledger.forecast.plan.changes import made, smaller_batches
from trainledger.forecast.predict.predict import memory_of_device
from trainledger.forecast.predict.roofline import Machine
from trainledger.ledger.entry import Amounts
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.ranks import account_of_stage, heaviest_stages
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
    ``by_category`` sums to ``peak_nbytes``, the tensors alone. ``stage`` is counted from 0 of ``stages``.
    """

    nbytes: int
    usable_nbytes: int
    peak_nbytes: int
    by_category: dict[str, int]
    stage: int
    stages: int
    moment: str
    reserved: Amounts = ()

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

    ``usable_nbytes`` is None where nothing is known of the device's memory; `memory_model` refuses that.
    """

    machine: Machine
    backend: str
    usable_nbytes: int
    heaviest: dict[int, int] = field(default_factory=dict)  # the heaviest stage so far, by number of stages

    def nbytes(self, run: Run, stage: int) -> int:
        """Bytes that a rank of a stage needs in all; of ranks with uneven shards the one with the largest."""
        ledger = account_of_stage(run, stage, backend=self.backend)
        return self._in_all(run, ledger)

    def fits(self, run: Run) -> bool:
        """Whether every stage fits; the stage that was heaviest before is checked first."""
        return self._fit(run, heaviest_stages(run))

    def likely(self, run: Run) -> bool:
        """Whether the first and the last stage fit, and the one that was heaviest before: false is certain."""
        return self._fit(run, {0, run.layout.pipeline - 1})

    def _fit(self, run: Run, of: Iterable[int]) -> bool:
        stages = run.layout.pipeline
        for stage in dict.fromkeys((self.heaviest.get(stages, 0), *of)):
            if self.nbytes(run, stage) > self.usable_nbytes:
                self.heaviest[stages] = stage
                return False
        return True

    def use_of(self, run: Run) -> MemoryUse:
        """The heaviest rank of a run, in full."""
        stages = run.layout.pipeline
        ledgers = {stage: account_of_stage(run, stage, backend=self.backend) for stage in heaviest_stages(run)}
        peaks = {stage: peak_nbytes(each) + each.reserved_nbytes for stage, each in ledgers.items()}
        stage = max(peaks, key=lambda each: peaks[each])
        self.heaviest[stages] = stage
        peak = ledgers[stage].peak()
        return MemoryUse(
            nbytes=self._in_all(run, ledgers[stage]), usable_nbytes=self.usable_nbytes, peak_nbytes=peak.nbytes,
            by_category=peak.by_category, stage=stage, stages=stages, moment=_moment(ledgers[stage]),
            reserved=ledgers[stage].reserved,
        )  # fmt: skip

    def _in_all(self, run: Run, ledger: Ledger) -> int:
        return int(memory_of_device(run, peak_nbytes(ledger), self.machine, ledger.reserved).nbytes)


def memory_model(machine: Machine | None, *, backend: str) -> MemoryModel:
    """The memory of a catalog device or a measured machine; raises InvalidInput where it is not known."""
    if machine is None:
        rule = "was not measured yet, so its memory is not known; run `trainledger measure machine` once"
        raise InvalidInput([Problem("cluster.device", "this-machine", rule, "h100-sxm")])
    usable = machine.memory_nbytes
    if isinstance(machine, Device) and machine.usable_nbytes is not None:
        usable = machine.usable_nbytes
    if usable is None:
        raise InvalidInput([Problem("cluster.device", machine.title, "has no known memory")])
    return MemoryModel(machine, backend, usable)


def _moment(ledger: Ledger) -> str:
    entry = ledger.peak().entry
    return f"{entry.name} of {entry.path or 'the update'}, {entry.phase}"


def refuse_beyond(run: Run, memory_nbytes: int, peak_nbytes: Callable[[Run], int], where: str) -> None:
    """Raise `InvalidInput` where a run's peak is more than the memory of ``where``, with the least change that fits.

    ``peak_nbytes`` is asked for the run and then for runs that need less: smaller micro-batches, then recomputation of
    every block, then both.
    """
    needed = peak_nbytes(run)
    if needed <= memory_nbytes:
        return
    rule = f"needs {format_nbytes(needed)} at the peak of a step, and {where} has {format_nbytes(memory_nbytes)}"
    for change in smaller_batches(run):
        if peak_nbytes(made(run, change)) <= memory_nbytes:
            nearest = " ".join(as_override(*each) for each in change.fields)
            raise InvalidInput([Problem("recipe.micro_batch", run.device_batch, rule, nearest)])
    raise InvalidInput([Problem("model", run.model.name, f"{rule}; no micro-batch is small enough")])
