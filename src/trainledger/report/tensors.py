"""Tensors, chains of operations, products and number formats for a terminal of 80 columns, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from trainledger.dtypes import BLOCK_FORMATS, NumberFormat, Rounded
from trainledger.predict.roofline import NoRate, peak_rate
from trainledger.report.table import sentence, table, wrapped
from trainledger.tensors.number import SHOWN, TF32, Whole, overflows_from, zero_up_to
from trainledger.units import GIB, GIGA, KIB, KILO, MEGA, MIB, format_flops, format_nbytes, format_seconds

if TYPE_CHECKING:
    from trainledger.predict.roofline import Machine
    from trainledger.tensors.einops import Rearranged
    from trainledger.tensors.einsum import Einsum
    from trainledger.tensors.strided import Chain, Strided
    from trainledger.tensors.tensor import Tensor

_UNITS = (("kB", KILO), ("KiB", KIB), ("MB", MEGA), ("MiB", MIB), ("GB", GIGA), ("GiB", GIB))
_FATES = {"overflow": "overflows", "underflow": "underflows to zero"}


def shape_text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def tensor(one: Tensor) -> str:
    """One tensor: bytes in every unit, its layout, and what an operation on each element costs."""
    rows = [
        ["elements", f"{one.elements:,}"],
        ["bytes", f"{one.nbytes:,}"],
        *([unit, f"{one.nbytes / size:,.6g}"] for unit, size in _UNITS if size / 100 <= one.nbytes < 10_000 * size),
        ["strides in elements", shape_text(one.strides)],
        ["elementwise FLOPs", f"{one.elementwise_flops:,}"],
        ["FLOPs per byte", f"{one.elementwise_intensity:.4g}"],
    ]
    if one.dtype in BLOCK_FORMATS:
        block = BLOCK_FORMATS[one.dtype]
        rows.insert(2, ["of them scales", f"{block.scale_nbytes_for(one.elements):,}"])
    notes = "Row-major. Elementwise: one operation on each element (ReLU, a square), the tensor read, one written."
    head = f"{one.dtype}{shape_text(one.shape)}"
    return "\n".join([table([head, ""], rows, align="lr"), "", wrapped(notes)])


def tensor_to_json(one: Tensor) -> dict[str, Any]:
    return {
        "dtype": one.dtype, "shape": one.shape, "elements": one.elements, "nbytes": one.nbytes, "strides": one.strides,
        "elementwise": {
            "flops": one.elementwise_flops, "nbytes": one.elementwise_nbytes, "intensity": one.elementwise_intensity,
        },
    }  # fmt: skip


def chain(one: Chain, total: bool = True) -> str:
    """What each operation makes: where the elements lie, what it costs, and why; ``total`` adds what all write."""
    rows = [["", "", *_layout(one.start), format_nbytes(one.start.storage_nbytes)]]
    rows += [[str(number), _tight(each.word), *_layout(each.result), each.cost.removesuffix(", free")]
             for number, each in enumerate(one.steps, start=1)]  # fmt: skip
    if one.failure is not None:
        rows.append([str(len(rows)), _tight(one.failed), "", "", "", "", "", "fails"])
    columns, align = ["", "step", "gives", "stride", "offset", "contiguous", "storage", "cost"], "rlllrlll"
    if not any(each.result.offset for each in one.steps):
        columns, align, rows = [*columns[:4], *columns[5:]], "rllllll", [[*row[:4], *row[5:]] for row in rows]
    parts = [table(columns, rows, align=align)]
    if one.steps:
        why = [wrapped(f"{number} {each.word.partition('(')[0]}: {each.why}.")
               for number, each in enumerate(one.steps, start=1)]  # fmt: skip
        end = "lies over the storage of the first" if one.shares else "has a storage of its own"
        said = f"Copies and results write {one.written_nbytes:,} bytes; the last tensor {end}."
        parts += ["\n".join(why), *([wrapped(said)] if total else [])]
    return "\n\n".join(parts)


def _layout(one: Strided) -> list[str]:
    order = one.memory_format.replace("contiguous", "yes") or "no"
    return [_tight(one.title), _tight(shape_text(one.stride)), str(one.offset), order, _letter(one)]


def _tight(text: str) -> str:
    """Without spaces, so that columns stay narrow."""
    return text.replace(", ", ",")


def _letter(one: Strided) -> str:
    """A letter for the storage; numbers behind the alphabet."""
    return chr(ord("A") + one.storage) if one.storage < 26 else str(one.storage + 1)


def elements(one: Chain, index: Sequence[int], places: Sequence[int | None]) -> str:
    """Where ``tensor[index]`` lies at each step."""
    tensors = [one.start, *(each.result for each in one.steps)]
    words = ["at first", *(f"{number} {each.word}" for number, each in enumerate(one.steps, start=1))]
    rows = [
        [word, "no such index", ""] if place is None else
        [word, f"{place:,} of {_letter(each)}", f"{place * each.itemsize:,}"]
        for word, each, place in zip(words, tensors, places, strict=True)
    ]  # fmt: skip
    shown = table([f"element {shape_text(index)}", "in the storage", "byte"], rows, align="lrr")
    return "\n".join([shown, "", "Bytes are counted from the storage's first, whose address comes on top."])


def drawing(one: Strided, word: str) -> str:
    """A tensor drawn over its storage."""
    drawn = one.drawing()
    if drawn.startswith("no drawing"):
        return wrapped(sentence(drawn))
    return f"{word}: {one.title}\n{drawn}"


def strided_to_json(one: Strided) -> dict[str, Any]:
    return {
        "dtype": one.dtype, "shape": one.shape, "elements": one.elements, "nbytes": one.nbytes, "strides": one.stride,
        "offset": one.offset, "contiguous": one.contiguous, "memory_format": one.memory_format,
        "storage": one.storage, "storage_nbytes": one.storage_nbytes,
    }  # fmt: skip


def chain_to_json(one: Chain, places: Sequence[int | None] | None) -> dict[str, Any]:
    """The steps in figures; ``element`` where an index was asked for, null where a tensor has no such index."""
    steps: list[dict[str, Any]] = [
        {"operation": each.word, "kind": each.kind, "written_nbytes": each.written_nbytes, "why": each.why,
         **strided_to_json(each.result)}
        for each in one.steps
    ]  # fmt: skip
    start = strided_to_json(one.start)
    for told, each, place in zip(
        (start, *steps), (one.start, *(each.result for each in one.steps)), places or (), strict=False
    ):
        told["element"] = None if place is None else {"place": place, "byte": place * each.itemsize}
    return {"start": start, "steps": steps, "written_nbytes": one.written_nbytes, "shares": one.shares}


def einsum(one: Einsum, machine: Machine | None) -> str:
    """One product: its steps, its totals, and what bounds it on a device."""
    operands = " and ".join(shape_text(each) for each in one.operands)
    parts = [wrapped(f"{one.equation}: {operands} to {shape_text(one.shape)} in {one.dtype}")]
    if len(one.steps) > 1:
        steps = [
            [str(number), each.equation, shape_text(each.shape), f"{each.flops:,}"]
            for number, each in enumerate(one.steps, start=1)
        ]
        parts.append(table(["step", "product", "gives", "FLOPs"], steps, align="rllr"))
    rows = [
        ["FLOPs", f"{one.flops:,}", format_flops(one.flops)],
        ["bytes moved", f"{one.nbytes:,}", format_nbytes(one.nbytes)],
        ["FLOPs per byte", f"{one.intensity:.4g}", ""],
    ]
    if len(one.steps) > 1:
        rows.insert(1, ["all at once", f"{one.at_once_flops:,}", format_flops(one.at_once_flops)])
    parts.append(table(["", "", ""], rows, align="lrr").split("\n", 2)[2])
    if one.view:
        said = "No arithmetic: torch gives a view, and the bytes move only where a copy is made of it."
        parts.append(wrapped(said))
    if machine is not None:
        parts.append(wrapped(_bound(one, machine)))
    return "\n\n".join(parts)


def pattern(one: Rearranged) -> str:
    """A pattern of einops on one tensor: its sizes, its steps on torch, and what they cost."""
    result = one.result
    head = f"{one.pattern}: {one.chain.start.title} to {result.title} by {one.function}"
    sizes = ", ".join(f"{name} = {size:,}" for name, size in one.sizes.items())
    end = "A view: nothing is copied." if one.view else (
        f"Not a view: {format_nbytes(one.chain.written_nbytes)} are written, {one.chain.written_nbytes:,} bytes."
    )  # fmt: skip
    rows = [["FLOPs", f"{one.flops:,}", format_flops(one.flops)],
            ["bytes moved", f"{one.moved_nbytes:,}", format_nbytes(one.moved_nbytes)]]  # fmt: skip
    parts = [wrapped(head), wrapped(sizes), chain(one.chain, total=False), end]
    parts.append(table(["", "", ""], rows, align="lrr").split("\n", 2)[2])
    return "\n\n".join(each for each in parts if each)


def pattern_to_json(one: Rearranged) -> dict[str, Any]:
    """A pattern in figures, with its steps as those of a chain."""
    return {
        "pattern": one.pattern, "function": one.function, "sizes": one.sizes, "dtype": one.result.dtype,
        "shape": one.result.shape, "view": one.view, "flops": one.flops, "nbytes": one.moved_nbytes,
        **chain_to_json(one.chain, None),
    }  # fmt: skip


def _seconds(one: Einsum, machine: Machine) -> tuple[float, float]:
    """Least seconds to compute and to move, from the machine's peaks; NoRate where one is not known."""
    bandwidth = machine.memory_bytes_per_second
    if bandwidth is None:
        raise NoRate(f"{machine.title} has no memory bandwidth on record")
    return one.flops / peak_rate(machine, one.dtype), one.nbytes / bandwidth


