"""The document of a profile against the forecast of its run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainledger.answers.pages.plain_data import plain
from trainledger.answers.pages.plan_figures import waterfall
from trainledger.answers.pages.profile import document as of_profile
from trainledger.answers.pages.profile import short_bars
from trainledger.answers.pages.profile_figures import figures
from trainledger.answers.pages.profile_ranks import document as of_ranks
from trainledger.forecast.plan.changes import EFFECTS
from trainledger.forecast.predict.forecast import Bar
from trainledger.observe.profiler.beside_forecast import Operation, ProfileBeside
from trainledger.report.chart import Chart
from trainledger.report.document import Bars, Document, Facts, Item, Items, Table, notes, section, sections
from trainledger.report.table import commands
from trainledger.spec.units import NANOSECONDS_PER_SECOND, format_count, format_percent, format_seconds

_ROWS = 16


def document(found: ProfileBeside, *, most: int = _ROWS) -> Document:
    """The two waterfalls, what of the operations does not match, changes with their gains, then the profile itself.

    Tables have ``most`` rows.
    """
    whole = of_profile(found.profile, most=most)
    bars = Table(
        "beside",
        ("of the time of a step", "forecast", "measured", "measured - forecast"),
        (*((each.cause, each.predicted_ns, each.measured_ns, _more(each.predicted_ns, each.measured_ns))
           for each in found.bars), _in_all(found)),
        ("", "nanoseconds", "nanoseconds", "nanoseconds"),
    )  # fmt: skip
    facts, *others = whole.sections
    ranks = [] if found.ranks is None else of_ranks(found.ranks).sections[:1]
    others = [each for each in others if not each.title.startswith("Step ")]
    measured = Bars(tuple(short_bars(found.waterfall)))
    return Document(
        title=f"{found.profile.path}: where the time of a step went, against the forecast",
        sections=sections(
            facts,
            *ranks,
            section("Against the forecast", Facts(tuple(_facts(found))), bars),
            section("Measured, from the account's model FLOPs at the peak", measured),
            section("What to change", Items(tuple(_remedies(found)))) if found.remedies else None,
            section("Operations of the account and of the trace", *_operations(found, most)),
            *others,
            notes(found.notes),
        ),
        data=lambda: {**whole.data(), **({} if found.ranks is None else of_ranks(found.ranks).data()), **_data(found)},
        figures=lambda: _figures(found),
    )


def _more(predicted: int | None, measured: int) -> int | None:
    return None if predicted is None else measured - predicted


def _in_all(found: ProfileBeside) -> tuple[str, int | None, int, int | None]:
    measured = sum(each.measured_ns for each in found.bars)
    known = [each.predicted_ns for each in found.bars if each.predicted_ns is not None]
    predicted = sum(known) if known else None
    return "in all", predicted, measured, _more(predicted, measured)


def _facts(found: ProfileBeside) -> Iterator[tuple[str, str]]:
    yield "account", f"of {found.rank}"
    forecast, seconds = found.plan.forecast, found.profile.step.nanoseconds / NANOSECONDS_PER_SECOND
    if forecast.step_seconds:
        ratio = seconds / float(forecast.step_seconds)
        yield (
            "step",
            f"{format_seconds(seconds)}, {ratio:.3g} times the {format_seconds(forecast.step_seconds)} of the forecast",
        )
    if found.mfu is not None:
        before = "" if forecast.mfu is None else f", forecast {format_percent(forecast.mfu)}"
        yield "MFU", f"{format_percent(found.mfu)} by the account's model FLOPs{before}"


def _remedies(found: ProfileBeside) -> Iterator[Item]:
    for each in found.remedies:
        what = f"{each.cause}: {each.change.what}, predicted to save {format_percent(each.gain)} of the step"
        yield Item(f"{what} ({EFFECTS[each.change.effect]})", commands(each.change.sets))


def _operations(found: ProfileBeside, most: int) -> Iterator[Table | str]:
    computed = [each for each in found.operations if each.unit == "FLOPs"]
    moved = [each for each in found.operations if each.unit == "bytes"]
    for name, some in (("matmuls and attention", computed), ("collectives", moved)):
        if some:
            same = [each for each in some if each.equal]
            equal, all_ = (sum(each.measured for each in group) for group in (same, some))
            share = f", {format_percent(equal / all_)} of the {some[0].unit} of the trace" if all_ else ""
            yield f"{format_count(len(same))} of {format_count(len(some))} {name} are equal in count and size{share}."
    rows = [each for each in found.operations if not each.equal]
    if rows:
        yield Table(
            "unexplained",
            ("unexplained", "shape", "account", "trace", "account, all", "trace, all", "what differs"),
            tuple(_row(each) for each in rows[:most]),
            ("", "", "count", "count", "count", "count", ""),
        )
    if len(rows) > most:
        yield f"{len(rows) - most} more differ (--json has them)."


def _row(each: Operation) -> tuple[Any, ...]:
    return (
        each.kind, each.shape, each.predicted_count, each.measured_count, each.predicted, each.measured,
        each.difference,
    )  # fmt: skip


def _figures(found: ProfileBeside) -> list[Chart]:
    charts = figures(found.profile, found.waterfall)
    before = [Bar(each.cause, each.predicted_ns) for each in found.bars if each.predicted_ns is not None]
    return [*charts, waterfall(before, "Where a step goes, forecast")] if before else charts


def _data(found: ProfileBeside) -> dict[str, Any]:
    forecast = found.plan.forecast
    return {
        "run": plain(found.plan.run), "account_of": found.rank, "mfu": found.mfu,
        "waterfall": plain(list(found.waterfall)), "beside": plain(list(found.bars)),
        "forecast": {"step_seconds": forecast.step_seconds, "mfu": forecast.mfu, "basis": dict(forecast.basis)},
        "operations": plain(list(found.operations), more={Operation: ("equal", "difference")}),
        "remedies": [
            {"cause": each.cause, "what": each.change.what, "set": list(each.change.sets), "gain": each.gain,
             "effect": each.change.effect, "basis": each.change.basis}
            for each in found.remedies
        ],
        "notes": list(found.notes),
    }  # fmt: skip
