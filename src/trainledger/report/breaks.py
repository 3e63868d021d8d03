"""What breaks when a run grows, for a terminal of 80 columns and as a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log10

from trainledger.document import Figure
from trainledger.plan.breaks import RULE, Along, Break, Breaks
from trainledger.plan.longer_context import ContextRanks
from trainledger.report.heading import of_run
from trainledger.report.style import COLOURS, GREY, arranged
from trainledger.report.table import sentence, table, wrapped
from trainledger.units import counted, format_count, format_nbytes, format_percent

_SHOW: dict[str, Callable[[float], str]] = {
    "nbytes": format_nbytes, "tokens": lambda value: f"{format_count(value)} tokens", "share": format_percent,
    "passes": lambda value: f"{value:.3g} passes",
}  # fmt: skip
_ORDER = ("first", "second", "third")
_NOT_KNOWN = {
    "device memory": "what the device's memory is",
    "exposed communication": "communication (one device, or no step time)",
    "pipeline bubble": "the bubble (no step time)",
    "data throughput": "waiting for data (no time of the run)",
    "failures": "checkpoints and failures (no time of the run)",
    "dataset exhausted": "how many tokens there are (--unique-tokens)",
    "repetition": "",
}


def text(found: Breaks) -> str:
    """All of it."""
    return "\n\n".join(_parts(found))


def _parts(found: Breaks) -> Iterator[str]:
    for now in found.already:
        yield _sentence(f"Broken already, as planned: {now.limit}. {_figures(now)}. What to do: {now.remedy}")
    for each in found.along:
        yield _along(each, "nothing else" if found.already else "nothing")
    remedies = {one.limit: one.remedy for each in found.along for one in each.breaks if one.limit != RULE}
    if remedies:
        yield "\n".join(["What to do", *(_sentence(f"{name}: {remedy}") for name, remedy in remedies.items())])
    missing = [_NOT_KNOWN.get(each, each) for each in found.unknown]
    if any(missing):
        yield _sentence(f"Not judged, because it is not known: {'; '.join(each for each in missing if each)}")


def _along(each: Along, nothing: str) -> str:
    title = f"{each.axis}: {each.field} from {each.start:,}"
    if each.carries:
        title += f"; with it {each.carries}"
    if not each.breaks:
        return "\n".join([wrapped(title), f"  {nothing} breaks up to {each.reached:,}", *_layout(each)])
    rows = [
        [
            _ORDER[at] if at < len(_ORDER) else f"{at + 1}th", one.limit, _holds(one), f"{one.breaks:,}",
            f"{one.factor:.3g}x", _figures(one),
        ]
        for at, one in enumerate(each.breaks)
    ]  # fmt: skip
    lines = [wrapped(title), table(["", "breaks", "holds at", "not at", "grown", "why"], rows, align="llrrrl")]
    lines += [_sentence(one.remedy) for one in each.breaks if one.limit == RULE and one.remedy]
    lines += [_sentence(_cure(one, one.cure)) for one in each.breaks if one.cure is not None]
    if len(each.breaks) < len(_ORDER) and each.reached > each.start:
        lines.append(_sentence(f"nothing else up to {each.reached:,}"))
    return "\n".join([*lines, *_layout(each)])


def _layout(each: Along) -> list[str]:
    """The layout at the largest value, where it is not the planned one."""
    sets = " ".join(f"--set {one}" for one in each.layout)
    return [_sentence(f"at {each.reached:,} the search takes {sets}")] if sets else []


def _cure(each: Break, cure: ContextRanks) -> str:
    """The context-parallel layout with which a limit holds further."""
    sets = " ".join(f"--set {one}" for one in cure.changes)
    return f"{each.limit}: context ranks hold it up to {cure.holds:,}, on {counted(cure.devices, 'device')}: {sets}"


def _holds(each: Break) -> str:
    return f"{each.holds:,}" if each.holds else "-"


def _figures(each: Break) -> str:
    """What is compared: as planned, then, and the most."""
    if each.limit == RULE or each.planned is None or each.after is None or each.most is None:
        return each.why
    show = _SHOW[each.unit]
    grown = each.why.partition("; ")[2]
    more = f"; {grown}" if grown else ""
    if not each.axis:
        most = f"of {show(each.most)} at most" if each.most else "and should be none"
        return f"{show(each.after)}, {most} ({each.basis}): {each.why}"
    most = f"at most {show(each.most)}" if each.most else "should be none"
    return f"{show(each.planned)} to {show(each.after)}, {most}, {each.basis}{more}"


def _sentence(words: str) -> str:
    return wrapped(sentence(words))


def about(found: Breaks) -> list[str]:
    """What the page of the figure says above it: the run as planned, and what it does not keep within already."""
    already = [f"Broken already, as planned: {each.limit}. {_figures(each)}." for each in found.already]
    return [*of_run(found.run), *already]


def figures(found: Breaks) -> dict[str, Figure]:
    """How far each thing can grow before it breaks, by title."""
    names = list(dict.fromkeys(one.limit for each in found.along for one in each.breaks))
    if not names:
        return {}
    rows = [each for each in found.along if each.breaks]
    data = []
    for at, name in enumerate(names):
        points = [(each, one) for each in rows for one in each.breaks if one.limit == name]
        # By turns above and below, as neighbours in a row may lie close together.
        sides = ["bottom center" if each.breaks.index(one) % 2 else "top center" for each, one in points]
        data.append(
            {
                "type": "scatter", "mode": "markers+text", "name": name,
                "x": [one.factor for _, one in points], "y": [f"{each.axis}<br>{each.start:,}" for each, _ in points],
                "text": [f"{one.breaks:,}" for _, one in points], "textposition": sides, "cliponaxis": False,
                "marker": {"size": 13, "color": COLOURS[at % len(COLOURS)], "symbol": at % 8},
                "textfont": {"size": 11, "color": GREY},
                "customdata": [[one.limit, one.field, _holds(one), f"{one.breaks:,}", _figures(one)]
                               for _, one in points],
                "hovertemplate": "<b>%{customdata[0]}</b><br>%{customdata[1]}: holds at %{customdata[2]}, "
                                 "not at %{customdata[3]}<br>%{customdata[4]}<extra></extra>",
            }
        )  # fmt: skip
    layout = arranged(
        f"What breaks when {found.run.model.name} grows", "times the planned value", height=130 + 70 * len(rows)
    )
    farthest = max(log10(each.factor) for row in rows for each in row.breaks)
    layout["xaxis"] |= {
        "type": "log", "dtick": 0.30103 * max(1, round(farthest / 0.30103 / 6)), "tickformat": ",~r",
        # A label may be as wide as a telephone's tenth, on both sides of its point.
        "range": [-0.12 * (farthest + 0.1), 1.15 * farthest + 0.1],
    }  # fmt: skip
    layout["yaxis"] |= {"autorange": "reversed", "type": "category"}
    return {"What breaks": {"data": data, "layout": layout}}
