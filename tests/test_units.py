"""Quantities in text: what they mean, what is refused, and that printing and reading agree."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger import units


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
def test_gigabytes_and_gibibytes_are_told_apart(text, nbytes):
    assert units.parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("2w", 1209600), ("1d", 86400), ("90min", 5400), ("0.5h", 1800), ("3ms", 0.003)]
)
def test_times(text, seconds):
    assert units.parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", " ", "T", "15Q", "15 T T", "nan", "inf", "-inf", "1e400", "9" * 5000, "0x10", "--3", "ten", "1e", "²"]
)
@pytest.mark.parametrize("parse", [units.parse_count, units.parse_nbytes, units.parse_seconds, units.parse_number])
def test_what_is_no_quantity_is_refused_with_an_example_of_one(parse, text):
    with pytest.raises(units.NotAQuantity, match="write it like"):
        parse(text)


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
    printed = units.format_seconds(seconds).replace("days", "d")
    assert units.parse_seconds(printed) == pytest.approx(seconds, rel=1e-3)


@given(st.integers(1, 10**18))
def test_printed_bytes_read_back(nbytes):
    number, unit = units.format_nbytes(nbytes).split(" ")
    scale = units.parse_nbytes(f"1{unit}")
    assert float(number) * scale == pytest.approx(nbytes, rel=1e-3)