def _bound(one: Einsum, machine: Machine) -> str:
    try:
        compute, move = _seconds(one, machine)
    except NoRate as reason:
        return sentence(f"no time: {reason}")
    bandwidth = machine.memory_bytes_per_second
    assert bandwidth is not None
    ridge = peak_rate(machine, one.dtype) / bandwidth
    which = "memory" if move > compute else "compute"
    return (
        f"On {machine.title} at least {format_seconds(max(compute, move))}, {which}-bound: {format_seconds(compute)} "
        f"to compute, {format_seconds(move)} to move; the ridge point of {one.dtype} is {ridge:.4g} FLOP/byte."
    )


def einsum_to_json(one: Einsum, machine: Machine | None) -> dict[str, Any]:
    """A product in figures; seconds are null without a device or a rate."""
    found: dict[str, Any] = {
        "equation": one.equation, "sizes": one.sizes, "dtype": one.dtype, "shape": one.shape, "flops": one.flops,
        "at_once_flops": one.at_once_flops, "nbytes": one.nbytes, "intensity": one.intensity,
        "view": one.view, "operands": one.operands,
        "steps": [vars(each) for each in one.steps], "compute_seconds": None, "memory_seconds": None,
    }  # fmt: skip
    if machine is not None:
        try:
            found["compute_seconds"], found["memory_seconds"] = _seconds(one, machine)
        except NoRate as reason:
            found["note"] = str(reason)
    return found


