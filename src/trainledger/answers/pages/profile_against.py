"""The document of two profiles, or of two directories of ranks, compared: verdict, largest changes, then tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from trainledger.answers.pages.plain_data import plain
from trainledger.answers.pages.plan_figures import waterfall
from trainledger.answers.pages.profile import short_name
from trainledger.forecast.predict.forecast import Bar
from trainledger.observe.profiler.against import Against, Changed, RanksAgainst
from trainledger.observe.profiler.profile import Profile
from trainledger.observe.profiler.ranks import WAITS, RankProfile, Ranks
from trainledger.report.chart import COLOURS, Axis, Chart, bar_chart, beside, stacked
from trainledger.report.document import Document, Facts, Section, Table, notes, section, sections, shown
from trainledger.spec.units import format_percent

_ROWS, _SENTENCES = 12, 3
_LEAST = 0.005  # of the step: less is no sentence
_LEAST_CHANGE = 0.0005  # of a step: less is written as 0.0 %
_DRAWN_PARTS, _DRAWN_RANKS = 10, 16
# Of a rank: its median step, its own work and gaps, what it waits for others.
_TIMES = ("step_ns", "own_ns", "waits_ns")


def page(found: Against | RanksAgainst, *, most: int = _ROWS) -> Document:
    """Both programs, what changed most in a sentence each, then ranks, parts, kernels, matmuls, collectives."""
    of_ranks = isinstance(found, RanksAgainst)
    over, whole = (", median over ranks", "the step") if of_ranks else ("", "in all")
    sentences = _of_ranks(found) if isinstance(found, RanksAgainst) else _of_profiles(found)
    ranks = section("Ranks", _ranks(found, most)) if isinstance(found, RanksAgainst) and found.shared else None
    facts = tuple((name, _fact(side)) for name, side in (("before", found.before), ("after", found.after)))
    return Document(
        title=f"{found.after.path} against {found.before.path}",
        sections=sections(
            section("", Facts(facts), list(sentences)),
            ranks,
            section("Parts of the step" + over, _parts(found, whole)),
            *(
                _changed(name, getattr(found.changes, name)[:most], over)
                for name in ("kernels", "matmuls", "collectives")
            ),
            notes(found.notes),
        ),
        data=lambda: _data(found),
        figures=lambda: _charts(found),
    )


def _fact(side: Profile | Ranks) -> str:
    """The path of one side, its steps and its MFU."""
    if isinstance(side, Profile):
        what = f"{shown(side.step.nanoseconds, 'nanoseconds')} (step {side.step.step.name}, the median of "
        what, speeds = f"{what}{len(side.steps)})", [side.mfu]
    else:
        steps = sorted(rank.profile.step.nanoseconds for rank in side.ranks)
        between = " to ".join(dict.fromkeys(shown(end, "nanoseconds") for end in (steps[0], steps[-1])))
        what = f"{'1 rank' if len(side.ranks) == 1 else f'{len(side.ranks):,} ranks'}, median steps of {between}"
        speeds = [rank.profile.mfu for rank in side.ranks]
    known = sorted(speed for speed in speeds if speed is not None)
    mfu = " to ".join(dict.fromkeys(format_percent(end) for end in (known[0], known[-1]))) if known else ""
    return f"{side.path}: {what}" + (f", MFU {mfu}" if mfu else "")


def _of_profiles(against: Against) -> Iterator[str]:
    before, difference = against.steps_ns[0], against.difference_ns
    if not before:
        return
    yield f"The step is {format_percent(abs(difference) / before)} {'longer' if difference > 0 else 'shorter'}."
    yield from _largest_changes(against)
    kernels = against.changes.kernels
    gone, new = [e for e in kernels if not e.after_count], [e for e in kernels if not e.before_count]
    for which, some in (("gone", gone), ("new", new)):
        if some:
            time = shown(sum(changed.before_ns + changed.after_ns for changed in some), "nanoseconds")
            count = "1 kernel is" if len(some) == 1 else f"{len(some)} kernels are"
            yield f"{count} {which} ({time}); the longest: {short_name(some[0].name)}"


def _of_ranks(against: RanksAgainst) -> Iterator[str]:
    before, after = against.steps_ns
    if before:
        share = abs(against.difference_ns) / before
        how = f"{format_percent(share)} {'longer' if against.difference_ns > 0 else 'shorter'}"
        change = how if share >= _LEAST_CHANGE else "as long as before"
        times = f"{shown(before, 'nanoseconds')} before, {shown(after, 'nanoseconds')} after"
        yield f"The step is {change}: {times} (median over ranks)."
        yield from _largest_changes(against)
    yield from _of_stragglers(against.before, against.after)
    yield _of_the_slowest(against.before, against.after)


def _largest_changes(found: Against | RanksAgainst) -> Iterator[str]:
    """A sentence on each of the parts that changed most."""
    before_ns = found.steps_ns[0]
    for part in found.changes.parts[:_SENTENCES]:
        changed_ns = abs(part.difference_ns)
        if changed_ns > _LEAST * before_ns:
            more = "more" if part.difference_ns > 0 else "less"
            share = format_percent(changed_ns / before_ns)
            yield f"{part.name}: {shown(changed_ns, 'nanoseconds')} {more} ({share} of the step before)."


def _of_stragglers(before: Ranks, after: Ranks) -> Iterator[str]:
    """Of each rank that holds the others up, before or after, what became of it."""
    late = [{straggler.rank: straggler for straggler in some.stragglers} for some in (before, after)]
    if not any(late):
        yield "No rank holds the others up, neither before nor after."
    for number in dict.fromkeys((*late[0], *late[1])):
        costs = [
            _cost(some, own[number]) if number in own else "" for some, own in zip((before, after), late, strict=True)
        ]
        if all(costs):
            yield f"Rank {number} still holds the others up: each waits {costs[0]} before and {costs[1]} after."
        elif costs[0]:
            gone = "" if any(rank.rank == number for rank in after.ranks) else ", where it has no trace"
            yield f"Rank {number} held the others up before (each waited {costs[0]}), and no longer does after{gone}."
        else:
            new = "" if any(rank.rank == number for rank in before.ranks) else ", of which there is no trace before,"
            yield f"Rank {number}{new} now holds the others up: each waits {costs[1]}."


def _cost(ranks: Ranks, straggler: RankProfile) -> str:
    cost_ns = ranks.costs_of_a_step_ns(straggler)
    return f"{shown(cost_ns, 'nanoseconds')} of a step, {format_percent(cost_ns / max(ranks.step_ns, 1))}"


def _of_the_slowest(before: Ranks, after: Ranks) -> str:
    """Which rank's own work takes the longest, before and after."""
    slowest = [some.slowest for some in (before, after)]
    if not any(slowest):
        return "No rank's own work stands out, neither before nor after."
    said = [
        f"rank {rank_profile.rank} ({shown(rank_profile.own_ns, 'nanoseconds')} of its own in a step, where the "
        f"median over ranks is {shown(some.own_ns, 'nanoseconds')})"
        if rank_profile
        else "none stands out"
        for rank_profile, some in zip(slowest, (before, after), strict=True)
    ]
    return f"The slowest rank before: {said[0]}; after: {said[1]}."


