"""Numbers as words: the formats of Plotly's templates and tick labels, as far as figures use them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from math import floor, isclose, log10

_FORMAT = re.compile(r"(\+?)(,?)(?:\.(\d+))?(~?)([defgr%]?)")
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_STEPS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
_DIGITS = 4


def formatted(value: object, form: str = "") -> str:
    """A value in a format of d3: sign, thousands, digits and letter; a text as it is.

    >>> formatted(12345.678, ",.4g"), formatted(0.00012, ".4g"), formatted(3.14159, "+.2f"), formatted(2.0, ",~r")
    ('12,350', '0.00012', '+3.14', '2')
    """
    if not isinstance(value, int | float):
        return "" if value is None else str(value)
    sign, comma, digits, letter = _parts(form)
    if letter in ("f", "e", "%"):
        return format(value, f"{sign}{comma}.{digits or 6}{letter}")
    if letter == "d":
        return format(round(value), f"{sign}{comma}d")
    if isinstance(value, int) and digits is None:
        return format(value, f"{sign}{comma}d")
    return significant(value, int(digits or 12), f"{sign}{comma}")


@lru_cache
def _parts(form: str) -> tuple[str, str, str | None, str]:
    """Sign, comma, digits and letter of a format."""
    found = _FORMAT.fullmatch(form)
    return (found[1], found[2], found[3], found[5]) if found else ("", "", None, "")


def significant(value: float, digits: int = _DIGITS, flags: str = ",") -> str:
    """A number with so many digits, as a power of ten only where it is very large or small.

    >>> significant(8030261248), significant(0.98765), significant(6.3e24), significant(0)
    ('8,030,000,000', '0.9877', '6.3e+24', '0')
    """
    if not value or value != value:
        return "0" if value == 0 else "unknown"
    exponent = floor(log10(abs(value)))
    if not -6 < exponent < 15:
        return format(value, f"{flags.replace(',', '')}.{digits}g")
    rounded = round(value, digits - 1 - exponent)
    shown = format(rounded, f"{flags}.{max(0, digits - 1 - exponent)}f")
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def tick_texts(values: Sequence[float], form: str = "", *, is_log: bool = False) -> list[str]:
    """The labels of an axis' ticks: all with the same decimals, large numbers with the letter of their scale.

    >>> tick_texts([0.0, 0.5, 1.0]), tick_texts([1e6, 1e7], is_log=True), tick_texts([1e21, 1e22], is_log=True)
    (['0', '0.5', '1.0'], ['1M', '10M'], ['10²¹', '10²²'])
    """
    if form:
        return [formatted(each, form) for each in values]
    if is_log:
        return [_short(each) for each in values]
    most = max(map(abs, values), default=0.0)
    if not 1e-4 < most < 1e15:
        return [_short(each) for each in values]
    scale, letter = next((each for each in _STEPS if most >= 2 * each[0]), (1.0, ""))
    scaled = [each / scale for each in values]
    decimals = next((n for n in range(9) if all(isclose(each, round(each, n), abs_tol=1e-9) for each in scaled)), 9)
    return [f"{each:,.{decimals}f}{letter}" if each else "0" for each in scaled]


def _short(value: float) -> str:
    """A round number in a few letters."""
    if not value:
        return "0"
    exponent = floor(log10(abs(value)) + 1e-9)
    if -4 < exponent < 15:
        scale, letter = next((each for each in _STEPS if abs(value) >= 0.999 * each[0]), (1.0, ""))
        return f"{significant(value / scale)}{letter}"
    mantissa = significant(value / 10.0**exponent, 3)
    power = f"10{str(exponent).translate(_RAISED)}"
    return power if mantissa == "1" else f"{mantissa}·{power}"
