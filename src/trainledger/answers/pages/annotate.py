"""The document of a program line by line: its source with the work of each line, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainledger.answers.pages.plain_data import plain
from trainledger.report.document import Document, Item, Items, Listed, Listing, notes, section, sections
from trainledger.report.table import sentence
from trainledger.spec.units import (
    EXA,
    GIGA,
    KILO,
    MEGA,
    PETA,
    TERA,
    counted,
    format_flops,
    format_nbytes,
    format_seconds,
)
from trainledger.trace.annotate.annotation import COPY, VIEW, Annotation, File, Finding, Line, Mark, Shown, Work

COLUMNS = ("line", "runs", "FLOP", "read", "write", "alloc", "alive", "F/B")
_GAP = Listed(("...", *("" for _ in COLUMNS[1:])), "")
_STEPS = ((EXA, "E"), (PETA, "P"), (TERA, "T"), (GIGA, "G"), (MEGA, "M"), (KILO, "k"))
LEGEND = (
    "FLOP, read, write and alloc: FLOPs, and bytes read, written and newly allocated, over all runs of a line. alive: "
    "bytes that the line made and that are live after its last run. F/B: FLOPs per byte read and written. back: what "
    "autograd ran for the line in backward; again: what it recomputed there. Each operation counts at one line, so the "
    "lines sum to the total."
)


def short(value: float) -> str:
    """A number in at most five characters, nothing for 0.

    >>> [short(each) for each in (0, 7, 999, 1000, 12345, 999_600, 8.39e6, 6e23, 0.25, 0.001)]
    ['', '7', '999', '1.00k', '12.3k', '1.00M', '8.39M', '6e23', '0.25', '<0.01']
    """
    if not value:
        return ""
    if abs(value) < 10 and value != int(value):
        return f"{value:.2f}" if abs(value) >= 0.01 else "<0.01"
    if abs(value) < 999.5:
        return f"{value:.0f}"
    for scale, letter in reversed(_STEPS):
        number = value / scale
        if abs(number) < 999.5:
            return f"{number:.{2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0}f}{letter}"
    return f"{value:.0e}".replace("e+", "e")


def page(annotation: Annotation, *, busy: bool = False, per_run: bool = False) -> Document:
    """The annotated files, then the findings and what qualifies them.

    ``busy`` leaves out lines that do nothing to tensors, ``per_run`` divides by the runs of each line.
    """
    elsewhere, total = annotation.elsewhere, annotation.total
    lines = [LEGEND]
    if elsewhere.operations:
        lines.append(
            f"At no line shown: {counted(elsewhere.operations, 'operation')}, {format_flops(elsewhere.flops)}, "
            f"{format_nbytes(elsewhere.moved)} moved, of {counted(total.operations, 'operation')} in all."
        )
    remarks = [sentence(note) for note in annotation.notes]
    remarks += [
        f"Not counted: {times} x {name}{f' at {at}' if at else ''}." for name, times, at in annotation.uncounted
    ]
    if annotation.ended:
        remarks.append(sentence(f"this is what ran so far: {annotation.ended}"))
    return Document(
        title=f"{annotation.script}, line by line",
        sections=sections(
            _head(annotation),
            *(section(file.name, _listing(file, annotation, busy, per_run)) for file in annotation.files),
            lines,
            section("Problems", _findings(annotation.problems)),
            section("Remarks", _findings(annotation.remarks)),
            "" if annotation.findings else nothing(annotation),
            notes(remarks),
        ),
        data=lambda: _data(annotation),
    )


def nothing(annotation: Annotation) -> str:
    """The sentence for no findings, or for a program that ended before all of it ran."""
    if not annotation.total.operations and annotation.ended:
        return "No findings: it ended before anything was done to a tensor."
    if annotation.ended:
        return "No findings in what ran before it ended; the rest was not examined."
    return "No findings: nothing unnecessary was seen."


def _head(annotation: Annotation) -> str:
    total = annotation.total
    steps = f"{counted(annotation.steps, 'optimizer step')}, " if annotation.steps else ""
    how = "on fake tensors" if annotation.fake else "with real values"
    where = f" as if on {annotation.device}" if annotation.device else ""
    return (
        f"{annotation.script}, {how}{where}: {steps}{format_flops(total.flops)}, {format_nbytes(total.read)} read, "
        f"{format_nbytes(total.written)} written, peak {format_nbytes(annotation.peak_nbytes)}, "
        f"{format_seconds(annotation.seconds)} under the tracer"
    )


def _listing(file: File, annotation: Annotation, busy: bool, per_run: bool) -> Listing:
    found_at = {finding.line for finding in annotation.findings}
    lines: list[Listed] = []
    for line in file.lines:
        if not busy or line.busy:
            lines += _lines(line, annotation, per_run, marked=f"{file.name}:{line.number}" in found_at)
        elif not lines or lines[-1] != _GAP:
            lines.append(_GAP)
    return Listing(COLUMNS, tuple(lines))


def _lines(line: Line, annotation: Annotation, per_run: bool, marked: bool) -> Iterator[Listed]:
    """A line with its own work, then rows of what backward ran and recomputed for it; the last has the marks."""
    runs = max(1, line.runs) if per_run else 1
    hanging = (*map(mark_text, line.marks), *map(shown_text, line.tensors))
    rows = [(str(line.number), short(line.runs), line.own, line.alive, line.text)]
    if line.backward.operations:
        rows.append(("back", "", line.backward, line.alive_of_backward, ""))
    if line.recompute.operations:
        rows.append(("again", "", line.recompute, 0, ""))
    for at, (name, times, work, alive, source) in enumerate(rows):
        intensity = short(work.intensity or 0) if work.flops else ""
        amounts = (*(each // runs for each in (work.flops, work.read, work.written, work.allocated)), alive)
        yield Listed(
            cells=(name, times, *map(short, amounts), intensity),
            source=source,
            notes=hanging if at + 1 == len(rows) else (),
            shares=_shares(work, alive, annotation),
            marked=marked and not at,
        )


def _shares(work: Work, alive: int, annotation: Annotation) -> tuple[float, ...]:
    """How much of the whole program each number is, no share being that of the line's number and its runs."""
    total = annotation.total
    amounts = (work.flops, work.read, work.written, work.allocated, alive)
    wholes = (total.flops, total.read, total.written, total.allocated, annotation.peak_nbytes)
    return (0, 0, *(amount / whole if whole > 0 else 0 for amount, whole in zip(amounts, wholes, strict=True)))


