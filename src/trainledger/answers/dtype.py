"""Number formats: what they hold, and what becomes of a number in each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Annotated, Any

from trainledger.answers.pages.plain_data import named
from trainledger.answers.question import question, text, word
from trainledger.report.document import Content, Document, Section, Table, section, sections
from trainledger.spec.dtypes import BLOCK_FORMATS, FORMATS, NumberFormat, Rounded
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.tensors.number import (
    TF32,
    WHOLE,
    InBlock,
    Whole,
    formats_and_blocks,
    in_block,
    is_format,
    known_format,
    overflows_from,
    read_number,
    zero_up_to,
)

_FATES = {"overflow": "overflows", "underflow": "underflows to zero"}
_SPECIALS = {"ieee": "infinities and NaNs", "nan": "one NaN, no infinity", "none": "neither infinity nor NaN"}


@question(intermixed=True, plots=False)
def dtype(
    words: Annotated[
        Sequence[str], word("a number such as 1e-8, a format such as fp8, or both", several=True, metavar="VALUE")
    ] = (),
    *,
    format: Annotated[str | None, text("this format only, such as bf16 (all)", metavar="NAME")] = None,
    largest: Annotated[
        str | None,
        text("the largest other magnitude in its block: what it becomes in formats in blocks", metavar="NUMBER"),
    ] = None,
) -> Document:
    """A number in every floating-point format: what it becomes, its error, its bits, and the step to the next.

    Without a number, the table of formats: range, smallest values, spacing, bytes, and what each suits. A format in
    place of the number, or before it, shows that format only: fp16, fp8 (both of them), int (integers), mxfp4 (its
    elements, and with --largest what becomes of the number in a block).

    Raises `InvalidInput`.
    """
    given = [word for word in words if not is_format(word)]
    numbers = [read_number(word) for word in given]
    if len(numbers) > 1:
        raise InvalidInput([Problem("value", given[1], "is a second number; one is shown at a time", given[0])])
    number = numbers[0] if numbers else None
    if format is not None and not is_format(format):
        known_format(format, "--format", floating=True)
    named = [word for word in words if word not in given] + ([] if format is None else [format])
    chosen, blocks = formats_and_blocks(named)
    if largest is None:
        return page(chosen, number, named)
    if number is None:
        raise InvalidInput([Problem("--largest", largest, "is of a block with a number in it; give the number too")])
    most = read_number(largest, "--largest")
    return page(chosen, number, named, [in_block(block, number, most, "--largest") for block in blocks])


def page(
    chosen: Sequence[NumberFormat | Whole],
    number: float | None = None,
    names: Sequence[str] = (),
    in_blocks: Sequence[InBlock] = (),
) -> Document:
    """What a number becomes in formats, or without one what the formats hold.

    ``names`` are those by which the formats were asked for; without any, all formats are in a table. ``in_blocks`` is
    the number in formats in blocks.
    """
    whole = [each for each in chosen if isinstance(each, Whole)]
    floating = [fmt for fmt in chosen if not isinstance(fmt, Whole)]
    blocks = [name for name in map(str.lower, names) if name in BLOCK_FORMATS and name not in WHOLE]
    rounded = [] if number is None else [fmt.rounded(number) for fmt in floating]
    data = [*(map(_rounded_data, rounded) if rounded else map(_format_data, floating))]
    data += [_whole_data(each, number) for each in whole]
    return Document(
        title="Number formats",
        sections=sections(
            *(_in_formats(number, rounded) if number is not None and rounded else _formats(floating, every=not names)),
            section("", *_integers(whole, number)),
            *(map(_of_block, blocks) if not in_blocks else []),
            _in_blocks(in_blocks),
        ),
        data=lambda: {
            **({} if number is None else {"value": number}),
            "formats": data,
            **({"blocks": [_block_data(each) for each in in_blocks]} if in_blocks else {}),
        },
    )


def _in_formats(number: float, rounded: Sequence[Rounded]) -> Iterator[Content]:
    """What a number becomes in each format, its bits, and what the formats hold."""
    values = tuple(
        (
            each.format.name,
            f"{each.value:.9g}",
            percent(each.relative_error),
            _FATES.get(each.fate, each.fate),
            f"{each.spacing:.4g}",
        )
        for each in rounded
    )
    bits = tuple((each.format.name, *each.bits) for each in rounded)
    becomes = Table("rounded", ("format", "becomes", "off by", "", "spacing"), values, align="lrrlr")
    yield section("", f"{number!r} rounded to the nearest value of each format", becomes)
    yield Table("bits", ("bits", "sign", "exponent", "mantissa"), bits, align="llll")
    yield section("", limits("holds", [each.format for each in rounded]), detail="what each format holds")
    yield in_fp64(number)
    yield "Spacing is the step to the next larger magnitude. Below its smallest normal value a format has even steps."


def limits(head: str, formats: Iterable[NumberFormat]) -> Table:
    """How many bits formats have, how far they reach, and how finely they step."""
    rows = tuple(
        (
            fmt.name, f"1+{fmt.exponent_bits}+{fmt.mantissa_bits}", f"{_nbytes(fmt):g}", f"{fmt.largest:.5g}",
            f"{fmt.smallest_normal:.4g}", f"{fmt.smallest_subnormal:.4g}", f"{fmt.epsilon:.4g}",
        )
        for fmt in formats
    )  # fmt: skip
    columns = (head, "s+e+m", "bytes", "largest", "min normal", "min subnormal", "epsilon")
    return Table("formats", columns, rows, align="llrrrrr")


def _formats(some: Sequence[NumberFormat], *, every: bool) -> Iterator[Content]:
    """One format in full, or the range, spacing and use of several; with ``every`` also the formats in blocks."""
    if len(some) == 1:
        yield _one_format(some[0])
    elif some:
        yield limits("format", some)
        yield (f"{fmt.name}: {fmt.suits}." for fmt in some)
    if every:
        rows = tuple(
            (
                block_format.name,
                block_format.element,
                str(block_format.block),
                block_format.scale,
                f"{block_format.bits_per_element:.4g}",
            )
            for block_format in BLOCK_FORMATS.values()
        )
        yield Table("blocks", ("in blocks", "elements", "block", "scale", "bits per element"), rows, align="llrlr")


def _of_block(name: str) -> str:
    """What a format in blocks adds to its elements."""
    one = BLOCK_FORMATS[name]
    shared = f"{one.block} elements share one {one.scale} scale, {one.bits_per_element:.4g} bits an element in all"
    elements = f"; shown are the elements ({one.element}) without their scale" if one.element in FORMATS else ""
    return f"{name}: {shared}{elements}."


def _in_blocks(some: Sequence[InBlock]) -> Section | None:
    """What a number becomes in blocks, whose scale follows from their largest magnitude."""
    if not some:
        return None
    rows = tuple(
        (
            each.format.name, f"{each.value:.9g}", percent(each.relative_error), _FATES.get(each.fate, each.fate),
            f"{each.scale:.6g}", f"{each.element:.6g}", each.bits,
        )
        for each in some
    )  # fmt: skip
    columns = ("in a block", "becomes", "off by", "", "scale", "x element", "bits")
    first = some[0]
    title = f"{first.given!r} in a block whose largest magnitude is {first.largest!r}"
    scales = [f"The scale of {each.format.name} is {each.rule}." for each in some]
    return section("", title, Table("blocks", columns, rows, align="lrrlrrl"), scales)


def _block_data(each: InBlock) -> dict[str, Any]:
    """A number in a format in blocks."""
    return {"format": each.format.name, **named(each, "largest scale element value fate relative_error bits")}


def _integers(some: Sequence[Whole], number: float | None) -> Iterator[Table | str]:
    """Range of integer formats, and what a number becomes in them."""
    if not some:
        return
    limits = ("bytes", "smallest", "largest")
    found = [_whole_data(whole, number) for whole in some]
    sizes = [tuple(str(each[name]) for name in ("nbytes", "smallest", "largest")) for each in found]
    if number is None:
        rows = tuple((whole.name, *size) for whole, size in zip(some, sizes, strict=True))
        yield Table("integers", ("format", *limits), rows, align="lrrr")
        return
    yield f"{number!r} converted to integers: the fraction is dropped, as in torch"
    values = [("" if each["value"] is None else str(each["value"]), each["fate"]) for each in found]
    rows = tuple((whole.name, *value, *size) for whole, value, size in zip(some, values, sizes, strict=True))
    yield Table("integers", ("format", "becomes", "", *limits), rows, align="lrlrrr")


def _whole_data(each: Whole, number: float | None) -> dict[str, Any]:
    """An integer format, and what a number becomes in it; null where it is out of range."""
    limits = {"nbytes": each.bits // 8, "smallest": each.smallest, "largest": each.largest}
    if number is None:
        return {"name": each.name, "bits": each.bits, **limits}
    held = each.held(number)
    fate = "out of range" if held is None else "exact" if held == number else "truncated"
    return {"format": each.name, "value": held, "fate": fate, **limits}


def _one_format(each: NumberFormat) -> Table:
    rows = (
        ("bits", f"{each.bits}: sign 1, exponent {each.exponent_bits}, mantissa {each.mantissa_bits}"),
        ("bytes", f"{_nbytes(each):g}"),
        ("largest", f"{each.largest:.17g}"),
        ("smallest normal", f"{each.smallest_normal:.17g}"),
        ("smallest subnormal", f"{each.smallest_subnormal:.17g}"),
        ("machine epsilon", f"{each.epsilon:.17g}"),
        ("rounds to zero", f"up to {zero_up_to(each):.17g}"),
        ("overflows", f"from {overflows_from(each):.17g}"),
        ("exact integers", f"up to {2 ** (each.mantissa_bits + 1):,}"),
        ("decimal digits", f"{(each.mantissa_bits + 1) * math.log10(2):.2g}"),
        ("specials", _SPECIALS[each.specials]),
        ("suits", each.suits),
    )
    return Table("format", (each.name, ""), rows, align="ll")


def _format_data(each: NumberFormat) -> dict[str, Any]:
    own = named(each, "bits largest smallest_normal smallest_subnormal epsilon")
    limits = {"zero_up_to": zero_up_to(each), "overflows_from": overflows_from(each)}
    return {**vars(each), **own, "nbytes": _nbytes(each), **limits}


def _rounded_data(each: Rounded) -> dict[str, Any]:
    """A number in a format; a value that is not finite is a text."""
    value = each.value if math.isfinite(each.value) else str(each.value)
    bits = dict(zip(("sign", "exponent", "mantissa"), each.bits, strict=True))
    return {"format": each.format.name, "value": value, **named(each, "fate relative_error spacing"), **bits}


def written(one: Rounded) -> str:
    """A value of a format from its bits, as a formula with the numbers put in.

    >>> from trainledger.spec.dtypes import FORMATS
    >>> written(FORMATS["bf16"].rounded(0.1))
    '2^(123 - 127) x (1 + 77/128) = 0.100097656'
    >>> written(FORMATS["fp16"].rounded(-1e-6)), written(FORMATS["fp16"].rounded(7e4))
    ('-2^(1 - 15) x 17/1024 = -1.01327896e-06', 'from 65520 on it is infinite')
    """
    form, sign = one.format, "-" if one.negative else ""
    if one.fate == "overflow":
        became = "is infinite" if math.isinf(one.value) else f"is cut to {form.largest:.9g}"
        return f"from {overflows_from(form):.9g} on it {became}"
    exponent, mantissa = divmod(one.code, 2**form.mantissa_bits)
    part = f"{mantissa}/{2**form.mantissa_bits}"
    if exponent == 0:
        return f"{sign}2^(1 - {form.bias}) x {part} = {one.value:.9g}"
    return f"{sign}2^({exponent} - {form.bias}) x (1 + {part}) = {one.value:.9g}"


def in_fp64(number: float) -> str:
    """That a number was rounded when it was read, with what it is read as; empty where fp64 holds it.

    >>> in_fp64(0.1), in_fp64(0.5)
    ('0.1 is read as the nearest number of fp64, 0.10000000000000000555.', '')
    """
    held = Decimal(number)
    if held == Decimal(repr(number)):
        return ""
    return f"{number!r} is read as the nearest number of fp64, {held:.20g}."


def largest_written(one: NumberFormat) -> str:
    """The largest value of a format as a formula, by what its top exponent is spent on.

    >>> from trainledger.spec.dtypes import FORMATS
    >>> largest_written(FORMATS["fp16"]), largest_written(FORMATS["e4m3"])
    ('(2 - 2^-10) x 2^15', '(2 - 2 x 2^-3) x 2^8')
    """
    if one.specials == "ieee":
        return f"(2 - 2^-{one.mantissa_bits}) x 2^{one.bias}"
    return f"(2 - {'2 x ' if one.specials == 'nan' else ''}2^-{one.mantissa_bits}) x 2^{one.bias + 1}"


def percent(error: float) -> str:
    """A relative error as percent; empty where the value is infinite.

    >>> percent(-0.25), percent(0.0)
    ('-25 %', '0 %')
    """
    if not math.isfinite(error):
        return ""
    return f"{100 * error:+.3g} %" if error else "0 %"


def _nbytes(each: NumberFormat) -> float:
    """Bytes of one element, packed; tf32 is stored as fp32."""
    return 4 if each.name == TF32.name else each.bits / 8
