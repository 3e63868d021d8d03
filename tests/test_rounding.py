"""Rounding into every format against torch, Python's struct, and the nearest of all values of a format."""

import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainledger.spec.dtypes import FORMATS

TORCH = {"bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
SMALL = {"e3m2", "e2m3", "e2m1", "e4m3", "e5m2"}

# Numbers that fp32 holds, so that no other rounding comes before: any, and those near what small formats hold.
SINGLES = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-1000, 1000, width=32),
    st.builds(lambda m, e: math.ldexp(m, e), st.integers(-2048, 2048), st.integers(-30, 6)),
)


@pytest.mark.parametrize("name", TORCH)
@settings(max_examples=400)
@given(number=SINGLES)
def test_as_torch_casts(name, number):
    torch = pytest.importorskip("torch")
    cast = torch.tensor(number, dtype=torch.float32).to(getattr(torch, TORCH[name]))
    ours, theirs = FORMATS[name].rounded(number), cast.double().item()
    if name == "e4m3" and ours.fate == "overflow" and torch.__version__ < (2, 13):
        assert math.isnan(theirs)  # the largest value since 2.13
        return
    assert ours.value == theirs
    assert math.copysign(1, ours.value) == math.copysign(1, theirs)
    integer = cast.view(torch.uint8 if FORMATS[name].bits == 8 else torch.int16).item() % 2 ** FORMATS[name].bits
    assert "".join(ours.bits) == format(integer, f"0{FORMATS[name].bits}b")


@settings(max_examples=400)
@given(number=st.floats(allow_nan=False, allow_infinity=False))
def test_as_struct_packs(number):
    double, single = FORMATS["fp64"].rounded(number), FORMATS["fp32"].rounded(number)
    assert (double.value, double.fate) == (number, "exact" if abs(number) >= 2**-1022 or not number else "subnormal")
    assert "".join(double.bits) == f"{struct.unpack('>Q', struct.pack('>d', number))[0]:064b}"
    try:
        packed = struct.pack(">f", number)
    except OverflowError:
        assert (single.fate, abs(single.value)) == ("overflow", math.inf)
        return
    assert single.value == struct.unpack(">f", packed)[0]
    assert "".join(single.bits) == f"{struct.unpack('>I', packed)[0]:032b}"


@pytest.mark.parametrize("name", sorted(SMALL))
@settings(max_examples=200)
@given(number=SINGLES)
def test_no_value_of_the_format_is_nearer(name, number):
    each = FORMATS[name]
    values = [each.value_of(code) for code in range(each._last + 1)]
    assert values == sorted(set(values))
    assert (values[0], values[-1]) == (0, each.largest)
    rounded = each.rounded(number)
    if rounded.fate == "overflow":
        assert abs(number) >= each.largest + each.rounded(each.largest).spacing / 2
        assert abs(rounded.value) == (math.inf if each.specials == "ieee" else each.largest)
        return
    least = min(abs(abs(number) - value) for value in values)
    nearest = [code for code, value in enumerate(values) if abs(abs(number) - value) == least]
    assert rounded.code in nearest
    assert len(nearest) == 1 or rounded.code % 2 == 0


@pytest.mark.parametrize("name", FORMATS)
def test_limits_round_to_themselves_and_halves_to_even(name):
    each = FORMATS[name]
    for limit in (each.largest, each.smallest_normal, 1.0, 1 + each.epsilon):
        rounded = each.rounded(limit)
        assert (rounded.value, rounded.fate, rounded.relative_error) == (limit, "exact", 0)
    assert each.rounded(1.0).spacing == each.epsilon
    least = each.rounded(each.smallest_subnormal)
    assert (least.value, least.fate) == (each.smallest_subnormal, "subnormal")
    if name != "fp64":
        assert each.rounded(each.smallest_subnormal / 2).fate == "underflow"
        assert each.rounded(1 + each.epsilon / 2).value == 1
        assert each.rounded(1 + 1.5 * each.epsilon).value == 1 + 2 * each.epsilon
        beyond = each.rounded(-4 * each.largest)
        assert beyond.fate == "overflow"
        assert beyond.value == (-math.inf if each.specials == "ieee" else -each.largest)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_only_finite_numbers_are_rounded(number):
    with pytest.raises(ValueError, match="is not a finite number"):
        FORMATS["fp16"].rounded(number)
