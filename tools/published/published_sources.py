"""What is assumed of published runs, source by source: ``sources.toml`` as frozen records.

A row of ``runs.csv`` says sizes, parallelism and a figure, never everything that memory and time depend on. What is
assumed is said once for all rows of a source; no constant belongs to a source.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("sources.toml").read_text(encoding="utf-8"))
LEFT_OUT: dict[str, dict[str, str]] = _FILE["left_out"]  # of each kind of figure, parts of a source's name and why
REASONS: dict[str, dict[str, Any]] = _FILE["reasons"]
REMARKS: dict[str, Any] = _FILE["remarks"]
WHOLE: dict[str, dict[str, Any]] = _FILE["whole"]  # runs whose layouts are assumed one by one, by their family


@dataclass(frozen=True)
class Source:
    """Where figures of memory come from, what they measured, and everything that is assumed of them.

    ``figure``: driver = all that the driver counts for the process, reserved = what PyTorch's allocator has taken from
    the driver, allocated = what it has given out at most. ``unit`` is what one of the printed units is in bytes.
    ``stages`` are those whose figure was read: all, ends = the larger of the first and the last, first. ``context`` is
    the CUDA context where the source measured it. ``reason`` says why the median error is above 20 %, where it is.
    """

    name: str
    title: str
    group: str
    figure: str
    unit: int
    unit_why: str
    assumed: tuple[str, ...]
    stages: str = "all"
    reason: str = ""
    context: int | None = None


@dataclass(frozen=True)
class TimeSource:
    """Where rows come from, how their figure becomes seconds of a step, and everything that is assumed of them.

    ``network`` are the fields of `Cluster` that say between which nodes and over what the devices are joined.
    ``reason`` says why the median error is above 25 %, where it is.
    """

    name: str
    title: str
    convention: str
    assumed: tuple[str, ...]
    network: tuple[tuple[str, Any], ...] = ()
    reason: str = ""


def _spelled(lines: Iterable[str]) -> Iterator[str]:
    """Lines with the phrases that they name."""
    for line in lines:
        yield from _FILE["phrases"][line[1:]] if line.startswith("@") else (line,)


def _read(kind: type, table: dict[str, Any]) -> Any:
    fields = {**table, "assumed": tuple(_spelled(table["assumed"]))}
    if "network" in table:
        fields["network"] = tuple(table["network"].items())
    return kind(**fields)


MEMORY: dict[str, Source] = {name: _read(Source, table) for name, table in _FILE["memory"].items()}
TIME: dict[str, TimeSource] = {name: _read(TimeSource, table) for name, table in _FILE["time"].items()}


def reason_left_out(kind: str, source: str) -> str:
    """Why a row of a source is left out."""
    return next((why for part, why in LEFT_OUT[kind].items() if part in source), "not predicted")


@dataclass(frozen=True)
class LaterSource:
    """A set of the facts of November 2026, and everything that is assumed of its rows."""

    name: str
    title: str
    assumed: tuple[str, ...]


LATER: dict[str, LaterSource] = {name: _read(LaterSource, table) for name, table in _FILE["later"].items()}