def _ranks(against: RanksAgainst, most: int) -> Table:
    """The ranks that both have, those whose own work changed most first; in a page all of them, by number."""
    rows = [
        (now.rank, *(getattr(rank, time) for time in _TIMES for rank in (then, now))) for then, now in against.shared
    ]
    if len(rows) > most:
        rows = sorted(sorted(rows, key=lambda row: -abs(row[4] - row[3]))[:most])
    columns = ("rank", "step before", "after", "own work before", "after", "waiting before", "after")
    return Table("ranks", columns, tuple(rows), ("integer", *("nanoseconds",) * 6))


def _parts(found: Against | RanksAgainst, whole: str) -> Table:
    """The parts of two steps, and under the name ``whole`` the steps."""
    rows = [(part.name, part.before_ns, part.after_ns, part.difference_ns) for part in found.changes.parts]
    rows.append((whole, *found.steps_ns, found.difference_ns))
    columns = ("of the time of a step", "before", "after", "after - before")
    return Table("parts", columns, tuple(rows), ("", *("nanoseconds",) * 3))


def _changed(name: str, changed: tuple[Changed, ...], over: str) -> Section | None:
    """The table of the kernels, matmuls or collectives that changed."""
    rows = tuple(
        (short_name(c.name), c.before_count, c.after_count, c.before_ns, c.after_ns, c.difference_ns) for c in changed
    )
    columns = (name, "runs before", "after", "time before", "after", "after - before")
    table = Table(name, columns, rows, ("", "count", "count", *("nanoseconds",) * 3))
    return section(name.capitalize() + over, table) if rows else None


