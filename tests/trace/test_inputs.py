"""Inputs from text: what is one, and what is said of what is none."""

from __future__ import annotations

import pytest
import torch

from trainledger.spec.problem import InvalidInput
from trainledger.trace.target import MOST_DIMS, dtype_named, floating_dtype_named, input_of

pytestmark = pytest.mark.torch


def test_as_many_dims_as_torch_computes_with() -> None:
    most = input_of(f"fp32[{','.join(['1'] * MOST_DIMS)}]")[1]
    assert (most + most).dim() == MOST_DIMS
    with pytest.raises(InvalidInput, match="has 2,000 dims, and torch computes with 64"):
        input_of(f"fp32[{','.join(['1'] * 2000)}]")


@pytest.mark.parametrize("name", ["uint1", "int7", "bits8", "bits1x8", "quint8", "qint32", "float4_e2m1fn_x2"])
def test_formats_that_torch_has_a_name_for_and_no_more(name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip("this torch has no such name")
    with pytest.raises(InvalidInput, match=f"= '{name}': is a format that torch cannot make or read tensors of"):
        input_of(f"{name}[2,8]")


@pytest.mark.parametrize("name", ["fp32", "bool", "e4m3", "int16", "uint16", "complex64", "torch.half", "float64"])
def test_formats_that_can_be_read(name: str) -> None:
    assert input_of(f"{name}[2]")[1].dtype is dtype_named(name, "dtype")


def test_formats_that_a_model_is_built_in() -> None:
    names = ("float", "bf16", "torch.half", "fp64")
    found = [floating_dtype_named(each, "--dtype") for each in names]
    assert found == [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    before = torch.get_default_dtype()
    for each in found:
        torch.set_default_dtype(each)
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ["int8", "complex64", "e4m3", "bool", "quint8", "fp33"])
def test_formats_that_no_model_is_built_in(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"--dtype = '{name}': "):
        floating_dtype_named(name, "--dtype")