def in_formats(number: float, rounded: Iterable[Rounded]) -> str:
    """What a number becomes in each format, its bits, and what the formats hold."""
    rounded = list(rounded)
    rows = [
        [each.format.name, f"{each.value:.9g}", _percent(each), _FATES.get(each.fate, each.fate), f"{each.spacing:.4g}"]
        for each in rounded
    ]
    head = wrapped(f"{number!r} rounded to the nearest value of each format")
    bits = [[each.format.name, *each.bits] for each in rounded]
    notes = "Spacing is the step to the next larger magnitude. Below their smallest normal value formats step evenly."
    return "\n".join([
        head, table(["format", "becomes", "off by", "", "spacing"], rows, align="lrrlr"), "",
        table(["bits", "sign", "exponent", "mantissa"], bits, align="llll"), "",
        _limits("holds", [each.format for each in rounded]), "", wrapped(notes),
    ])  # fmt: skip


def _limits(head: str, formats: Iterable[NumberFormat]) -> str:
    """How many bits formats have, how far they reach, and how finely they step."""
    rows = [
        [each.name, f"1+{each.exponent_bits}+{each.mantissa_bits}", _nbytes(each), f"{each.largest:.5g}",
         f"{each.smallest_normal:.4g}", f"{each.smallest_subnormal:.4g}", f"{each.epsilon:.4g}"]
        for each in formats
    ]  # fmt: skip
    return table([head, "s+e+m", "bytes", "largest", "min normal", "min subnormal", "epsilon"], rows,
                 align="llrrrrr")  # fmt: skip


def formats() -> str:
    """The table of all formats, those in blocks included."""
    blocks = [
        [each.name, each.element, each.block, each.scale, f"{each.bits_per_element:.4g}"]
        for each in BLOCK_FORMATS.values()
    ]
    in_blocks = table(["in blocks", "elements", "block", "scale", "bits per element"], blocks, align="llrlr")
    return f"{several_formats(SHOWN.values())}\n\n{in_blocks}"


