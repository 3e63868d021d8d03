"""The ledger of a compiled step on fake tensors, against the compiled run and the eager trace."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_cases import Case, measured, traced
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainledger.ledger.ledger import Ledger
from trainledger.observe.measure.meter import meter
from trainledger.spec.problem import InvalidInput
from trainledger.trace import compiled as compiled_steps
from trainledger.trace.compiled import internal as private_name
from trainledger.trace.compiled import is_compiled
from trainledger.trace.step import trace

torch.set_num_threads(1)
pytestmark = [
    pytest.mark.agreement,
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler on a CPU"
    ),
]


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Stack(nn.Module):
    def __init__(self, layers: int = 2, between: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.between = between or (lambda x: x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x.square().mean()


def batch() -> Tensor:
    return torch.randn(16, 32)


def fused(ledger: Ledger) -> list[Any]:
    return [each for each in ledger if each.name.startswith("cpp_fused")]


# Against the compiled run

QUICK = Case(compiled="blocks", precision="bf16", layers=1)  # the C++ compiler takes up to a minute for a case
ALL = [
    Case(model, compiled, vocab_size, precision, checkpointing)
    for model in ("llama", "gpt", "hf-llama", "hf-gpt2")
    for compiled in ("model", "blocks")
    for vocab_size in (256, 8192)
    for precision in ("fp32", "bf16")
    for checkpointing in (False, True)
]


def as_measured(case: Case) -> None:
    predicted, run = traced(case), measured(case)
    assert predicted.partial == ""
    assert predicted.kept_nbytes == pytest.approx(run.kept, rel=0.002)
    if not case.checkpointing:  # eager checkpointing computes again what is asked for, instead of telling what it holds
        assert run.saved == pytest.approx(run.kept, rel=0.002)
    # oneDNN takes up to this much while it multiplies small bf16 matrices, which no operator shows.
    hidden = 2**18 if case.precision == "bf16" else 0
    assert predicted.peak().nbytes == pytest.approx(run.peak, rel=0.05, abs=hidden)


def test_kept_and_peak_are_those_of_the_compiled_run() -> None:
    as_measured(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_kept_and_peak_are_those_of_the_compiled_run_in_every_case(case: Case) -> None:
    as_measured(case)


# Against the eager trace


@pytest.mark.parametrize("compiled", ["model", "blocks"])
def test_matmuls_are_those_of_the_eager_step(compiled: str) -> None:
    case = Case(compiled=compiled, layers=1)
    compiled_step, eager = traced(case), traced(replace(case, compiled="nothing"))
    for phase in ("forward", "backward"):
        mine, theirs = (
            each.filter(lambda entry: entry.phase == phase and entry.kind in ("matmul", "attention"))  # noqa: B023
            for each in (compiled_step, eager)
        )
        assert mine.flops == theirs.flops
        assert mine.by("path") == theirs.by("path")
    assert compiled_step.model_flops == eager.model_flops
    assert compiled_step.parameters == eager.parameters
    assert dict(compiled_step.resident) == dict(eager.resident)
    assert fused(compiled_step)
    assert compiled_step.total("read") < eager.total("read")


class Checkpointed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


def test_checkpointed_blocks_compute_their_matmuls_again() -> None:
    plain, again = (trace(torch.compile(each), batch()) for each in (Stack(2), Checkpointed(2)))
    matmuls = [each.filter(lambda entry: entry.kind == "matmul") for each in (plain, again)]
    matmul = 2 * 16 * 32 * 128
    assert "recompute" not in matmuls[0].by("phase")
    # The second matmul of the last block alone is needed again: the loss asks for its square.
    of_recompute = matmuls[1].filter(lambda each: each.phase == "recompute")
    assert of_recompute.by("path") == {"layers.*.up": 2 * matmul, "layers.*.down": matmul}
    assert again.model_flops == plain.model_flops
    assert again.kept_nbytes < plain.kept_nbytes


def test_tensors_one_by_one_make_up_the_peak() -> None:
    ledger = traced(Case(compiled="blocks"))
    peak = ledger.peak()
    at = next(index for index, each in enumerate(ledger) if each is peak.entry)
    assert sum(each.nbytes for each in ledger.tensors if each.lives(at)) + peak.entry.scratch == peak.nbytes
    assert all(each.path.startswith("model") for each in ledger.tensors if each.name.startswith("cpp_fused"))


# Which module and line


def test_blocks_that_share_code_have_their_own_paths_and_lines() -> None:
    model = Stack(3)
    for layer in model.layers:
        layer.compile()
    ledger = trace(model, batch())
    kernels = fused(ledger)
    assert len({each.name for each in kernels if each.phase == "forward"}) < 4  # one code for three blocks
    for phase in ("forward", "backward"):
        paths = {
            each.path.split(".up")[0].split(".norm")[0].split(".down")[0] for each in kernels if each.phase == phase
        }
        assert paths == {"layers.0", "layers.1", "layers.2"}
    matmuls = ledger.filter(lambda each: each.kind == "matmul").by("path")
    assert set(matmuls) == {"layers.*.up", "layers.*.down"}
    line = Block.forward.__code__.co_firstlineno + 1
    for each in kernels:
        assert each.line == f"tests/trace/test_compiled_steps.py:{line}"


def test_compiled_and_eager_parts_stand_beside_each_other() -> None:
    model = Stack(2)
    model.layers[0] = torch.compile(model.layers[0])  # type: ignore[assignment]
    assert is_compiled(model)
    assert not is_compiled(Stack(2))
    ledger = trace(model, batch())
    names = {path: {each.name for each in ledger if each.path.startswith(path)} for path in ("layers.0", "layers.1")}
    assert any(each.startswith("cpp_fused") for each in names["layers.0"])
    assert not any(each.startswith("cpp_fused") for each in names["layers.1"])
    assert {"native_layer_norm", "gelu"} <= names["layers.1"]
    assert not any("_orig_mod" in each.path for each in ledger)
    assert not any("_orig_mod" in each.name for each in ledger.tensors)


def test_a_compiled_function_of_an_eager_model_is_found() -> None:
    ledger = trace(Stack(2, torch.compile(lambda x: F.silu(x) * 2 + 1)), batch())
    # Before torch 2.12 the kernel of backward has operations of the forward again, which are entries of their own.
    phases = [each.phase for each in fused(ledger) if each.phase != "recompute"]
    assert phases == ["forward", "forward", "backward", "backward"]


def test_a_graph_break_is_said_with_its_line() -> None:
    def between(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    model = Stack(1, between)
    ledger = trace(torch.compile(model), batch())
    line = between.__code__.co_firstlineno + 1
    (note,) = ledger.notes
    assert note.startswith(f"graph break at tests/trace/test_compiled_steps.py:{line}: ")
    assert len({each.name for each in fused(ledger)}) > 1
    assert ledger.matmul_flops == trace(Stack(1), batch()).matmul_flops


# Real and fake do not meet


def test_the_real_model_stays_as_it_is() -> None:
    model = Stack(2)
    compiled = torch.compile(model)
    x = batch()
    expected = model(x).item()
    assert compiled(x).item() == pytest.approx(expected, rel=1e-5)
    before = trace(compiled, x)
    assert compiled(x).item() == pytest.approx(expected, rel=1e-5)
    assert fused(before)
    assert before.entries == trace(compiled, x).entries


def test_sizes_that_may_vary_are_those_of_the_batch() -> None:
    model = Stack(1)
    varying, fixed = (trace(torch.compile(model, dynamic=each), batch()) for each in (True, False))
    assert varying.kept_nbytes == fixed.kept_nbytes
    assert varying.by("kind")["matmul"] == fixed.by("kind")["matmul"]
    assert varying.by("phase")["recompute"] == fixed.by("phase")["recompute"]


def test_a_compiled_optimizer_is_one_kernel() -> None:
    model = Stack(1)
    optimizer = torch.optim.AdamW(model.parameters())
    eager = trace(model, batch(), optimizer=optimizer)
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    ledger = trace(model, batch(), optimizer=optimizer)
    update = [each for each in ledger if each.phase == "optimizer"]
    assert len(update) == 1
    assert update[0].name.startswith("cpp_fused")
    # Each parameter and both of its moments are read and written, and its gradient read.
    values = 4 * eager.parameters
    assert 7 * values <= update[0].read + update[0].written < 7 * values + 100
    assert [each for each in ledger if each.phase != "optimizer"] == [
        each for each in eager if each.phase != "optimizer"
    ]


def test_micro_batches_keep_the_same_each() -> None:
    once, twice = (trace(torch.compile(Stack(1)), batch(), grad_accum=count) for count in (1, 2))
    assert twice.kept_nbytes == once.kept_nbytes
    assert twice.matmul_flops == 2 * once.matmul_flops


# Metered as they really run


INPUT = torch.linspace(-2.0, 2.0, 16 * 32).reshape(16, 32)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(INPUT).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("whole", [False, True])
def test_a_real_compiled_step_is_recorded_as_it_runs(whole: bool) -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Stack(2)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for layer in model.layers:
            if not whole:
                layer.compile()
        compiled = torch.compile(model) if whole else model
        stepped(compiled, optimizer)
        made.append((model, compiled, optimizer))
    (model, compiled, optimizer), (other, of_other, its_optimizer) = made
    with meter(compiled, optimizer) as metered:
        stepped(compiled, optimizer)
    found = metered.ledger
    # The same bits as without the meter, also of the step after it.
    stepped(of_other, its_optimizer)
    for _ in range(2):
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
        stepped(compiled, optimizer)
        stepped(of_other, its_optimizer)
    # What the trace says, kernel by kernel, and with the time that each took.
    expected = trace(compiled, INPUT, optimizer=optimizer)
    assert fused(found)
    assert [(each.name, each.phase, each.flops, each.read, each.written) for each in fused(found)] == [
        (each.name, each.phase, each.flops, each.read, each.written) for each in fused(expected)
    ]
    assert found.matmul_flops == expected.matmul_flops
    assert found.kept_nbytes == expected.kept_nbytes
    assert found.peak().nbytes == expected.peak().nbytes
    assert all(each.seconds is not None for each in fused(found))
    assert sum(each.seconds for each in fused(found)) > 0
    assert found.notes == ()


# What cannot be said


def test_recording_a_real_compiled_model_where_it_cannot_be_followed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_steps, "has_all_names", lambda: False)
    model = Stack(2)
    for layer in model.layers:
        layer.compile()
    with meter(model) as metered:
        model(batch()).backward()
    assert metered.ledger.notes == (
        "layers.0 and 1 more are compiled, and ran eagerly while each operation was recorded",
    )
    assert not fused(metered.ledger)


def test_what_a_backend_cannot_compile_is_accounted_for_as_eager_and_said() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such device")

    ledger = trace(torch.compile(Stack(1), backend=backend), batch())
    assert any("accounted for as eager" in each and "no such device" in each for each in ledger.notes)
    assert ledger.kept_nbytes == trace(Stack(1), batch()).kept_nbytes


def test_allocations_written_in_cpp_are_refused_by_name() -> None:
    ledger = trace(torch.compile(Stack(1), options={"cpp_wrapper": True}), batch())
    assert any("cpp_wrapper = true" in each and "nearest that works: false" in each for each in ledger.notes)


def test_a_name_that_this_torch_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiled_steps._NAMES, "graphs", ("torch._inductor.graph", "GraphLowering", ("no_such_name",)))
    private_name.cache_clear()
    with pytest.raises(InvalidInput, match=r"torch._inductor.graph.GraphLowering.no_such_name: is needed"):
        private_name("graphs")
    private_name.cache_clear()


def test_the_aot_backend_without_kernels_keeps_what_its_partition_keeps() -> None:
    ledger = trace(torch.compile(Stack(1), backend="aot_eager"), batch())
    assert not fused(ledger)
    assert ledger.notes == ()
    assert ledger.matmul_flops == trace(Stack(1), batch()).matmul_flops
