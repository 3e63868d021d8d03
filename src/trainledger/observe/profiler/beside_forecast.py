"""A profile against the forecast of its run: causes, matmuls and collectives one by one, and remedies with gains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainledger.forecast.plan.advise import Advice, Advised
from trainledger.forecast.plan.changes import RESULT
from trainledger.forecast.plan.plan import Plan
from trainledger.forecast.predict.forecast import IDEAL, nanoseconds
from trainledger.forecast.predict.roofline import Machine, NoRate, matmul_dtype, mfu, peak_rate
from trainledger.forecast.predict.step import CAUSES
from trainledger.ledger.ledger import Ledger
from trainledger.observe.profiler.causes import COMPUTE, RULES, MeasuredBar, measured_waterfall
from trainledger.observe.profiler.flops import MatmulRate
from trainledger.observe.profiler.kinds import collective_named
from trainledger.observe.profiler.profile import Profile
from trainledger.observe.profiler.ranks import Ranks
from trainledger.observe.profiler.step_work import Runs, Sent, summed
from trainledger.report.document import Answer
from trainledger.spec.device import Device
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.spec.units import NANOSECONDS_PER_SECOND, format_flops, format_percent, format_seconds

Shape = tuple[str, str]  # kind of operation, and sizes or ranks as text
_BACKWARD = ", backward"
FOREIGN = "No matmul of the trace is one of the account"


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
    computed = summed(
        (
            (entry.kind, _shape(entry.kind, entry.shape, entry.kind == "attention" and "backward" in entry.name)),
            (entry.times, entry.times * entry.flops),
        )
        for entry in ledger
        if entry.kind in ("matmul", "attention") and entry.flops and entry.shape
    )
    ran = summed(
        (
            (rate.kind, _shape(rate.kind, rate.sizes, rate.shape.endswith(_BACKWARD)) if rate.sizes else rate.shape),
            (rate.count, rate.flops),
        )
        for rate in matmuls
    )
    moved = summed(
        (
            (collective_named(entry.name) or entry.name, f"{entry.ranks} ranks"),
            (entry.times, entry.times * entry.payload),
        )
        for entry in ledger
        if entry.kind == "collective" and entry.payload
    )
    arrived = summed(
        ((each.collective, f"{each.ranks} ranks"), (each.count, each.count * (each.payload_nbytes or 0)))
        for each in sent
    )
    return (*_rows("FLOPs", computed, ran), *_rows("bytes", moved, arrived))


def _rows(unit: str, predicted: Mapping[Shape, Runs], measured: Mapping[Shape, Runs]) -> Iterator[Operation]:
    both = {key: (predicted.get(key, (0, 0)), measured.get(key, (0, 0))) for key in (*predicted, *measured)}
    for (kind, shape), (before, after) in sorted(both.items(), key=lambda each: -max(each[1][0][1], each[1][1][1])):
        yield Operation(kind, shape, unit, before[0], after[0], before[1], after[1])


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


_PADDED = "model.vocab_multiple"
_LEAST_GAIN = 0.005  # of the step: less is not worth a line


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
class ProfileBeside(Answer, report="pages.profile"):
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
    """A profile against the plan of its run, of several ranks that of the first one; ``advice`` is of the same run.

    Raises `InvalidInput` where the step is shorter than its run's model FLOPs take at the peak.
    """
    ranks = found if isinstance(found, Ranks) else None
    profile = found.ranks[0].profile if isinstance(found, Ranks) else found
    ledger, rank, notes = _account_of(profile, plan)
    machine: Machine | None = profile.device or plan.machine
    if profile.device is not None and plan.machine is not None and profile.device.title != plan.machine.title:
        notes.append(f"The trace is of {profile.device.title}, the forecast of {plan.machine.title}.")
    elif not profile.on_device and isinstance(plan.machine, Device):
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
            seconds = profile.step.nanoseconds / NANOSECONDS_PER_SECOND
            reached = mfu(ledger.model_flops, seconds, peak) if seconds else None
    except NoRate as reason:
        notes.append(f"No MFU: {reason}.")
    if reached is not None and reached > 1:
        took = format_seconds(profile.step.nanoseconds / NANOSECONDS_PER_SECOND)
        rule = (
            f"{format_flops(ledger.model_flops)} of the run in the traced step of {took} are an MFU of "
            f"{format_percent(reached)}: it is probably of another model, batch or sequence length"
        )
        raise InvalidInput([Problem("run", None, rule, "the run file of the traced program")])
    bars = measured_waterfall(
        profile.step,
        profile.split,
        profile.matmuls,
        {} if machine is None else machine.peak_flops_per_second,
        model_at_peak_ns=at_peak_ns,
        pipeline=plan.run.layout.pipeline > 1,
        waiting_for_others_ns={} if ranks is None else ranks.ranks[0].waited_in_median_ns,
    )
    unknown = [note for note in plan.forecast.notes if note.startswith("no step time")]
    notes += [f"{note.replace('no step time', 'No predicted step time', 1)}." for note in unknown]
    rows = operations(ledger, profile.matmuls, profile.collectives)
    computed = [row for row in rows if row.unit == "FLOPs" and row.measured_count]
    if computed and not any(row.equal for row in computed):
        notes.insert(0, f"{FOREIGN}: is the run file that of the program traced?")
        reached = None
    if not profile.on_device and any(row.kind == "reduce-scatter" and not row.measured_count for row in rows):
        notes.append("A host's gloo runs a reduce-scatter as an all-reduce of the same bytes, and the trace has that.")
    remedies = () if advice is None else tuple(_remedies(profile, advice))
    both = tuple(_both(plan, bars))
    return ProfileBeside(profile, plan, rank, reached, bars, both, rows, remedies, tuple(notes), ranks)


def _account_of(profile: Profile, plan: Plan) -> tuple[Ledger, str, list[str]]:
    """The account of the rank that a profile is of, what it is called, and sentences on what was assumed."""
    run = plan.run
    notes = []
    if profile.ranks and profile.ranks != run.layout.devices:
        notes.append(f"The trace is of {profile.ranks:,} ranks, the run of {run.layout.devices:,}.")
    if not plan.ranks:
        return plan.ledger, "the one device", notes
    stage = 0 if profile.rank is None else stage_of_rank(run, profile.rank)
    if profile.rank is None and len(plan.ranks) > 1:
        notes.append("The trace does not say which rank it is of: assuming one of the first stage.")
    some = [rank for rank in plan.ranks if rank.stage == stage] or list(plan.ranks)
    return some[0].ledger, some[0].title, notes


def stage_of_rank(run: Run, rank: int) -> int:
    """The pipeline stage of a rank: stages are outermost in the mesh (`engine.train.parallel.mesh`)."""
    return int(rank * run.layout.pipeline // run.layout.devices)


def _both(plan: Plan, bars: Sequence[MeasuredBar]) -> Iterator[BothBars]:
    """The causes of both sides in the planner's order, then those that only the measurement has."""
    measured = {
        cause: nanoseconds for cause, (_, nanoseconds) in summed((b.cause, (1, b.nanoseconds)) for b in bars).items()
    }
    predicted = _in_nanoseconds(plan.forecast.step_causes, plan.forecast.step_seconds)
    names = (IDEAL, COMPUTE, *(cause for cause in CAUSES if cause != "ideal"))
    for cause in dict.fromkeys((*names, *measured)):
        both = BothBars(cause, predicted.get(cause, 0) if predicted else None, measured.get(cause, 0))
        if both.predicted_ns or both.measured_ns:
            yield both


