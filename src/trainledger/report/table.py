"""Plain-text tables that fit a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.spec.problem import printable

WIDTH = 80
_GAP = "  "
_NARROWEST = 4
_TEXT = 16  # to which texts are narrowed before a number is broken from its unit
_SCALES = ("", "k", "K", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti")
_UNITS = {f"{scale}{unit}" for scale in _SCALES for unit in ("B", "B/s", "FLOP", "FLOPs", "FLOP/s")} | {
    "s", "ms", "us", "ns", "min", "h", "d", "days", "hours", "years", "%",
}  # fmt: skip


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
    heads = [_text(column) for column in columns]
    cells = [[_text(each) for each in row] + [""] * (len(heads) - len(row)) for row in rows]
    for row in cells:
        if len(row) > len(heads):
            raise ValueError(f"a row has {len(row)} cells for {len(heads)} columns: {row}")
    sides = [align[at] if at < len(align) else _side([row[at] for row in cells]) for at in range(len(heads))]
    widths = _fit(heads, cells, sides, width)
    lines = [*_lines(heads, widths, sides), _GAP.join("-" * each for each in widths)]
    for row in cells:
        lines.extend(_lines(row, widths, sides))
    return "\n".join(lines)


def _text(value: object) -> str:
    """A cell as one printable line; control characters would move the terminal's cursor."""
    if value is None:
        return ""
    text = printable(" ".join(str(value).split()))
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)


def _side(cells: list[str]) -> str:
    filled = [cell for cell in cells if cell]
    return "r" if filled and all(each.lstrip("+-~<>≤≥").startswith(tuple("0123456789")) for each in filled) else "l"


def _fit(heads: list[str], rows: list[list[str]], sides: Sequence[str], width: int) -> list[int]:
    """Column widths: as wide as the cells, and the widest columns give way where the sum is too much.

    Texts are broken between words first, then within, and only then a number from its unit.
    """
    count = range(len(heads))
    widths = [max(len(row[at]) for row in (heads, *rows)) for at in count]
    room = width - len(_GAP) * (len(heads) - 1)
    words = [max(map(len, heads[at].split()), default=0) for at in count]
    whole = [max([words[at], *(len(piece) for row in rows for piece in _pieces(row[at]))]) for at in count]
    broken = [each if side == "r" else min(each, _TEXT) for each, side in zip(whole, sides, strict=True)]
    for floor in (whole, broken, [_NARROWEST] * len(heads), [1] * len(heads)):
        while sum(widths) > room:
            wide = [at for at in range(len(widths)) if widths[at] > floor[at]]
            if not wide:
                break
            widths[max(wide, key=lambda at: widths[at])] -= 1
    return widths


def _pieces(cell: str) -> list[str]:
    """What of a cell stays together: words, and a number with its unit.

    >>> _pieces("copy, 12.58 MB of 3")
    ['copy,', '12.58 MB', 'of', '3']
    """
    pieces: list[str] = []
    for word in cell.split():
        if pieces and pieces[-1][-1].isdigit() and " " not in pieces[-1] and word in _UNITS:
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
    return pieces


def _lines(row: list[str], widths: list[int], sides: Sequence[str]) -> list[str]:
    wrapped = [_wrap(cell, size, _pieces(cell)) for cell, size in zip(row, widths, strict=True)]
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
    """A sentence over as many lines as the width asks for, broken between words; all have its indentation.

    >>> wrapped("  a list of words", 12)
    '  a list of\\n  words'
    """
    text = printable(text)
    words = text.lstrip(" ")
    indent = text[: len(text) - len(words)]
    return "\n".join(indent + each for each in _wrap(words, width - len(indent), words.split()))


def _wrap(cell: str, width: int, pieces: list[str]) -> list[str]:
    if len(cell) <= width:
        return [cell]
    lines: list[str] = []
    line = ""
    for word in pieces if all(len(piece) <= width for piece in pieces) else cell.split():
        if line and len(line) + 1 + len(word) <= width:
            line += " " + word
            continue
        if line:
            lines.append(line)
        while len(word) > width:
            at = _break(word, width)
            lines.append(word[:at])
            word = word[at:]
        line = word
    return [*lines, line] if line else lines


def _break(word: str, width: int) -> int:
    """Where a word that is too long is broken: after a comma, the slash or stop of a path, or a hyphen, if any.

    >>> _break("bf16[8,1024,768]", 14), _break("model.layers.0.mlp", 14), _break("a" * 9, 4)
    (12, 13, 4)
    >>> _break("a100-sxm-80gb", 10)
    9
    """
    for mark in (",", "/", ".", "-"):
        at = word.rfind(mark, 0, width)
        if at > 0 and not (mark == "." and word[at - 1].isdigit() and word[at + 1 : at + 2].isdigit()):
            return at + 1
    return width


def sentence(note: str) -> str:
    """A note with a capital at its start and a stop at its end.

    >>> sentence("no MFU: the peak is unknown")
    'No MFU: the peak is unknown.'
    """
    return note[:1].upper() + note[1:] + ("" if note.endswith(".") else ".")


def pasted(toml: str) -> str:
    """Lines of a run file, its long lists over several lines.

    >>> print(pasted("stage_layers = [" + ", ".join(["2"] * 30) + "]"))
    stage_layers = [
        2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2,
        2, 2, 2, 2, 2
    ]
    """
    lines = []
    for line in toml.splitlines():
        name, opens, rest = line.partition(" = [")
        if len(line) <= WIDTH or not opens:
            lines.append(line)
        else:
            items = wrapped(rest.rstrip("]"), WIDTH - 4).splitlines()
            lines += [f"{name} = [", *(f"    {item}" for item in items), "]"]
    return "\n".join(lines)


def commands(sets: Sequence[str]) -> str:
    r"""``--set`` flags to paste into a shell, several on a line of `WIDTH` as long as they fit.

    >>> commands(["recipe.micro_batch=2", "layout.overlap=['experts']"])
    "    --set recipe.micro_batch=2 --set 'layout.overlap=['\\''experts'\\'']'"
    """
    words = [f"--set {_quoted(each)}" for each in sets]
    lines, current = [], "   "
    for at, word in enumerate(words):
        end = " \\" if at + 1 < len(words) else ""
        if len(current) + 1 + len(word) + len(end) > WIDTH and current.strip():
            lines.append(current + " \\")
            current = "   "
        current += f" {word}"
    return "\n".join([*lines, current] if current.strip() else lines)


def _quoted(each: str) -> str:
    return each if all(one.isalnum() or one in "._=-,+" for one in each) else "'" + each.replace("'", "'\\''") + "'"
