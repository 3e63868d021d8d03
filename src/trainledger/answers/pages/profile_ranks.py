"""The document of the traces of several ranks: a table of them, who waits for whom, and the bars of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainledger.answers.pages.plain_data import plain
from trainledger.answers.pages.plan_figures import waterfall
from trainledger.answers.pages.profile import causes_of, short_bars, shown_last, work_of
from trainledger.answers.pages.profile_figures import rank_charts
from trainledger.forecast.predict.forecast import Bar
from trainledger.observe.profiler.profile import BROKEN_OFF
from trainledger.observe.profiler.ranks import RankProfile, Ranks
from trainledger.observe.profiler.step_time import EXPOSED
from trainledger.report.chart import Chart
from trainledger.report.document import Bars, Document, Facts, Table, notes, section, sections, shown
from trainledger.spec.units import format_count, format_percent


def page(found: Ranks, *, most: int = 0) -> Document:
    """The ranks with what they wait, the stragglers in a sentence each, and the waterfalls of both kinds of ranks.

    A page (``most`` rows are asked for) has the kernels and matmuls of these ranks too.
    """
    waits = max(found.ranks, key=lambda rank: rank.waits_ns)
    ranks = [waits, *(rank for rank in found.stragglers if rank.rank != waits.rank)]
    late = [found.said_of(rank) for rank in found.stragglers] or [each for each in (found.by_turns,) if each]
    doubts = dict.fromkeys(doubt for rank in found.ranks for doubt in rank.profile.doubts)
    return Document(
        title=f"{found.path}: where the time of {format_count(len(found.ranks))} ranks went",
        sections=sections(
            section("", Facts(tuple(_facts(found))), _table(found), late),
            *(section(_title(rank), Bars(tuple(short_bars(rank.waterfall)))) for rank in ranks),
            *(
                section(f"Where to look first, on rank {rank.rank}", causes_of(rank.profile, 2))
                for rank in ranks
                if rank.profile.causes
            ),
            *(
                replace(part, title=f"{part.title} of rank {rank.rank}")
                for rank in ranks
                for part in work_of(rank.profile, most)
                if part is not None
            ),
            notes((*found.doubts, *shown_last(doubts))),
        ),
        data=lambda: _data(found),
        figures=lambda: rank_charts(found) + _waterfalls(ranks),
    )


def _title(rank: RankProfile) -> str:
    return f"Rank {rank.rank}, step {rank.profile.step.step.name}: {shown(rank.step_ns, 'nanoseconds')}"


def _facts(ranks: Ranks) -> Iterator[tuple[str, str]]:
    first = ranks.ranks[0].profile
    cut = [str(rank.rank) for rank in ranks.ranks if BROKEN_OFF in rank.profile.doubts]
    if cut:
        yield "file", f"Of rank {', '.join(cut)}: {BROKEN_OFF}"
    if first.device_name:
        yield "device", first.device_name
    yield "ranks", f"{format_count(len(ranks.ranks))}, {format_count(len(ranks.steps))} steps that all have"
    speeds = [rank.profile.mfu for rank in ranks.ranks if rank.profile.mfu is not None]
    if speeds:
        yield "MFU", f"{format_percent(min(speeds))} to {format_percent(max(speeds))}"


def _table(ranks: Ranks) -> Table:
    rows = []
    for rank in ranks.ranks:
        step, whole = rank.profile.step, max(rank.step_ns, 1)
        shares = (step.busy_ns / whole, step.parts_ns[EXPOSED] / whole, rank.waits_ns / whole)
        rows.append((rank.rank, rank.step_ns, *shares, rank.caused_ns, f"{rank.last} of {rank.compared}"))
    columns = ("rank", "step", "busy", "exposed communication", "waits for the slowest", "others waited for it", "last")
    return Table(
        "ranks", columns, tuple(rows), ("integer", "nanoseconds", "share", "share", "share", "nanoseconds", "")
    )


def _waterfalls(some: list[RankProfile]) -> list[Chart]:
    return [
        waterfall(
            [Bar(bar.title, bar.nanoseconds) for bar in rank_profile.waterfall],
            f"Where a step of rank {rank_profile.rank} goes",
        )
        for rank_profile in some
    ]


def _data(found: Ranks) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank.rank,
            "waited_ns": {step: dict(by) for step, by in rank.waited_ns.items()},
            **{name: getattr(rank, name) for name in ("caused_ns", "last", "compared")},
            "waterfall": plain(list(rank.waterfall)),
            "profile": rank.profile.document().data(),
        }
        for rank in found.ranks
    ]
    return {
        "path": found.path,
        "common_steps": list(found.steps),
        "ranks": ranks,
        "stragglers": [{"rank": rank.rank, "sentence": found.said_of(rank)} for rank in found.stragglers],
        "by_turns": found.by_turns,
        "doubts": list(found.doubts),
    }
