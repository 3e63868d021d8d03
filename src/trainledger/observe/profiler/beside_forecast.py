"""A profile against the forecast of its run: causes, matmuls and collectives one by one, and remedies with gains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainledger.forecast.plan.advise import Advice, Advised
from trainledger.forecast.plan.changes import RESULT
from trainledger.forecast.plan.plan import Plan
from trainledger.forecast.predict.forecast import nanoseconds
from trainledger.forecast.predict.roofline import Machine, NoRate, matmul_dtype, mfu, peak_rate
from trainledger.forecast.predict.step import CAUSES, IDEAL
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.observe.profiler.causes import COMPUTE, MeasuredBar, measured_waterfall
from trainledger.observe.profiler.collectives import collective_named
from trainledger.observe.profiler.flops import MatmulRate
from trainledger.observe.profiler.kinds import RECOMPUTATION
from trainledger.observe.profiler.profile import Profile
from trainledger.observe.profiler.ranks import Ranks
from trainledger.observe.profiler.step_time import EXPOSED, HOST, LAUNCH_GAPS, OUTSIDE
from trainledger.observe.profiler.step_work import Sent
from trainledger.report.document import Answer
from trainledger.spec.device import Device
from trainledger.spec.run import Run
from trainledger.spec.units import NANOSECONDS_PER_SECOND

Amounts = tuple[int, int]  # how often it runs, and FLOPs or bytes in all
_BACKWARD = ", backward"


@dataclass(frozen=True)
class Operation:
    """One operation of a step: how often it runs, and its ``unit`` (FLOPs or bytes) in all, predicted and measured."""

    kind: str
    shape: str
    unit: str
    predicted_count: int
    measured_count: int
    predicted: int
    measured: int

    @property
    def equal(self) -> bool:
        return (self.predicted_count, self.predicted) == (self.measured_count, self.measured)

    @property
    def difference(self) -> str:
        """What differs, in words; empty where nothing does."""
        if self.equal:
            return ""
        if not self.measured_count:
            return "not in the trace"
        if not self.predicted_count:
            return "not in the account"
        if self.predicted == self.measured:
            return f"the same {self.unit} in other pieces"
        return "another count" if self.predicted_count != self.measured_count else f"other {self.unit}"


def operations(ledger: Ledger, matmuls: tuple[MatmulRate, ...], sent: tuple[Sent, ...]) -> tuple[Operation, ...]:
    """All matmuls, attentions and collectives of an account and of a profile's step, those with most FLOPs first."""
    computed = _rows("FLOPs", _by_key(_of_account(ledger)), _by_key(_of_trace(matmuls)))
    moved = _rows("bytes", _by_key(_sent_by_account(ledger)), _by_key(_sent_by_trace(sent)))
    return (*computed, *moved)


def _rows(
    unit: str, predicted: dict[tuple[str, str], Amounts], measured: dict[tuple[str, str], Amounts]
) -> Iterator[Operation]:
    nothing = (0, 0)
    keys = dict.fromkeys((*predicted, *measured))
    most = sorted(keys, key=lambda key: -max(predicted.get(key, nothing)[1], measured.get(key, nothing)[1]))
    for kind, shape in most:
        before, after = predicted.get((kind, shape), nothing), measured.get((kind, shape), nothing)
        yield Operation(kind, shape, unit, before[0], after[0], before[1], after[1])


def _by_key(found: Iterator[tuple[tuple[str, str], int, int]]) -> dict[tuple[str, str], Amounts]:
    summed: dict[tuple[str, str], Amounts] = {}
    for key, count, amount in found:
        before = summed.get(key, (0, 0))
        summed[key] = (before[0] + count, before[1] + amount)
    return summed


def _of_account(ledger: Ledger) -> Iterator[tuple[tuple[str, str], int, int]]:
    for each in ledger:
        if each.kind in ("matmul", "attention") and each.flops and each.shape:
            yield (each.kind, _shape(each.kind, each.shape, _is_backward(each))), each.times, each.times * each.flops


def _is_backward(entry: Entry) -> bool:
    return entry.kind == "attention" and "backward" in entry.name


def _of_trace(matmuls: tuple[MatmulRate, ...]) -> Iterator[tuple[tuple[str, str], int, int]]:
    for each in matmuls:
        backward = each.shape.endswith(_BACKWARD)
        shape = _shape(each.kind, each.sizes, backward) if each.sizes else each.shape
        yield (each.kind, shape), each.count, each.flops


