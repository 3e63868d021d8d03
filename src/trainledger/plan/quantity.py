"""Numbers that a person gives to a question: as a number or as text, within bounds, each complaint a sentence."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

from trainledger.spec.problem import Problem
from trainledger.units import SECONDS_PER_DAY, NotAQuantity, parse_count, parse_number, parse_seconds

LARGEST, SMALLEST = 1e18, 1e-6
_WRITTEN_OUT = 1e9  # from here on a bound is told as 1e18


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
    if hasattr(value, "__index__") and not isinstance(value, bool):  # of numpy
        value = value.__index__()
    try:
        number = parse(value) if isinstance(value, str) else value
    except NotAQuantity as error:
        problems.append(Problem(name, value, error.rule, error.nearest))
        return None
    if isinstance(number, bool) or not isinstance(number, int | float) or not isfinite(number):
        problems.append(Problem(name, value, "must be a finite number"))
    elif parse is parse_count and number != int(number):
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