def of_block(name: str) -> str:
    """What a format in blocks adds to its elements."""
    one = BLOCK_FORMATS[name]
    return wrapped(
        f"{name}: {one.block} elements share one {one.scale} scale, {one.bits_per_element:.4g} bits an element in all; "
        f"shown are the elements ({one.element}) without their scale."
    )


def several_formats(some: Iterable[NumberFormat]) -> str:
    """Range, spacing and use of several formats."""
    some = list(some)
    return "\n".join([_limits("format", some), "", *(wrapped(f"{each.name}: {each.suits}.") for each in some)])


def whole_formats(some: Iterable[Whole], number: float | None) -> str:
    """Range of integer formats, and what a number becomes in them."""
    limits = {each: [each.bits // 8, each.smallest, each.largest] for each in some}
    if number is None:
        rows = [[each.name, *told] for each, told in limits.items()]
        return table(["format", "bytes", "smallest", "largest"], rows, align="lrrr")
    rows = [[each.name, *_whole_held(each, number), *told] for each, told in limits.items()]
    shown = table(["format", "becomes", "", "bytes", "smallest", "largest"], rows, align="lrlrrr")
    return f"{wrapped(f'{number!r} converted to integers: a fraction is dropped, as torch drops it')}\n{shown}"


def _whole_held(each: Whole, number: float) -> tuple[int | None, str]:
    held = each.held(number)
    return held, "out of range" if held is None else "exact" if held == number else "truncated"


def whole_to_json(each: Whole, number: float | None) -> dict[str, Any]:
    """An integer format, and what a number becomes in it; null where it is out of range."""
    limits = {"nbytes": each.bits // 8, "smallest": each.smallest, "largest": each.largest}
    if number is None:
        return {"name": each.name, "bits": each.bits, **limits}
    held, fate = _whole_held(each, number)
    return {"format": each.name, "value": held, "fate": fate, **limits}


def one_format(each: NumberFormat) -> str:
    """All that there is to say of one format."""
    specials = {"ieee": "infinities and NaNs", "nan": "one NaN, no infinity", "none": "neither infinity nor NaN"}
    rows = [
        ["bits", f"{each.bits}: sign 1, exponent {each.exponent_bits}, mantissa {each.mantissa_bits}"],
        ["bytes", _nbytes(each)],
        ["largest", f"{each.largest:.17g}"],
        ["smallest normal", f"{each.smallest_normal:.17g}"],
        ["smallest subnormal", f"{each.smallest_subnormal:.17g}"],
        ["machine epsilon", f"{each.epsilon:.17g}"],
        ["rounds to zero", f"up to {zero_up_to(each):.17g}"],
        ["overflows", f"from {overflows_from(each):.17g}"],
        ["exact integers", f"up to {2 ** (each.mantissa_bits + 1):,}"],
        ["decimal digits", f"{(each.mantissa_bits + 1) * math.log10(2):.2g}"],
        ["specials", specials[each.specials]],
        ["suits", each.suits],
    ]
    return table([each.name, ""], rows, align="ll")


def format_to_json(each: NumberFormat) -> dict[str, Any]:
    """A format's figures."""
    return {
        "name": each.name, "bits": each.bits, "exponent_bits": each.exponent_bits, "mantissa_bits": each.mantissa_bits,
        "largest": each.largest, "smallest_normal": each.smallest_normal,
        "smallest_subnormal": each.smallest_subnormal, "epsilon": each.epsilon, "suits": each.suits,
        "nbytes": _in_memory(each), "zero_up_to": zero_up_to(each), "overflows_from": overflows_from(each),
    }  # fmt: skip


def rounded_to_json(each: Rounded) -> dict[str, Any]:
    """A number in a format; a value that is not finite is a text."""
    sign, exponent, mantissa = each.bits
    value = each.value if math.isfinite(each.value) else str(each.value)
    return {
        "format": each.format.name, "value": value, "fate": each.fate, "relative_error": each.relative_error,
        "spacing": each.spacing, "sign": sign, "exponent": exponent, "mantissa": mantissa,
    }  # fmt: skip


def _percent(each: Rounded) -> str:
    error = each.relative_error
    if not math.isfinite(error):
        return ""
    return f"{100 * error:+.3g} %" if error else "0 %"


def _nbytes(each: NumberFormat) -> str:
    return f"{_in_memory(each):g}"


def _in_memory(each: NumberFormat) -> float:
    """Bytes of one element, packed; tf32 is stored as fp32."""
    return 4 if each.name == TF32.name else each.bits / 8
