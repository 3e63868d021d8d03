"""Division upwards: the same of integers of any size, arrays and formulas."""

import doctest
from math import ceil

import numpy as np
import sympy
from hypothesis import given
from hypothesis import strategies as st

from trainledger.spec import division
from trainledger.spec.division import ceil_div, round_up

counts, sizes = st.integers(0, 10**30), st.integers(1, 10**12)


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(division) == (0, 2)


@given(counts, sizes)
def test_pieces_hold_all_and_one_fewer_does_not(a, b):
    assert (ceil_div(a, b) - 1) * b < a <= ceil_div(a, b) * b == round_up(a, b)


@given(st.lists(st.integers(0, 10**9), min_size=1), st.integers(1, 10**6))
def test_arrays_and_formulas_give_what_numbers_give(many, b):
    expected = [ceil(sympy.Rational(each, b)) for each in many]
    assert list(ceil_div(np.array(many), b)) == expected
    a = sympy.Symbol("a", integer=True)
    assert ceil_div(a, b).subs(a, many[0]) == expected[0]
