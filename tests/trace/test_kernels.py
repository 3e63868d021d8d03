"""Traces with CUDA's kernels on fake tensors of a CPU: the engine's models against the closed form, and each rule."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from agreement import facts, live_nbytes, shared_nbytes, unrolled
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_runs import pick, run_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import trainledger as tl
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.step import account
from trainledger.observe.measure.step import rehearse
from trainledger.spec.device import cudnn_takes
from trainledger.spec.optimizers import IMPLEMENTATIONS
from trainledger.spec.run import Run
from trainledger.trace.fakes.kernels import _IN_FP32, _TO_FP32, autocast_as_on_cuda, kernels_of
from trainledger.trace.recorder.storages import dtype_name

pytestmark = pytest.mark.torch

torch.set_num_threads(1)


# The engine's own models against the closed form of an accelerator


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Runs in which the engine does not itself look at the device: see the docstring of `trace.kernels`."""
    llama = draw(st.booleans())
    precision = draw(pick("fp32", "bf16-mixed", "bf16", "fp16-mixed"))
    attention = "sdpa" if precision == "fp16-mixed" else draw(pick("sdpa", "sdpa", "math"))  # for its softmax
    heads = draw(pick(1, 2, 4))
    fields: dict[str, Any] = {
        "attention.n_heads": heads,
        "positions": draw(pick("rope", "learned", "none")),
        "feed_forward.gated": draw(st.booleans()),
        "norm.bias": not llama and draw(st.booleans()),
        "attention.qk_norm": draw(pick(None, None, "head")),
    }
    fields["attention.window"] = draw(pick(None, None, 4))
    # The kernel for fp32 and for masks has no heads that queries share, so the engine would copy them.
    shared = attention == "math" or (precision != "fp32" and fields["attention.window"] is None)
    fields["attention.n_kv_heads"] = draw(pick(1, heads)) if shared else heads
    optimizer = draw(pick("adamw", "sgd", "momentum"))
    return run_of(
        gpt2=not llama, seq_len=draw(pick(8, 32) if fields["attention.window"] else pick(5, 8, 32)),
        model={"max_seq_len": 40, "attention.head_dim": 16, **fields}, precision=precision, attention=attention,
        optimizer=optimizer, global_batch=draw(pick(1, 3)), grad_clip=draw(pick(None, 1.0)),
        activation_checkpointing=draw(pick("none", "full")), dropout=draw(pick(0.0, 0.0, 0.1)),
        **{"optimizer.implementation": draw(pick(*IMPLEMENTATIONS[optimizer]))},
    )  # fmt: skip


def on_cuda(run: Run, kernels: str) -> Ledger:
    """The engine's step with CUDA's kernels; of clipping it asks the device, which is a CPU here."""
    clip: Callable[..., Tensor] = torch.nn.utils.clip_grad_norm_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args, foreach: clip(*args, foreach=True))
        return rehearse(run, kernels=kernels)


@pytest.mark.agreement
@settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)  # fmt: skip
@given(runs(), pick("cuda", "sm90", "sm100"))
def test_the_closed_form_of_cuda_is_the_trace_with_its_kernels(run: Run, kernels: str) -> None:
    predicted, traced = account(run, backend=kernels), on_cuda(run, kernels)
    ours, theirs = unrolled(predicted), unrolled(traced)
    for mine, other in zip(ours, theirs, strict=False):
        assert facts(mine) == facts(other)
    assert len(ours) == len(theirs)
    assert traced.uncounted == ()
    assert predicted.kept_nbytes == traced.kept_nbytes
    assert dict(predicted.resident) == dict(traced.resident)
    loose = shared_nbytes(run)
    for at, (mine_now, other_now) in enumerate(zip(live_nbytes(predicted), live_nbytes(traced), strict=True)):
        assert abs(mine_now - other_now) <= loose, (at, mine_now, other_now)


# Each rule


def of(ledger: Ledger, phase: str) -> list[Entry]:
    return [each for each in ledger if each.phase == phase]


def normed(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Ledger:
    norm = nn.RMSNorm(64, dtype=dtype, **options)
    x_BTD = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), norm)
    return tl.trace(model, x_BTD, loss=lambda y: (y * y).sum(), kernels="cuda")


