"""Number formats: how many bits, how far they reach, how finely they step."""

from __future__ import annotations

from trainledger.frozen import frozen


@frozen
class NumberFormat:
    """A binary floating-point format given by its exponent and mantissa widths.

    ``ieee_specials`` is False for E4M3, which spends only one bit pattern of the top exponent on NaN and
    none on infinity (OCP 8-bit Floating Point Specification, section 5).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    ieee_specials: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def nbytes(self) -> int:
        return self.bits // 8

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def largest(self) -> float:
        """The largest finite value.

        >>> FORMATS["fp16"].largest, FORMATS["e4m3"].largest, FORMATS["e5m2"].largest
        (65504.0, 448.0, 57344.0)
        """
        if self.ieee_specials:
            return (2.0 - 2.0**-self.mantissa_bits) * 2.0**self.bias
        return (2.0 - 2.0 ** (1 - self.mantissa_bits)) * 2.0 ** (self.bias + 1)

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


FORMATS = {
    each.name: each
    for each in (
        NumberFormat("fp64", 11, 52),
        NumberFormat("fp32", 8, 23),
        NumberFormat("bf16", 8, 7),
        NumberFormat("fp16", 5, 10),
        NumberFormat("e4m3", 4, 3, ieee_specials=False),
        NumberFormat("e5m2", 5, 2),
    )
}
