"""An explained account for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainledger.report.table import table, wrapped
from trainledger.units import (
    counted,
    format_count,
    format_flops,
    format_flops_per_second,
    format_nbytes,
    format_seconds,
)

if TYPE_CHECKING:
    from trainledger.explain.account import Line, Part
    from trainledger.explain.envelope import Envelope
    from trainledger.predict.utilization import RooflineRow

SHOW: dict[str, Callable[[float], str]] = {
    "memory": format_nbytes, "flops": format_flops, "parameters": format_count, "time": format_seconds,
}  # fmt: skip
UNITS = {"memory": "nbytes", "flops": "flops", "parameters": "parameters", "time": "seconds"}
WIDTH = 80


def account(what: str, parts: tuple[Part, ...], legend: Mapping[str, tuple[int, str]]) -> str:
    """All lines of the parts under a legend of the symbols."""
    return "\n\n".join([*_legend(legend), *("\n".join(_part(part, SHOW[what])) for part in parts)])


def longest(parts: Sequence[Part], top: int) -> tuple[tuple[Part, ...], tuple[str, ...]]:
    """The parts of a time with the ``top`` longest of all their lines, their sums whole; a sentence on other lines."""
    lines = sorted((each for part in parts for each in part.lines), key=lambda each: -each.value)
    kept, left = {id(each) for each in lines[:top]}, lines[top:]
    if not left:
        return tuple(parts), ()
    shown = tuple(replace(part, lines=tuple(each for each in part.lines if id(each) in kept)) for part in parts)
    took = format_seconds(sum(each.value for each in left))
    return shown, (f"{counted(len(left), 'other')}, {took} in all: --top {len(lines)} tells every one.",)


def roofline(rows: Sequence[RooflineRow]) -> str:
    """What each kind of operation computes for a byte, where its format's ridge is, and what it reaches.

    "waiting" is the device's, for the program to launch what comes next.
    """
    body = [
        [
            _operations(each), f"{each.intensity:,.3g}",
            "" if each.ridge is None else f"{each.ridge:,.0f}", each.bound,
            format_flops_per_second(each.flops_per_second) if each.ridge is not None else
            f"{format_nbytes(each.bytes_per_second)}/s" if each.nbytes else "",
            format_seconds(each.seconds), f"{each.share:.1%}",
        ]
        for each in rows
    ]  # fmt: skip
    columns = ["operations", "FLOP/byte", "ridge", "bound by", "reached", "time", "share"]
    return table(columns, body, align="lrrlrrr")


def _operations(row: RooflineRow) -> str:
    waits = row.kind == "unknown" and row.bound == "overhead"  # a step's entry of its own: `predict.step`
    return "waiting" if waits else f"{row.kind} {row.dtype}".strip()


def _legend(legend: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    if legend:
        yield table(["", "", "stands for"], [[name, f"{value:,}", means] for name, (value, means) in legend.items()])


def _part(part: Part, show: Callable[[float], str]) -> Iterator[str]:
    """The lines; a source that all of them have stands once, under the title."""
    yield _between(part.title, show(part.total))
    sources = {line.source for line in part.lines}
    shared = len(part.lines) > 1 and len(sources) == 1
    if shared:
        yield wrapped(f"({sources.pop()})")
    for line in part.lines:
        yield from _line(line, show, with_source=not shared)


def _line(line: Line, show: Callable[[float], str], with_source: bool) -> Iterator[str]:
    yield _between(f"  {line.what}", f"{show(line.value)}  {line.basis}")
    numbers = f" = {line.numbers}" if line.numbers and line.numbers != line.formula else ""
    for text in (f"{line.formula}{numbers}", *([line.source] if with_source else [])):
        for each in wrapped(text, WIDTH - 6).split("\n"):
            yield f"      {each}"


def _between(left: str, right: str) -> str:
    """Both in one line, the right one at the right edge; in two where they do not fit."""
    if len(left) + len(right) + 2 <= WIDTH:
        return left + right.rjust(WIDTH - len(left))
    return "\n".join([*wrapped(left).split("\n"), right.rjust(WIDTH)])


def envelope(found: Envelope, means: str) -> str:
    """The peak over one size, its parts as expressions, and the largest that fits."""
    name = found.symbol
    lines = [f"{name}: {means}; from {found.exact_from} on. All bytes.", ""]
    lines += [wrapped(f"{category} = {formula}") for category, formula in found.categories.items()]
    lines.append("")
    for piece in found.pieces:
        where = f"for all {name}" if len(found.pieces) == 1 else _range(name, piece.first, piece.last)
        lines.append(wrapped(f"peak = {piece.formula}   ({where}, at {piece.at})"))
    if found.memory_nbytes is not None:
        lines += ["", wrapped(verdict(found))]
    return "\n".join(lines)


def verdict(found: Envelope) -> str:
    """The largest size that fits, as a sentence."""
    memory = format_nbytes(found.memory_nbytes or 0)
    if not found.largest:
        return f"Not even {found.symbol} = {found.pieces[0].first} fits in {memory}."
    assert found.nbytes_at_largest is not None
    tensors = format_nbytes(found.nbytes_at_largest)
    if found.most is not None and found.largest > found.most:
        return f"All {found.most:,} that the model has positions for fit in {memory} (and {found.largest:,} would)."
    return f"So at most {found.symbol} = {found.largest:,} in {memory}: {tensors} of tensors."


def _range(name: str, first: int, last: int | None) -> str:
    if last is None:
        return f"{name} >= {first}"
    return f"{name} = {first}" if first == last else f"{first} <= {name} <= {last}"


def to_json(what: str, parts: tuple[Part, ...]) -> list[dict[str, Any]]:
    """The parts of an account as JSON takes them: what they come to is named by its unit, as in `UNITS`."""
    unit = UNITS[what]
    return [
        {
            "title": each.title,
            unit: each.total,
            "lines": [
                {unit if name == "value" else name: of for name, of in vars(line).items()} for line in each.lines
            ],
        }
        for each in parts
    ]