def test_an_rms_norm_is_one_kernel_that_keeps_its_input_and_a_root_a_row() -> None:
    forward = of(normed(), "forward")
    (norm,) = (each for each in forward if each.path == "1")
    assert (norm.name, norm.kind, norm.basis, norm.source) == (
        "_fused_rms_norm", "norm", "assumed", "aten::_fused_rms_norm"
    )  # fmt: skip
    assert norm.allocated == (("logits and loss", 2 * 8 * 64 * 2), ("activations", 2 * 8 * 4))
    assert (norm.read, norm.written) == (2 * 8 * 64 * 2 + 64 * 2, 2 * 8 * 64 * 2 + 2 * 8 * 4)
    backward = [each for each in of(normed(), "backward") if each.path == "1"]
    assert [each.name for each in backward] == ["_fused_rms_norm_backward"]
    assert dict(backward[0].allocated)["gradients"] == 64 * 2
    assert backward[0].read == 2 * (2 * 8 * 64 * 2) + 2 * 8 * 4 + 64 * 2  # gradient and input, root, weight


def test_the_backward_of_an_rms_norm_has_the_line_of_its_forward() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x_BD: Tensor) -> Tensor:
            return F.rms_norm(x_BD, (64,), self.weight)

    ledger = tl.trace(Norm(), torch.zeros(8, 64, requires_grad=True), loss=lambda y: (y * y).sum(), kernels="cuda")
    lines = {each.name: each.line for each in ledger}
    assert lines["_fused_rms_norm_backward"] == lines["_fused_rms_norm"] != ""
    assert "test_kernels.py:" in lines["_fused_rms_norm"]


def test_an_rms_norm_without_weight_or_with_a_frozen_one_has_no_gradient_of_it() -> None:
    without = [each for each in of(normed(elementwise_affine=False), "backward") if each.path == "1"]
    assert [each.name for each in without] == ["_fused_rms_norm_backward"]
    assert "gradients" not in dict(without[0].allocated)
    norm = nn.RMSNorm(64).requires_grad_(False)
    model = nn.Sequential(nn.Linear(64, 64), norm)
    frozen = tl.trace(model, torch.zeros(2, 64), loss=lambda y: (y * y).sum(), kernels="cuda")
    backward = [each for each in of(frozen, "backward") if each.path == "1"]
    assert [(each.name, dict(each.allocated).get("gradients")) for each in backward] == [
        ("_fused_rms_norm_backward", None)
    ]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_an_rms_norm_of_two_formats_is_taken_apart_as_torch_takes_it() -> None:
    names = [each.name for each in of(normed(torch.float32), "forward") if each.path == "1"]
    assert "_fused_rms_norm" not in names
    assert "rsqrt" in names


def test_a_block_with_an_rms_norm_is_made_again_in_backward() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64), nn.RMSNorm(64), nn.Linear(64, 64))

        def forward(self, x_BD: Tensor) -> Tensor:
            made: Tensor = torch.utils.checkpoint.checkpoint(self.body, x_BD, use_reentrant=False)
            return made

    x_BD = torch.zeros(8, 64, requires_grad=True)
    ledger = tl.trace(Again(), x_BD, loss=lambda y: (y * y).sum(), kernels="cuda")
    assert not ledger.partial
    again = [each.name for each in ledger if each.phase == "recompute"]
    assert [each for each in again if "rng" not in each] == ["_fused_rms_norm", "addmm", "_fused_rms_norm"]


def test_a_layer_norm_in_half_precision_keeps_its_statistics_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), nn.LayerNorm(64, dtype=torch.bfloat16))
    x_BD = torch.zeros(16, 64, dtype=torch.bfloat16)
    for kernels, nbytes in (("cpu", 2), ("cuda", 4)):
        ledger = tl.trace(model, x_BD, loss=lambda y: (y * y).sum(), kernels=kernels)
        (norm,) = (each for each in ledger if each.name == "native_layer_norm")
        assert norm.written == 16 * 64 * 2 + 2 * 16 * nbytes


_FRESH = """
import sys, torch, torch.nn.functional as F, trainledger as tl
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64) if sys.argv[1] == "all" else None
        self.linear, self.dropout = nn.Linear(64, 64), nn.Dropout(0.1)
    def forward(self, x):
        if sys.argv[1] == "relu":
            return F.relu(self.linear(x))
        q = self.linear(self.dropout(self.norm(x))).view(4, 128, 4, 16).transpose(1, 2)
        return attend(q, q, q, is_causal=True) + F.one_hot(x.argmax(-1), 16).view(4, 1, 128, 16)

found = tl.trace(torch.compile(Model()), torch.zeros(512, 64), loss=lambda y: y.mean(), kernels="cuda")
print(found.kept_nbytes, found.notes, "_scaled_dot_product_efficient_attention" in [entry.name for entry in found])
torch.compile(Model(), fullgraph=True, backend="eager")(torch.zeros(512, 64))
"""


