"""The MFU that a person supposes: a share of the peak."""

from __future__ import annotations

from trainledger.spec.problem import InvalidInput, Problem
from trainledger.units import NotAQuantity, parse_number

SMALLEST = 1e-6


def read_mfu(value: object) -> float:
    """A share of the peak, above 0 and at most 1, from a number or a text; raises InvalidInput.

    >>> read_mfu("50%"), read_mfu(0.4)
    (0.5, 0.4)
    """
    try:
        share = parse_number(value) if isinstance(value, str) else value
    except NotAQuantity as error:
        raise InvalidInput([Problem("mfu", value, error.rule, error.nearest)]) from None
    if isinstance(share, bool) or not isinstance(share, int | float) or not abs(share) <= 1e300:  # nan is not either
        raise InvalidInput([Problem("mfu", value, "must be a finite number")])
    if SMALLEST <= share <= 1:
        return float(share)
    if share > 1:
        nearest = share / 100 if share <= 100 else 1
        raise InvalidInput([Problem("mfu", value, "is a share of the peak, above 0 and at most 1", nearest)])
    raise InvalidInput([Problem("mfu", value, f"must be between {SMALLEST:g} and 1", SMALLEST)])