def _in_nanoseconds(causes: Mapping[str, float], seconds: float | None) -> dict[str, int]:
    """The causes of a forecast's step in whole nanoseconds that sum to it; empty where no time is known."""
    if seconds is None or not causes:
        return {}
    whole = {IDEAL if name == "ideal" else name: nanoseconds(float(cause)) for name, cause in causes.items()}
    largest = max(whole, key=lambda name: abs(whole[name]))
    whole[largest] += nanoseconds(float(seconds)) - sum(whole.values())
    return whole


def _remedies(profile: Profile, advice: Advice) -> Iterator[Remedy]:
    """For each cause the change that gains most, of those that train the same (or only fill up a size) and fit."""
    before = advice.forecast.step_seconds
    if not before:
        return
    alone = [
        (1 - change.forecast.step_seconds / before, change)
        for change in advice.alone
        if change.forecast.step_seconds and change.works
        if change.effect != RESULT or change.sets[0].startswith(_PADDED)
    ]
    for cause in profile.causes:
        fields = tuple(RULES[cause.name].fields)
        gains = [each for each in alone if fields and all(name.startswith(fields) for name in each[1].sets)]
        gain, best = max(gains, key=lambda each: each[0], default=(0.0, None))
        if best is not None and gain >= _LEAST_GAIN:
            yield Remedy(cause.name, best, gain)
