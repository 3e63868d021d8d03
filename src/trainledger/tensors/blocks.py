"""What becomes of a number in a format in blocks: elements share a scale that follows from the largest of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainledger.spec.dtypes import BLOCK_FORMATS, FORMATS, BlockFormat, NumberFormat
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.tensors.number import SHOWN, WHOLE, Whole, formats_named

# Of mxint8 an element counts 64ths (OCP Microscaling Formats Specification v1.0, section 5.3.4), of int8 and int4 ones.
_UNITS = {"mxint8": 64}
_SCALE_EXPONENTS = (-127, 127)  # of e8m0
# The 16 values of nf4 (Dettmers et al. 2023, QLoRA, arXiv 2305.14314, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Where the scales are quantized once more, they depend on those of other blocks.
SHOWN_BLOCKS = {name: each for name, each in BLOCK_FORMATS.items() if each.scale_block is None}


@frozen
class InBlock:
    """A number as an element of a block: ``scale`` is that of the block, ``element`` what is stored, ``value`` both.

    ``bits`` are those of the element, which is ``cut`` to the largest where it would round to more; ``rule`` says how
    the scale follows from the largest magnitude of the block.
    """

    format: BlockFormat
    given: float
    largest: float
    scale: float
    element: float
    bits: str
    cut: bool
    rule: str

    @property
    def value(self) -> float:
        return self.scale * self.element

    @property
    def relative_error(self) -> float:
        """How far the value is from the number, as a share of the number."""
        return (self.value - self.given) / abs(self.given) if self.given else 0.0

    @property
    def fate(self) -> str:
        """exact, rounded, underflow (to zero), or overflow: cut to the largest element."""
        if self.value == self.given:
            return "exact"
        if self.value == 0:
            return "underflow"
        return "overflow" if self.cut else "rounded"


def in_block(name: str, number: float, largest: float, field: str = "largest") -> InBlock:
    """A number in a block of which ``largest`` is the largest other magnitude; `InvalidInput` where that is below 0.

    The scale of mx formats is 2^(floor(log2 largest) - the exponent of the largest element) (OCP Microscaling Formats
    Specification v1.0, section 6.3), that of the others the largest magnitude over the largest element, in the format
    of scales.
    The scale of nvfp4 is that of the block with the largest magnitude of its tensor, which the tensor's fp32 scale
    makes exact to fp32 (arXiv 2509.25149, section 2). Elements are rounded to the nearest, of two as near to the even.

    >>> found = in_block("mxfp4", 0.3, 6.0)
    >>> found.scale, found.element, found.value, found.bits
    (1.0, 0.5, 0.5, '0001')
    >>> in_block("int8", 0.3, 6.0).element
    6.0
    """
    block = SHOWN_BLOCKS[name]
    if largest < 0:
        raise InvalidInput([Problem(field, largest, "is a magnitude, so it must be at least 0", -largest)])
    largest = max(largest, abs(number))
    scale, rule = _scale(block, largest)
    element, bits, cut = _element(block, number / scale if scale else 0.0)
    return InBlock(block, number, largest, scale, element, bits, cut, rule)


def _scale(block: BlockFormat, largest: float) -> tuple[float, str]:
    """The scale of a block and its formula with the numbers put in."""
    most = _most(block)
    if block.scale == "e8m0":
        low, high = _SCALE_EXPONENTS
        top = math.frexp(most)[1] - 1
        exponent = math.frexp(largest)[1] - 1 - top if largest else low
        scale = math.ldexp(1.0, min(max(exponent, low), high))
        return scale, f"2^(floor(log2 {largest:g}) - {top}) = {scale:g}"
    stored = FORMATS[{"e4m3": "fp32"}.get(block.scale, block.scale)]  # of nvfp4 together with the tensor's scale
    held = stored.rounded(largest / most).value
    scale = held if math.isfinite(held) else stored.largest
    return scale, f"{largest:g} / {most:g} = {scale:.9g} in {stored.name}"


def _most(block: BlockFormat) -> float:
    """The largest element of a format."""
    if block.element == "nf4":
        return 1.0
    if block.element.startswith("int"):
        most: float = (2 ** (block.bits - 1) - 1) / _UNITS.get(block.name, 1)
        return most
    return FORMATS[block.element].largest


def _element(block: BlockFormat, number: float) -> tuple[float, str, bool]:
    """The element that a number over its scale becomes, its bits, and whether it would round to more than the largest.

    >>> _element(BLOCK_FORMATS["mxfp4"], -2.6), _element(BLOCK_FORMATS["mxint8"], 1.999)
    ((-3.0, '1101', False), (1.984375, '01111111', True))
    """
    if block.element == "nf4":
        code = min(range(len(NF4)), key=lambda each: abs(NF4[each] - number))
        return NF4[code], format(code, "04b"), False
    if block.element.startswith("int"):
        unit, most = _UNITS.get(block.name, 1), 2 ** (block.bits - 1) - 1
        whole = round(number * unit)
        held = min(max(whole, -most), most)
        return held / unit, format(held % 2**block.bits, f"0{block.bits}b"), held != whole
    one = FORMATS[block.element].rounded(number)
    return one.value, "".join(one.bits), one.fate == "overflow"


def formats_and_blocks(names: Sequence[str]) -> tuple[list[NumberFormat | Whole], list[str]]:
    """The formats that names mean, and those of the names that are of a format in blocks; without names all of both.

    >>> [[each.name for each in some] for some in formats_and_blocks(["fp8", "mxfp4"])[:1]]
    [['e4m3', 'e5m2', 'e2m1']]
    >>> formats_and_blocks(["fp8", "MXFP4"])[1], is_format("nf4"), is_format("4")
    (['mxfp4'], True, False)
    """
    if not names:
        return list(SHOWN.values()), list(SHOWN_BLOCKS)
    formats = dict.fromkeys(each for name in names for each in formats_named(name))
    blocks = [each for each in map(str.lower, names) if each in SHOWN_BLOCKS and each not in WHOLE]
    return list(formats), blocks


def is_format(word: str) -> bool:
    """Whether a word names formats, or a format in blocks."""
    return bool(formats_named(word)) or word.lower() in SHOWN_BLOCKS
