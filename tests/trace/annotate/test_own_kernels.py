"""Kernels that programs bring, compile or fetch, and values that they have on their host."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import trainledger as tl
from trainledger.trace.annotate.annotate import annotate
from trainledger.trace.annotate.annotation import Annotation
from trainledger.trace.operators.custom import CUSTOM

torch.set_num_threads(1)


def fake(folder: Path, source: str, ends: str = "") -> Annotation:
    file = folder / "script.py"
    file.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(source))
    found = annotate(file, fake=True, device="cuda")
    assert ends in found.ended if ends else found.ended == "", found.ended
    return found


# Kernels that are compiled from source

COMPILED = """
double = torch.cuda._compile_kernel("__global__ void twice(const float *x, float *y) {}", "twice")
double.set_shared_memory_config(1024)
x, y = torch.ones(256, device="cuda"), torch.empty(256, device="cuda")
double((1, 1, 1), (256, 1, 1), (x, y))
(y * 2).sum()
"""


@pytest.fixture
def own_rule() -> Iterator[None]:
    tl.cost_rule("cuda::twice", kind="elementwise")(lambda x, y, *, out: x.numel())
    yield
    del CUSTOM["cuda::twice"]


def test_a_kernel_of_source_code_is_not_compiled_and_not_counted(tmp_path: Path) -> None:
    found = fake(tmp_path, COMPILED)
    assert found.uncounted == (("cuda::twice", 1, f"{tmp_path}/script.py:7"),)
    assert found.peak_nbytes == 3 * 1024 + 4
    assert found.total.flops == 256 + 256  # of the last line


@pytest.mark.usefixtures("own_rule")
def test_the_flops_of_an_own_kernel_can_be_told(tmp_path: Path) -> None:
    found = fake(tmp_path, COMPILED)
    assert found.uncounted == ()
    assert found.line(7).own.flops == 256


TRITON = """
import triton
import triton.language as tl