def _findings(findings: Sequence[Finding]) -> Items | None:
    texts = (
        f"{finding.line}: {finding.kind}\n{finding.what}\nWhy: {finding.why}.\nInstead: {finding.instead}."
        for finding in findings
    )
    return Items(tuple(map(Item, texts))) if findings else None


def _data(annotation: Annotation) -> dict[str, Any]:
    """Lines that neither ran nor did anything are left out."""
    data: dict[str, Any] = plain(annotation)
    for file, plain_file in zip(annotation.files, data["files"], strict=True):
        lines = zip(file.lines, plain_file["lines"], strict=True)
        plain_file["lines"] = [
            each | {"intensity": line.work.intensity} for line, each in lines if line.runs or line.busy
        ]
    return data


def mark_text(mark: Mark) -> str:
    """A mark in words.

    >>> mark_text(Mark("view", "transpose, view", 2)), mark_text(Mark("copy", "non-contiguous by reshape", 3, 6000))
    ('view (free): transpose, view', 'copy 6 kB (3 times): non-contiguous by reshape')
    """
    if mark.kind == VIEW:
        return f"view (free): {mark.why}"
    times = f" ({mark.times:,} times)" if mark.times > 1 else ""
    if mark.kind == COPY:
        return f"copy {format_nbytes(mark.nbytes)}{times}: {mark.why}"
    return f"{mark.kind}{times if mark.kind == 'sync' else ''}: {mark.why}"


def shown_text(shown: Shown) -> str:
    """
    >>> shown_text(Shown("t", "view", (8, 4), (1, 8), "fp32", "cpu", False))
    't (view): fp32[8, 4], stride [1, 8], not contiguous, cpu'
    """
    contiguous = "" if shown.contiguous else ", not contiguous"
    kind = "" if shown.kind in ("", shown.operation) else f" ({shown.kind})"
    return (
        f"{shown.operation}{kind}: {shown.dtype}{list(shown.shape)}, stride {list(shown.stride)}{contiguous}, "
        f"{shown.device}"
    )
