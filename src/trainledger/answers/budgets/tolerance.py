"""By how much a quantity may exceed its lock, and the limits that a test sets itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from trainledger.answers.budgets.summary import PLACED, QUANTITIES, Place, Summary
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.units import NotAQuantity, parse_count, parse_nbytes, parse_number


@frozen
class Tolerance:
    """A tolerance: ``share`` of what is locked, or an ``amount`` of the quantity's own unit."""

    share: Fraction = Fraction(0)
    amount: int = 0

    def of(self, locked: int) -> int:
        """The most that a quantity may be above what is locked.

        >>> Tolerance(share=Fraction("0.01")).of(1050), Tolerance(amount=64).of(1050), Tolerance().of(1050)
        (10, 64, 0)
        """
        return int(self.share * abs(locked)) + self.amount


Tolerances = Mapping[str, Tolerance]
Amount = int | float | str


def read_tolerances(data: object, field: str) -> dict[str, Tolerance]:
    """Tolerances from plain data such as ``{"peak": "1%", "kept": "64MB", "flops": 1000}``; raises `InvalidInput`."""
    if not isinstance(data, Mapping):
        rule = 'must be a table such as { peak = "1%", kept = "64MB" }'
        raise InvalidInput([Problem(field, data, rule)])
    problems: list[Problem] = []
    allowed = {}
    for name, value in data.items():
        if name not in QUANTITIES:
            rule = f"is not a quantity; there are {', '.join(QUANTITIES)}"
            problems.append(Problem(f"{field}.{name}", value, rule, nearest_text(str(name), QUANTITIES)))
            continue
        try:
            allowed[name] = _read(value, QUANTITIES[name][1])
        except (NotAQuantity, ValueError) as error:
            rule = error.rule if isinstance(error, NotAQuantity) else str(error)
            problems.append(Problem(f"{field}.{name}", value, rule))
    if problems:
        raise InvalidInput(problems)
    return allowed


def read_flags(texts: Iterable[str]) -> dict[str, Tolerance]:
    """Tolerances from texts such as ``peak=1%``; raises `InvalidInput`."""
    given: dict[str, Any] = {}
    for each in texts:
        name, equals, value = each.partition("=")
        if not equals:
            raise InvalidInput([Problem("--allow", each, "is written QUANTITY=TOLERANCE", "peak=1%")])
        given[name.strip()] = value.strip()
    return read_tolerances(given, "--allow")


def read_amount(value: object, unit: str) -> int:
    """An amount of a quantity: a whole number, or a text such as ``"1.2GB"`` or ``"3T"``; raises ValueError."""
    if isinstance(value, str):
        return (
            parse_nbytes(value) if unit == "nbytes" else parse_count(_without_unit(value) if unit == "flops" else value)
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300 or value != int(value):
        example = '"1.2GB"' if unit == "nbytes" else '"3T"'
        raise ValueError(f"must be a whole number from 0, or a text such as {example}")
    return int(value)


def _read(value: object, unit: str) -> Tolerance:
    if isinstance(value, str) and value.rstrip().endswith("%"):
        parse_number(value)
        share = Fraction(value.rstrip().removesuffix("%").strip().replace("_", "").replace(",", "")) / 100
        if share < 0:
            raise ValueError("must not be negative")
        return Tolerance(share=share)
    amount = read_amount(value, unit)
    if amount < 0:
        raise ValueError("must not be negative")
    return Tolerance(amount=amount)


def _without_unit(text: str) -> str:
    """FLOPs may be written with their unit: ``3 TFLOP``."""
    lower = text.rstrip().lower()
    return text.rstrip()[: -len("flop")] if lower.endswith("flop") else text


@frozen
class Limit:
    """A quantity with the most that it may be."""

    quantity: str
    most: int
    now: int

    @property
    def is_met(self) -> bool:
        return self.now <= self.most


def read_limits(amounts: Mapping[str, Amount | None]) -> dict[str, int]:
    """The amounts of a budget as numbers, those left out that are None; raises `InvalidInput`.

    >>> read_limits({"peak": "1.2GB", "flops": "3T", "kept": None})
    {'peak': 1200000000, 'flops': 3000000000000}
    """
    limits = {}
    for quantity, amount in amounts.items():
        if amount is None:
            continue
        try:
            limits[quantity] = read_amount(amount, QUANTITIES[quantity][1])
        except ValueError as error:
            raise InvalidInput([Problem(quantity, amount, getattr(error, "rule", str(error)))]) from None
    return limits


def limits_of(found: Summary, limits: Mapping[str, int]) -> list[Limit]:
    """A step's figures with their limits; of what is split by kind, the sum."""
    return [Limit(quantity, most, _total(found, quantity)) for quantity, most in limits.items()]


def _total(found: Summary, quantity: str) -> int:
    if quantity in found.totals:
        return found.totals[quantity]
    if quantity == "uncounted":
        return sum(found.uncounted.values())
    return sum(each.count if quantity == "collectives" else each.payload for each in found.collectives.values())


def largest(found: Summary, quantity: str) -> list[tuple[int, Place]]:
    """The places at which most of a quantity arises, the largest first; [] where no place is known of it."""
    if quantity not in PLACED:
        return []
    amounts = [(each.amount(quantity), each) for each in found.places if each.amount(quantity)]
    return sorted(amounts, key=lambda each: (-each[0], each[1].key))
