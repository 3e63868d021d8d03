"""Layers that torch runs in one kernel for inference: their FLOPs and peaks against the layers without it and the
allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import trainledger as tl
from trainledger.observe.measure.meter import AllocatorPeak

pytestmark = pytest.mark.torch

# B, T, D, H, F: the MLP, the scores and neither are the largest
SIZES = [(4, 16, 64, 4, 2048), (2, 128, 64, 4, 128), (2, 64, 32, 8, 16), (3, 8, 32, 2, 64)]


def peaks(module: nn.Module, batch: dict[str, Any], fused: str) -> None:
    """Hold a traced forward's peak against the allocator's, and its matmuls against the same ones in training mode."""
    ledger = tl.trace(module, batch, backward=False)
    assert [each.name for each in ledger if each.name.endswith(fused)] == [fused]
    assert (ledger.uncounted, ledger.notes) == ((), ())
    module(**batch)
    with AllocatorPeak(torch.device("cpu")) as real:
        module(**batch)
    assert ledger.peak().nbytes - sum(nbytes for _, nbytes in ledger.resident) == real.nbytes
    module.train()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # it knows no flash kernel of a CPU
        module(**batch)
    module.eval()
    assert sum(each.flops for each in ledger if each.kind == "matmul") == counter.get_total_flops()


def masks(batch: int, length: int) -> list[dict[str, Any]]:
    keys = torch.zeros(batch, length, dtype=torch.bool)
    keys[:, -2:] = True
    causal = torch.ones(length, length).triu(1).bool()
    return [{}, {"keys": keys}, {"queries": causal}, {"keys": keys, "queries": causal}]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("norm_first", "dtype"), [(False, torch.float32), (True, torch.float64)])
def test_an_encoder_layer(sizes: tuple[int, ...], norm_first: bool, dtype: torch.dtype) -> None:
    B, T, D, H, F = sizes
    layer = nn.TransformerEncoderLayer(D, H, F, 0.0, batch_first=True, norm_first=norm_first, dtype=dtype)
    layer.eval().requires_grad_(False)
    for mask in masks(B, T):
        names = {"keys": "src_key_padding_mask", "queries": "src_mask"}
        given = {names[name]: each for name, each in mask.items()}
        peaks(layer, {"src": torch.randn(B, T, D, dtype=dtype), **given}, "_transformer_encoder_layer_fwd")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("weights", "average"), [(True, True), (True, False), (False, True)])
def test_attention_alone(sizes: tuple[int, ...], weights: bool, average: bool) -> None:
    B, T, D, H, _ = sizes
    attention = nn.MultiheadAttention(D, H, batch_first=True).eval().requires_grad_(False)
    x = torch.randn(B, T, D)
    for mask in masks(B, T):
        names = {"keys": "key_padding_mask", "queries": "attn_mask"}
        given = {names[name]: each for name, each in mask.items()}
        batch = {"query": x, "key": x, "value": x, "need_weights": weights, "average_attn_weights": average, **given}
        peaks(attention, batch, "_native_multi_head_attention")
