"""Traces of small models have the entries that they had before the house was rebuilt."""

import pytest
import torch
from golden_cases import TRACES, trace_of

from golden import frozen, renames

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="written with torch 2.13"),
]


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_what_it_was(name: str) -> None:
    if name == "recurrent" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("what oneDNN's LSTM saves for backward depends on the processor; written with AVX-512")
    assert trace_of(TRACES[name], renames()["words"]) == frozen("traces")[name]
