"""Number formats by the names that people use, and one number as each of them holds it."""

from __future__ import annotations

import math

from trainledger.spec.dtypes import BLOCK_FORMATS, FORMATS, OTHER_NBYTES, NumberFormat
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text

# Other names: of torch, numpy and JAX, and the short ones.
ALIASES = {
    "float64": "fp64", "double": "fp64", "f64": "fp64", "float32": "fp32", "float": "fp32", "f32": "fp32",
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "f16": "fp16", "float8_e4m3fn": "e4m3",
    "float8_e4m3": "e4m3", "fp8": "e4m3", "fp8_e4m3": "e4m3", "float8_e5m2": "e5m2", "fp8_e5m2": "e5m2",
    "fp4": "e2m1", "float4_e2m1fn": "e2m1", "long": "int64", "i64": "int64", "int": "int32", "i32": "int32",
    "short": "int16", "i16": "int16", "i8": "int8", "byte": "uint8", "u8": "uint8", "boolean": "bool",
    "float8_e8m0fnu": "e8m0",
}  # fmt: skip
LARGEST_TEXT = 400

# What tensor cores make of fp32 operands: the range of fp32 with the mantissa of fp16; in memory it is fp32, 4 bytes
# (NVIDIA A100 Tensor Core GPU Architecture, 2020, "TensorFloat-32").
TF32 = NumberFormat(
    "tf32", 8, 10, "ieee", "matmuls of fp32 operands on tensor cores; in memory they stay fp32",
    "NVIDIA A100 Tensor Core GPU Architecture (2020), TensorFloat-32",
)  # fmt: skip
# The floating-point formats that a number is shown in, widest first.
SHOWN = {name: each for pair in FORMATS.items() for name, each in (pair, *([("tf32", TF32)] * (pair[0] == "fp32")))}


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


WHOLE = {
    each.name: each
    for each in (Whole("int64", 64), Whole("int32", 32), Whole("int16", 16), Whole("int8", 8), Whole("uint8", 8, False))
}
# Names that mean several formats.
FAMILIES = {
    "fp8": ("e4m3", "e5m2"), "fp6": ("e3m2", "e2m3"), "fp4": ("e2m1",), "int": tuple(WHOLE), "integer": tuple(WHOLE),
}  # fmt: skip


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
    if number == 0 and any(each.isdecimal() and int(each) for each in digits):
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
