"""What is said about a run before it starts, kept with it so that it can be held against the measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

from trainledger.frozen import frozen
from trainledger.ledger.entry import BASES, Ledger
from trainledger.ledger.parameters import leaves_of
from trainledger.ledger.summary import summary
from trainledger.ledger.update import whole_of
from trainledger.predict.ratios import hfu, matmul_dtype, mfu
from trainledger.predict.roofline import Machine, NoRate, peak_rate
from trainledger.predict.run_time import run_time
from trainledger.predict.step_time import StepTime, step_time
from trainledger.spec.cluster import Device
from trainledger.spec.problem import Problem
from trainledger.spec.run import Run


@frozen(kw_only=True)
class Forecast:
    """A run as predicted: one step's ledger in figures, its time, and the time of the whole.

    Names are those of `ledger.measured.Measured`. What could not be predicted is None, and ``notes`` says why.
    ``basis`` names that of each quantity: exact, bound, assumed or measured.
    """

    parameters: int | None = None
    tokens_per_step: int | None = None
    flops: dict[str, int] = field(default_factory=dict)
    model_flops: int | None = None
    kept_nbytes: int | None = None
    kept_by_kind: dict[str, int] = field(default_factory=dict)
    peak_nbytes: int | None = None
    peak_by_category: dict[str, int] = field(default_factory=dict)
    step_seconds: float | None = None
    step_seconds_by_phase: dict[str, float] = field(default_factory=dict)
    step_seconds_by_kind: dict[str, float] = field(default_factory=dict)
    step_seconds_by_bound: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float | None = None
    total_seconds: float | None = None
    seconds_by_phase: dict[str, float] = field(default_factory=dict)
    mfu: float | None = None
    hfu: float | None = None
    matmul_dtype: str = ""
    peak_flops_per_second: float | None = None
    device_hours: float | None = None
    money: float | None = None
    device: str = ""
    basis: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def problems(self) -> Iterator[Problem]:
        for quantity, basis in self.basis.items():
            if basis not in BASES:
                yield Problem(f"basis.{quantity}", basis, f"must be one of {', '.join(BASES)}")


def forecast(run: Run, ledger: Ledger, machine: Machine | None) -> Forecast:
    """The forecast of a run from its ledger and the machine it runs on (None = unknown: no times, no MFU)."""
    facts: dict[str, object] = {**summary(ledger), "matmul_dtype": matmul_dtype(ledger)}
    counted = "assumed" if ledger.uncounted else "exact"
    basis = {"parameters": "exact", "flops": counted, "kept_nbytes": "exact", "peak_nbytes": "exact"}
    notes: list[str] = []
    if ledger.uncounted:
        names = ", ".join(name for name, _ in ledger.uncounted)
        notes.append(f"operations without a rule, whose FLOPs are not counted: {names}")
    if machine is None:
        notes.append(
            "no step time and no MFU: this machine was not measured yet (trainledger measure machine does it, once)"
        )
        return Forecast(**facts, basis=basis, notes=tuple(notes))  # type: ignore[arg-type]
    facts["device"] = machine.title
    step = step_time(ledger, machine, tensors=whole_of(leaves_of(run.model, run.recipe)).tensors)
    notes += step.notes
    basis |= dict.fromkeys(("step_seconds", "tokens_per_second", "total_seconds", "mfu"), step.basis)
    if step.seconds:
        facts |= _times(run, ledger, step, machine, notes)
        try:
            peak = peak_rate(machine, matmul_dtype(ledger))
            facts["peak_flops_per_second"] = peak
            facts["mfu"] = mfu(ledger.model_flops, step.seconds, peak)
            facts["hfu"] = hfu(ledger.matmul_flops, step.seconds, peak)
        except NoRate as reason:
            notes.append(f"no MFU: {reason}")
    return Forecast(**facts, basis=basis, notes=tuple(notes))  # type: ignore[arg-type]


def _times(run: Run, ledger: Ledger, step: StepTime, machine: Machine, notes: list[str]) -> dict[str, object]:
    assert step.seconds is not None
    state = dict(ledger.resident)
    whole = run_time(
        run,
        step.seconds,
        by_phase=step.by_phase,
        checkpoint_nbytes=state.get("parameters", 0) + state.get("optimizer state", 0),
        storage_bytes_per_second=None if isinstance(machine, Device) else machine.storage_bytes_per_second,
    )
    notes += whole.notes
    return {
        "step_seconds": step.seconds,
        "step_seconds_by_phase": step.by_phase,
        "step_seconds_by_kind": step.by_kind,
        "step_seconds_by_bound": step.by_bound,
        "tokens_per_second": whole.tokens_per_second,
        "total_seconds": whole.total_seconds,
        "seconds_by_phase": whole.by_phase,
        "device_hours": whole.device_hours,
        "money": whole.money,
    }
