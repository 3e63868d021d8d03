"""Tolerances and amounts as people write them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from trainledger.answers.budgets.compare import Row, Tolerance, read_amount, read_flags, read_tolerances
from trainledger.spec.problem import InvalidInput


def test_shares_and_amounts() -> None:
    allowed = read_tolerances({"peak": "0.1%", "kept": "64MiB", "flops": "2 MFLOP", "parameters": 7}, "allow")
    assert allowed["peak"] == Tolerance(share=Fraction(1, 1000))
    assert [allowed[name].of(10**9) for name in ("peak", "kept", "flops", "parameters")] == [10**6, 2**26, 2 * 10**6, 7]
    assert read_flags(["peak=0.1%", " kept = 64MiB "]) == {name: allowed[name] for name in ("peak", "kept")}
    # A share is exact however it is written: 0.1 % of 10^18 is no float's rounding of it.
    assert Tolerance(share=Fraction("0.1") / 100).of(10**18 + 999) == 10**15


@pytest.mark.parametrize(
    ("change", "verdict"), [(0, "same"), (10, "within"), (-10, "within"), (11, "more"), (-11, "less")]
)
def test_the_tolerance_itself_is_allowed(change: int, verdict: str) -> None:
    assert (
        Row("peak", "peak memory", 1000, 1000 + change, Tolerance(share=Fraction(1, 100)).of(1000)).verdict == verdict
    )


def test_what_is_no_tolerance() -> None:
    for given, sentence in (
        ({"pek": "1%"}, "allow.pek = '1%': is not a quantity; .*; nearest that works: peak"),
        ({"peak": "-1%"}, "must not be negative"),
        ({"peak": "-1MB"}, "must not be negative"),
        ({"peak": "much"}, "is not a number of bytes"),
        ({"kept": "a lot %"}, "is not a number"),
        ({"flops": 1.5}, "must be a whole number"),
        ({"flops": True}, "must be a whole number"),
        ({"flops": None}, "must be a whole number"),
        ({"peak": float("inf")}, "must be a whole number"),
        (3, 'must be a table such as { peak = "1%"'),
    ):
        with pytest.raises(InvalidInput, match=sentence):
            read_tolerances(given, "allow")
    with pytest.raises(InvalidInput, match="is written QUANTITY=TOLERANCE"):
        read_flags(["peak"])


def test_amounts_of_a_budget() -> None:
    assert read_amount("1.2GB", "nbytes") == 1_200_000_000
    assert read_amount("3 TFLOP", "flops") == read_amount("3T", "flops") == read_amount(3e12, "flops") == 3 * 10**12
    assert read_amount("8B", "count") == 8 * 10**9