@triton.autotune([triton.Config({"SIZE": 64}), triton.Config({"SIZE": 128})], key=["n"])
@triton.jit
def twice(x, y, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

@triton.jit
def thrice(x, y, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, 3 * tl.load(x + at, mask=at < n), mask=at < n)

class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        twice[lambda meta: (triton.cdiv(x.numel(), meta["SIZE"]),)](x, y, x.numel())
        return y

    @staticmethod
    def backward(ctx, g):
        y = torch.empty(g.shape, device=g.device)
        thrice[(4,)](g, y, g.numel(), SIZE=64)
        return y

x = torch.ones(256, device="cuda", requires_grad=True)
Own.apply(x).sum().backward()
"""


def test_kernels_of_triton_are_not_run_and_not_counted(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="comes with a torch for CUDA: make test-torch")
    found = fake(tmp_path, TRITON)
    assert [(name, times) for name, times, _ in found.uncounted] == [("triton::thrice", 1), ("triton::twice", 1)]
    assert found.total.flops == 256
    assert found.peak_nbytes == 2 * 1024 + 4 + 4  # x, y or its gradient, the sum and what backward begins with


# Kernels of a hub

HUB = """
from kernels import get_kernel
attention = get_kernel("kernels-community/flash-attn3")
q, k, v = (torch.ones(2, 64, 4, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in "qkv")
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hugging Face's package where it is installed; else a module of its name, of which nothing is run."""
    try:
        import kernels  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        (tmp_path / "kernels.py").write_text("def get_kernel(repository):\n    raise OSError('no network')\n")
    yield
    sys.modules.pop("kernels", None)


@pytest.mark.usefixtures("hub")
def test_flash_attention_of_a_hub_counts_as_that_of_torch(tmp_path: Path) -> None:
    fetched = fake(tmp_path, HUB + "attention.flash_attn_func(q, k, v).sum().backward()\n")
    other = HUB.replace("kernels-community/flash-attn3", "someone/flash-attention-3")
    inner = fake(tmp_path, other + "attention.flash_attn_interface.flash_attn_func(q, k, v).sum().backward()\n")
    ours = fake(
        tmp_path,
        HUB + "q, k, v = (each.transpose(1, 2) for each in (q, k, v))\n"
        "nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()\n",
    )
    assert fetched.total.flops == ours.total.flops == inner.total.flops
    assert any("flash_attn_func of kernels-community/flash-attn3" in each for each in fetched.notes)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("options", "keys"),
    [("max_seqlen_k=32", 32), ("max_seqlen_k=32, causal=True, window_size=(7, 0)", 8), ("max_seqlen_k=4096", 128)],
)
def test_sequences_behind_each_other_see_the_longest_or_a_window(tmp_path: Path, options: str, keys: int) -> None:
    found = fake(
        tmp_path,
        HUB + "q, k, v = (each.reshape(128, 4, 16) for each in (q, k, v))\n"
        "starts = torch.tensor([0, 40, 128], dtype=torch.int32, device='cuda')\n"
        f"attention.flash_attn_varlen_func(q, k, v, starts, starts, {options})\n",
    )
    assert found.line(9).own.flops == 2 * 2 * 128 * keys * 4 * 16


@pytest.mark.usefixtures("hub")
def test_another_kernel_of_a_hub_says_what_it_is_where_it_is_called(tmp_path: Path) -> None:
    source = "\n".join((HUB, "norm = get_kernel('kernels-community/rms-norm').rms_norm", "norm(q)"))
    fake(tmp_path, source, "script.py:9: rms_norm of kernels-community/rms-norm is compiled code")


# Values on the host

TOKENS = """
import os
import numpy as np
path = os.path.join(os.path.dirname(__file__), "tokens.bin")
(np.arange(1000) % 70).astype(np.int32).tofile(path)
tokens = torch.from_file(path, False, 1000, dtype=torch.int32)
starts = (tokens == 0).nonzero()[:, 0]
"""


def test_tokens_of_a_file_are_counted_and_cut_as_they_are(tmp_path: Path) -> None:
    found = fake(
        tmp_path,
        TOKENS + "assert starts.tolist() == list(range(0, 1000, 70))\n"
        "lengths = torch.empty(15, dtype=torch.int64)\n"
        "lengths[:14] = starts[1:] - starts[:-1]\n"
        "lengths[14] = 20\n"
        "assert lengths.sum().item() == 1000\n"
        "assert lengths.numpy()[-1] == 20\n"
        "batch = tokens[starts[1] : starts[2]].to('cuda')\n"
        "assert batch.shape == (70,)\n",
    )
    assert not [each for each in found.notes if "assumed to be 0" in each]


def test_what_weights_have_done_is_not_known(tmp_path: Path) -> None:
    found = fake(
        tmp_path,
        "count = torch.zeros(3, dtype=torch.int64)\n"
        "count += torch.randn(3).argmax()\n"
        "if count[0] > 0:\n    pass\n"
        "held = torch.empty(3)\n"
        "held[0].item()\n",
    )
    said = [each.partition(" assumed")[0] for each in found.notes if "assumed to be 0" in each]
    assert said == [f"2 values read at {tmp_path}/script.py:5, 8"]


def test_a_default_device_still_makes_empty_tensors(tmp_path: Path) -> None:
    fake(tmp_path, "with torch.device('meta'):\n    assert nn.Linear(8, 8).weight.is_meta\n")


# Own code in backward, and what only a compiler lets pass

OWN = """
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, shift):
        return x * scale + shift

    @staticmethod
    def backward(ctx, g):
        assert g.device == x.device == torch.device("cuda", 0)
        made = torch.zeros(g.shape, device=g.device)
        return made + g, RETURNED

x = torch.ones(8, device="cuda", requires_grad=True)
Own.apply(x, 2.0, 1.0).sum().backward()
assert x.grad.is_cuda
"""


def test_a_backward_makes_tensors_on_the_device_of_its_gradient(tmp_path: Path) -> None:
    fake(tmp_path, OWN.replace("RETURNED", "None, None"))


def test_gradients_that_are_left_out_are_none(tmp_path: Path) -> None:
    whole, short = (fake(tmp_path, OWN.replace("RETURNED", each)) for each in ("None, None", "None"))
    assert short.total == whole.total
    assert any(each.startswith("backward of Own returns 2 gradients of 3 inputs") for each in short.notes)


def test_only_a_program_prints(tmp_path: Path) -> None:
    averaged = """
    mean, weight = torch.zeros(8, device="cuda"), torch.tensor(0.1)
    for step in range(6):
        mean.lerp_(torch.ones(8, device="cuda"), 1 - weight)
        PRINTED
    """
    silent, printing = (fake(tmp_path, averaged.replace("PRINTED", each)) for each in ("pass", "print(mean)"))
    assert not [each for each in silent.findings if "print" in each.what]
    assert [each.line for each in printing.findings if "print" in each.what] == [f"{tmp_path}/script.py:7"]


def test_a_program_that_logs_nvidia_smi_has_none(tmp_path: Path) -> None:
    fake(
        tmp_path,
        "import subprocess\n"
        "assert subprocess.run(['nvidia-smi'], capture_output=True, text=True).stdout == ''\n"
        "assert subprocess.run(['echo', 'here'], capture_output=True, text=True).stdout == 'here\\n'\n",
    )
