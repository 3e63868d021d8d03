"""Number formats: how many bits, how far they reach, how finely they step, and what scales they need."""

from __future__ import annotations

import math
from typing import Any

from trainledger.spec.frozen import frozen
from trainledger.spec.plain import table_beside
from trainledger.spec.units import ceil_div

Int = Any  # int, array or symbol


@frozen
class NumberFormat:
    """A binary floating-point format given by its exponent and mantissa widths.

    ``specials`` says what the top exponent is spent on: infinities and NaNs (``ieee``), one NaN pattern and no
    infinity (``nan``: E4M3; OCP 8-bit Floating Point Specification, section 5), or numbers only (``none``: the
    element formats of the OCP Microscaling Formats Specification v1.0, section 5.3). ``suits`` says what it is used
    for, ``source`` where it is defined.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: str = "ieee"
    suits: str = ""
    source: str = ""

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def nbytes(self) -> int:
        """Bytes of one element; ValueError for a format that shares a byte with its neighbour."""
        if self.bits % 8:
            raise ValueError(f"{self.name} has {self.bits} bits, not whole bytes; ask for nbytes_for(elements)")
        return self.bits // 8

    def nbytes_for(self, elements: Int) -> Int:
        """Bytes of so many elements, packed.

        >>> FORMATS["e2m1"].nbytes_for(5), FORMATS["bf16"].nbytes_for(5)
        (3, 10)
        """
        return ceil_div(elements * self.bits, 8)

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def largest(self) -> float:
        """The largest finite value.

        >>> FORMATS["fp16"].largest, FORMATS["e4m3"].largest, FORMATS["e5m2"].largest, FORMATS["e2m1"].largest
        (65504.0, 448.0, 57344.0, 6.0)
        """
        if self.specials == "ieee":
            return (2.0 - 2.0**-self.mantissa_bits) * 2.0**self.bias
        steps_below_two = 2 if self.specials == "nan" else 1
        return (2.0 - steps_below_two * 2.0**-self.mantissa_bits) * 2.0 ** (self.bias + 1)

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest value above zero.

        >>> FORMATS["fp16"].smallest_subnormal
        5.960464477539063e-08
        """
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """The step from 1 to the next value."""
        return 2.0**-self.mantissa_bits

    def rounded(self, number: float) -> Rounded:
        """A finite number as this format holds it: rounded to the nearest value, of two as near to the even one.

        Too large a number becomes infinity, or where there is none the largest value: so torch 2.13 casts to E4M3
        (before, it made NaN; the OCP specification of 8 bits allows both) and the OCP Microscaling specification,
        section 6.3, clamps elements. ValueError for NaN and infinities.

        >>> FORMATS["fp16"].rounded(1e-8).value, FORMATS["bf16"].rounded(1e-8).value
        (0.0, 1.0011717677116394e-08)
        >>> FORMATS["fp16"].rounded(6e-5).fate, FORMATS["fp16"].rounded(65520).value
        ('subnormal', inf)
        """
        if not math.isfinite(number):
            raise ValueError(f"{number} is not a finite number")
        size = abs(number)
        exponent = max(math.frexp(size)[1] - 1, 1 - self.bias) if size else 1 - self.bias
        # Python rounds halves to even; scaling by a power of two is exact.
        steps = round(math.ldexp(size, self.mantissa_bits - exponent))
        code = steps + ((exponent + self.bias - 1) << self.mantissa_bits)
        fate = ""
        if code > self._last:
            code = self._beyond if self.specials == "ieee" else self._last
            fate = "overflow"
        return Rounded(self, number, math.copysign(1.0, number) < 0, code, fate)

    @property
    def _last(self) -> int:
        """The code of the largest value: exponent and mantissa as one integer."""
        whole = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        return whole - {"ieee": 1 << self.mantissa_bits, "nan": 1, "none": 0}[self.specials]

    @property
    def _beyond(self) -> int:
        """The code of infinity, or of what replaces it."""
        return self._last + 1

    def value_of(self, code: int) -> float:
        """The value of an exponent and a mantissa in one integer, without sign.

        >>> FORMATS["e2m1"].value_of(7), FORMATS["e4m3"].value_of(127)
        (6.0, nan)
        """
        if code > self._last:
            return math.inf if self.specials == "ieee" and code == self._beyond else math.nan
        exponent, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        if exponent == 0:
            return math.ldexp(mantissa, 1 - self.bias - self.mantissa_bits)
        return math.ldexp((1 << self.mantissa_bits) + mantissa, exponent - self.bias - self.mantissa_bits)


