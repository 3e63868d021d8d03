"""Bytes of quantized weights: the account, and real tensors that were quantized, packed, and made wide again."""

import doctest
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models import sizes
from trainledger.engine.nn.cache import Cache
from trainledger.engine.nn.lora import NF4, codes_of, dequantize
from trainledger.engine.nn.transformer import Transformer
from trainledger.ledger.core.graph import Leaf
from trainledger.ledger.serving import account_serving, is_quantized
from trainledger.spec import serving
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.serving import CACHE_FORMATS, WEIGHT_FORMATS, WHOLE, Serving

torch.set_num_threads(1)
# Shapes: O outputs, I inputs, N groups of a row, G elements of a group.
Packed = tuple[Tensor, list[Tensor], Callable[[], Tensor]]  # codes, scales, and the weight made wide again


def pairs(codes_OI: Tensor) -> Tensor:
    """Two codes of 4 bits in a byte, each row from a byte of its own."""
    even = F.pad(codes_OI.to(torch.uint8), (0, codes_OI.shape[1] % 2))
    return even[:, ::2] * 16 + even[:, 1::2]


def apart(packed: Tensor, columns: int) -> Tensor:
    return torch.stack((packed // 16, packed % 16), dim=-1).flatten(1)[:, :columns]


def groups(weight_OI: Tensor, size: int) -> Tensor:
    return F.pad(weight_OI, (0, -weight_OI.shape[1] % size)).unflatten(1, (-1, size))


def int8(weight: Tensor) -> Packed:
    scale = (weight.abs().amax(1, keepdim=True) / 127).half()
    codes = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return codes, [scale], lambda: codes.float() * scale.float()


def fp8(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return codes, [scale], lambda: codes.float() * scale


def fp8_tiles(weight: Tensor) -> Packed:
    rows, columns = weight.shape
    whole = F.pad(weight, (0, -columns % 128, 0, -rows % 128))
    tiles = whole.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = tiles.abs().amax((1, 3)).clamp(min=1e-30) / 448
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return codes, [scale], lambda: codes.float() * spread


def int4(weight: Tensor, size: int, *, zero_points: bool = True) -> Packed:
    columns = weight.shape[1]
    values = groups(weight, size)
    if not zero_points:
        scale = (values.abs().amax(2) / 7).clamp(min=1e-7).half()
        codes = (values / scale.float()[..., None]).round().clamp(-8, 7) + 8
        packed = pairs(codes.flatten(1)[:, :columns])

        def symmetric() -> Tensor:
            wide = groups(apart(packed, columns).float() - 8, size)
            return (wide * scale.float()[..., None]).flatten(1)[:, :columns]

        return packed, [scale], symmetric
    low, high = values.amin(2).clamp(max=0), values.amax(2).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-7).half()
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = ((values / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    packed, zeros = pairs(codes.flatten(1)[:, :columns]), pairs(zero)

    def wide() -> Tensor:
        back = groups(apart(packed, columns).float(), size) - apart(zeros, zero.shape[1]).float()[..., None]
        return (back * scale.float()[..., None]).flatten(1)[:, :columns]

    return packed, [scale, zeros], wide


def nf4(weight: Tensor) -> Packed:
    flat = weight.flatten()
    blocks = F.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    scale = blocks.abs().amax(1)
    levels = torch.tensor(NF4)
    scaled = (blocks / scale.clamp(min=1e-30)[:, None]).contiguous()
    codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2).flatten()[: len(flat)]
    packed = pairs(codes[None])

    def wide() -> Tensor:
        back = F.pad(levels[apart(packed, len(flat)).long()].flatten(), (0, -len(flat) % 64)).view(-1, 64)
        return (back * scale[:, None]).flatten()[: len(flat)].view_as(weight)

    return packed, [scale], wide


def nf4_double(weight: Tensor) -> Packed:
    stored = codes_of(weight, "nf4")
    return stored[0], list(stored[1:]), lambda: dequantize(list(stored), "nf4", *weight.shape, torch.float32)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def four_bits(values: Tensor) -> Tensor:
    """Codes of e2m1: a sign and one of eight magnitudes."""
    size = torch.bucketize(values.abs().contiguous(), (E2M1[1:] + E2M1[:-1]) / 2)
    return size + 8 * (values < 0)


def from_four_bits(codes: Tensor) -> Tensor:
    return E2M1[(codes % 8).long()] * torch.where(codes >= 8, -1.0, 1.0)


def microscaled(weight: Tensor, bits: int) -> Packed:
    """Blocks of 32 with a power of two in a byte; elements in e4m3 or e2m1."""
    columns, values = weight.shape[1], groups(weight, 32)
    largest_power = 8 if bits == 8 else 2
    power = values.abs().amax(2).clamp(min=1e-30).log2().floor() - largest_power
    scale = (power + 127).to(torch.uint8)
    scaled = (values / 2 ** power[..., None]).flatten(1)[:, :columns]
    codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn) if bits == 8 else pairs(four_bits(scaled))

    def wide() -> Tensor:
        back = codes.float() if bits == 8 else from_four_bits(apart(codes, columns))
        return (groups(back, 32) * 2 ** (scale.float() - 127)[..., None]).flatten(1)[:, :columns]

    return codes, [scale], wide


def nvfp4(weight: Tensor) -> Packed:
    columns, values = weight.shape[1], groups(weight, 16)
    above = (values.abs().amax() / (448 * 6)).reshape(1)
    scale = (values.abs().amax(2) / 6 / above).clamp(min=2**-9).to(torch.float8_e4m3fn)
    spread = scale.float()[..., None] * above
    packed = pairs(four_bits((values / spread).flatten(1)[:, :columns]))

    def wide() -> Tensor:
        return (groups(from_four_bits(apart(packed, columns)), 16) * spread).flatten(1)[:, :columns]

    return packed, [scale, above], wide


# How to quantize for real, and how far a normal weight may then be off (root mean square, as a share of its own).
REAL: dict[str, tuple[Callable[[Tensor], Packed], float]] = {
    "int8": (int8, 0.02),
    "fp8": (fp8, 0.04),
    "fp8-block": (fp8_tiles, 0.04),
    "int4": (lambda weight: int4(weight, 128), 0.2),
    "int4-g64": (lambda weight: int4(weight, 64), 0.2),
    "int4-g32": (lambda weight: int4(weight, 32), 0.2),
    "int4-symmetric": (lambda weight: int4(weight, 128, zero_points=False), 0.2),
    "int4-symmetric-g64": (lambda weight: int4(weight, 64, zero_points=False), 0.2),
    "int4-symmetric-g32": (lambda weight: int4(weight, 32, zero_points=False), 0.2),
    "nf4": (nf4, 0.15),
    "nf4-double": (nf4_double, 0.15),
    "mxfp8": (lambda weight: microscaled(weight, 8), 0.06),
    "mxfp4": (lambda weight: microscaled(weight, 4), 0.25),
    "nvfp4": (nvfp4, 0.2),
}
NOT_PACKED_HERE = {"mxfp6"}  # torch has no way to hold 6 bits but to spend 8


def test_every_format_has_a_real_tensor():
    assert {*REAL, *WHOLE, *NOT_PACKED_HERE} == set(WEIGHT_FORMATS)


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 400), seed=st.integers(0, 2**31))
def test_bytes_are_those_of_real_tensors(name, rows, columns, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    quantize, tolerance = REAL[name]
    codes, scales, wide = quantize(weight)
    assert WEIGHT_FORMATS[name].nbytes((rows, columns)) == (codes.nbytes, sum(each.nbytes for each in scales)), name
    if rows * columns > 2000:
        error = (wide() - weight).square().mean().sqrt() / weight.square().mean().sqrt()
        assert error < tolerance


@pytest.mark.parametrize("name", [*WHOLE])
def test_bytes_of_whole_weights(name):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    assert WEIGHT_FORMATS[name].nbytes((3, 5)) == (torch.zeros(3, 5, dtype=dtype).nbytes, 0)


SPEC = from_fields(
    ModelSpec,
    {
        **sizes(V=97, D=96, L=2, H=4, KV=2, F=136, T=64),
        "attention.bias": True,
        "feed_forward": "experts",
        "feed_forward.n_experts": 4,
        "feed_forward.expert_d_ff": 72,
        "feed_forward.n_dense_layers": 1,
        "feed_forward.n_shared": 1,
    },
)


@pytest.mark.parametrize("quantized", ["linear", "experts"])
@pytest.mark.parametrize("name", REAL)
def test_a_whole_model_quantized_for_real(name, quantized):
    serving = Serving(weights=name, batch=3, context=17, quantized=quantized)
    model = Transformer(SPEC).to(torch.bfloat16)
    nbytes = 0
    for path, parameter in model.named_parameters():
        if is_quantized(Leaf(path.partition("layers.")[2].partition(".")[2] or path, tuple(parameter.shape)), serving):
            for matrix in parameter.detach().float().reshape(-1, *parameter.shape[-2:]):
                codes, scales, _ = REAL[name][0](matrix)
                nbytes += codes.nbytes + sum(each.nbytes for each in scales)
        else:
            nbytes += parameter.nbytes
    run = Run(model=SPEC, recipe=Recipe(seq_len=1, global_batch=1, steps=1))
    resident = dict(account_serving(run, serving).resident)
    assert resident["frozen weights"] == nbytes
    assert resident["cache"] == Cache(model.spec, model.embed_tokens.weight, 3, 17).nbytes


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4), ("int2", 2)])
def test_bytes_of_a_quantized_cache_are_those_of_real_tensors(name, bits):
    for heads, width in ((8, 128), (2, 96), (1, 64)):
        keys = torch.randn(3, 5, heads, width)
        values = F.pad(keys, (0, -width % 64)).unflatten(-1, (-1, 64))
        scales, zeros = (each.to(torch.float16) for each in (values.amax(-1), values.amin(-1)))
        codes = torch.zeros(keys.numel() * bits // 8, dtype=torch.uint8)
        assert CACHE_FORMATS[name].nbytes(keys.numel(), width) == codes.nbytes + scales.nbytes + zeros.nbytes
    assert CACHE_FORMATS["fp8"].nbytes(keys.numel(), 64) == keys.to(torch.float8_e4m3fn).nbytes


def test_examples_and_sentences():
    failed, tried = doctest.testmod(serving)
    assert (failed, tried > 1) == (0, True)
    found = Serving(phase="decod", weights="int5", cache="fp9", compute="bf17", quantized="all", batch=0)
    sentences = [str(each) for each in found.problems()]
    assert sentences[0] == "phase = 'decod': must be one of prefill, decode; nearest that works: decode"
    assert sentences[1].endswith("nearest that works: int4")
    assert [each.field for each in found.problems()] == [
        "phase", "weights", "cache", "compute", "quantized", "batch",
    ]  # fmt: skip


def test_what_follows_the_format_of_the_matmuls_is_reported_once():
    serving = Serving(weights="bf17", cache="bf17", compute="bf17")
    assert [each.field for each in serving.problems()] == ["compute"]
