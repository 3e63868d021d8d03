"""Number formats against torch's own limits and against published claims."""

import doctest

import pytest

from trainledger import dtypes
from trainledger.dtypes import FORMATS

TORCH = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}


def test_the_examples_in_the_docstrings_hold():
    failed, tried = doctest.testmod(dtypes)
    assert tried > 1
    assert failed == 0


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_limits_are_those_of_torch(name):
    torch = pytest.importorskip("torch")
    limits, ours = torch.finfo(getattr(torch, TORCH[name])), FORMATS[name]
    assert ours.largest == limits.max
    assert ours.smallest_normal == limits.tiny
    assert ours.epsilon == limits.eps
    assert ours.bits == limits.bits
    assert ours.nbytes == getattr(torch, TORCH[name]).itemsize


@pytest.mark.parametrize("name", ["bf16", "fp16", "e5m2", "e4m3"])
def test_the_smallest_subnormal_is_the_last_value_above_zero(name):
    torch = pytest.importorskip("torch")
    dtype, smallest = getattr(torch, TORCH[name]), FORMATS[name].smallest_subnormal
    assert torch.tensor(smallest).to(dtype).float().item() == smallest
    assert torch.tensor(0.49 * smallest).to(dtype).float().item() == 0


@pytest.mark.parametrize(
    ("shape", "name", "nbytes"),
    [((4, 8), "fp32", 128), ((4, 8), "bf16", 64), ((49152, 12288), "fp32", 2415919104)],
)
def test_bytes_of_published_tensors(shape, name, nbytes):
    assert shape[0] * shape[1] * FORMATS[name].nbytes == nbytes


def test_published_claims_about_fp16():
    assert FORMATS["fp16"].largest == 65504
    assert FORMATS["fp16"].smallest_subnormal > 1e-8  # so 1e-8 underflows, as published
    assert FORMATS["fp16"].smallest_subnormal < 6e-5  # so 6e-5 does not, whatever is published
    assert FORMATS["bf16"].smallest_normal < 1e-8
