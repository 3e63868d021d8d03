"""Numbers given as numbers or as text, read within bounds; each error a sentence."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

from trainledger.spec.device import Device
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import SECONDS_PER_DAY, NotAQuantity, parse_count, parse_number, parse_seconds

LARGEST, SMALLEST = 1e18, 1e-6
_WRITTEN_OUT = 1e9  # from here on a bound is printed as 1e18


def read(
    name: str,
    value: Any,
    parse: Callable[[str], Any],
    problems: list[Problem],
    *,
    least: float = SMALLEST,
    most: float = LARGEST,
) -> Any:
    """A number or a quantity in text within its bounds; None where it is absent or wrong, which is added to problems.

    >>> wrong = []
    >>> read("days", "2w", parse_days, wrong), read("days", "soon", parse_days, wrong), len(wrong)
    (14.0, None, 1)
    """
    if value is None:
        return None
    number = _number(name, value, parse, problems)
    if number is None:
        return None
    if parse is parse_count and number != int(number):
        problems.append(Problem(name, value, "must be a whole number", round(number)))
    elif not least <= number <= most:
        bound = least if number < least else most
        between = f"must be between {_short(least)} and {_short(most)}"
        rule = f"must be at least {_short(least)}" if bound == least and most == LARGEST else between
        near = _short(bound) if bound >= _WRITTEN_OUT else int(bound) if bound >= 1 else bound
        problems.append(Problem(name, value, rule, near))
    else:
        return int(number) if parse is parse_count else float(number)
    return None


def read_mfu(value: object, problems: list[Problem]) -> float | None:
    """A share of the peak FLOP/s, above 0 and at most 1, from a number or a text; None where wrong, as in `read`.

    >>> read_mfu("50%", []), read_mfu(0.4, [])
    (0.5, 0.4)
    """
    share = _number("mfu", value, parse_number, problems)
    if share is None:
        return None
    if SMALLEST <= share <= 1:
        return float(share)
    if share > 1:
        percent_meant = 2 <= share <= 100 and "%" not in str(value)
        nearest = float(f"{share / 100:.6g}") if percent_meant else 1
        problems.append(Problem("mfu", value, "is a share of the peak, above 0 and at most 1", nearest))
    else:
        problems.append(Problem("mfu", value, f"must be between {SMALLEST:g} and 1", SMALLEST))
    return None


def checked_mfu(value: object) -> float:
    """As `read_mfu`; raises InvalidInput where the value is no share."""
    problems: list[Problem] = []
    share = read_mfu(value, problems)
    if share is None:
        raise InvalidInput(problems)
    return share


def read_peak(device: Device, dtype: str | None, problems: list[Problem]) -> tuple[float | None, str]:
    """The peak of a dtype and its name: of bf16 where none is given and the device has it, else fp16, else fp32."""
    peaks = device.peak_flops_per_second
    chosen = dtype or next((each for each in ("bf16", "fp16", "fp32") if each in peaks), "bf16")
    if chosen not in peaks:
        problems.append(Problem("dtype", chosen, f"{device.name} has no known peak for it; known: {', '.join(peaks)}"))
    return peaks.get(chosen), chosen


def _number(name: str, value: object, parse: Callable[[str], Any], problems: list[Problem]) -> float | None:
    if hasattr(value, "__index__") and not isinstance(value, bool):  # of numpy
        value = value.__index__()
    try:
        number = parse(value) if isinstance(value, str) else value
    except NotAQuantity as error:
        problems.append(Problem(name, value, error.rule, error.nearest))
        return None
    if isinstance(number, bool) or not isinstance(number, int | float) or not _finite(number):
        problems.append(Problem(name, value, "must be a finite number"))
        return None
    return number


def _finite(number: float) -> bool:
    try:
        return isfinite(number)
    except OverflowError:  # an int beyond every float
        return False


def _short(value: float) -> str:
    whole = value == int(value) and value < 1e9
    return f"{value:,.0f}" if whole else f"{value:.4g}".replace("e+", "e")


def parse_days(text: str) -> float:
    """Days in text: a plain number, or a time with its unit."""
    try:
        return parse_number(text)
    except NotAQuantity:
        return parse_seconds(text) / SECONDS_PER_DAY


def parse_flops(text: str) -> float:
    """FLOPs in text: "6.3e24", or a count with its letter."""
    try:
        return parse_number(text)
    except NotAQuantity:
        return float(parse_count(text))
