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
    main = _EXTRA.sub("", template)

    def said(at: int) -> str:
        lines = [each for each in lines_of(_filled(main, trace, at)) if each]
        name = " ".join(lines_of(_filled(extra, trace, at)))
        return f"{name}: " * bool(name) + "\n".join(lines)

    return said


def _filled(template: str, trace: dict[str, Any], at: int) -> str:
    def value(found: re.Match[str]) -> str:
        name, index, form = found.groups()
        held: Any = _held(trace, "x" if name == "delta" else name, at)
        return formatted(held[int(index)] if index is not None and held is not None else held, form or "")

    return _FIELD.sub(value, template) if "%{" in template else template


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