def _charts(found: Against | RanksAgainst) -> list[Chart]:
    """Waterfalls of two profiles; of ranks their parts before and after, and of each its own work and its waiting."""
    if isinstance(found, Against):
        return [
            waterfall(
                [Bar(bar.title, bar.nanoseconds) for bar in side.waterfall], f"Where a step goes, {name}: {side.path}"
            )
            for name, side in (("before", found.before), ("after", found.after))
        ]
    parts = sorted(found.changes.parts, key=lambda part: -max(part.before_ns, part.after_ns))[:_DRAWN_PARTS]
    times = {"before": [part.before_ns / 1e6 for part in parts], "after": [part.after_ns / 1e6 for part in parts]}
    bars = beside(times, lambda name, row: f"{name}: {times[name][row]:.4g} ms of {parts[row].name}")
    title = "Parts of a step before and after, median over ranks"
    charts = [bar_chart(title, "milliseconds", [part.name for part in parts], bars)]
    return [*charts, _rank_chart(found)] if found.shared else charts


def _rank_chart(against: RanksAgainst) -> Chart:
    """A pair of bars for each rank that both have (of many those whose own work changed most)."""
    some = sorted(against.shared, key=lambda pair: -abs(pair[1].own_ns - pair[0].own_ns))[:_DRAWN_RANKS]
    lanes = [
        (f"rank {pair[1].rank}, {when}", rank_profile)
        for pair in sorted(some, key=lambda pair: pair[1].rank)
        for when, rank_profile in zip(("before", "after"), pair, strict=True)
    ]
    parts = {
        "its own work and gaps": [rank_profile.own_ns / 1e6 for _, rank_profile in lanes],
        WAITS: [rank_profile.waits_ns / 1e6 for _, rank_profile in lanes],
    }
    colours = dict(zip(parts, (COLOURS[0], COLOURS[5]), strict=True))
    bars = stacked(
        parts, colours, lambda name, row: f"{lanes[row][0]}: {parts[name][row]:.4g} ms of {name}", thick=0.75
    )
    few = f", {len(some)} of {len(against.shared)}" if len(some) < len(against.shared) else ""
    names = tuple(name for name, _ in lanes)
    x = Axis("milliseconds of the median step")
    return Chart(f"The ranks before and after{few}", tuple(bars), x, Axis(names=names), height=26 * len(lanes))


def _data(found: Against | RanksAgainst) -> dict[str, Any]:
    sides = {"before": found.before, "after": found.after}
    changes = {
        field.name: plain(list(getattr(found.changes, field.name)), more={Changed: ("difference_ns",)})
        for field in fields(found.changes)
    }
    data: dict[str, Any] = {name: side.document().data() for name, side in sides.items()}
    if isinstance(found, Against):
        return data | {"difference_ns": found.difference_ns, **changes, "notes": list(found.notes)}
    ranks = [
        {"rank": now.rank}
        | {
            name: {"before": getattr(then, time), "after": getattr(now, time)}
            for name, time in zip(("step_ns", "own_ns", "waited_ns"), _TIMES, strict=True)
        }
        for then, now in found.shared
    ]
    before, after = found.steps_ns
    return data | {
        "step_ns": {"before": before, "after": after, "difference": found.difference_ns},
        "ranks": ranks,
        "slowest": {name: side.slowest and side.slowest.rank for name, side in _ranks_of(found)},
        "stragglers": {name: [rank.rank for rank in side.stragglers] for name, side in _ranks_of(found)},
        **changes,
        "notes": list(found.notes),
    }


def _ranks_of(against: RanksAgainst) -> tuple[tuple[str, Ranks], ...]:
    return ("before", against.before), ("after", against.after)
