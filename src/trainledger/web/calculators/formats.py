"""Number formats: a number's bits in each, what becomes of it, and how far and how finely each format reaches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trainledger.answers import dtype as report
from trainledger.answers.pages.format_figures import bits_chart, bits_table, ranges_chart, steps_chart, uses_table
from trainledger.spec.dtypes import BLOCK_FORMATS, NumberFormat, Rounded
from trainledger.spec.dtypes import FORMATS as KNOWN
from trainledger.tensors.number import (
    FAMILIES,
    SHOWN,
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
from trainledger.web.calculator import BAD, GOOD, PLAIN, Drawing, Headline, Progress, Reply, calculator, headline
from trainledger.web.field import Query, one_of

_HEADED = ("fp32", "bf16", "fp16", "e4m3", "e5m2", "e2m1")  # in the headlines where no format is chosen
_BEYOND_DOUBLES = {"zero_up_to": "2^-1075", "overflows_from": "2^1024 - 2^970"}  # of fp64
_LOST = ("overflow", "underflow")
_NO_BLOCK, _NO_NUMBER = "choose a format with a block", "there is no number"  # why the largest does not count


def _reply(query: Query, progress: Progress) -> Reply:
    named = [query["format"]] if query["format"] else []
    if named and not is_format(named[0]):
        known_format(named[0], "format", floating=True)
    chosen, blocks = formats_and_blocks(named)
    number = None if query.get("value") is None else read_number(query["value"], "value")
    floating = [number_format for number_format in chosen if not isinstance(number_format, Whole)]
    whole = [each for each in chosen if isinstance(each, Whole)] or ([] if named else [WHOLE["int8"]])
    inside = (
        []
        if number is None or query.get("largest") is None
        else [in_block(block, number, read_number(query["largest"], "largest"), "largest") for block in blocks]
    )
    rounded = [] if number is None else [number_format.rounded(number) for number_format in floating]
    return Reply(
        document=report.page(chosen, number, named, inside),
        headlines=tuple(_headlines(number, rounded, floating, inside, named)),
        verdict=_verdict(number, rounded, chosen),
        tone=PLAIN if len(rounded) != 1 else BAD if any(each.fate in _LOST for each in rounded) else GOOD,
        drawings=tuple(_drawings(number, floating, whole, inside)),
        values={},
        unused={} if inside and named else {"largest": _NO_NUMBER if blocks and number is None else _NO_BLOCK},
        words=_words(query, number, inside),
        python=_python(query, named, number),
        notes=_notes(inside) if named else (),
    )


def _verdict(number: float | None, rounded: Sequence[Rounded], chosen: Sequence[NumberFormat | Whole]) -> str:
    """In which formats a number is kept, changed and lost."""
    if number is None or not rounded:
        return ", ".join(each.name for each in chosen) or "elements under a scale of their block"
    kinds = {
        "is exact in": ("exact",),
        "is rounded in": ("rounded", "subnormal"),
        "underflows to zero in": ("underflow",),
        "overflows in": ("overflow",),
    }
    fates = {each.format.name: each.fate for each in rounded}
    if len(fates) > 1 and report.in_fp64(number):
        fates.pop("fp64", None)  # the number is read in it: what was rounded then is no part of the others' errors
    said = {kind: [name for name, fate in fates.items() if fate in own] for kind, own in kinds.items()}
    return f"{number!r} " + "; ".join(f"{kind} {', '.join(names)}" for kind, names in said.items() if names)


def _headlines(
    number: float | None,
    rounded: Sequence[Rounded],
    floating: Sequence[NumberFormat],
    inside: Sequence[InBlock],
    named: Sequence[str],
) -> Iterator[Headline]:
    if number is None:
        for one in floating if named else []:
            yield from _limits(one)
        return
    for each in rounded:
        if named or each.format.name in _HEADED:
            yield _becomes(each.format.name, each.value, report.written(each), each.format.source)
    for one_block in inside:
        if named:
            written = f"scale x element, scale = {one_block.rule}: {one_block.scale:.6g} x {one_block.element:.6g} = "
            said = f"{written}{one_block.value:.9g}"
            yield _becomes(one_block.format.name, one_block.value, said, one_block.format.source)


def _becomes(name: str, value: float, formula: str, source: str) -> Headline:
    finite = math.isfinite(value)
    return Headline(
        name=name, title=f"in {name}", value=value if finite else None, unit="", said=f"{value:.9g}", formula=formula,
        basis="exact", source=source,
    )  # fmt: skip


def _limits(one: NumberFormat) -> Iterator[Headline]:
    """What a format alone reaches."""
    found = {
        "largest": (one.largest, report.largest_written(one)),
        "smallest_normal": (one.smallest_normal, f"2^(1 - bias) = 2^(1 - {one.bias})"),
        "smallest_subnormal": (
            one.smallest_subnormal,
            f"2^(1 - bias - mantissa) = 2^(1 - {one.bias} - {one.mantissa_bits})",
        ),
        "epsilon": (one.epsilon, f"2^-mantissa = 2^-{one.mantissa_bits}"),
        "zero_up_to": (zero_up_to(one), f"half the smallest value = {one.smallest_subnormal:.6g} / 2"),
        "overflows_from": (overflows_from(one), "half a step above the largest value"),
    }
    for name, (value, formula) in found.items():
        held = math.isfinite(value) and value != 0  # by a double, in which this is worked out
        said = f"{value:.9g}" if held else _BEYOND_DOUBLES[name]
        shown, of_it = value if held else None, {"said": said, "source": one.source, "format": one.name}
        yield headline(f"formats.{name}", shown, f"{formula} = {said}", **of_it)


def _drawings(
    number: float | None, floating: Sequence[NumberFormat], whole: Sequence[Whole], inside: Sequence[InBlock]
) -> Iterator[Drawing]:
    if number is not None and (floating or inside):
        yield Drawing(
            chart=bits_chart(number, floating, whole, inside, f"The bits of {number!r}"),
            table=bits_table(number, floating, whole, inside),
        )
    if floating:
        ranges = list(
            dict.fromkeys((*(KNOWN[name] for name in FAMILIES["training"]), *(floating if len(floating) == 1 else ())))
        )
        yield Drawing(chart=ranges_chart(ranges, number), table=uses_table(ranges))
        yield Drawing(chart=steps_chart(floating, number), table=uses_table(floating))


def _notes(inside: Sequence[InBlock]) -> tuple[str, ...]:
    return tuple(
        f"{each.format.name}: {each.format.block} elements share one {each.format.scale} scale, "
        f"{each.format.bits_per_element:.4g} bits an element in all ({each.format.source})."
        for each in inside
    )


def _words(query: Query, number: float | None, inside: Sequence[InBlock]) -> tuple[str, ...]:
    value = [] if number is None else [query["value"]]
    largest = ["--largest", query["largest"]] if inside else []
    return ("dtype", *value, *([query["format"]] if query["format"] else []), *largest)


def _python(query: Query, named: Sequence[str], number: float | None) -> str:
    lines = ["from trainledger.tensors.number import formats_and_blocks, in_block", ""]
    lines += [f"formats, blocks = formats_and_blocks({list(named)!r})"]
    if number is None:
        return "\n".join([*lines, "print(*formats, sep=chr(10))"])
    lines += [f"print(*(each.rounded({number!r}).value for each in formats))"]
    if query.get("largest") is not None:
        lines += [f"print(*(in_block(each, {number!r}, {query['largest']}).value for each in blocks))"]
    return "\n".join(lines)


_CHOICES = one_of(("", *SHOWN, *FAMILIES, *WHOLE, *BLOCK_FORMATS), training="fp32, bf16, fp16, e4m3, e5m2")
FORMATS = calculator("formats", _reply, {"format": _CHOICES})
