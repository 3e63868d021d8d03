"""The document of two directories of ranks compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainledger.answers.pages.profile_against import (
    MOST_ROWS,
    changed_sections,
    changes_data,
    largest_changes,
    parts_table,
)
from trainledger.answers.pages.profile_ranks import document as of_ranks
from trainledger.observe.profiler.against import RanksAgainst
from trainledger.observe.profiler.ranks import WAITS, RankProfile, Ranks
from trainledger.report.chart import COLOURS, Axis, Chart, bar_chart, beside, stacked
from trainledger.report.document import Document, Facts, Table, notes, section, sections, shown
from trainledger.spec.units import format_percent

_DRAWN_PARTS, _DRAWN_RANKS = 10, 16
_OVER = ", median over ranks"
_LEAST_CHANGE = 0.0005  # of a step: less is written as 0.0 %
_BEFORE, _AFTER = COLOURS[7], COLOURS[0]
_HOVER = "%{y}: %{x:.4g} ms<extra></extra>"


def document(found: RanksAgainst, *, most: int = MOST_ROWS) -> Document:
    """Both programs, what changed in a sentence each, then ranks, parts, kernels, matmuls, collectives."""
    steps = found.before.step_ns, found.after.step_ns
    return Document(
        title=f"{found.after.path} against {found.before.path}",
        sections=sections(
            section("", Facts(tuple(_facts(found))), list(_sentences(found))),
            section("Ranks", _ranks(found, most)) if found.shared else None,
            section("Parts of the step" + _OVER, parts_table(found.changes, steps, "the step")),
            *changed_sections(found.changes, most, _OVER),
            notes(found.notes),
        ),
        data=lambda: _data(found),
        figures=lambda: _figures(found),
    )


def _facts(found: RanksAgainst) -> Iterator[tuple[str, str]]:
    for name, some in (("before", found.before), ("after", found.after)):
        steps = sorted(each.profile.step.nanoseconds for each in some.ranks)
        between = " to ".join(dict.fromkeys(shown(each, "nanoseconds") for each in (steps[0], steps[-1])))
        speeds = [each.profile.mfu for each in some.ranks if each.profile.mfu is not None]
        mfu = " to ".join(dict.fromkeys(format_percent(each) for each in (min(speeds), max(speeds)))) if speeds else ""
        ranks = "1 rank" if len(some.ranks) == 1 else f"{len(some.ranks):,} ranks"
        yield name, f"{some.path}: {ranks}, median steps of {between}" + (f", MFU {mfu}" if mfu else "")


def _sentences(found: RanksAgainst) -> Iterator[str]:
    before, after = found.before, found.after
    if before.step_ns:
        how = "longer" if found.difference_ns > 0 else "shorter"
        share = abs(found.difference_ns) / before.step_ns
        change = f"{format_percent(share)} {how}" if share >= _LEAST_CHANGE else "as long as before"
        times = f"{shown(before.step_ns, 'nanoseconds')} before, {shown(after.step_ns, 'nanoseconds')} after"
        yield f"The step is {change}: {times} (median over ranks)."
        yield from largest_changes(found.changes.parts, before.step_ns)
    yield from _of_stragglers(before, after)
    yield _of_the_slowest(before, after)


def _of_stragglers(before: Ranks, after: Ranks) -> Iterator[str]:
    """Of each rank that holds the others up, before or after, what became of it."""
    late = [{each.rank: each for each in some.stragglers} for some in (before, after)]
    if not any(late):
        yield "No rank holds the others up, neither before nor after."
    for number in dict.fromkeys((*late[0], *late[1])):
        costs = [
            _cost(some, own[number]) if number in own else "" for some, own in zip((before, after), late, strict=True)
        ]
        if all(costs):
            yield f"Rank {number} still holds the others up: each waits {costs[0]} before and {costs[1]} after."
        elif costs[0]:
            gone = "" if any(each.rank == number for each in after.ranks) else ", where it has no trace"
            yield f"Rank {number} held the others up before (each waited {costs[0]}), and no longer does after{gone}."
        else:
            new = "" if any(each.rank == number for each in before.ranks) else ", of which there is no trace before,"
            yield f"Rank {number}{new} now holds the others up: each waits {costs[1]}."


def _cost(found: Ranks, straggler: RankProfile) -> str:
    cost_ns = found.costs_of_a_step_ns(straggler)
    return f"{shown(cost_ns, 'nanoseconds')} of a step, {format_percent(cost_ns / max(found.step_ns, 1))}"


def _of_the_slowest(before: Ranks, after: Ranks) -> str:
    """Which rank's own work takes the longest, before and after."""
    slowest = [some.slowest for some in (before, after)]
    if not any(slowest):
        return "No rank's own work stands out, neither before nor after."
    said = [
        f"rank {each.rank} ({shown(each.own_ns, 'nanoseconds')} of its own in a step, where the median over ranks is "
        f"{shown(some.own_ns, 'nanoseconds')})" if each else "none stands out"
        for each, some in zip(slowest, (before, after), strict=True)
    ]  # fmt: skip
    return f"The slowest rank before: {said[0]}; after: {said[1]}."