def _shape(kind: str, sizes: tuple[int, ...], backward: bool) -> str:
    """The sizes of an operation as text, the same for a matmul and its transpose.

    >>> _shape("matmul", (1, 64, 16, 32), False), _shape("matmul", (2, 16, 64, 32), False)
    ('16 x 32 x 64', '2 of 16 x 32 x 64')
    """
    if kind == "attention":
        heads, queries, keys, width = sizes[:4]
        return f"{heads} heads, {queries} x {keys} x {width}{_BACKWARD if backward else ''}"
    batch, m, n, k = sizes
    low, high = sorted((m, n))
    return f"{low} x {k} x {high}" if batch == 1 else f"{batch} of {low} x {k} x {high}"


def _sent_by_account(ledger: Ledger) -> Iterator[tuple[tuple[str, str], int, int]]:
    for each in ledger:
        if each.kind == "collective" and each.payload:
            kind = collective_named(each.name) or each.name
            yield (kind, f"{each.ranks} ranks"), each.times, each.times * each.payload


def _sent_by_trace(sent: tuple[Sent, ...]) -> Iterator[tuple[tuple[str, str], int, int]]:
    for each in sent:
        yield (each.collective, f"{each.ranks} ranks"), each.count, each.count * (each.payload_nbytes or 0)


_PADDED = "model.vocab_multiple"
_LEAST_GAIN = 0.005  # of the step: less is not worth a line
# Fields whose change takes away from a cause, by the names of `observe.profiler.causes`.
_FIELDS = {
    EXPOSED: ("layout.", "recipe.micro_batch", "recipe.global_batch"),
    HOST: ("recipe.compile", "recipe.micro_batch", "recipe.launch_blocking", "recipe.optimizer"),
    OUTSIDE: ("recipe.compile", "recipe.micro_batch", "recipe.optimizer"),
    "memory-bound kernels": ("recipe.compile", "recipe.loss", "recipe.precision", "recipe.attention"),
    RECOMPUTATION: ("recipe.activation_checkpointing",),
    "optimizer": ("recipe.optimizer", "layout.zero", "layout.shard"),
    "matmuls below the peak": ("recipe.precision", "recipe.micro_batch", "recipe.attention", "model."),
}


@dataclass(frozen=True)
class BothBars:
    """One cause of a step's time, as forecast (None: no time is known) and as measured."""

    cause: str
    predicted_ns: int | None
    measured_ns: int


@dataclass(frozen=True)
class Remedy:
    """A cause of the profile, and the change that is predicted to gain most of those that concern it.

    ``gain`` is the share of the forecast's step that it saves.
    """

    cause: str
    change: Advised
    gain: float


@dataclass(frozen=True)
class ProfileBeside(Answer, report="profile_beside"):
    """A profile and the forecast of the run that it is of.

    ``rank`` says whose account the operations are compared with. ``mfu`` is of the account's model FLOPs in the
    measured time, None where no peak is known; ``waterfall`` begins with them.
    """

    profile: Profile
    plan: Plan
    rank: str
    mfu: float | None
    waterfall: tuple[MeasuredBar, ...]
    bars: tuple[BothBars, ...]
    operations: tuple[Operation, ...]
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()
    ranks: Ranks | None = None


