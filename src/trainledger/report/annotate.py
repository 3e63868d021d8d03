"""A program line by line as text with its source, as HTML, and as data for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any

from trainledger.annotate.annotation import COPY, VIEW, Annotation, File, Finding, Line, Mark, Shown, Work
from trainledger.report.table import WIDTH, sentence, wrapped
from trainledger.units import EXA, GIGA, KILO, MEGA, PETA, TERA, counted, format_flops, format_nbytes, format_seconds

COLUMNS = ("line", "runs", "FLOP", "read", "write", "alloc", "alive", "F/B")
_WIDTHS = (4, 5, 5, 5, 5, 5, 5, 5)
_MARGIN = " " * 6
_STEPS = ((EXA, "E"), (PETA, "P"), (TERA, "T"), (GIGA, "G"), (MEGA, "M"), (KILO, "k"))
LEGEND = (
    "FLOPs, and bytes read, written and newly allocated, of all runs of a line together; alive: bytes that it made and "
    "that are there when it is done for the last time; F/B: FLOPs per byte read and written. back: the same of what "
    "autograd ran for the line in backward passes, again: of what it recomputed there. Each operation "
    "counts at one line, so that the lines sum to the total."
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


def text(annotation: Annotation, *, width: int = WIDTH, busy: bool = False, per_run: bool = False) -> str:
    """The annotated files, then the findings and what else there is to say, ``width`` characters wide at most.

    ``busy`` leaves out lines that do nothing to tensors, ``per_run`` divides by the runs of each line.
    """
    parts = [_head(annotation, width)]
    for file in annotation.files:
        parts.append("\n".join([file.name, *_table(file, annotation, width, busy, per_run)]))
    parts.append(_sums(annotation, width))
    for title, found in (("Problems", annotation.problems), ("Remarks", annotation.remarks)):
        if found:
            parts.append("\n\n".join([title, *(_finding(at, each, width) for at, each in enumerate(found, 1))]))
    if not annotation.findings:
        parts.append(wrapped(nothing(annotation), width))
    notes = [sentence(each) for each in annotation.notes]
    notes += [f"Not counted: {times} x {name}{f' at {at}' if at else ''}." for name, times, at in annotation.uncounted]
    if annotation.ended:
        notes.append(sentence(f"this is what ran so far: {annotation.ended}"))
    if notes:
        parts.append("\n".join(wrapped(each, width) for each in notes))
    return "\n\n".join(parts)


def nothing(annotation: Annotation) -> str:
    """The sentence for no findings, or for a program that ended before all of it ran."""
    if not annotation.total.operations and annotation.ended:
        return "No findings: it ended before anything was done to a tensor."
    if annotation.ended:
        return "No findings in what ran before it ended; the rest was not examined."
    return "No findings: nothing unnecessary was seen."


def _head(annotation: Annotation, width: int) -> str:
    total = annotation.total
    steps = f"{counted(annotation.steps, 'optimizer step')}, " if annotation.steps else ""
    how = "on fake tensors" if annotation.fake else "with real values"
    where = f" as if on {annotation.device}" if annotation.device else ""
    return wrapped(
        f"{annotation.script}, {how}{where}: {steps}{format_flops(total.flops)}, {format_nbytes(total.read)} read, "
        f"{format_nbytes(total.written)} written, {format_nbytes(annotation.peak_nbytes)} live at most, "
        f"{format_seconds(annotation.seconds)} under the tracer",
        width,
    )


def _table(file: File, annotation: Annotation, width: int, busy: bool, per_run: bool) -> Iterator[str]:
    yield _row(COLUMNS, "source", width)
    yield _row(tuple("-" * each for each in _WIDTHS), "-" * max(6, width - sum(_WIDTHS) - len(_WIDTHS) - 1), width)
    gap = False
    for line in file.lines:
        if busy and not line.busy:
            gap = True
            continue
        if gap:
            yield "  ..."
            gap = False
        yield from _line(line, width, per_run)


def _line(line: Line, width: int, per_run: bool) -> Iterator[str]:
    share = max(1, line.runs) if per_run else 1
    runs = short(line.runs)
    yield _row((str(line.number), runs, *_cells(line.own, share, line.alive)), line.text, width)
    if line.backward.operations:
        yield _row(("back", "", *_cells(line.backward, share, line.alive_of_backward)), "", width)
    if line.recompute.operations:
        yield _row(("again", "", *_cells(line.recompute, share, 0)), "", width)
    for mark in line.marks:
        yield from _hanging(mark_text(mark), width)
    for shown in line.tensors:
        yield from _hanging(shown_text(shown), width)


def _cells(work: Work, share: int, alive: int) -> tuple[str, ...]:
    intensity = work.intensity if work.flops else None
    return (
        short(work.flops // share), short(work.read // share), short(work.written // share),
        short(work.allocated // share), short(alive), "" if intensity is None else short(intensity),
    )  # fmt: skip


def _row(cells: tuple[str, ...], source: str, width: int) -> str:
    filled = " ".join(cell.rjust(size) for cell, size in zip(cells, _WIDTHS, strict=True))
    source = source.expandtabs(4)
    room = max(6, width - len(filled) - 2)
    if len(source) > room:
        source = source[: room - 1] + "…"
    return f"{filled}  {source}".rstrip()


def _hanging(what: str, width: int) -> Iterator[str]:
    first, *rest = wrapped(what, width - len(_MARGIN) - 2).split("\n")
    yield f"{_MARGIN}^ {first}"
    for each in rest:
        yield f"{_MARGIN}  {each}"


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


def _sums(annotation: Annotation, width: int) -> str:
    elsewhere, total = annotation.elsewhere, annotation.total
    lines = [wrapped(LEGEND, width)]
    if elsewhere.operations:
        lines.append(wrapped(
            f"At no line shown: {counted(elsewhere.operations, 'operation')}, {format_flops(elsewhere.flops)}, "
            f"{format_nbytes(elsewhere.moved)} moved, of {counted(total.operations, 'operation')} in all.", width,
        ))  # fmt: skip
    return "\n".join(lines)


def _finding(number: int, finding: Finding, width: int) -> str:
    lines = [f"{number}. {finding.line}: {finding.kind}"]
    for what in (finding.what, f"Why: {finding.why}.", f"Instead: {finding.instead}."):
        lines += [f"   {each}" for each in wrapped(what, width - 3).split("\n")]
    return "\n".join(lines)


def to_json(annotation: Annotation) -> dict[str, Any]:
    """The annotation as plain data; lines that neither ran nor did anything are left out."""
    plain: dict[str, Any] = _plain(annotation)
    for file, plain_file in zip(annotation.files, plain["files"], strict=True):
        plain_file["lines"] = [
            each | {"intensity": line.work.intensity}
            for line, each in zip(file.lines, plain_file["lines"], strict=True)
            if line.runs or line.busy
        ]
    return plain


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value


_STYLE = """<style>
table.source { font: 13px/1.35 ui-monospace, monospace; } body { max-width: 1300px; }
table.source td, table.source th { padding: 0 .5rem; text-align: right; border-bottom: 0; }
table.source td.code, table.source th.code { text-align: left; white-space: pre; }
tr.back td { color: #555; } tr.mark td { color: #0072B2; text-align: left; white-space: normal; padding-left: 4rem; }
dt { font-weight: 600; margin-top: .8rem; } tr.found td { background: #fdf0e0; }
</style>"""


def html(annotation: Annotation) -> str:
    """One page that opens offline: the findings, then the files with heat behind the numbers."""
    from trainledger.report.html import page

    parts = [_STYLE, f"<h1>{escape(annotation.script)}, line by line</h1>"]
    parts.append(f'<p class="where">{escape(_head(annotation, 10_000))}</p>')
    if annotation.ended:
        parts.append(f"<p><b>{escape(sentence(f'this is what ran so far: {annotation.ended}'))}</b></p>")
    for title, found in (("Problems", annotation.problems), ("Remarks", annotation.remarks)):
        if found:
            items = "".join(
                f"<dt>{escape(each.line)}: {escape(each.kind)}</dt><dd>{escape(each.what)}<br>Why: {escape(each.why)}."
                f"<br>Instead: {escape(each.instead)}.</dd>"
                for each in found
            )
            parts.append(f"<h2>{title}</h2><dl>{items}</dl>")
    found_at = {each.line for each in annotation.findings}
    for file in annotation.files:
        rows = "".join(_html_line(file, line, annotation, found_at) for line in file.lines)
        heads = "".join(f"<th>{each}</th>" for each in COLUMNS)
        parts.append(
            f'<h2>{escape(file.name)}</h2><div class="wide"><table class="source"><thead><tr>{heads}'
            f'<th class="code">source</th></tr></thead><tbody>{rows}</tbody></table></div>'
        )
    if not annotation.findings:
        parts.append(f"<p>{escape(nothing(annotation))}</p>")
    parts.append(f'<p class="note">{escape(LEGEND)}</p>')
    parts += [f'<p class="note">{escape(sentence(each))}</p>' for each in annotation.notes]
    return page(f"{annotation.script}, line by line", parts, {})


def _html_line(file: File, line: Line, annotation: Annotation, found_at: set[str]) -> str:
    found = ' class="found"' if f"{file.name}:{line.number}" in found_at else ""
    total = annotation.total
    wholes = (total.flops, total.read, total.written, total.allocated, annotation.peak_nbytes, 0)

    def row(name: str, runs: str, work: Work, alive: int, source: str, kind: str) -> str:
        amounts = (work.flops, work.read, work.written, work.allocated, alive, 0)
        cells = "".join(
            f"<td{_heat(amount, whole)}>{cell}</td>"
            for cell, amount, whole in zip(_cells(work, 1, alive), amounts, wholes, strict=True)
        )
        return f'<tr{kind}><td>{name}</td><td>{runs}</td>{cells}<td class="code">{escape(source)}</td></tr>'

    rows = [row(str(line.number), short(line.runs), line.own, line.alive, line.text, found)]
    if line.backward.operations:
        rows.append(row("back", "", line.backward, line.alive_of_backward, "", ' class="back"'))
    if line.recompute.operations:
        rows.append(row("again", "", line.recompute, 0, "", ' class="back"'))
    for each in (*map(mark_text, line.marks), *map(shown_text, line.tensors)):
        rows.append(f'<tr class="mark"><td colspan="9">{escape(each)}</td></tr>')
    return "".join(rows)


def _heat(amount: int, whole: int) -> str:
    share = amount / whole if whole > 0 else 0
    return f' style="background: rgba(230,159,0,{min(1, 0.1 + share):.2f})"' if share > 0.01 else ""
