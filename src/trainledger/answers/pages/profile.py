"""The document of a profile, alone or against the forecast of its run: where a step's time went, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from trainledger.answers.pages.plain_data import named, plain
from trainledger.answers.pages.plan_figures import waterfall
from trainledger.answers.pages.profile_figures import figures
from trainledger.forecast.plan.changes import EFFECTS
from trainledger.forecast.predict.forecast import Bar
from trainledger.observe.profiler.beside_forecast import FOREIGN, Operation, ProfileBeside
from trainledger.observe.profiler.causes import MeasuredBar
from trainledger.observe.profiler.flops import MatmulRate
from trainledger.observe.profiler.profile import BROKEN_OFF, Profile
from trainledger.report.chart import Chart
from trainledger.report.document import (
    Bars,
    Document,
    Facts,
    Item,
    Items,
    Section,
    Table,
    notes,
    section,
    sections,
    shown,
)
from trainledger.report.table import commands
from trainledger.spec.units import (
    NANOSECONDS_PER_SECOND,
    format_count,
    format_flops_per_second,
    format_nbytes,
    format_percent,
    format_seconds,
)

_CAUSES = 4
_ROWS, _ROWS_BESIDE, _ROWS_OF_A_PAGE = 12, 16, 100
_LONGEST_NAME, _LONGEST_BAR = 60, 43


def page(found: Profile | ProfileBeside, *, most: int | None = None) -> Document:
    """Steps, parts of the median one, its kernels, matmuls and collectives, and what the recording cannot say.

    Against a forecast: first the two waterfalls, what of the operations does not match, and changes with their gains.
    Tables have ``most`` rows.
    """
    if isinstance(found, ProfileBeside):
        return _beside(found, _ROWS_BESIDE if most is None else most)
    rows = _ROWS if most is None else most
    count = len(found.steps)
    title = f"Step {found.step.step.name}" + (f", the median of {count}" if count > 1 else "")
    return Document(
        title=f"{found.path}: where the time of a step went",
        sections=sections(
            Facts(tuple(_facts(found))),
            section(title, Bars(tuple(short_bars(found.waterfall))), _parts(found)),
            section("Where to look first", causes_of(found)) if found.causes else None,
            *work_of(found, rows),
            notes(shown_last(found.doubts)),
        ),
        data=lambda: _data(found),
        figures=lambda: figures(found, found.waterfall),
    )


def _beside(beside: ProfileBeside, most: int) -> Document:
    profile, ranks = beside.profile, beside.ranks
    first = [] if ranks is None else ranks.document().sections[:1]
    predicted = [bar.predicted_ns for bar in beside.bars if bar.predicted_ns is not None]
    rows = [(bar.cause, bar.predicted_ns, bar.measured_ns) for bar in beside.bars]
    rows.append(("in all", sum(predicted) if predicted else None, sum(bar.measured_ns for bar in beside.bars)))
    bars = Table(
        "beside",
        ("of the time of a step", "forecast", "measured", "measured - forecast"),
        tuple((name, told, took, None if told is None else took - told) for name, told, took in rows),
        ("", "nanoseconds", "nanoseconds", "nanoseconds"),
    )
    remedies = [
        Item(
            f"{remedy.cause}: {remedy.change.what}, predicted to save {format_percent(remedy.gain)} of the step "
            f"({EFFECTS[remedy.change.effect]})",
            commands(remedy.change.sets),
        )
        for remedy in beside.remedies
    ]
    return Document(
        title=f"{profile.path}: where the time of a step went, against the forecast",
        verdict=next((note for note in beside.notes if note.startswith(FOREIGN)), ""),
        sections=sections(
            Facts(tuple(_facts(profile))),
            *first,
            section("Against the forecast", Facts(tuple(_facts_beside(beside))), bars),
            section("Measured, from the account's model FLOPs at the peak", Bars(tuple(short_bars(beside.waterfall)))),
            section("What to change", Items(tuple(remedies))) if remedies else None,
            section("Operations of the account and of the trace", *_operations(beside, most)),
            section("Where to look first", causes_of(profile)) if profile.causes else None,
            *work_of(profile, most),
            notes(shown_last(profile.doubts)),
            notes(beside.notes),
        ),
        data=lambda: {**_data(profile), **({} if ranks is None else ranks.document().data()), **_data_beside(beside)},
        figures=lambda: _charts_beside(beside),
    )


def work_of(profile: Profile, most: int) -> Iterator[Section | None]:
    """The tables of kernels, matmuls and collectives."""
    room = _LONGEST_NAME if most < _ROWS_OF_A_PAGE else 5 * _LONGEST_NAME  # of a kernel's name
    length = max(profile.step.nanoseconds, 1)
    yield _table(
        "kernels",
        ("kernel", "kind", "runs", "time", "share"),
        [
            (short_name(ran.name, room), ran.kind, ran.count, ran.nanoseconds, ran.nanoseconds / length)
            for ran in profile.kernels[:most]
        ],
        ("", "", "count", "nanoseconds", "share"),
    )
    yield _table(
        "matmuls",
        ("kind", "shape", "format", "runs", "time", "speed", "of peak", "again"),
        [_matmul(profile, rate) for rate in profile.matmuls[:most]],
        ("", "", "", "count", "nanoseconds", "flops_per_second", "share", ""),
    )
    yield _table(
        "collectives",
        ("collective", "elements", "format", "ranks", "runs", "time"),
        [
            (sent.collective, sent.elements_in, sent.dtype, sent.ranks, sent.count, sent.nanoseconds)
            for sent in profile.collectives[:most]
        ],
        ("", "count", "", "count", "count", "nanoseconds"),
    )


def _table(name: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]], units: tuple[str, ...]) -> Section | None:
    return section(name.capitalize(), Table(name, columns, tuple(rows), units)) if rows else None


def _parts(profile: Profile) -> Table:
    length, rows = max(profile.step.nanoseconds, 1), list[tuple[Any, ...]]()
    for name, nanoseconds in profile.step.parts_ns.items():
        every = [step.parts_ns[name] for step in profile.steps]
        if any(every):
            rows.append((name, nanoseconds, nanoseconds / length, min(every), max(every)))
    columns = ("of the time of a step", "time", "share", "shortest", "longest")
    return Table("parts", columns, tuple(rows), ("", "nanoseconds", "share", "nanoseconds", "nanoseconds"))


def short_bars(bars: Iterable[MeasuredBar]) -> Iterator[tuple[str, int]]:
    """Bars of a waterfall with names that a terminal has room for."""
    return ((short_name(bar.title, _LONGEST_BAR), bar.nanoseconds) for bar in bars)


def short_name(name: str, most: int = _LONGEST_NAME) -> str:
    """The name of a kernel without what all names have: namespaces, and the arguments of the function."""
    for common in ("void ", "at::native::", "(anonymous namespace)::", "pytorch_flash::"):
        name = name.replace(common, "")
    return name if len(name) <= most else f"{name[: most - 3]}..."


def _facts(profile: Profile) -> Iterator[tuple[str, str]]:
    if BROKEN_OFF in profile.doubts:
        yield "file", BROKEN_OFF
    if profile.device_name:
        known = f" ({profile.device.title})" if profile.device is not None else ", which the catalog does not know"
        yield "device", profile.device_name + known
    if profile.rank is not None:
        yield "rank", f"{profile.rank}" + (f" of {profile.ranks}" if profile.ranks else "")
    lengths = [step.nanoseconds for step in profile.steps]
    some = ", ".join(shown(length, "nanoseconds") for length in lengths[:_ROWS])
    yield "steps", f"{format_count(len(lengths))}, found by {profile.found_by}: {some}"
    step = profile.step
    busy = format_percent(step.busy_ns / max(step.nanoseconds, 1))
    yield "busy", f"{busy} of the step" + ("" if profile.on_device else " in operators")
    if step.communication_ns:
        hidden = format_percent(step.overlapped_ns / step.communication_ns)
        time = shown(step.communication_ns, "nanoseconds")
        yield "communication", f"{time}, of which {hidden} lie beside computation"
    if profile.flops:
        rate = format_flops_per_second(profile.flops * NANOSECONDS_PER_SECOND / max(step.nanoseconds, 1))
        mfu = (
            ""
            if profile.mfu is None
            else f", MFU {format_percent(profile.mfu)}, HFU {format_percent(profile.hfu or 0.0)}"
        )
        yield "speed", f"{rate}{mfu} (matmuls, attention and convolutions whose shapes are known)"
    if profile.memory is not None:
        yield "memory", f"{format_nbytes(profile.memory.peak_nbytes)} at the most in the step, of PyTorch's allocator"
    if profile.flops > profile.model_flops:
        again = format_percent(1 - profile.model_flops / profile.flops)
        yield "recomputed", f"{again} of these FLOPs, which MFU leaves out"


def _facts_beside(beside: ProfileBeside) -> Iterator[tuple[str, str]]:
    yield "account", f"of {beside.rank}"
    forecast, seconds = beside.plan.forecast, beside.profile.step.nanoseconds / NANOSECONDS_PER_SECOND
    if forecast.step_seconds:
        ratio = seconds / float(forecast.step_seconds)
        told = format_seconds(forecast.step_seconds)
        yield "step", f"{format_seconds(seconds)}, {ratio:.3g} times the {told} of the forecast"
    if beside.mfu is not None:
        before = "" if forecast.mfu is None else f", forecast {format_percent(forecast.mfu)}"
        yield "MFU", f"{format_percent(beside.mfu)} by the account's model FLOPs{before}"


def shown_last(doubts: Iterable[str]) -> tuple[str, ...]:
    """The doubts but for that of a file that breaks off, which a page begins with."""
    return tuple(doubt for doubt in doubts if doubt != BROKEN_OFF)


def causes_of(profile: Profile, most: int = _CAUSES) -> Items:
    """What is most at stake: a sentence each, and the change in code."""
    length = max(profile.step.nanoseconds, 1)
    return Items(
        tuple(
            Item(
                f"{cause.name}, {format_percent(cause.nanoseconds / length)} of the step: {cause.sentence}", cause.code
            )
            for cause in profile.causes[:most]
        )
    )


def _matmul(profile: Profile, rate: MatmulRate) -> tuple[Any, ...]:
    speed, peak = rate.flops_per_second, profile.peaks.get(rate.dtype)
    share = None if speed is None or peak is None else speed / peak
    what = (rate.kind, rate.shape, rate.dtype, rate.count, rate.nanoseconds)
    return *what, speed, share, "recomputed" if rate.recomputed else ""


def _operations(beside: ProfileBeside, most: int) -> Iterator[Table | str]:
    computed = [operation for operation in beside.operations if operation.unit == "FLOPs"]
    moved = [operation for operation in beside.operations if operation.unit == "bytes"]
    for name, some in (("matmuls and attention", computed), ("collectives", moved)):
        if some:
            same = [operation for operation in some if operation.equal]
            equal, all_ = (sum(operation.measured for operation in group) for group in (same, some))
            share = f", {format_percent(equal / all_)} of the {some[0].unit} of the trace" if all_ else ""
            yield f"{format_count(len(same))} of {format_count(len(some))} {name} are equal in count and size{share}."
    rows = [operation for operation in beside.operations if not operation.equal]
    if rows:
        yield Table(
            "unexplained",
            ("unexplained", "shape", "account", "trace", "account, all", "trace, all", "what differs"),
            tuple(
                (
                    row.kind,
                    row.shape,
                    row.predicted_count,
                    row.measured_count,
                    row.predicted,
                    row.measured,
                    row.difference,
                )
                for row in rows[:most]
            ),
            ("", "", "count", "count", "count", "count", ""),
        )
    if len(rows) > most:
        yield f"{len(rows) - most} more differ (--json has them)."


def _charts_beside(beside: ProfileBeside) -> list[Chart]:
    charts = figures(beside.profile, beside.waterfall)
    before = [Bar(bar.cause, bar.predicted_ns) for bar in beside.bars if bar.predicted_ns is not None]
    return [*charts, waterfall(before, "Where a step goes, forecast")] if before else charts


def _data(profile: Profile) -> dict[str, Any]:
    step = profile.step
    steps = [
        {"name": step_time.step.name, "nanoseconds": step_time.nanoseconds, "parts_ns": dict(step_time.parts_ns)}
        for step_time in profile.steps
    ]
    return {
        "path": profile.path,
        "device": profile.device.name if profile.device else None,
        **named(profile, "device_name rank ranks"),
        "steps_found_by": profile.found_by,
        "steps": steps,
        "step": step.step.name,
        "step_seconds": step.nanoseconds / NANOSECONDS_PER_SECOND,
        "parts_ns": dict(step.parts_ns),
        "waterfall": plain(list(profile.waterfall)),
        **named(step, "busy_ns communication_ns overlapped_ns"),
        **named(profile, "flops model_flops mfu hfu"),
        "kernels": plain(list(profile.kernels)),
        "matmuls": plain(list(profile.matmuls), more={MatmulRate: ("flops_per_second",)}),
        **{name: plain(list(getattr(profile, name))) for name in ("collectives", "causes")},
        "doubts": list(profile.doubts),
        "memory": plain(profile.memory),
    }


def _data_beside(beside: ProfileBeside) -> dict[str, Any]:
    forecast = beside.plan.forecast
    return {
        "run": plain(beside.plan.run), "account_of": beside.rank, "mfu": beside.mfu,
        "waterfall": plain(list(beside.waterfall)), "beside": plain(list(beside.bars)),
        "forecast": {"step_seconds": forecast.step_seconds, "mfu": forecast.mfu, "basis": dict(forecast.basis)},
        "operations": plain(list(beside.operations), more={Operation: ("equal", "difference")}),
        "remedies": [
            {"cause": remedy.cause, "what": remedy.change.what, "set": list(remedy.change.sets), "gain": remedy.gain,
             "effect": remedy.change.effect, "basis": remedy.change.basis}
            for remedy in beside.remedies
        ],
        "notes": list(beside.notes),
    }  # fmt: skip