# Of all: attention's q and output and the matmul's input in fp32, a mask in bytes, the kernels' sums and seeds.
_OF_ALL = 3 * 4 * 512 * 64 + 512 * 64 + 4 * (4 * 512 + 512) + 20


@pytest.mark.parametrize(("functions", "printed"), [("relu", "32772 () False"), ("all", f"{_OF_ALL} () True")])
@pytest.mark.long
def test_a_first_compiled_step_for_a_gpu_is_one_graph_and_leaves_torch_as_it_was(functions: str, printed: str) -> None:
    # In a process of its own: torch makes its tables of functions once, when Dynamo first asks for them.
    ran = subprocess.run([sys.executable, "-c", _FRESH, functions], capture_output=True, text=True, timeout=600)
    assert (ran.stdout.strip(), ran.returncode) == (printed, 0), ran.stderr


@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
def test_a_forward_in_inference_mode_has_the_flops_of_one_without_gradients(kernels: str) -> None:
    class Model(nn.Sequential):
        without: Any = torch.no_grad

        def forward(self, x_BD: Tensor) -> Tensor:
            with self.without():
                y_BD = super().forward(x_BD)
                q_1HTK = y_BD.view(1, 8, 4, 16).transpose(1, 2)
                return torch.matmul(y_BD, F.scaled_dot_product_attention(q_1HTK, q_1HTK, q_1HTK).reshape(1, 64, 8))

    model = Model(nn.RMSNorm(64), nn.Linear(64, 64), nn.Dropout(0.1))
    ledgers = [tl.trace(model, torch.zeros(8, 64), backward=False, kernels=kernels)]
    model.without = torch.inference_mode
    ledgers.append(tl.trace(model, torch.zeros(8, 64), backward=False, kernels=kernels))
    without, inference = ({kind: ledger.by("kind")[kind] for kind in ("matmul", "attention")} for ledger in ledgers)
    assert without == inference == {"matmul": 2 * 8 * 64 * (64 + 8), "attention": 4 * 4 * 8 * 8 * 16}
    assert [ledger.uncounted for ledger in ledgers] == [(), ()]


def test_dropout_keeps_one_byte_an_element() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1))
    x_BD = torch.zeros(16, 64)
    on_cpu, on_cuda = (
        tl.trace(model, x_BD, loss=lambda y: (y * y).sum(), kernels=kernels).kept_nbytes for kernels in ("cpu", "cuda")
    )
    assert on_cpu - on_cuda == 16 * 64 * 3


@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
def test_optimizers_and_clipping_take_lists_where_torch_does(kernels: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x_BD: Tensor) -> None:
        model(x_BD).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    ledger = tl.trace_step(step, model, torch.zeros(4, 8), optimizers=optimizer, kernels=kernels)
    names = [each.name for each in ledger]
    assert "_foreach_norm" in names  # clipping takes lists of a CPU's tensors as well
    assert ("_foreach_addcdiv_" in names) == (kernels == "cuda")
    assert ("addcdiv_" in names) == (kernels == "cpu")


def test_a_real_clip_on_a_cpu_takes_lists() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model(torch.zeros(4, 8)).sum().backward()
    with tl.meter(model) as meter:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert "_foreach_norm" in [each.name for each in meter.ledger]


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_attention_under_autocast_runs_in_half_precision(low: torch.dtype) -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, q_BHTK: Tensor) -> Tensor:
            q_BHTK = q_BHTK * self.scale
            return F.scaled_dot_product_attention(q_BHTK, q_BHTK, q_BHTK, is_causal=True)

    ledger = tl.trace(Attend(), torch.zeros(2, 4, 16, 32), loss=torch.sum, autocast=low, kernels="cuda")
    assert "_scaled_dot_product_flash_attention" in [each.name for each in ledger]
    plain = tl.trace(Attend(), torch.zeros(2, 4, 16, 32), loss=torch.sum, kernels="cuda")
    assert "_scaled_dot_product_efficient_attention" in [each.name for each in plain]


def test_heads_of_an_odd_width_are_filled_up_for_the_flash_kernel() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

        def forward(self, q_BHTK: Tensor) -> Tensor:
            q_BHTK = q_BHTK * self.scale
            return F.scaled_dot_product_attention(q_BHTK, q_BHTK, q_BHTK, is_causal=True)

    ledger = tl.trace(Attend(), torch.zeros(2, 4, 16, 33, dtype=torch.bfloat16), loss=torch.sum, kernels="cuda")
    (run,) = (each for each in ledger if each.name == "_scaled_dot_product_flash_attention")
    assert run.shape == (8, 16, 16, 40, 40, 1)
    assert [each.name for each in of(ledger, "forward")].count("constant_pad_nd") == 3


