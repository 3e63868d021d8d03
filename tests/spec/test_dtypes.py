"""Number formats against torch's own limits and against published claims."""

import doctest

import pytest

from trainledger.spec import dtypes
from trainledger.spec.dtypes import BLOCK_FORMATS, FORMATS, nbytes_in

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


MICROSCALING = {"e3m2": (28.0, 0.25), "e2m3": (7.5, 1.0), "e2m1": (6.0, 1.0)}  # OCP, section 5.3: largest, least normal


def test_every_format_has_a_witness():
    assert set(FORMATS) == {*TORCH, *MICROSCALING}


@pytest.mark.parametrize("name", sorted(MICROSCALING))
def test_limits_of_the_small_formats_are_those_of_their_specification(name):
    each = FORMATS[name]
    assert (each.largest, each.smallest_normal) == MICROSCALING[name]


def test_the_values_of_four_bits_are_the_eight_that_the_specification_lists():
    each = FORMATS["e2m1"]
    magnitudes = {(2.0 ** max(1 - each.bias, e - each.bias)) * (m / 2 + (e > 0)) for e in range(4) for m in range(2)}
    assert sorted(magnitudes) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert (each.smallest_subnormal, each.largest) == (0.5, 6)


@pytest.mark.parametrize("name", sorted(TORCH))
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
    ("shape", "name", "nbytes"), [((4, 8), "fp32", 128), ((4, 8), "bf16", 64), ((49152, 12288), "fp32", 2415919104)]
)
def test_bytes_of_published_tensors(shape, name, nbytes):
    assert shape[0] * shape[1] * FORMATS[name].nbytes == nbytes


def test_published_claims_about_fp16():
    assert FORMATS["fp16"].largest == 65504
    assert FORMATS["fp16"].smallest_subnormal > 1e-8  # so 1e-8 underflows, as published
    assert FORMATS["fp16"].smallest_subnormal < 6e-5  # so 6e-5 does not, whatever is published
    assert FORMATS["bf16"].smallest_normal < 1e-8


@pytest.mark.parametrize("name", ["e2m1", "e3m2", "e2m3"])
def test_what_shares_a_byte_has_no_bytes_of_its_own(name):
    with pytest.raises(ValueError, match=f"{name} has {FORMATS[name].bits} bits"):
        _ = FORMATS[name].nbytes
    assert FORMATS[name].nbytes_for(8) == FORMATS[name].bits


@pytest.mark.parametrize(
    ("name", "bits"),
    [("mxfp8", 8.25), ("mxfp6", 6.25), ("mxfp4", 4.25), ("nvfp4", 4.5), ("nf4", 4.5), ("nf4-double", 4.126953125)],
)
def test_bits_of_an_element_with_its_share_of_the_scales(name, bits):
    # 4.25 bits of MXFP4: OpenAI 2025, gpt-oss model card; 0.127 bits of double quantization: QLoRA, section 3.
    each = BLOCK_FORMATS[name]
    assert each.bits_per_element == bits
    large = 2**24
    assert 8 * (each.nbytes_for(large) - each.tensor_nbytes) == bits * large


def test_a_block_that_is_not_full_has_a_whole_scale():
    assert BLOCK_FORMATS["mxfp4"].nbytes_for(33) == 17 + 2
    assert BLOCK_FORMATS["nvfp4"].nbytes_for(1) == 1 + 1 + 4


@pytest.mark.parametrize("name", [*FORMATS, *BLOCK_FORMATS])
def test_bytes_of_arrays_and_symbols_are_those_of_their_elements(name):
    numpy, sympy = pytest.importorskip("numpy"), pytest.importorskip("sympy")
    sizes = [1, 31, 32, 4096, 100_000]
    exact = [nbytes_in(each, name) for each in sizes]
    assert all(isinstance(each, int) for each in exact)
    assert nbytes_in(numpy.array(sizes), name).tolist() == exact
    n = sympy.Symbol("n", integer=True, positive=True)
    assert [int(sympy.sympify(nbytes_in(n, name)).subs(n, each)) for each in sizes] == exact


def test_block_scaled_bytes_are_those_of_torch_tensors():
    torch = pytest.importorskip("torch")
    elements = torch.zeros(64, 16, dtype=torch.uint8)  # two of four bits in a byte: 64 x 32
    scales = torch.zeros(64, 1, dtype=torch.uint8)
    assert nbytes_in(64 * 32, "mxfp4") == elements.nbytes + scales.nbytes
