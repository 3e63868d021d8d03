"""What breaks first when a run grows: the first limits along each axis, warnings on the way, and what to do then."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import log2
from typing import Annotated, Any, Unpack

from trainledger.answers import defaults
from trainledger.answers.layout import spread
from trainledger.answers.load import Source, resolve
from trainledger.answers.machine import kernels_of, machine_of
from trainledger.answers.pages.heading import found_layout_section, of_run
from trainledger.answers.pages.plain_data import plain, run_data
from trainledger.answers.question import Progress, choice, count, question, share, silent, text
from trainledger.answers.source import OfCluster, with_cluster
from trainledger.forecast.plan.breaks import RULE, Along, Break, Breaks
from trainledger.forecast.plan.breaks import breaks as breaks_of
from trainledger.forecast.plan.layouts.grid import fixed_by
from trainledger.forecast.plan.limits import LIMITS, Limits
from trainledger.forecast.plan.other_layouts import ContextRanks
from trainledger.forecast.plan.sizes import AXES
from trainledger.forecast.predict.interval import EVEN
from trainledger.report.chart import COLOURS, SYMBOLS, Axis, Chart, Line
from trainledger.report.document import Document, Section, Table, Text, section, sections, shown
from trainledger.report.table import sentence
from trainledger.spec.problem import InvalidInput
from trainledger.spec.reading import Overrides
from trainledger.spec.run import Run
from trainledger.spec.run_text import found_layout
from trainledger.spec.units import counted


@question()
def breaks(
    run: Source,
    overrides: Overrides = (),
    *,
    along: Annotated[str | Iterable[str] | None, choice("what grows", AXES, several=True, default_text="all")] = None,
    reach: Annotated[int, count("up to so many times the planned value", least=2, most=10**6)] = 64,
    most: Annotated[int, count("how many limits of each size", most=20)] = 3,
    exposed: Annotated[float, share("most exposed communication, or bubble, as a share of the step")] = 0.2,
    lost: Annotated[float, share("most lost to checkpoints and failures, as a share of the run")] = 0.1,
    keep_tokens: Annotated[
        bool, text("keep the sequences of a step as they grow longer; absent: keep its tokens", flag="--keep-batch")
    ] = True,
    unique_tokens: Annotated[int | None, count('tokens that the dataset has, such as "15T"')] = None,
    progress: Progress = silent,
    **cluster: Unpack[OfCluster],
) -> Breaks:
    """The first, second and third limit of a run as one of its sizes grows.

    Each limit is exact: the last value that works and the next one that does not (a vocabulary grows by 128 rows for
    each tensor rank). With --set layout=auto the layout follows the size, on a grid of values. RUN is a run file, a
    model of the catalog or a Hugging Face config.json.

    Raises `InvalidInput`. `trainledger.forecast.plan.breaks` has the method.
    """
    overrides = with_cluster(overrides, **cluster)
    asked = defaults.of_full_rows(resolve(run, overrides, search=False))
    run = defaults.of_full_rows(defaults.with_length(resolve(run, overrides, progress=progress)))
    axes = AXES if along is None else tuple(along)
    return breaks_of(
        run,
        machine_of(run),
        backend=kernels_of(run),
        axes=axes,
        limits=Limits(unique_tokens=unique_tokens, exposed=exposed, lost=lost),
        reach=reach,
        most=most,
        keep_tokens=keep_tokens,
        planner=_planner(asked) if asked.layout.auto else None,
        say=lambda what: progress(what, axes.index(what) if what in axes else 0, len(axes)),
    )


def _planner(asked: Run) -> Callable[[Run], Run | None]:
    """Searches for the layout of other runs as of the requested one: the fields that it gives are kept."""

    def planned(run: Run) -> Run | None:
        free = replace(
            run.recipe,
            micro_batch=asked.recipe.micro_batch,
            activation_checkpointing=asked.recipe.activation_checkpointing,
        )
        wanted = replace(run, layout=asked.layout, recipe=free)
        try:
            layouts = spread(wanted, fixed=fixed_by(wanted), keep=1, front=False, first=True, chance=EVEN)
        except InvalidInput:  # such as more devices than a known network joins
            return None
        if layouts.interrupted:
            raise KeyboardInterrupt
        return None if layouts.simplest is None else layouts.simplest.run

    return planned


_EDGES = (("largest that works", "first that fails"), ("works", "fails"))  # exact, or of the values that were tried
_ORDER = ("first", "second", "third")


def page(found: Breaks) -> Document:
    """The nearest limit, the limits along each axis, and what to do; the numbers of each limit are details."""
    warned = tuple(f"Warning, as planned: {_broken(broken)}" for broken in found.warnings)
    remedies = {
        limit.limit: limit.remedy
        for along in found.along
        for limit in (*along.breaks, *along.warnings)
        if limit.limit != RULE
    }
    missing = [limit.not_known for limit in LIMITS if limit.name in found.unknown and limit.not_known]
    nothing = "nothing else" if found.already else "nothing"
    return Document(
        title=f"What breaks when {found.run.model.name} grows",
        verdict=verdict(found),
        sections=sections(
            _first_limits(found),
            section("", (sentence(f"{limit.limit}: {limit.remedy}") for limit in _nearest(found))),
            found_layout_section(found.run),
            section(
                "As planned",
                (
                    sentence(f"Broken already, as planned: {_broken(broken)}. What to do: {broken.remedy}")
                    for broken in found.already
                ),
                (
                    sentence(f"{said}. What to do: {broken.remedy}")
                    for said, broken in zip(warned, found.warnings, strict=True)
                ),
                detail="the numbers of each limit",
            ),
            *(replace(_along(along, nothing), detail="the numbers of each limit") for along in found.along),
            section(
                "What to do",
                (sentence(f"{name}: {remedy}") for name, remedy in remedies.items()),
                detail="every remedy",
            ),
            section(
                "",
                sentence(f"Not checked, since unknown: {'; '.join(missing)}") if missing else None,
                detail="what is not checked",
            ),
        ),
        about=(
            *of_run(found.run),
            *(f"Broken already, as planned: {_broken(broken)}." for broken in found.already),
            *(f"{said}." for said in warned),
        ),
        data=lambda: _data(found),
        figures=lambda: figures(found),
        more=("advise RUN",),
    )


def verdict(found: Breaks) -> str:
    """What is broken as planned, or the nearest limit of all."""
    if found.already:
        return f"Broken as planned: {', '.join(map(_amounts, found.already))}."
    limits = [limit for along in found.along for limit in along.breaks]
    if not limits:
        return f"No limit along {', '.join(along.axis for along in found.along)}, up to where it was looked."
    nearest = min(limits, key=lambda limit: limit.factor)
    if any(along.grid and nearest in along.breaks for along in found.along):
        between = f"between {nearest.field} = {nearest.holds:,}, which works, and {nearest.breaks:,}, which does not"
        return f"The first limit is {nearest.limit}, {between} (up to {nearest.factor:.4g} times the plan)."
    works = f"{nearest.field} = {nearest.holds:,} works, {nearest.breaks:,} does not"
    return f"The first limit is {nearest.limit}: {works} ({nearest.factor:.4g} times the plan)."


def _amounts(broken: Break) -> str:
    """A limit with its number and the most that it may be."""
    if broken.after is None or not broken.most:
        return broken.limit
    return f"{broken.limit} ({shown(broken.after, broken.unit)}, at most {shown(broken.most, broken.unit)})"


def _nearest(found: Breaks) -> tuple[Break, ...]:
    """The limits whose remedies the short answer has: what is broken as planned, else the nearest."""
    limits = sorted((limit for along in found.along for limit in along.breaks), key=lambda limit: limit.factor)
    return found.already or tuple(limit for limit in limits[:1] if limit.remedy)


def _first_limits(found: Breaks) -> Table:
    """The limits of one axis, or the first of each of several."""
    most = len(_ORDER) if len(found.along) == 1 else 1
    rows: list[tuple[str | int | float, ...]] = []
    for along in found.along:
        for limit in along.breaks[:most]:
            rows.append((along.axis, limit.limit, limit.holds or "-", limit.breaks, limit.factor))
        if not along.breaks:
            rows.append((along.axis, "none", along.reached, "-", "-"))
    columns = ("what grows", "limit", *_EDGES[any(along.grid for along in found.along)], "factor")
    return Table("limits", columns, tuple(rows), units=("", "", "integer", "integer", "factor"), align="llrrr")


def _broken(each: Break) -> str:
    return f"{each.limit}. {_figures(each)}"


def _along(each: Along, nothing: str) -> Section:
    title = f"{each.axis}: {each.field} from {each.start:,}"
    if each.carries:
        title += f"; with it {each.carries}"
    if not each.breaks and not each.warnings:
        return section(title, (f"  {nothing} breaks up to {each.reached:,}", *_layout(each)))
    named = [(_ORDER[at] if at < len(_ORDER) else f"{at + 1}th", one) for at, one in enumerate(each.breaks)]
    named += [("warning", one) for one in each.warnings]
    rows = tuple(
        (name, one.limit, one.holds or "-", one.breaks, one.factor, _figures(one))
        for name, one in sorted(named, key=lambda each: each[1].breaks)
    )
    columns = ("", "limit", *_EDGES[each.grid], "factor", "why")
    units = ("", "", "integer", "integer", "factor")
    lines = [sentence(one.remedy) for one in each.breaks if one.limit == RULE and one.remedy]
    lines += [sentence(_cure(one, one.cure)) for one in each.breaks if one.cure is not None]
    if not each.breaks:
        lines.append(sentence(f"{nothing} breaks up to {each.reached:,}; a warning is no limit"))
    elif len(each.breaks) < len(_ORDER) and each.reached > each.start:
        lines.append(f"No further limit up to {each.reached:,}.")
    if each.grid and rows:
        lines.append("The layout is searched for at some values only: each limit is between the two of its row.")
    lines += _layout(each)
    table = Table(each.axis, columns, rows, units=units, align="llrrrl")
    return Section(title, (table, Text(tuple(lines))) if lines else (table,))


def _layout(each: Along) -> list[str]:
    """The layout at the largest value that fits, where it is not the planned one."""
    sets = " ".join(f"--set {one}" for one in each.layout)
    return [sentence(f"at {each.laid_out:,} the search selects {sets}")] if sets else []


def _cure(each: Break, cure: ContextRanks) -> str:
    """The context-parallel layout with which a limit holds further."""
    sets = " ".join(f"--set {one}" for one in cure.changes)
    return f"{each.limit}: context ranks hold it up to {cure.holds:,}, on {counted(cure.devices, 'device')}: {sets}"


def _figures(each: Break) -> str:
    """What is compared: as planned, when grown, and the most."""
    if each.limit == RULE or each.planned is None or each.after is None or each.most is None:
        return each.why
    planned, after, most = (shown(value, each.unit) for value in (each.planned, each.after, each.most))
    grown = each.why.partition("; ")[2]
    more = f"; {grown}" if grown else ""
    if not each.axis:
        limit = f"warns from {most}" if each.warns else f"of {most} at most" if each.most else "and should be none"
        return f"{after}, {limit} ({each.basis}): {each.why}"
    limit = f"warns from {most}" if each.warns else f"at most {most}" if each.most else "should be none"
    return f"{planned} as planned, {after} there; {limit}, {each.basis}{more}"


def _data(found: Breaks) -> dict[str, Any]:
    return {
        "run": run_data(found.run),
        "layout": list(found_layout(found.run)),
        "already": [_break_data(each) for each in found.already],
        "warnings": [_break_data(warning) for warning in found.warnings],
        "along": [
            plain(along) | {name: [_break_data(one) for one in getattr(along, name)] for name in ("breaks", "warnings")}
            for along in found.along
        ],
        "not_judged": list(found.unknown),
    }


def _break_data(each: Break) -> dict[str, Any]:
    data: dict[str, Any] = plain(each, more={Break: ("factor",)} if each.axis else None)
    data["set"] = data.pop("changes")
    return data


def figures(found: Breaks) -> list[Chart]:
    """How far each axis can grow before which limit breaks."""
    rows = [along for along in found.along if along.breaks]
    broken = [(row, one) for row, along in enumerate(rows) for one in along.breaks]
    if not broken:
        return []
    marks = []
    for at, limit in enumerate(dict.fromkeys(one.limit for _, one in broken)):
        own = [(row, one) for row, one in broken if one.limit == limit]
        said = [
            f"{limit}\n{one.field}: works up to {one.holds or '-'}, fails from {one.breaks:,}\n{_figures(one)}"
            for _, one in own
        ]
        marks.append(
            Line(
                [one.factor for _, one in own],
                [row for row, _ in own],
                limit,
                COLOURS[at % len(COLOURS)],
                width=0,
                symbol=SYMBOLS[at % len(SYMBOLS)],
                size=13,
                said=said,
                texts=[f"{one.breaks:,}" for _, one in own],
            )
        )
    farthest = max(log2(one.factor) for _, one in broken)
    every = max(1, round(farthest / 6))
    # A label may be as wide as a telephone's tenth, on both sides of its point.
    x = Axis(
        "times the planned value",
        log=True,
        ends=(2 ** (-0.12 * (farthest + 0.3)), 2 ** (1.15 * farthest + 0.3)),
        ticks={2.0**power: f"{2**power:,}" for power in range(0, int(1.15 * farthest + 0.3) + 1, every)},
    )
    y = Axis(names=tuple(f"{row.axis}\n{row.start:,}" for row in rows))
    return [Chart(f"What breaks when {found.run.model.name} grows", tuple(marks), x, y, height=70 * len(rows))]
