"""The document of the traces of several ranks: a table of them, who waits for whom, and the bars of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainledger.answers.pages.plain_data import plain
from trainledger.answers.pages.plan_figures import waterfall
from trainledger.answers.pages.profile import causes_of, short_bars
from trainledger.answers.pages.profile import document as of_profile
from trainledger.answers.pages.rank_figures import rank_charts
from trainledger.forecast.predict.forecast import Bar
from trainledger.observe.profiler.ranks import RankProfile, Ranks
from trainledger.observe.profiler.step_time import EXPOSED
from trainledger.report.chart import Chart
from trainledger.report.document import Bars, Document, Facts, Table, notes, section, sections, shown
from trainledger.spec.units import format_count, format_percent


def document(found: Ranks, *, most: int = 0) -> Document:
    """The ranks with what they wait, the stragglers in a sentence each, and the waterfalls of both kinds of ranks.

    A page (``most`` rows are asked for) has the kernels and matmuls of these ranks too.
    """
    waits = _who_waits_most(found)
    shown_ranks = [waits, *(each for each in found.stragglers if each.rank != waits.rank)]
    return Document(
        title=f"{found.path}: where the time of {format_count(len(found.ranks))} ranks went",
        sections=sections(
            section(
                "",
                Facts(tuple(_facts(found))),
                _table(found),
                _who_is_late(found),
            ),
            *(section(_title(each), Bars(tuple(short_bars(each.waterfall)))) for each in shown_ranks),
            *(
                section(f"Where to look first, on rank {each.rank}", causes_of(each.profile, 2))
                for each in shown_ranks
                if each.profile.causes
            ),
            *(
                replace(part, title=f"{part.title} of rank {each.rank}")
                for each in shown_ranks
                for part in of_profile(each.profile, most=most).sections
                if most and part.title in ("Kernels", "Matmuls", "Collectives")
            ),
            notes((*found.doubts, *dict.fromkeys(said for each in found.ranks for said in each.profile.doubts))),
        ),
        data=lambda: _data(found),
        figures=lambda: [*rank_charts(found), *_figures(shown_ranks)],
    )


def _who_is_late(found: Ranks) -> list[str]:
    """A sentence on each straggler, or that ranks wait by turns."""
    return [found.said_of(each) for each in found.stragglers] or [each for each in (found.by_turns,) if each]


def _who_waits_most(found: Ranks) -> RankProfile:
    return max(found.ranks, key=lambda each: sum(each.waited_in_median_ns.values()))


def _title(each: RankProfile) -> str:
    step = each.profile.step
    return f"Rank {each.rank}, step {step.step.name}: {shown(step.nanoseconds, 'nanoseconds')}"


def _facts(found: Ranks) -> Iterator[tuple[str, str]]:
    first = found.ranks[0].profile
    if first.device_name:
        yield "device", first.device_name
    yield "ranks", f"{format_count(len(found.ranks))}, {format_count(len(found.steps))} steps that all have"
    speeds = [each.profile.mfu for each in found.ranks if each.profile.mfu is not None]
    if speeds:
        yield "MFU", f"{format_percent(min(speeds))} to {format_percent(max(speeds))}"


def _table(found: Ranks) -> Table:
    rows = []
    for each in found.ranks:
        step = each.profile.step
        whole = max(step.nanoseconds, 1)
        rows.append(
            (each.rank, step.nanoseconds, step.busy_ns / whole, step.parts_ns[EXPOSED] / whole,
             sum(each.waited_in_median_ns.values()) / whole, each.caused_ns, f"{each.last} of {each.compared}")
        )  # fmt: skip
    columns = ("rank", "step", "busy", "exposed communication", "waits for the slowest", "others waited for it", "last")
    return Table(
        "ranks", columns, tuple(rows), ("integer", "nanoseconds", "share", "share", "share", "nanoseconds", "")
    )


def _figures(some: list[RankProfile]) -> list[Chart]:
    return [
        waterfall([Bar(bar.title, bar.nanoseconds) for bar in each.waterfall], f"Where a step of rank {each.rank} goes")
        for each in some
    ]


def _data(found: Ranks) -> dict[str, Any]:
    return {
        "path": found.path, "common_steps": list(found.steps),
        "ranks": [
            {
                "rank": each.rank,
                "waited_ns": {step: dict(by) for step, by in each.waited_ns.items()},
                "caused_ns": each.caused_ns, "last": each.last,
                "compared": each.compared, "waterfall": plain(list(each.waterfall)),
                "profile": of_profile(each.profile).data(),
            }
            for each in found.ranks
        ],
        "stragglers": [{"rank": each.rank, "sentence": found.said_of(each)} for each in found.stragglers],
        "by_turns": found.by_turns, "doubts": list(found.doubts),
    }  # fmt: skip
