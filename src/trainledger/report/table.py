"""Plain-text tables that fit a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 80
_GAP = "  "
_NARROWEST = 4


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, align: str = "", width: int = WIDTH) -> str:
    """Rows under headings, at most ``width`` characters wide, without a trailing newline.

    ``align`` has one letter per column, ``l`` or ``r``; where it is silent, a column of numbers goes to the
    right and any other to the left. ``None`` is an empty cell. Cells too long for the width are wrapped.

    >>> print(table(["phase", "FLOPs"], [["forward", 12], ["backward", 24]]))
    phase     FLOPs
    --------  -----
    forward      12
    backward     24
    """
    heads = [_text(each) for each in columns]
    cells = [[_text(each) for each in row] + [""] * (len(heads) - len(row)) for row in rows]
    for row in cells:
        if len(row) > len(heads):
            raise ValueError(f"a row has {len(row)} cells for {len(heads)} columns: {row}")
    sides = [align[at] if at < len(align) else _side([row[at] for row in cells]) for at in range(len(heads))]
    widths = _fit(heads, cells, width)
    lines = [*_lines(heads, widths, sides), _GAP.join("-" * each for each in widths)]
    for row in cells:
        lines.extend(_lines(row, widths, sides))
    return "\n".join(lines)


def _text(value: object) -> str:
    """A cell as one printable line; control characters would move the terminal's cursor."""
    if value is None:
        return ""
    text = " ".join(str(value).split())
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)


def _side(cells: list[str]) -> str:
    filled = [each for each in cells if each]
    return "r" if filled and all(each.lstrip("+-~<>≤≥").startswith(tuple("0123456789")) for each in filled) else "l"


def _fit(heads: list[str], rows: list[list[str]], width: int) -> list[int]:
    """Column widths: as wide as the cells, and the widest columns give way where the sum is too much."""
    widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]
    room = width - len(_GAP) * (len(heads) - 1)
    words = [max(len(word) for row in (heads, *rows) for word in (row[at].split() or [""])) for at in range(len(heads))]
    for floor in (words, [_NARROWEST] * len(heads), [1] * len(heads)):
        while sum(widths) > room:
            wide = [at for at in range(len(widths)) if widths[at] > floor[at]]
            if not wide:
                break
            widths[max(wide, key=lambda at: widths[at])] -= 1
    return widths


def _lines(row: list[str], widths: list[int], sides: list[str]) -> list[str]:
    wrapped = [_wrap(cell, size) for cell, size in zip(row, widths, strict=True)]
    height = max((len(each) for each in wrapped), default=0)
    lines = []
    for at in range(height):
        parts = [each[at] if at < len(each) else "" for each in wrapped]
        filled = [
            part.rjust(size) if side == "r" else part.ljust(size)
            for part, size, side in zip(parts, widths, sides, strict=True)
        ]
        lines.append(_GAP.join(filled).rstrip())
    return lines


def wrapped(text: str, width: int = WIDTH) -> str:
    """A sentence over as many lines as the width asks for, broken between words."""
    return "\n".join(_wrap(text, width))


def _wrap(cell: str, width: int) -> list[str]:
    if len(cell) <= width:
        return [cell]
    lines: list[str] = []
    line = ""
    for word in cell.split():
        if line and len(line) + 1 + len(word) <= width:
            line += " " + word
            continue
        if line:
            lines.append(line)
        while len(word) > width:
            lines.append(word[:width])
            word = word[width:]
        line = word
    return [*lines, line] if line else lines


def sentence(note: str) -> str:
    """A note with a capital in front and a stop behind.

    >>> sentence("no MFU: the peak is unknown")
    'No MFU: the peak is unknown.'
    """
    return note[:1].upper() + note[1:] + ("" if note.endswith(".") else ".")
