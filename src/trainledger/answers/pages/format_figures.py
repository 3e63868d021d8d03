"""Number formats drawn: the bits of a number in each, and how finely each steps from its smallest to its largest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trainledger.answers.pages.storage import Cell, cell_chart
from trainledger.report.chart import COLOURS, Axis, Band, Bars, Chart, Line, bar_chart
from trainledger.report.document import Table
from trainledger.spec.dtypes import FORMATS, NumberFormat, Rounded
from trainledger.spec.units import ceil_div
from trainledger.tensors.number import WHOLE, InBlock, Whole

COLUMNS = 32  # bits in a row of cells
SIGN, EXPONENT, MANTISSA, INTEGER = "sign", "exponent", "mantissa", "integer"
_HUES = {SIGN: COLOURS[5], EXPONENT: COLOURS[1], MANTISSA: COLOURS[0], INTEGER: COLOURS[2]}
_LOW, _HIGH, _AROUND = 2.0**-32, 2.0**20, 8  # magnitudes that the figure of steps shows; and around the number
_FINEST = 1e-8  # a step over its magnitude

Bits = tuple[str, list[tuple[str, str, str]]]  # the name of a row; of each bit its group, 0 or 1, and what it says


def bits_chart(
    number: float, formats: Sequence[NumberFormat], whole: Sequence[Whole], blocks: Sequence[InBlock], title: str
) -> Chart:
    """The bits of a number in each format, sign, exponent and mantissa in their colours; each says what it is worth."""
    cells, names, row = [], {}, 0
    for name, bits in _rows(number, formats, whole, blocks):
        names[row] = name
        for at, (group, bit, said) in enumerate(bits):
            cells.append(Cell(at % COLUMNS, row + at // COLUMNS, _HUES[group], bit, f"{name}, {said}", group))
        row += ceil_div(len(bits), COLUMNS)
    return cell_chart(title, "bits, the sign first", cells, COLUMNS, names)


def bits_table(
    number: float, formats: Sequence[NumberFormat], whole: Sequence[Whole], blocks: Sequence[InBlock]
) -> Table:
    """The same bits as text."""
    rows = []
    for name, bits in _rows(number, formats, whole, blocks):
        parts = {group: "".join(bit for of, bit, _ in bits if of == group) for group in _HUES}
        rows.append((name, parts[SIGN], parts[EXPONENT], parts[MANTISSA] or parts[INTEGER]))
    return Table("bits", ("format", SIGN, EXPONENT, "mantissa or integer"), tuple(rows), align="llll")


def _rows(
    number: float, formats: Sequence[NumberFormat], whole: Sequence[Whole], blocks: Sequence[InBlock]
) -> Iterator[Bits]:
    for one in formats:
        yield one.name, list(_floating(one.rounded(number)))
    for each in whole:
        if bits := each.bits_of(number):
            yield each.name, list(_integer(bits, signed=each.signed))
    for block in blocks:
        element, name = FORMATS.get(block.format.element), block.format.name
        own = _integer(block.bits, signed=block.format.element != "nf4")
        if element is not None:
            own = _floating(element.rounded(block.element))
        yield f"{name} block" if name in WHOLE else name, list(own)


def _floating(one: Rounded) -> Iterator[tuple[str, str, str]]:
    """The bits of a number with what each is worth."""
    sign, exponent, mantissa = one.bits
    yield SIGN, sign, "sign: minus" if sign == "1" else "sign: plus"
    bias, subnormal = one.format.bias, int(exponent, 2) == 0
    power = (1 if subnormal else int(exponent, 2)) - bias
    said = f"2^{power}" + (", as all bits 0 are: no leading 1" if subnormal else f" = 2^({int(exponent, 2)} - {bias})")
    said = said if math.isfinite(one.value) else "all bits 1 are infinity"
    for at, bit in enumerate(exponent):
        yield EXPONENT, bit, f"exponent bit worth {2 ** (len(exponent) - 1 - at):,}: {said}"
    for at, bit in enumerate(mantissa):
        yield MANTISSA, bit, f"mantissa bit worth 2^{power - 1 - at}"


def _integer(bits: str, *, signed: bool) -> Iterator[tuple[str, str, str]]:
    for at, bit in enumerate(bits):
        worth = 2 ** (len(bits) - 1 - at)
        minus = "-" if signed and at == 0 else ""
        yield INTEGER, bit, f"bit worth {minus}{worth:,}"


def steps_chart(formats: Sequence[NumberFormat], number: float | None = None) -> Chart:
    """The step to the next value as a share of the value, over its magnitude, from the smallest value to the largest.

    A format steps evenly below its smallest normal value, so that the share grows until all is rounded to zero; above
    it is at most machine epsilon. Where ``number`` is given, a point shows its own step in each format that holds it.
    Of several formats those that step more finely than the chart shows are left out.
    """
    size = abs(number) if number else 1.0
    low, high = min(_LOW, size / _AROUND), max(_HIGH, size * _AROUND)
    drawn = [fmt for fmt in formats if fmt.epsilon >= _FINEST] or formats
    marks = []
    for at, one in enumerate(drawn):
        corners = (one.smallest_subnormal, one.smallest_normal, one.largest)
        sizes = [min(max(corner, low), high) for corner in corners]
        colour = COLOURS[at % len(COLOURS)]
        steps = [max(one.epsilon, one.smallest_subnormal / each) for each in sizes]
        said = [
            f"{one.name}: steps of at most {step:.3g} of {each:.3g}" for step, each in zip(steps, sizes, strict=True)
        ]
        marks.append(Line(sizes, steps, one.name, colour, said=said))
        if number and (held := one.rounded(number)).fate not in ("overflow", "underflow"):
            words = f"{number:g} in {one.name}: {held.value:.9g}, {held.fate}, step {held.spacing:.4g}"
            marks.append(
                Line([size], [held.spacing / size], one.name, colour, 0, symbol="circle", size=9, said=[words])
            )
    return Chart(
        "How finely each format steps, from its smallest value to its largest",
        tuple(marks),
        Axis("magnitude", log=True),
        Axis("step / magnitude", log=True),
    )


def ranges_chart(formats: Sequence[NumberFormat], number: float | None = None) -> Chart:
    """From the smallest to the largest magnitude of each format, under what it is used for; a line at ``number``."""
    rows = range(len(formats))
    smallest, normal, largest = (
        [getattr(each, name) for each in formats] for name in ("smallest_subnormal", "smallest_normal", "largest")
    )
    said = [
        f"{each.name}: all digits from {each.smallest_normal:.3g} to {each.largest:.4g}, "
        f"fewer and fewer below, down to {each.smallest_subnormal:.3g}"
        for each in formats
    ]
    marks = (
        Bars(rows, smallest, normal, "fewer digits (subnormal)", COLOURS[4], said),
        Bars(rows, normal, largest, "all digits", COLOURS[0], said),
        *([Band("x", abs(number), text=f"{number:g}")] if number else ()),
    )
    names = [f"{each.name}: {each.suits}" for each in formats]
    return bar_chart("How far each format reaches, and what it is for", Axis("magnitude", log=True), names, marks)


def uses_table(formats: Sequence[NumberFormat]) -> Table:
    """Where each format underflows and overflows, its relative step, and what it is used for."""
    rows = tuple(
        (fmt.name, f"{fmt.smallest_subnormal:.4g}", f"{fmt.smallest_normal:.4g}", f"{fmt.largest:.5g}",
         f"{fmt.epsilon:.4g}", fmt.suits)
        for fmt in formats
    )  # fmt: skip
    columns = ("format", "smallest subnormal", "smallest normal", "largest", "machine epsilon", "used for")
    return Table("formats", columns, rows, align="lrrrrl")
