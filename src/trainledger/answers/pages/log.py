"""The document of a run's log: its speed, alone or beside the forecast, when that changed, and what to look at next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise

from trainledger.answers.defaults import assumptions
from trainledger.answers.pages.interval import ends
from trainledger.answers.pages.plain_data import plain
from trainledger.forecast.plan.plan import Plan
from trainledger.forecast.predict.interval import Interval
from trainledger.ledger.rules_of_thumb import CONVENTIONS
from trainledger.observe.logs import TABLE, Log
from trainledger.report.document import Amount, Document, Facts, Table, notes, section, sections, shown
from trainledger.report.table import sentence
from trainledger.spec.frozen import frozen
from trainledger.spec.units import counted, format_flops_per_second, format_seconds

_SAME, _MOST = 0.02, 4  # relative, what the digits of a log leave of equal numbers; steps, jumps, speeds in a list
_COLUMNS = ("", "log", "forecast", "80 % of runs", "log / forecast")


@frozen
class Row:
    """A quantity of a log and of the forecast, None where that is not known; ``within`` lie four of five runs."""

    quantity: str
    measured: float
    predicted: float | None = None
    within: Interval | None = None

    @property
    def place(self) -> str:
        """Where the measurement lies: below, within or above the interval; empty where that is not known."""
        if self.within is None:
            return ""
        return "below" if self.measured < self.within.low else "above" if self.measured > self.within.high else "within"


def page(log: Log, plan: Plan | None = None, run: str = "") -> Document:
    """The verdict, the quantities, when the speed changed, losses that are no numbers or jump, what is next, doubts."""
    rows = {row.quantity: row for row in _rows(log, plan)}
    columns, factors = 5 if plan else 2, [None, *(b.seconds / a.seconds for a, b in pairwise(log.speeds))]
    said = {
        "claims": list(_claims(log, plan)) if plan else [],
        "next": [_next(log, rows.get("step_seconds"), plan, run)],
        "doubts": [sentence(doubt) for doubt in (*log.doubts, *(_doubts(log, plan, rows) if plan else ()))],
    }
    cells = tuple(_cells(row)[:columns] for row in rows.values())
    speeds = tuple((f"{s.first:,} to {s.last:,}", s.seconds, by) for s, by in zip(log.speeds, factors, strict=False))
    steps = Table("speeds", ("steps", "a step", "times the one before"), speeds[-_MOST:], ("", "seconds", "ratio"))
    return Document(
        title=f"{log.path}: a log of {log.program}",
        verdict=_verdict(log, rows.get("step_seconds")),
        sections=sections(
            Facts(tuple(_facts(log))),
            Table("quantities", _COLUMNS[:columns], cells, ("", "", "", "", "ratio")[:columns], "lrrrr"[:columns]),
            said["claims"],
            section("When the speed changed", steps) if speeds else None,
            section("Next", said["next"]),
            notes(said["doubts"]),
        ),
        data=lambda: {
            "log": plain(log, less={Log: ("steps",)}),
            "quantities": plain(list(rows.values()), more={Row: ("place",)}),
            **said,
        },
    )


def _cells(row: Row) -> tuple[Amount | str | float | None, ...]:
    title, unit = TABLE["quantities"][row.quantity]
    within = ends(row.within, partial(shown, unit=unit)).partition(": ")[2] if row.within else ""
    told = row.predicted and Amount(row.predicted, unit)
    return title, Amount(row.measured, unit), told, within, row.predicted and row.measured / row.predicted


def _rows(log: Log, plan: Plan | None) -> Iterator[Row]:
    """The quantities that the log has, those of the forecast beside them."""
    measured: dict[str, float | None] = {**log.figures}
    measured["step_seconds"] = log.step_seconds.median if log.step_seconds else None
    predicted, scales = dict[str, float | None](), dict[str, tuple[float, float]]()
    if plan is not None:
        forecast, memory, rate = plan.forecast, plan.device_memory, _rate(log, plan)
        tokens = plan.run.recipe.tokens_per_step
        same = abs(log.figures.get("tokens_per_step", tokens) / tokens - 1) <= _SAME
        measured["our_mfu"] = rate * (forecast.model_flops or 0) / tokens / (forecast.peak_flops_per_second or math.inf)
        measured["tokens_per_second"] = rate * _devices(log, plan)
        of_step, of_device = (forecast.intervals.get(name) for name in ("step_seconds", "device_nbytes"))
        if (step := forecast.step_seconds) and not forecast.impossible:
            predicted = {"tokens_per_second": forecast.tokens_per_second, "our_mfu": forecast.mfu}
            predicted["step_seconds"] = step if same else None
            if of_step is not None:
                scales = dict.fromkeys(predicted, (step / of_step.high, step / of_step.low))
                scales["step_seconds"] = of_step.low / step, of_step.high / step
        if memory and (whole := forecast.device_nbytes) and not memory.tensors_alone:
            predicted |= {"allocated": memory.allocated_nbytes, "reserved": memory.reserved_nbytes}
            if of_device is not None:
                scales |= dict.fromkeys(("allocated", "reserved"), (of_device.low / whole, of_device.high / whole))
    for name in TABLE["quantities"]:
        if (value := measured.get(name)) and not (plan and name in ("rate", "tflops")):
            told, scale = predicted.get(name), scales.get(name)
            yield Row(name, value, told, Interval(scale[0] * told, scale[1] * told) if told and scale else None)


def _devices(log: Log, plan: Plan) -> float:
    return log.figures.get("devices", plan.run.cluster.count)


def _rate(log: Log, plan: Plan) -> float:
    """Tokens per second of one device: the log's, else those of the run in the log's time of a step."""
    assumed = plan.run.recipe.tokens_per_step / log.step_seconds.median if log.step_seconds else 0
    return log.figures.get("rate") or log.figures.get("tokens_per_second", assumed) / _devices(log, plan)


def _claims(log: Log, plan: Plan) -> Iterator[str]:
    """What the log says of its FLOP/s and its MFU, and which convention of counting gives that."""
    has, rate, peak = log.figures.get, _rate(log, plan), plan.forecast.peak_flops_per_second or 0
    tflops, mfu, seconds = has("tflops", 0), has("mfu", 0), log.step_seconds.median if log.step_seconds else 1
    its_peak = tflops * 1e12 / mfu if tflops and mfu else has("peak", peak)
    told = tflops * 1e12 or mfu * its_peak or has("flops_per_step", 0) / seconds / _devices(log, plan)
    if not told or not rate:
        return
    runs = plan.run.recipe.tokens_per_step / rate  # seconds of a device for the tokens of a step
    ours = {name: convention.flops(plan.run, plan.ledger) / runs for name, convention in CONVENTIONS.items()}
    nearest = min(ours, key=lambda name: abs(told / ours[name] - 1))
    same = " or ".join(name for name, flops in ours.items() if abs(told / flops - 1) <= _SAME)
    by = f"no convention of trainledger rules (nearest: {nearest}, {format_flops_per_second(ours[nearest])})"
    by = f"the convention {same} (trainledger rules lists them)" if same else by
    yield f"The log counts {format_flops_per_second(told)} of a device, by {by}."
    if mfu and peak and abs(its_peak / peak - 1) > _SAME:
        yield f"Its MFU is of {format_flops_per_second(its_peak)}, ours of {format_flops_per_second(peak)}."


def _doubts(log: Log, plan: Plan, rows: Mapping[str, Row]) -> Iterator[str]:
    """Why log and forecast may not compare."""
    run, tokens, theirs = plan.run, plan.run.recipe.tokens_per_step, log.figures.get("tokens_per_step")
    if run.origin.assumed:
        yield f"assuming of the run {assumptions(run)}"
    if theirs and abs(theirs / tokens - 1) > _SAME:
        yield f"a step of the log has {theirs:,.0f} tokens, of the run {tokens:,}: their times do not compare"
    elif not theirs and "rate" not in log.figures:
        yield f"assuming the run's {tokens:,} tokens per step for tokens/s and MFU"
    if _devices(log, plan) != run.cluster.count:
        yield f"the log is of {_devices(log, plan):,.0f} devices, the run of {run.cluster.count:,}"
    if plan.forecast.impossible:
        yield "the devices of the run cannot share it without a layout, so there is no step to compare"
    yield from (note for note in plan.forecast.notes if note.startswith("no step time"))
    if "our_mfu" in rows and rows["our_mfu"].measured > 1:
        yield "an MFU above 100 %: the log is of another model, batch or device"


def _verdict(log: Log, step: Row | None) -> str:
    if step is None:
        return "The log has no times of steps."
    text = against(step)
    for last in log.speeds[-1:]:
        if abs(last.seconds / step.measured - 1) > _SAME:
            text += f"; from step {last.first:,} on {format_seconds(last.seconds)}"
    return f"{text}." + (f" The loss is no number from step {log.not_finite[0]:,} on." if log.not_finite else "")


def against(step: Row) -> str:
    """A measured step beside the predicted one, as a clause."""
    text = f"A step takes {format_seconds(step.measured)}"
    if step.predicted:
        place = step.place and f", {step.place} the interval of four in five runs"
        text += f", {step.measured / step.predicted:.3g} times the forecast{place}"
    return text


def _facts(log: Log) -> Iterator[tuple[str, str]]:
    steps = f", steps {min(log.steps):,} to {max(log.steps):,} in {counted(len(log.steps), 'line')}"
    of_run = (("devices", "devices"), ("tokens_per_step", "tokens a step"))
    more = (f", {log.figures[name]:,.0f} {what}" for name, what in of_run if name in log.figures)
    yield "log", "".join([log.program, steps, *more])
    if (times := log.step_seconds) is not None and times.count > 1:
        quartiles = f"{format_seconds(times.low)} to {format_seconds(times.high)}"
        yield "times", f"median of {times.count:,} undisturbed ones; half of them {quartiles}"
    if log.disturbed:
        some = ", ".join(f"{step:,}" for step in log.disturbed[:_MOST]) + ", ..." * (len(log.disturbed) > _MOST)
        yield "left out", f"{counted(len(log.disturbed), 'time')} (start, evaluation, checkpoint ...), at {some}"
    if log.not_finite:
        yield "loss", f"no number in {counted(len(log.not_finite), 'line')}, first at step {log.not_finite[0]:,}"
    if log.jumps:
        some = ", ".join("at {step:,} from {before:.4g} to {loss:.4g}".format(**jump) for jump in log.jumps[:_MOST])
        yield "loss", f"{counted(len(log.jumps), 'jump')}: {some}{', ...' * (len(log.jumps) > _MOST)}"


def _next(log: Log, step: Row | None, plan: Plan | None, run: str) -> str:
    """What to look at next, with its command."""
    slower = len(log.speeds) > 1 and log.speeds[-1].seconds > log.speeds[-2].seconds
    case = "alone" if plan is None else "slower" if slower else "untimed" if step is None else step.place or "within"
    first = log.speeds[-1].first if log.speeds else 0
    return str(TABLE["next"][case]).format(log=log.path, run=run, first=first)