@frozen
class Rounded:
    """A number in a format: ``code`` holds exponent and mantissa, ``fate`` says what became of it.

    ``fate`` is exact, rounded, subnormal, underflow (to zero) or overflow.
    """

    format: NumberFormat
    given: float
    negative: bool
    code: int
    beyond: str = ""

    @property
    def value(self) -> float:
        size = self.format.value_of(self.code)
        return -size if self.negative else size

    @property
    def fate(self) -> str:
        if self.beyond:
            return self.beyond
        if self.value == 0:
            return "underflow" if self.given else "exact"
        if self.code >> self.format.mantissa_bits == 0:
            return "subnormal"
        return "exact" if self.value == self.given else "rounded"

    @property
    def relative_error(self) -> float:
        """The relative error of the value; infinite where it became infinity."""
        return (self.value - self.given) / abs(self.given) if self.given else 0.0

    @property
    def spacing(self) -> float:
        """The step to the next larger magnitude; NaN beyond the largest value."""
        exponent = max(self.code >> self.format.mantissa_bits, 1)
        return math.nan if self.beyond else 2.0 ** (exponent - self.format.bias - self.format.mantissa_bits)

    @property
    def bits(self) -> tuple[str, str, str]:
        """Sign, exponent and mantissa in binary.

        >>> FORMATS["bf16"].rounded(-1.5).bits
        ('1', '01111111', '1000000')
        """
        width = self.format.mantissa_bits
        exponent = format(self.code >> width, f"0{self.format.exponent_bits}b")
        return str(int(self.negative)), exponent, format(self.code & ((1 << width) - 1), f"0{width}b")


@frozen
class BlockFormat:
    """Elements in blocks that share a scale: ``bits`` each, one scale of ``scale_bits`` per ``block`` elements.

    ``scale`` names the scales' format, ``element`` the elements'. Where the scales are quantized again (double
    quantization), ``scale_block`` of them share one fp32 scale. ``tensor_nbytes`` come once per tensor.
    """

    name: str
    element: str
    bits: int
    block: int
    scale: str
    scale_bits: int
    source: str
    scale_block: int | None = None
    tensor_nbytes: int = 0

    def scale_nbytes_for(self, elements: Int) -> Int:
        """Bytes of the scales of so many elements."""
        scales = ceil_div(elements, self.block)
        nbytes = ceil_div(scales * self.scale_bits, 8) + self.tensor_nbytes
        return nbytes if self.scale_block is None else nbytes + 4 * ceil_div(scales, self.scale_block)

    def nbytes_for(self, elements: Int) -> Int:
        """Bytes of so many elements, scales included.

        >>> BLOCK_FORMATS["mxfp4"].nbytes_for(4096), BLOCK_FORMATS["nvfp4"].nbytes_for(4096)
        (2176, 2308)
        """
        return ceil_div(elements * self.bits, 8) + self.scale_nbytes_for(elements)

    @property
    def bits_per_element(self) -> float:
        """Bits of an element and of its share of the scales, in a large tensor.

        >>> BLOCK_FORMATS["mxfp8"].bits_per_element, BLOCK_FORMATS["nf4-double"].bits_per_element
        (8.25, 4.126953125)
        """
        bits = self.bits + self.scale_bits / self.block
        return bits if self.scale_block is None else bits + 32 / (self.block * self.scale_block)


TABLES: dict[str, dict[str, Any]] = table_beside(__file__, "formats.toml")
FORMATS = {name: NumberFormat(name, **row) for name, row in TABLES["numbers"].items()}
BLOCK_FORMATS = {name: BlockFormat(name, **row) for name, row in TABLES["blocks"].items()}

# Whole bytes of what is not a signed floating-point number. e8m0 is a scale: a power of two from 2^-127 to 2^127
# or NaN, without sign and mantissa (OCP Microscaling Formats Specification v1.0, section 5.4).
OTHER_NBYTES = {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "e8m0": 1}

# Of tokens on disk.
TOKEN_NBYTES = {"uint16": 2, "uint32": 4}


def token_dtype(vocab_size: int) -> str:
    """The smallest of uint16 and uint32 that holds every token id.

    >>> token_dtype(65536), token_dtype(65537)
    ('uint16', 'uint32')
    """
    return "uint16" if vocab_size <= 2**16 else "uint32"


_WHOLE_NBYTES = {entry.name: entry.nbytes for entry in FORMATS.values() if entry.bits % 8 == 0} | OTHER_NBYTES


def nbytes_in(elements: Int, dtype: str) -> Int:
    """Bytes of so many elements in a format by name; scales of a block format are counted.

    >>> nbytes_in(1000, "bf16"), nbytes_in(1000, "bool"), nbytes_in(1024, "mxfp8")
    (2000, 1000, 1056)
    """
    whole = _WHOLE_NBYTES.get(dtype)
    if whole is not None:
        return elements * whole
    return (BLOCK_FORMATS if dtype in BLOCK_FORMATS else FORMATS)[dtype].nbytes_for(elements)
