"""Where formats underflow and overflow, and tf32, by rounding itself and by the bits of fp32."""

import math
import re
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainledger.spec.problem import InvalidInput
from trainledger.tensors.number import SHOWN, TF32, known_format, overflows_from, read_number, zero_up_to


@pytest.mark.parametrize("name", SHOWN)
def test_limits_are_where_rounding_changes(name):
    one = SHOWN[name]
    low, high = zero_up_to(one), overflows_from(one)
    assert one.rounded(low).value == 0
    assert one.rounded(math.nextafter(low, 1.0)).value == one.smallest_subnormal
    assert one.rounded(math.nextafter(high, 0.0)).value == one.largest
    if math.isfinite(high):
        assert one.rounded(high).fate == "overflow"


@pytest.mark.parametrize("name", SHOWN)
def test_whole_numbers_are_exact_up_to_a_power_of_two(name):
    one = SHOWN[name]
    limit = 2 ** (one.mantissa_bits + 1)
    if limit < min(one.largest, 10**6):
        assert all(one.rounded(float(each)).fate == "exact" for each in range(limit + 1))
        assert one.rounded(float(limit + 1)).fate != "exact"


@settings(max_examples=300)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_tf32_is_fp32_with_thirteen_bits_less(number):
    (code,) = struct.unpack("<I", struct.pack("<f", number))
    kept, rest = code >> 13, code & 0x1FFF
    kept += rest > 0x1000 or (rest == 0x1000 and kept & 1)
    ours = TF32.rounded(number)
    assert (int(ours.negative) << 18 | ours.code) == kept
    assert known_format("tf32", floating=True) == "tf32"


def test_a_format_in_the_place_of_a_number_is_not_proposed_again() -> None:
    with pytest.raises(InvalidInput, match=re.escape("is a format, and not a number")) as refused:
        read_number("torch.bfloat16", "largest")
    assert refused.value.problems[0].nearest == 0.1
