"""Number formats by the names that people use, and one number as each of them holds it, alone or in a block.

Elements of a block share a scale that follows from the largest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainledger.spec.dtypes import BLOCK_FORMATS, FORMATS, OTHER_NBYTES, BlockFormat, NumberFormat
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text

# Other names, each before the one that it means: of torch, numpy and JAX, and the short ones.
_ALIASES = """
    float64 fp64 double fp64 f64 fp64 float32 fp32 float fp32 f32 fp32 bfloat16 bf16 float16 fp16 half fp16 f16 fp16
    float8_e4m3fn e4m3 float8_e4m3 e4m3 fp8 e4m3 fp8_e4m3 e4m3 float8_e5m2 e5m2 fp8_e5m2 e5m2 fp4 e2m1
    float4_e2m1fn e2m1 long int64 i64 int64 int int32 i32 int32 short int16 i16 int16 i8 int8 byte uint8 u8 uint8
    boolean bool float8_e8m0fnu e8m0
"""
ALIASES = dict(zip(_ALIASES.split()[::2], _ALIASES.split()[1::2], strict=True))
LARGEST_TEXT = 400

# What tensor cores make of fp32 operands: the range of fp32 with the mantissa of fp16; in memory it is fp32, 4 bytes
# (NVIDIA A100 Tensor Core GPU Architecture, 2020, "TensorFloat-32").
_OF_TF32 = "matmuls of fp32 operands on tensor cores; in memory they stay fp32"
TF32 = NumberFormat("tf32", 8, 10, "ieee", _OF_TF32, "NVIDIA A100 Tensor Core GPU Architecture (2020), TensorFloat-32")
# The floating-point formats that a number is shown in, widest first.
SHOWN = {
    name: number_format
    for pair in FORMATS.items()
    for name, number_format in (pair, *([("tf32", TF32)] * (pair[0] == "fp32")))
}


@frozen
class Whole:
    """An integer format, in two's complement where it is signed."""

    name: str
    bits: int
    signed: bool = True

    @property
    def smallest(self) -> int:
        return -(2 ** (self.bits - 1)) if self.signed else 0

    @property
    def largest(self) -> int:
        return int(2 ** (self.bits - self.signed)) - 1

    def held(self, number: float) -> int | None:
        """A number as torch converts it, without its fraction; None where it is out of range.

        >>> WHOLE["int8"].held(-3.7), WHOLE["uint8"].held(256)
        (-3, None)
        """
        whole = math.trunc(number)
        return whole if self.smallest <= whole <= self.largest else None

    def bits_of(self, number: float) -> str:
        """The bits of a number as `held`, in two's complement; nothing where it is out of range.

        >>> WHOLE["int8"].bits_of(-3.7), WHOLE["uint8"].bits_of(256)
        ('11111101', '')
        """
        held = self.held(number)
        return "" if held is None else format(held % 2**self.bits, f"0{self.bits}b")


WHOLE = {f"int{bits}": Whole(f"int{bits}", bits) for bits in (64, 32, 16, 8)} | {"uint8": Whole("uint8", 8, False)}
# Names that mean several formats.
FAMILIES = {"fp8": ("e4m3", "e5m2"), "fp6": ("e3m2", "e2m3"), "fp4": ("e2m1",)}
FAMILIES |= {"training": ("fp32", "bf16", "fp16", *FAMILIES["fp8"])}
FAMILIES |= dict.fromkeys(("int", "integer"), tuple(WHOLE))


def _plain(name: str) -> str:
    return name.strip().lower().removeprefix("torch.").removeprefix("np.").removeprefix("jnp.")


def formats_named(name: str) -> tuple[NumberFormat | Whole, ...]:
    """The formats that a name means, those of its elements for a format in blocks; none for any other word.

    >>> [each.name for each in formats_named("fp8")], [each.name for each in formats_named("nvfp4")]
    (['e4m3', 'e5m2'], ['e2m1'])
    """
    plain = _plain(name)
    plain = plain if plain in FAMILIES else ALIASES.get(plain, plain)
    if plain in BLOCK_FORMATS and plain not in WHOLE:
        plain = BLOCK_FORMATS[plain].element
    known: dict[str, NumberFormat | Whole] = {**SHOWN, **WHOLE}
    return tuple(known[each] for each in FAMILIES.get(plain, (plain,)) if each in known)


