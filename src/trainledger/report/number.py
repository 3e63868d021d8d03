"""Number formats, and a number in each of them, for a terminal of 80 columns."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from trainledger.dtypes import BLOCK_FORMATS, NumberFormat, Rounded
from trainledger.report.table import table, wrapped
from trainledger.tensors.number import SHOWN, TF32, overflows_from, zero_up_to

_FATES = {"overflow": "overflows", "underflow": "underflows to zero"}


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
    return table([head, "s+e+m", "bytes", "largest", "least normal", "least above 0", "step at 1"], rows,
                 align="llrrrrr")  # fmt: skip


def formats() -> str:
    """The table of all formats, those in blocks included."""
    blocks = [
        [each.name, each.element, each.block, each.scale, f"{each.bits_per_element:.4g}"]
        for each in BLOCK_FORMATS.values()
    ]
    suits = [wrapped(f"{each.name}: {each.suits}.") for each in SHOWN.values()]
    return "\n".join([
        _limits("format", SHOWN.values()), "", *suits, "",
        table(["in blocks", "elements", "block", "scale", "bits per element"], blocks, align="llrlr"),
    ])  # fmt: skip


def one_format(each: NumberFormat) -> str:
    """All that there is to say of one format."""
    specials = {"ieee": "infinities and NaNs", "nan": "one NaN, no infinity", "none": "neither infinity nor NaN"}
    rows = [
        ["bits", f"{each.bits}: sign 1, exponent {each.exponent_bits}, mantissa {each.mantissa_bits}"],
        ["bytes", _nbytes(each)],
        ["largest", f"{each.largest:.17g}"],
        ["smallest normal", f"{each.smallest_normal:.17g}"],
        ["smallest above zero", f"{each.smallest_subnormal:.17g}"],
        ["step from 1", f"{each.epsilon:.17g}"],
        ["rounds to zero", f"up to {zero_up_to(each):.17g}"],
        ["overflows", f"from {overflows_from(each):.17g}"],
        ["counts to", f"{2 ** (each.mantissa_bits + 1):,} without leaving one out"],
        ["decimal digits", f"{(each.mantissa_bits + 1) * math.log10(2):.2g}"],
        ["specials", specials[each.specials]],
        ["suits", each.suits],
    ]
    return table([each.name, ""], rows, align="ll")


def to_json(each: NumberFormat) -> dict[str, Any]:
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
    """Bytes of one element, packed; tf32 is no format of memory, where it stands as fp32."""
    return 4 if each.name == TF32.name else each.bits / 8
