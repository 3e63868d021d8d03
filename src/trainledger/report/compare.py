"""Two plans side by side, for a terminal of 80 columns and as figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainledger.document import Figure
from trainledger.plan.compare import ROUNDING, Comparison, Part, Row, reasons
from trainledger.report.heading import of_run
from trainledger.report.style import COLOURS, above_bars, around, arranged, folded, height_of, mark
from trainledger.report.table import sentence, table, wrapped
from trainledger.units import (
    GIGA,
    counted,
    format_count,
    format_flops,
    format_nbytes,
    format_percent,
    format_seconds,
)

_NANO = 1e-9
_SHOW: dict[str, Callable[[float], str]] = {
    "count": lambda value: f"{value:,}" if abs(value) < 10**9 else format_count(value),
    "flops": format_flops, "nbytes": format_nbytes, "seconds": format_seconds, "share": format_percent,
    "rate": lambda value: f"{value:,.0f}",
    "amount": lambda value: f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}",
}  # fmt: skip


def text(found: Comparison, names: Sequence[str] = ("a", "b")) -> str:
    """All of it; ``names`` are what the two are called."""
    return "\n\n".join(_parts(found, names))


def _parts(found: Comparison, names: Sequence[str]) -> Iterator[str]:
    yield "\n".join(wrapped(f"{letter}: {name}") for letter, name in zip("ab", names, strict=True))
    if not found.fields:
        yield "The two runs are alike in every field."
        return
    yield table(["field", "a", "b"], [[each.field, _value(each.a), _value(each.b)] for each in found.fields])
    yield table(["", "a", "b", "b less a", ""], [_row(each) for each in found.rows], align="lrrrr")
    if found.times:
        yield _split(f"Time of {found.of}", found.times, lambda value: format_seconds(value * _NANO))
    if found.memory:
        yield _split("Memory of the heaviest device", found.memory, format_nbytes)
    yield "\n".join(_sentences(found))


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)


def _row(each: Row) -> list[str]:
    show = _SHOW[each.unit]
    difference = each.difference
    more = "" if difference is None else _signed(difference, show)
    if each.unit == "share":
        more = more.replace("%", "points")  # of shares; a percentage would be of one of them
    relative = ""
    if difference is not None and each.a and each.unit != "share":
        relative = format_percent(difference / each.a, signed=True)
    return [each.name, "" if each.a is None else show(each.a), "" if each.b is None else show(each.b), more, relative]


def _signed(value: float, show: Callable[[float], str]) -> str:
    shown = show(abs(value))
    if not any(each in "123456789" for each in shown):  # nothing, or less than is shown
        return shown if value else "0"
    return ("+" if value > 0 else "-") + shown


def _split(title: str, parts: tuple[Part, ...], show: Callable[[float], str]) -> str:
    rows = [[each.name, *_cells(each.a, each.b, show)] for each in parts if each.a or each.b]
    rows.append(["in all", *_cells(sum(each.a for each in parts), sum(each.b for each in parts), show)])
    return f"{title}\n" + table(["", "a", "b", "b less a"], rows, align="lrrr")


def _cells(a: int, b: int, show: Callable[[float], str]) -> list[str]:
    return [_signed(a, show).lstrip("+"), _signed(b, show).lstrip("+"), _signed(b - a, show)]


def _sentences(found: Comparison) -> Iterator[str]:
    """Why: the largest differences that make up the whole one."""
    if found.times:
        yield _why("takes", "less", "longer", found.times, lambda value: format_seconds(value * _NANO), found.of)
    if found.memory:
        yield _why("holds", "less", "more", found.memory, format_nbytes, "the heaviest device")
    for letter, told in (("a", found.forecast_a), ("b", found.forecast_b)):
        if told.impossible:
            why = f"{letter} is impossible without a [layout]: {'; '.join(told.impossible)}"
            yield wrapped(sentence(f"{why}; its step and its tokens/s are of one device alone"))
        if told.fits is False:
            yield wrapped(sentence(f"{letter} does NOT fit in the memory of its device"))
        if told.step_seconds is None and told.notes:
            yield wrapped(sentence(f"{letter}: {told.notes[0]}"))
    without = [told.interruptions is None for told in (found.forecast_a, found.forecast_b)]
    if found.times and without[0] != without[1] and None not in (found.forecast_a.goodput, found.forecast_b.goodput):
        letter = "a" if without[0] else "b"
        why = "as of its device no rate is known (cluster.mtbf_device_hours says yours)"
        what = "its goodput, days and bill are too good beside the other's"
        yield wrapped(sentence(f"interruptions are not in {letter}, {why}: {what}"))
    bases = {told.basis.get("step_seconds", "") for told in (found.forecast_a, found.forecast_b)} - {""}
    if bases:
        yield wrapped(sentence(f"basis of the times: {' and '.join(sorted(bases))}"))
    if len(bases) > 1 and "bound" in bases:
        letter, other = ("a", "b") if found.forecast_a.basis["step_seconds"] == "bound" else ("b", "a")
        why = f"what its device allows at best, where {other}'s is what programs reach"
        yield wrapped(sentence(f"{letter}'s time is only a bound, {why}: their difference is no comparison of the two"))


def _why(verb: str, less: str, more: str, parts: tuple[Part, ...], show: Callable[[float], str], of: str) -> str:
    change = sum(each.difference for each in parts)
    before = sum(each.a for each in parts)
    within = ROUNDING * before if verb == "takes" else 0  # bytes are exact
    causes = [each for each in reasons(parts) if abs(each.difference) > within]
    listed = ", ".join(f"{each.name} {_signed(each.difference, show)}" for each in causes[:4])
    rest = causes[4:]
    if rest:
        left = _signed(sum(each.difference for each in rest), show)
        listed += f", {counted(len(rest), 'other')} {left}"
    if abs(change) <= within:
        told = f"{of}: b {verb} as {'long' if verb == 'takes' else 'much'} as a"
    else:
        share = f" ({format_percent(change / before, signed=True)})" if before else ""
        told = f"{of}: b {verb} {show(abs(change))} {less if change < 0 else more} than a{share}"
    return wrapped(sentence(told + (f": {listed}" if listed else "")))


def figures(found: Comparison, names: Sequence[str] = ("a", "b")) -> dict[str, Figure]:
    """The causes of the time and the categories of memory, a beside b, by title."""
    drawn = {}
    if found.times:
        largest = max(sum(each.a for each in found.times), sum(each.b for each in found.times)) * _NANO
        scale, unit = next(
            (each for each in ((86400.0, "days"), (3600.0, "hours"), (1.0, "seconds")) if largest >= each[0]),
            (1e-3, "milliseconds"),
        )
        drawn[f"Time of {found.of}"] = _bars(f"Time of {found.of}", unit, found.times, names, _NANO / scale)
    if found.memory:
        title = "Memory of the heaviest device"
        drawn[title] = _bars(title, "GB", found.memory, names, 1 / GIGA)
        _draw_devices(drawn[title], found)
    return drawn


def _draw_devices(figure: Figure, found: Comparison) -> None:
    """What the devices give where one side does not fit."""
    layout, told = figure["layout"], (found.forecast_a, found.forecast_b)
    if all(each.fits is not False for each in told):
        return
    gives: dict[int, list[str]] = {}
    for letter, each in zip("ab", told, strict=True):
        if each.usable_nbytes is not None:
            gives.setdefault(each.usable_nbytes, []).append(letter)
    reach = [each for side in figure["data"] for each in side["x"]]
    layout["xaxis"] |= {"range": around([0.0, *reach, *(each / GIGA for each in gives)])}
    for nbytes, letters in gives.items():
        whose = "" if len(letters) == len(told) else f"{letters[0]}: "
        mark(layout, "v", nbytes / GIGA, f"{whose}{format_nbytes(nbytes)} usable")


def about(found: Comparison, names: Sequence[str] = ("a", "b")) -> list[str]:
    """What the page of the figures says above them: both runs, and whether each fits its device."""
    lines = []
    for letter, name, run, told in zip(
        "ab", names, (found.a, found.b), (found.forecast_a, found.forecast_b), strict=True
    ):
        lines += [f"{letter}: {name}", "; ".join(of_run(run))]
        if told.device_nbytes is not None and told.usable_nbytes is not None:
            fits = "fits" if told.fits else "does NOT fit"
            needs = format_nbytes(told.device_nbytes)
            lines.append(f"{letter} {fits}: {needs} in its heaviest device, of {format_nbytes(told.usable_nbytes)}")
    return lines


def _bars(title: str, unit: str, parts: tuple[Part, ...], names: Sequence[str], scale: float) -> Figure:
    whole = Part("in all", sum(each.a for each in parts), sum(each.b for each in parts))
    shown = [*(each for each in parts if each.a or each.b), whole]
    data = [
        {
            "type": "bar", "orientation": "h", "name": folded(f"{letter}: {name}"), "y": [each.name for each in shown],
            "x": [getattr(each, letter) * scale for each in shown], "marker": {"color": COLOURS[at]},
            "customdata": [each.difference * scale for each in shown],
            "hovertemplate": f"%{{y}}: %{{x:.4g}} {unit}<br>b less a: %{{customdata:+.4g}} {unit}<extra></extra>",
        }
        for at, (letter, name) in enumerate(zip("ab", names, strict=True))
    ]  # fmt: skip
    layout = arranged(title, unit, height=height_of(len(shown)), barmode="group")
    above_bars(layout, [each.name for each in shown])
    return {"data": data, "layout": layout}