def _ranks(found: RanksAgainst, most: int) -> Table:
    """The ranks that both have, those whose own work changed most first; in a page all of them, by number."""
    rows = [
        (now.rank, *(time for of in (_step, _own, _waits) for time in (of(then), of(now))))
        for then, now in found.shared
    ]
    if len(rows) > most:
        rows = sorted(sorted(rows, key=lambda each: -abs(each[4] - each[3]))[:most])
    columns = ("rank", "step before", "after", "own work before", "after", "waiting before", "after")
    return Table("ranks", columns, tuple(rows), ("integer", *("nanoseconds",) * 6))


def _step(rank: RankProfile) -> int:
    return rank.profile.step.nanoseconds


def _own(rank: RankProfile) -> int:
    return rank.own_ns


def _waits(rank: RankProfile) -> int:
    return sum(rank.waited_in_median_ns.values())


def _figures(found: RanksAgainst) -> list[Chart]:
    """Parts before and after beside each other, and of each rank its own work and its waiting."""
    parts = sorted(found.changes.parts, key=lambda each: -max(each.before_ns, each.after_ns))[:_DRAWN_PARTS]
    times = {"before": [each.before_ns / 1e6 for each in parts], "after": [each.after_ns / 1e6 for each in parts]}
    bars = beside(times, lambda name, row: f"{name}: {times[name][row]:.4g} ms of {parts[row].name}")
    title = "Parts of a step before and after, median over ranks"
    charts = [bar_chart(title, "milliseconds", [each.name for each in parts], bars)]
    return [*charts, _of_ranks(found)] if found.shared else charts


def _of_ranks(found: RanksAgainst) -> Chart:
    """A pair of bars for each rank that both have (of many those whose own work changed most)."""
    some = sorted(found.shared, key=lambda pair: -abs(pair[1].own_ns - pair[0].own_ns))[:_DRAWN_RANKS]
    lanes = [
        (f"rank {pair[1].rank}, {when}", each)
        for pair in sorted(some, key=lambda pair: pair[1].rank)
        for when, each in zip(("before", "after"), pair, strict=True)
    ]
    parts = {
        "its own work and gaps": [_own(each) / 1e6 for _, each in lanes],
        WAITS: [_waits(each) / 1e6 for _, each in lanes],
    }
    colours = dict(zip(parts, (COLOURS[0], COLOURS[5]), strict=True))
    bars = stacked(
        parts, colours, lambda name, row: f"{lanes[row][0]}: {parts[name][row]:.4g} ms of {name}", thick=0.75
    )
    few = f", {len(some)} of {len(found.shared)}" if len(some) < len(found.shared) else ""
    names = tuple(name for name, _ in lanes)
    x = Axis("milliseconds of the median step")
    return Chart(f"The ranks before and after{few}", tuple(bars), x, Axis(names=names), height=26 * len(lanes))


def _data(found: RanksAgainst) -> dict[str, Any]:
    return {
        "before": of_ranks(found.before).data(), "after": of_ranks(found.after).data(),
        "step_ns": {"before": found.before.step_ns, "after": found.after.step_ns, "difference": found.difference_ns},
        "ranks": [
            {"rank": now.rank, **{
                name: {"before": of(then), "after": of(now)}
                for name, of in (("step_ns", _step), ("own_ns", _own), ("waited_ns", _waits))
            }}
            for then, now in found.shared
        ],
        "slowest": {
            name: some.slowest and some.slowest.rank
            for name, some in (("before", found.before), ("after", found.after))
        },
        "stragglers": {
            "before": [each.rank for each in found.before.stragglers],
            "after": [each.rank for each in found.after.stragglers],
        },
        **changes_data(found.changes),
        "notes": list(found.notes),
    }  # fmt: skip
