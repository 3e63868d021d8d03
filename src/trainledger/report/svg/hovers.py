"""What a point or a bar says when the pointer rests on it: Plotly's hover templates, worked out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from trainledger.report.svg.elements import lines_of
from trainledger.report.svg.numerals import formatted, significant

_FIELD = re.compile(r"%\{(\w+)(?:\[(\d+)\])?(?::([^}]*))?\}")
_EXTRA = re.compile(r"<extra>(.*?)</extra>", re.DOTALL)


def hover_of(trace: dict[str, Any], titles: tuple[str, str] = ("", "")) -> Callable[[int], str]:
    """A function that gives what the trace's n-th point says: its template, or the values by the titles of the axes.

    >>> points = {"x": [8], "y": [2.5], "name": "KV cache", "hovertemplate": "%{y:.2f} GB<extra>batch %{x}</extra>"}
    >>> hover_of(points)(0)
    'batch 8: 2.50 GB'
    """
    if trace.get("hoverinfo") == "skip":
        return lambda at: ""
    template = trace.get("hovertemplate")
    if template is None:
        return lambda at: _plain(trace, titles, at)
    found = _EXTRA.search(template)
    extra = found[1] if found else str(trace.get("name") or "")
    main, name = _filler(_EXTRA.sub("", template), trace), _filler(extra, trace)

    def said(at: int) -> str:
        lines, first = lines_of(main(at)), name(at)
        words = lines[0] if len(lines) == 1 else "\n".join(each for each in lines if each)
        return f"{' '.join(lines_of(first))}: {words}" if first else words

    return said


def _filler(template: str, trace: dict[str, Any]) -> Callable[[int], str]:
    """A function that puts the values of a trace's n-th point into a template."""
    words = _FIELD.split(template)
    if len(words) == 1:
        return lambda at: template
    fields = [
        (name, index, form or "") for name, index, form in zip(words[1::4], words[2::4], words[3::4], strict=True)
    ]

    def filled(at: int) -> str:
        found = [words[0]]
        for (name, index, form), after in zip(fields, words[4::4], strict=True):
            held = _held(trace, "x" if name == "delta" else name, at)
            found += (formatted(held[int(index)] if index and held is not None else held, form), after)
        return "".join(found)

    return filled


def _held(trace: dict[str, Any], name: str, at: int) -> Any:
    """What a trace has of one point: a list has an item for each, all else is of all."""
    values = trace.get(name)
    if isinstance(values, Sequence) and not isinstance(values, str):
        return values[at] if at < len(values) else None
    return values


def _plain(trace: dict[str, Any], titles: tuple[str, str], at: int) -> str:
    lines = [" ".join(lines_of(str(trace.get("name") or "")))]
    for name, title in zip("xy", titles, strict=True):
        value = _held(trace, name, at)
        shown = significant(value) if isinstance(value, float) else formatted(value, ",")
        lines.append(f"{title}: {shown}" if title else shown)
    return "\n".join(each for each in lines if each)