@pytest.mark.parametrize(("keys", "padded"), [(16, 0), (12, 1)])
def test_a_mask_is_one_tensor_of_the_scores_format_with_rows_at_multiples_of_8(keys: int, padded: int) -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

        def forward(self, q_BHTK: Tensor, mask_TT: Tensor) -> Tensor:
            q_BHTK = q_BHTK * self.scale
            return F.scaled_dot_product_attention(q_BHTK, q_BHTK, q_BHTK, attn_mask=mask_TT)

    batch = (torch.zeros(2, 4, keys, 32, dtype=torch.bfloat16), torch.zeros(keys, keys, dtype=torch.bool))
    ledger = tl.trace(Attend(), batch, loss=torch.sum, kernels="cuda")
    forward = of(ledger, "forward")
    assert "_scaled_dot_product_efficient_attention" in [each.name for each in forward]
    (mask,) = (each for each in forward if each.name == "where")
    assert mask.written == keys * keys * 2
    assert [each.name for each in forward].count("constant_pad_nd") == padded


# Autocast


def test_autocast_of_a_cpu_takes_what_cuda_takes_in_fp32_and_only_inside() -> None:
    x_BD = torch.randn(4, 8, dtype=torch.bfloat16)
    low: dict[str, Callable[[], Tensor]] = {
        "softmax": lambda: x_BD.softmax(-1), "layer norm": lambda: F.layer_norm(x_BD, [8]),
        "power": lambda: x_BD**2, "sum": lambda: x_BD.sum(), "exp": lambda: x_BD.exp(),
        "log softmax": lambda: F.log_softmax(x_BD, -1), "group norm": lambda: F.group_norm(x_BD, 2),
    }  # fmt: skip
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with autocast_as_on_cuda():
            assert {name: run().dtype for name, run in low.items()} == dict.fromkeys(low, torch.float32)
            assert (x_BD @ x_BD.T).dtype == torch.bfloat16
            assert x_BD.softmax(-1, dtype=torch.bfloat16).dtype == torch.bfloat16
            assert torch.ones(3, dtype=torch.int64).sum().dtype == torch.int64
            assert torch.ones(3, dtype=torch.float64).exp().dtype == torch.float64
        assert {name: run().dtype for name, run in low.items()} == dict.fromkeys(low, torch.bfloat16)
    with autocast_as_on_cuda():
        assert {name: run().dtype for name, run in low.items()} == dict.fromkeys(low, torch.bfloat16)


def test_what_autocast_of_cuda_takes_in_fp32_is_what_torch_s_own_header_says() -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("this torch comes without its headers")
    text = re.sub(r"\\\n", " ", header.read_text())
    for macro, ours in (("AT_FORALL_FP32", _IN_FP32.split()), ("AT_FORALL_FP32_SET_OPT_DTYPE", _TO_FP32.split())):
        (line,) = re.findall(rf"#define {macro}\(_\)(.*)", text)
        theirs = {".".join(re.split(r",\s*", each)) for each in re.findall(r"_\(([\w, ]+)\)", line)}
        assert set(ours) <= theirs
        left = theirs - set(ours)
        named = {each for each in left if "dimname" in each.lower()}  # of tensors with named dims, until torch 2.12
        for each in left - named:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{each}", "AutocastCPU"), each


def test_rms_norms_under_autocast_run_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64))
    ledger = tl.trace(model, torch.zeros(8, 64), loss=lambda y: (y * y).sum(), autocast=torch.bfloat16, kernels="cuda")
    (norm,) = (each for each in ledger if each.name == "_fused_rms_norm")
    assert norm.dtype == "fp32"
    assert norm.written == 8 * 64 * 4 + 8 * 4


