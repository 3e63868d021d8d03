"""The document of what breaks first when a run grows, along each axis, what warns on the way, and what to do then."""

from __future__ import annotations

from math import log2
from typing import Any

from trainledger.answers.pages.heading import found_layout_section, of_run
from trainledger.answers.pages.plain_data import plain, run_data
from trainledger.forecast.plan.breaks import RULE, Along, Break, Breaks
from trainledger.forecast.plan.other_layouts import ContextRanks
from trainledger.report.chart import COLOURS, SYMBOLS, Axis, Chart, Line
from trainledger.report.document import Document, Section, Table, Text, section, sections, shown
from trainledger.report.table import sentence
from trainledger.spec.run_text import found_layout
from trainledger.spec.units import counted

_ORDER = ("first", "second", "third")
_NOT_KNOWN = {
    "device memory": "device memory (its size is not known)",
    "exposed communication": "exposed communication (one device, or no step time)",
    "pipeline bubble": "the pipeline bubble (no step time)",
    "data throughput": "waiting for data (no time of the run)",
    "failures": "checkpoints and failures (no time of the run)",
    "dataset exhausted": "the size of the dataset (--unique-tokens)",
    "repetition": "",
}


def document(found: Breaks) -> Document:
    """What is broken already, what breaks along each axis, the remedies, and what could not be judged."""
    already = tuple(sentence(f"Broken already, as planned: {_broken(each)}. What to do: {each.remedy}")
                    for each in found.already)  # fmt: skip
    warned = tuple(f"Warning, as planned: {_broken(each)}" for each in found.warnings)
    passed = [one for each in found.along for one in (*each.breaks, *each.warnings)]
    remedies = {one.limit: one.remedy for one in passed if one.limit != RULE}
    missing = [each for each in (_NOT_KNOWN.get(name, name) for name in found.unknown) if each]
    return Document(
        title=f"What breaks when {found.run.model.name} grows",
        sections=sections(
            found_layout_section(found.run),
            *already,
            *(sentence(f"{said}. What to do: {each.remedy}")
              for said, each in zip(warned, found.warnings, strict=True)),
            *(_along(each, "nothing else" if found.already else "nothing") for each in found.along),
            section("What to do", (sentence(f"{name}: {each}") for name, each in remedies.items())),
            sentence(f"Not checked, since unknown: {'; '.join(missing)}") if missing else None,
        ),
        about=(
            *of_run(found.run), *(f"Broken already, as planned: {_broken(each)}." for each in found.already),
            *(f"{each}." for each in warned),
        ),
        data=lambda: _data(found),
        figures=lambda: figures(found),
    )  # fmt: skip


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
    columns = ("", "breaks", "holds at", "not at", "grown", "why")
    units = ("", "", "integer", "integer", "factor")
    lines = [sentence(one.remedy) for one in each.breaks if one.limit == RULE and one.remedy]
    lines += [sentence(_cure(one, one.cure)) for one in each.breaks if one.cure is not None]
    if not each.breaks:
        lines.append(sentence(f"{nothing} breaks up to {each.reached:,}; a warning is no limit"))
    elif len(each.breaks) < len(_ORDER) and each.reached > each.start:
        lines.append(f"Nothing else up to {each.reached:,}.")
    lines += _layout(each)
    found = Table(each.axis, columns, rows, units=units, align="llrrrl")
    return Section(title, (found, Text(tuple(lines))) if lines else (found,))


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
        "warnings": [_break_data(each) for each in found.warnings],
        "along": [
            plain(each) | {name: [_break_data(one) for one in getattr(each, name)] for name in ("breaks", "warnings")}
            for each in found.along
        ],
        "not_judged": list(found.unknown),
    }


def _break_data(each: Break) -> dict[str, Any]:
    data: dict[str, Any] = plain(each, more={Break: ("factor",)} if each.axis else None)
    data["set"] = data.pop("changes")
    return data


def figures(found: Breaks) -> list[Chart]:
    """How far each axis can grow before which limit breaks."""
    rows = [each for each in found.along if each.breaks]
    broken = [(row, one) for row, each in enumerate(rows) for one in each.breaks]
    if not broken:
        return []
    marks = []
    for at, limit in enumerate(dict.fromkeys(one.limit for _, one in broken)):
        own = [(row, one) for row, one in broken if one.limit == limit]
        said = [
            f"{limit}\n{one.field}: holds at {one.holds or '-':,}, not at {one.breaks:,}\n{_figures(one)}"
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
    y = Axis(names=tuple(f"{each.axis}\n{each.start:,}" for each in rows))
    return [Chart(f"What breaks when {found.run.model.name} grows", tuple(marks), x, y, height=70 * len(rows))]
