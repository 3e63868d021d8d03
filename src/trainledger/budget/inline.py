"""Budgets inside a test: amounts that a step may cost at most."""

from __future__ import annotations

from collections.abc import Mapping

from trainledger.budget.allow import read_amount
from trainledger.budget.footprint import PLACED, QUANTITIES, Footprint, Place
from trainledger.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem

Amount = int | float | str


@frozen
class Limit:
    """A quantity with the most that it may be."""

    quantity: str
    most: int
    now: int

    @property
    def is_kept(self) -> bool:
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


def held(found: Footprint, limits: Mapping[str, int]) -> list[Limit]:
    """A step's figures beside their limits; of what is split by kind, the sum."""
    return [Limit(quantity, most, _total(found, quantity)) for quantity, most in limits.items()]


def _total(found: Footprint, quantity: str) -> int:
    if quantity in found.totals:
        return found.totals[quantity]
    if quantity == "uncounted":
        return sum(found.uncounted.values())
    return sum(each.count if quantity == "collectives" else each.payload for each in found.collectives.values())


def largest(found: Footprint, quantity: str) -> list[tuple[int, Place]]:
    """The places at which most of a quantity arises, the largest first; [] where no place is known of it."""
    if quantity not in PLACED:
        return []
    amounts = [(each.amount(quantity), each) for each in found.places if each.amount(quantity)]
    return sorted(amounts, key=lambda each: (-each[0], each[1].key))
