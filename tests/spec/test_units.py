"""Quantities in text: what they mean, what is refused, and that printing and reading agree."""

import doctest
from math import ceil

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from trainledger.spec import units
from trainledger.spec.units import ceil_div, round_up


def test_the_examples_in_the_docstrings_hold():
    failed, tried = doctest.testmod(units)
    assert tried > 8
    assert failed == 0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("15T", 15 * 10**12), ("70B", 70 * 10**9), ("1e9", 10**9), ("1.5k", 1500), ("1_000", 1000), ("4,096", 4096),
        (" 2 M ", 2_000_000), ("-3", -3), ("1.1T", 1_100_000_000_000),
    ],
)  # fmt: skip
def test_counts_are_decimal(text, count):
    assert units.parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("80GB", 80 * 10**9), ("80GiB", 80 * 2**30), ("1kB", 1000), ("1KiB", 1024), ("0.5 GB", 5 * 10**8)],
)
def test_gigabytes_and_gibibytes_are_distinguished(text, nbytes):
    assert units.parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "rate"),
    [("50GB/s", 50 * 10**9), ("50 gb", 50 * 10**9), ("400Gbit/s", 50 * 10**9), ("1GiB/s", 2**30), ("1kbit", 125)],
)
def test_bits_and_bytes_of_a_rate_are_distinguished(text, rate):
    assert units.parse_bytes_per_second(text) == rate


@pytest.mark.parametrize("text", ["400Gb/s", "400Gb", "1.5Tb/s"])
def test_a_rate_that_may_be_of_bits_or_of_bytes_is_refused_with_both(text):
    number = text.partition("G")[0].partition("T")[0]
    with pytest.raises(units.NotAQuantity, match=rf'write "{number}[GT]bit/s" or "{number}[GT]B/s"'):
        units.parse_bytes_per_second(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("2w", 1209600), ("1d", 86400), ("90min", 5400), ("0.5h", 1800), ("3ms", 0.003)]
)
def test_times(text, seconds):
    assert units.parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", " ", "T", "15Q", "15 T T", "nan", "inf", "-inf", "9" * 5000, "0x10", "--3", "ten", "1e", "²"]
)
@pytest.mark.parametrize(
    "parse",
    [units.parse_count, units.parse_nbytes, units.parse_bytes_per_second, units.parse_seconds, units.parse_number],
)
def test_what_is_no_quantity_is_refused_with_an_example_of_one(parse, text):
    with pytest.raises(units.NotAQuantity, match="write it like"):
        parse(text)


@pytest.mark.parametrize("text", ["1e400", "-1e400", ".1e400", "1e308T"])
def test_what_is_written_well_but_too_large_is_said_to_be_that(text):
    for parse in (units.parse_count, units.parse_amount):
        with pytest.raises(units.NotAQuantity, match="is too large for any quantity"):
            parse(text)


@pytest.mark.parametrize(
    ("text", "parse", "nearest"),
    [
        ("1,5K", units.parse_count, "1.5K"), ("0,5", units.parse_number, "0.5"), ("0,500", units.parse_number, "0.500"),
        ("12,5%", units.parse_number, "12.5%"), ("1,5GB", units.parse_nbytes, "1.5GB"),
        ("2,5h", units.parse_seconds, "2.5h"),
        ("1,5", units.parse_count, 2), ("1,2,3", units.parse_count, None), ("1.234,5", units.parse_number, None),
        ("1234,567", units.parse_number, "1234.567"), (",", units.parse_count, None),
        ("1,,000", units.parse_count, None),
    ],
)  # fmt: skip
def test_a_comma_for_a_point_is_refused_with_the_point(text, parse, nearest):
    with pytest.raises(units.NotAQuantity, match="a comma only parts thousands") as caught:
        parse(text)
    assert caught.value.nearest == nearest


@pytest.mark.parametrize(
    ("text", "value"), [("1,500", 1500), ("12,345,678", 12345678), ("-1,000.5k", -1000500), ("+1,000e3", 10**6)]
)
def test_a_comma_between_thousands_is_read(text, value):
    assert units.parse_count(text) == value


@given(st.integers(-(10**15), 10**15))
def test_what_python_prints_with_commas_reads_back(count):
    assert units.parse_count(f"{count:,}") == count


def test_amounts_print_without_odd_signs_plurals_and_exponents():
    assert [units.format_percent(each) for each in (-1e-9, 0.0, -0.5)] == ["0.0 %", "0.0 %", "-50.0 %"]
    assert [units.format_percent(each, signed=True) for each in (-1e-9, 0.01)] == ["0.0 %", "+1.0 %"]
    assert [units.format_seconds(86400 * each) for each in (1, 2, 12345)] == ["1 day", "2 days", "12,345 days"]
    assert [units.format_count(each) for each in (10**18, 10**16 - 1, 9_999_900)] == ["1e18", "10,000T", "10M"]
    assert [units.counted(each, "step") for each in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]


def test_half_a_thing_is_refused_with_the_nearest_whole():
    with pytest.raises(units.NotAQuantity, match=r"'1\.5' is not a whole number of things; the nearest is 2"):
        units.parse_count("1.5")


@given(st.text())
def test_any_text_is_a_quantity_or_refused(text):
    for parse in (units.parse_count, units.parse_nbytes, units.parse_seconds, units.parse_number):
        try:
            value = parse(text)
        except units.NotAQuantity:
            continue
        assert value - value == 0  # neither nan nor infinite


@given(st.integers(1, 10**15))
def test_a_printed_count_reads_back_within_its_digits(count):
    assert units.parse_number(units.format_count(count).rstrip("TBMK")) > 0
    assert units.parse_count(f"{count}") == count


@given(st.floats(1e-6, 1e9))
def test_a_printed_time_reads_back(seconds):
    printed = units.format_seconds(seconds).replace("days", "d").replace("day", "d")
    assert units.parse_seconds(printed) == pytest.approx(seconds, rel=1e-3)


@given(st.integers(1, 10**18))
def test_printed_bytes_read_back(nbytes):
    number, unit = units.format_nbytes(nbytes).split(" ")
    scale = units.parse_nbytes(f"1{unit}")
    assert float(number) * scale == pytest.approx(nbytes, rel=1e-3)


counts, sizes = st.integers(0, 10**30), st.integers(1, 10**12)


@given(counts, sizes)
def test_pieces_hold_all_and_one_fewer_does_not(a, b):
    assert (ceil_div(a, b) - 1) * b < a <= ceil_div(a, b) * b == round_up(a, b)


@given(st.lists(st.integers(0, 10**9), min_size=1), st.integers(1, 10**6))
def test_arrays_and_formulas_give_what_numbers_give(many, b):
    expected = [ceil(sympy.Rational(each, b)) for each in many]
    assert list(ceil_div(np.array(many), b)) == expected
    a = sympy.Symbol("a", integer=True)
    assert ceil_div(a, b).subs(a, many[0]) == expected[0]