def known_format(name: str, field: str = "dtype", *, floating: bool = False) -> str:
    """The one of `dtypes`' formats that a name means; `InvalidInput` with the nearest where there is none.

    ``floating`` leaves only formats of single floating-point numbers, without integers and blocks.

    >>> known_format("torch.float32"), known_format("BF16"), known_format("half", floating=True)
    ('fp32', 'bf16', 'fp16')
    """
    known = [*SHOWN] if floating else [*dict.fromkeys((*FORMATS, *OTHER_NBYTES, *BLOCK_FORMATS))]
    plain = ALIASES.get(_plain(name), _plain(name))
    if plain in known:
        return plain
    near = nearest_text(plain, [*known, *(each for each, meant in ALIASES.items() if meant in known)])
    rule = "is not a known floating-point format" if floating else "is not a known number format"
    raise InvalidInput([Problem(field, name, f"{rule} ({', '.join(known)})", near)])


def read_number(text: str, field: str = "value") -> float:
    """A finite number from text such as 1e-8, 0.1 or 65504; `InvalidInput` otherwise.

    >>> read_number("1e-8"), read_number("-0")
    (1e-08, -0.0)
    """
    try:
        number = float(text) if len(text) <= LARGEST_TEXT else math.nan
    except ValueError:
        names = [*SHOWN, *(each for each, meant in ALIASES.items() if meant in SHOWN)]
        if _plain(text) in names:
            rule = "is a format, and not a number (write it like 1e-8, 0.1 or 65504)"
            raise InvalidInput([Problem(field, text, rule, 0.1)]) from None
        rule = "is neither a number (write it like 1e-8, 0.1 or 65504) nor a floating-point format"
        near = nearest_text(text, names)
        raise InvalidInput([Problem(field, text, rule, near)]) from None
    if not math.isfinite(number):
        largest = math.copysign(FORMATS["fp64"].largest, number)
        raise InvalidInput([Problem(field, text, "must be a finite number that fp64 holds", largest)])
    digits = text.lower().partition("e")[0]
    if number == 0 and any(digit.isdecimal() and int(digit) for digit in digits):
        smallest = math.copysign(FORMATS["fp64"].smallest_subnormal, number)
        raise InvalidInput([Problem(field, text, "is too small for fp64 and would be read as zero", smallest)])
    return number


def zero_up_to(each: NumberFormat) -> float:
    """The largest number that a format rounds to zero: half its smallest value, which lies between zero and it.

    >>> zero_up_to(FORMATS["fp16"]), zero_up_to(FORMATS["fp64"])
    (2.9802322387695312e-08, 0.0)
    """
    return each.smallest_subnormal / 2


def overflows_from(each: NumberFormat) -> float:
    """The smallest number that is too large for a format: half a step above its largest value, where a tie is rounded
    to the even side, and in the formats without infinities the tie itself is still the largest value.

    >>> overflows_from(FORMATS["fp16"]), overflows_from(FORMATS["e5m2"]), overflows_from(FORMATS["fp64"])
    (65520.0, 61440.0, inf)
    """
    last = each.rounded(each.largest)
    above = each.largest + last.spacing / 2
    if not math.isfinite(above) or each.rounded(above).fate == "overflow":
        return above
    return math.nextafter(above, math.inf)


# Of mxint8 an element counts 64ths (OCP Microscaling Formats Specification v1.0, section 5.3.4), of int8 and int4 ones.
_UNITS = {"mxint8": 64}
_SCALE_EXPONENTS = (-127, 127)  # of e8m0
# The 16 values of nf4 (Dettmers et al. 2023, QLoRA, arXiv 2305.14314, appendix E).
_NF4 = """
    -1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334
    -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
    0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0
"""
NF4 = tuple(map(float, _NF4.split()))
# Where the scales are quantized once more, they depend on those of other blocks.
SHOWN_BLOCKS = {name: block_format for name, block_format in BLOCK_FORMATS.items() if block_format.scale_block is None}


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
        code = min(range(len(NF4)), key=lambda index: abs(NF4[index] - number))
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