def beside(found: Profile | Ranks, plan: Plan, advice: Advice | None = None) -> ProfileBeside:
    """A profile against the plan of its run, of several ranks that of the first one; ``advice`` is of the same run."""
    ranks = found if isinstance(found, Ranks) else None
    waited_ns: Mapping[str, int] = {}
    if isinstance(found, Ranks):
        waited_ns, found = found.ranks[0].waited_in_median_ns, found.ranks[0].profile
    ledger, rank, notes = _account_of(found, plan)
    machine: Machine | None = found.device or plan.machine
    if found.device is not None and plan.machine is not None and found.device.title != plan.machine.title:
        notes.append(f"The trace is of {found.device.title}, the forecast of {plan.machine.title}.")
    elif not found.on_device and isinstance(plan.machine, Device):
        notes.append(
            f"The trace has no work of an accelerator, and the forecast is of {plan.machine.title}: times do not "
            "compare, and there is no MFU."
        )
        machine = None
    at_peak_ns = reached = None
    try:
        if machine is not None:
            peak = peak_rate(machine, matmul_dtype(ledger))
            at_peak_ns = ledger.model_flops * NANOSECONDS_PER_SECOND / peak
            seconds = found.step.nanoseconds / NANOSECONDS_PER_SECOND
            reached = mfu(ledger.model_flops, seconds, peak) if seconds else None
    except NoRate as reason:
        notes.append(f"No MFU: {reason}.")
    bars = measured_waterfall(
        found.step, found.split, found.matmuls, {} if machine is None else machine.peak_flops_per_second,
        model_at_peak_ns=at_peak_ns, pipeline=plan.run.layout.pipeline > 1,
        waiting_for_others_ns=waited_ns,
    )  # fmt: skip
    notes += [f"{each[0].upper()}{each[1:]}." for each in plan.forecast.notes if each.startswith("no step time")]
    rows = operations(ledger, found.matmuls, found.collectives)
    computed = [each for each in rows if each.unit == "FLOPs" and each.measured_count]
    if computed and not any(each.equal for each in computed):
        notes.append("No matmul of the trace is one of the account: is the run file that of the program traced?")
    if not found.on_device and any(each.kind == "reduce-scatter" and not each.measured_count for each in rows):
        notes.append("A host's gloo runs a reduce-scatter as an all-reduce of the same bytes, and the trace has that.")
    return ProfileBeside(
        profile=found, plan=plan, rank=rank, mfu=reached, waterfall=bars, bars=tuple(_both(plan, bars)),
        operations=rows,
        remedies=() if advice is None else tuple(_remedies(found, advice)), notes=tuple(notes), ranks=ranks,
    )  # fmt: skip


def _account_of(found: Profile, plan: Plan) -> tuple[Ledger, str, list[str]]:
    """The account of the rank that a profile is of, what it is called, and sentences on what was assumed."""
    run = plan.run
    notes = []
    if found.ranks and found.ranks != run.layout.devices:
        notes.append(f"The trace is of {found.ranks:,} ranks, the run of {run.layout.devices:,}.")
    if not plan.ranks:
        return plan.ledger, "the one device", notes
    stage = 0 if found.rank is None else stage_of_rank(run, found.rank)
    if found.rank is None and len(plan.ranks) > 1:
        notes.append("The trace does not say which rank it is of: assuming one of the first stage.")
    some = [each for each in plan.ranks if each.stage == stage] or list(plan.ranks)
    return some[0].ledger, some[0].title, notes


def stage_of_rank(run: Run, rank: int) -> int:
    """The pipeline stage of a rank: stages are outermost in the mesh (`engine.train.parallel.mesh`)."""
    return int(rank * run.layout.pipeline // run.layout.devices)


def _both(plan: Plan, bars: Sequence[MeasuredBar]) -> Iterator[BothBars]:
    """The causes of both sides in the planner's order, then those that only the measurement has."""
    measured: dict[str, int] = {}
    for each in bars:
        measured[each.cause] = measured.get(each.cause, 0) + each.nanoseconds
    predicted = _in_nanoseconds(plan.forecast.step_causes, plan.forecast.step_seconds)
    names = (IDEAL, COMPUTE, *(each for each in CAUSES if each != "ideal"))
    for cause in dict.fromkeys((*names, *measured)):
        both = BothBars(cause, predicted.get(cause, 0) if predicted else None, measured.get(cause, 0))
        if both.predicted_ns or both.measured_ns:
            yield both


def _in_nanoseconds(causes: Mapping[str, float], seconds: float | None) -> dict[str, int]:
    """The causes of a forecast's step in whole nanoseconds that sum to it; empty where no time is known."""
    if seconds is None or not causes:
        return {}
    found = {IDEAL if name == "ideal" else name: nanoseconds(float(each)) for name, each in causes.items()}
    largest = max(found, key=lambda name: abs(found[name]))
    found[largest] += nanoseconds(float(seconds)) - sum(found.values())
    return found


def _remedies(found: Profile, advice: Advice) -> Iterator[Remedy]:
    """For each cause the change that gains most, of those that train the same (or only fill up a size) and fit."""
    before = advice.forecast.step_seconds
    if not before:
        return
    names = {LAUNCH_GAPS: HOST}
    for cause in found.causes:
        fields = _FIELDS.get(names.get(cause.name, cause.name), ())
        gains = [
            (1 - each.forecast.step_seconds / before, each)
            for each in advice.alone
            if each.forecast.step_seconds and each.works and (each.effect != RESULT or each.sets[0].startswith(_PADDED))
            and all(name.startswith(fields) for name in each.sets) and fields
        ]  # fmt: skip
        if gains:
            gain, best = max(gains, key=lambda each: each[0])
            if gain >= _LEAST_GAIN:
                yield Remedy(cause.name, best, gain)