@pytest.mark.parametrize(
    ("kernels", "width", "value_width", "given", "kernel"),
    [
        ("sm90", 64, 64, {}, "cudnn"), ("sm100", 128, 128, {"is_causal": False}, "cudnn"),
        ("sm90", 192, 128, {}, "cudnn"), ("sm100", 192, 128, {}, "cudnn"), ("sm90", 192, 160, {}, "cudnn"),
        ("sm100", 192, 160, {}, "efficient"), ("sm90", 256, 256, {}, "cudnn"), ("sm100", 256, 256, {}, "flash"),
        ("sm90", 264, 264, {}, "efficient"), ("sm90", 60, 60, {}, "flash"),
        ("sm100", 64, 64, {"dropout_p": 0.125}, "cudnn"), ("sm100", 64, 64, {"dropout_p": 0.1}, "cudnn"),
        ("sm90", 64, 64, {"dtype": torch.float32}, "efficient"), ("sm90", 64, 64, {"masked": True}, "cudnn"),
        ("cuda", 64, 64, {}, "flash"), ("cuda", 64, 64, {"masked": True}, "efficient"),
        ("sm70", 64, 64, {"dtype": torch.float16}, "efficient"), ("other", 64, 64, {}, "flash"),
        ("sm70", 33, 33, {"dtype": torch.float32}, "efficient"),
        ("sm90", 64, 64, {"only": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]}, "efficient"),
        ("sm90", 64, 64, {"only": SDPBackend.FLASH_ATTENTION}, "flash"),
        ("cuda", 64, 64, {"only": SDPBackend.CUDNN_ATTENTION}, "cudnn"),
    ],
)  # fmt: skip
def test_a_device_takes_the_first_attention_that_it_has_and_the_program_allows(
    kernels: str, width: int, value_width: int, given: dict[str, Any], kernel: str
) -> None:
    dtype, dropout = given.get("dtype", torch.bfloat16), given.get("dropout_p", 0.0)

    class Core(nn.Module):
        def forward(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTW: Tensor) -> Tensor:
            hidden = torch.ones(33, 33, dtype=torch.bool).tril() if given.get("masked") else None
            causal = hidden is None and given.get("is_causal", True)
            with sdpa_kernel(given["only"]) if "only" in given else nullcontext():
                return F.scaled_dot_product_attention(
                    q_BHTK, k_BHTK, v_BHTW, attn_mask=hidden, is_causal=causal, dropout_p=dropout
                )

    heads = [torch.zeros(2, 4, 33, each, dtype=dtype, requires_grad=True) for each in (width, width, value_width)]
    ledger = tl.trace(Core(), heads, loss=lambda y: (y * y).sum(), kernels=kernels)
    (forward,) = (each for each in of(ledger, "forward") if each.kind == "attention")
    assert forward.name == f"_scaled_dot_product_{kernel}_attention"
    (backward,) = (each for each in of(ledger, "backward") if each.kind == "attention")
    assert backward.name == f"{forward.name}_backward"
    if "only" not in given:
        ours = cudnn_takes(kernels, dtype_name(dtype), width, value_width)
        assert ours == (kernel == "cudnn"), "the closed form asks the same"


class Attend(nn.Module):
    def __init__(self, only: list[SDPBackend]) -> None:
        super().__init__()
        self.qkv, self.only = nn.Linear(64, 192, dtype=torch.bfloat16), only

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = self.qkv(x_BTD).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.only):
            return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK)


@pytest.mark.filterwarnings("ignore:the trace is partial")
def test_before_8_bf16_attention_is_unfused_and_flash_alone_is_refused() -> None:
    x_BTD = torch.zeros(2, 128, 64, dtype=torch.bfloat16)
    every = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    unfused = tl.trace(Attend(every), x_BTD, loss=torch.mean, kernels="sm70")
    assert "bmm" in [entry.name for entry in of(unfused, "forward")]
    refused = tl.trace(Attend(every[:1]), x_BTD, loss=torch.mean, kernels="sm70")
    assert "No available kernel: sm70 has none" in refused.partial
    assert "test_kernels.py" in refused.partial


def test_other_backends_are_refused_with_those_that_are_known() -> None:
    with (
        pytest.raises(ValueError, match="kernels must be one of cpu, cuda, sm70, sm90, sm100, other, not 'tpu'"),
        kernels_of("tpu"),
    ):
        pass


@pytest.mark.long
def test_flex_attention_has_a_backward_with_kernels_of_a_gpu() -> None:
    class Flex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x_BTD: Tensor) -> Tensor:
            q_BHTK = self.linear(x_BTD).unflatten(-1, (4, 16)).transpose(1, 2)
            return flex_attention(q_BHTK, q_BHTK, q_BHTK)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it runs unfused, as it is not compiled
        ledger = tl.trace(Flex(), torch.zeros(2, 128, 64), loss=torch.mean, kernels="cuda")
    assert (ledger.partial, [each.phase for each in ledger if each.kind == "attention"]) == (
        "",
        ["forward", "backward"],
    )
