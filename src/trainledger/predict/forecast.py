"""The forecast of a run, kept with it to be compared with the measurement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

from trainledger.frozen import frozen
from trainledger.ledger.entry import BASES
from trainledger.predict.waterfall import Bar, Bottleneck
from trainledger.spec.problem import Problem


@frozen(kw_only=True)
class Forecast:
    """A run as predicted: one step's ledger in figures, its time, and the time of the whole.

    Names are those of `ledger.measured.Measured`. What could not be predicted is None, and ``notes`` says why.
    ``basis`` names that of each quantity: exact, bound, assumed or measured. ``peak_nbytes`` is of the tensors of the
    heaviest device, ``device_nbytes`` all that it holds, of ``usable_nbytes`` that it has. ``waterfall`` leads from
    6 N D at the peak to ``total_seconds``; ``step_causes`` split a step (`predict.step.CAUSES`). ``goodput`` is
    the share of the time that goes to steps that are kept. ``kwh`` is at the devices' rated power times
    ``cluster.power_share`` and the power usage effectiveness. ``impossible`` says why several devices without a layout
    cannot share the run: then there is no forecast of the whole run, and the step and its tokens per second are
    those of one device alone. ``run_step_seconds`` and ``run_tokens_per_second`` are those of all devices
    together with what a step waits for its tokens; the others are of steps that do not wait.
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
    run_step_seconds: float | None = None
    run_tokens_per_second: float | None = None
    total_seconds: float | None = None
    seconds_by_phase: dict[str, float] = field(default_factory=dict)
    mfu: float | None = None
    hfu: float | None = None
    matmul_dtype: str = ""
    peak_flops_per_second: float | None = None
    days: float | None = None
    device_hours: float | None = None
    money: float | None = None
    kwh: float | None = None
    co2_kg: float | None = None
    goodput: float | None = None
    interruptions: float | None = None
    checkpoint_every: int | None = None
    step_causes: dict[str, float] = field(default_factory=dict)
    waterfall: tuple[Bar, ...] = ()
    bottleneck: Bottleneck | None = None
    device_nbytes: int | None = None
    usable_nbytes: int | None = None
    fits: bool | None = None
    device: str = ""
    basis: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    impossible: tuple[str, ...] = ()

    def __repr__(self) -> str:
        names = ("step_seconds", "tokens_per_second", "mfu", "days", "device_hours", "money", "device_nbytes", "fits")
        shown = [f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
                for name in names if (value := getattr(self, name)) is not None]  # fmt: skip
        limit = [] if self.bottleneck is None else [f"bottleneck={self.bottleneck.name!r}"]
        cannot = [f"impossible={'; '.join(self.impossible)!r}"] if self.impossible else []
        if self.step_seconds is None:  # then the notes say why, and memory is all there is
            shown = [*shown, *([] if self.peak_nbytes is None else [f"peak_nbytes={self.peak_nbytes}"])]
            cannot += [f"notes={'; '.join(self.notes)!r}"] if self.notes else []
        return f"Forecast({', '.join([*shown, *limit, *cannot])})"

    @property
    def waits(self) -> bool:
        """Whether steps of the run wait for their tokens."""
        if self.run_tokens_per_second is None or self.tokens_per_second is None:
            return False
        return self.run_tokens_per_second < self.tokens_per_second

    @property
    def run_mfu(self) -> float | None:
        """MFU with what a step waits for its tokens."""
        if self.mfu is None or not self.tokens_per_second or self.run_tokens_per_second is None:
            return None
        return self.mfu * self.run_tokens_per_second / self.tokens_per_second

    def problems(self) -> Iterator[Problem]:
        for quantity, basis in self.basis.items():
            if basis not in BASES:
                yield Problem(f"basis.{quantity}", basis, f"must be one of {', '.join(BASES)}")
