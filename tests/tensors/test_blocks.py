"""Numbers under the scale of a block: worked examples, the bound on the error, and the scale's rule."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.spec.dtypes import FORMATS
from trainledger.spec.problem import InvalidInput
from trainledger.tensors.number import NF4, SHOWN_BLOCKS, formats_and_blocks, in_block

magnitudes = st.floats(2.0**-60, 2.0**60)


@pytest.mark.parametrize(
    ("name", "number", "largest", "scale", "element"),
    [
        ("mxfp4", 5.0, 6.0, 1.0, 4.0),  # a tie between 4 and 6 goes to the even mantissa
        ("mxfp4", 7.0, 7.0, 1.0, 6.0),  # cut
        ("mxfp4", 0.3, 0.1, 0.0625, 4.0),  # the number is the largest itself: 4.8 x 1/16
        ("mxfp8", 448.0, 448.0, 1.0, 448.0),
        ("mxint8", 1.0, 1.0, 1.0, 1.0),
        ("mxint8", -1.999, 1.0, 1.0, -127 / 64),
        ("nvfp4", 1.0, 3.0, 0.5, 2.0),
        ("nf4", -0.5, 2.0, 2.0, NF4[4]),
        ("int4", 3.0, 7.0, 1.0, 3.0),
    ],
)
def test_worked_examples(name: str, number: float, largest: float, scale: float, element: float) -> None:
    found = in_block(name, number, largest)
    assert (found.scale, found.element) == (scale, element)


@given(st.sampled_from(sorted(SHOWN_BLOCKS)), magnitudes, magnitudes, st.booleans())
def test_an_element_is_as_near_as_its_format_allows(name: str, number: float, largest: float, minus: bool) -> None:
    one, mirrored = in_block(name, number, largest), in_block(name, -number, largest)
    if name != "nf4":  # whose values are not the same on both sides
        assert mirrored.value == -one.value
    if one.scale == 0 or one.cut:
        return
    block = SHOWN_BLOCKS[name]
    if block.element in FORMATS:
        element = FORMATS[block.element]
        half = element.rounded(number / one.scale).spacing / 2
    else:
        half = {"nf4": (1 - NF4[-2]) / 2 + 0.05, "mxint8": 1 / 128}.get(name, 0.5)
    assert abs(one.value - number) <= one.scale * half * (1 + 1e-6)


@given(magnitudes)
def test_the_scale_of_mx_formats_is_a_power_of_two_under_which_the_largest_nearly_fills_the_elements(largest):
    for name in ("mxfp8", "mxfp6", "mxfp4"):
        found = in_block(name, largest, 0.0)
        assert math.frexp(found.scale)[0] == 0.5
        most = FORMATS[SHOWN_BLOCKS[name].element].largest
        assert most / 2 < largest / found.scale < 2 * most


def test_zero_alone_stays_zero_and_a_negative_magnitude_is_refused() -> None:
    assert all(in_block(name, 0.0, 0.0).value == 0 for name in SHOWN_BLOCKS)
    with pytest.raises(InvalidInput, match="is a magnitude, so it must be at least 0"):
        in_block("mxfp4", 0.0, -1.0)


def test_names_mean_formats_and_blocks() -> None:
    assert [len(each) for each in formats_and_blocks([])] == [10, len(SHOWN_BLOCKS)]
    assert formats_and_blocks(["nf4"]) == ([], ["nf4"])
    assert formats_and_blocks(["int8"])[1] == []  # the integer, not the format in blocks
