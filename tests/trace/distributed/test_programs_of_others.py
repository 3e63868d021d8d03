"""Ranks of programs as others write them: compiled parts, a GPU that is asked about, printed losses, masks, copies."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import trainledger as tl
from thinned import thinned
from trainledger.cli import main
from trainledger.spec.problem import InvalidInput
from trainledger.trace.distributed import trace_rank
from trainledger.trace.recorder.source_lines import Refused

pytestmark = pytest.mark.torch

RANKS = 8


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


def trained(model: nn.Module, make: Any = torch.optim.AdamW, batch: Any = None, after: Any = None) -> None:
    """A loop that never ends by itself."""
    optimizer = make(model.parameters())
    for _ in range(100):
        loss = model(torch.randn(4, 8) if batch is None else batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(loss)


# Compiled with one graph


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def blocks_of_one_graph() -> None:
    """torchtitan's way: each block compiled with fullgraph, then sharded."""
    dist.init_process_group("nccl")
    block = Block()
    block.compile(fullgraph=True)
    trained(fully_shard(block))


class Compiled(torch.optim.Optimizer):
    """nanochat's way: an optimizer whose arithmetic is one compiled function."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @staticmethod
    @torch.compile(dynamic=False, fullgraph=True)
    def update(p: Tensor, g: Tensor, average: Tensor, rate: Tensor) -> None:
        average.lerp_(g, 1 - rate)
        p.sub_(rate * average)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["average"] = torch.zeros_like(p)
            self.update(p, p.grad, state["average"], torch.tensor(0.9))


def optimizer_of_one_graph() -> None:
    dist.init_process_group("nccl")
    trained(nn.Linear(8, 8, bias=False), Compiled)


@pytest.mark.long
def test_blocks_that_are_one_graph_are_followed_as_compiled() -> None:
    ledger = trace_rank(blocks_of_one_graph, world_size=RANKS)
    assert ledger.partial == ""
    matmul = 2 * 4 * 8 * 32
    assert ledger.matmul_flops == 2 * 3 * matmul - matmul  # no gradient of the batch
    assert {each.name for each in ledger if each.kind == "collective"} == {"all_gather", "reduce_scatter"}


def test_an_optimizer_that_is_one_graph_has_its_state_before_the_step() -> None:
    ranks = trace_rank(optimizer_of_one_graph, world_size=RANKS)
    model = nn.Linear(8, 8, bias=False)
    alone = tl.trace(model, torch.zeros(4, 8), loss=lambda y: y.square().mean(), optimizer=Compiled(model.parameters()))
    for ledger in (ranks, alone):
        assert dict(ledger.resident)["optimizer state"] == dict(ledger.resident)["parameters"]
        assert not any("first step" in each for each in ledger.notes)
    fused = [each for each in ranks if each.phase == "optimizer" and each.name.startswith("cpp_fused")]
    assert len(fused) == 1


@pytest.mark.parametrize(
    "reduce",
    thinned([lambda x: x.var(-1).sum(), lambda x: x.logsumexp(-1).sum(), lambda x: x.norm(), lambda x: x.mean()]),
)
def test_a_reduction_counts_once_in_a_compiled_kernel(reduce: Any) -> None:
    class Reduced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = reduce(x * self.weight)
            return result

    eager, compiled = (
        tl.trace(each, torch.zeros(64, 16), backward=False) for each in (Reduced(), torch.compile(Reduced()))
    )
    assert compiled.total("flops") == pytest.approx(eager.total("flops"), rel=0.01)


def test_torch_does_not_warn_of_our_hooks(recwarn: pytest.WarningsRecorder) -> None:
    def program() -> None:
        dist.init_process_group("gloo")
        trained(torch.compile(mlp()))  # type: ignore[arg-type]

    trace_rank(program, world_size=2)
    assert not [each for each in recwarn if "global hooks" in str(each.message)]


# A GPU that is asked about


def test_a_rank_has_the_gpus_of_its_host() -> None:
    told: dict[str, Any] = {}

    def program() -> None:
        rank = int(os.environ["LOCAL_RANK"])
        told["available"] = torch.cuda.is_available(), torch.cuda.device_count()
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        told["device"] = torch.cuda.current_device(), torch.accelerator.current_device_index()
        told["capability"] = torch.cuda.get_device_capability()
        about = torch.cuda.get_device_properties(rank)
        told["memory"] = about.total_memory, *torch.cuda.mem_get_info()
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        event.record()
        model = DistributedDataParallel(mlp().cuda(), device_ids=[rank])

        def batch() -> Tensor:
            with torch.cuda.stream(stream):
                x = torch.randn(4, 8).pin_memory().to("cuda", non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)
            return x

        def after(loss: Tensor) -> None:
            told["allocated"] = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocated_bytes.all.current"]
            told["peak"] = torch.cuda.max_memory_allocated()

        trained(model, batch=batch, after=after)

    ledger = trace_rank(program, world_size=16, rank=11)
    assert told["available"] == (True, 8)
    assert told["device"] == (3, 3)
    assert told["capability"] == (9, 0)
    assert told["memory"][0] == told["memory"][2] == 80 * 10**9
    parameters = 8 * 32 + 32 + 32 * 8 + 8
    assert told["allocated"][0] == told["allocated"][1] >= 3 * 4 * parameters  # with the optimizer's state
    assert told["peak"] >= told["allocated"][0]
    assert ledger.total("payload") == 4 * parameters
    assert not torch.cuda.is_available()


def test_a_cuda_graph_that_is_replayed_unseen_is_refused() -> None:
    def program() -> None:
        dist.init_process_group("nccl")
        model, graph = mlp(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(torch.zeros(4, 8)).sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            graph.replay()
            optimizer.step()

    with pytest.raises(Exception, match="a CUDA graph is replayed, of which no operation is seen"):
        trace_rank(program, world_size=2)


def test_a_step_that_only_makes_states_is_none() -> None:
    def program() -> None:
        dist.init_process_group("gloo")
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        for each in model.parameters():
            each.grad = torch.zeros_like(each)
        optimizer.step()  # as a checkpoint does it before it loads one
        optimizer.zero_grad()
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert trace_rank(program, world_size=2).matmul_flops > 0


def test_a_closure_is_forward_and_backward() -> None:
    """Lightning's way: the optimizer calls what computes the gradients."""

    def program() -> None:
        dist.init_process_group("gloo")
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    ledger = trace_rank(program, world_size=2)
    assert {each.phase for each in ledger if each.kind == "matmul"} == {"forward", "backward"}
    assert ledger.kept_nbytes > 0


def test_a_loader_keeps_its_signature() -> None:
    """Trainers make a loader anew, of its arguments by name."""
    import inspect

    found: list[set[str]] = []

    def program() -> None:
        dist.init_process_group("gloo")
        found.append(set(inspect.signature(torch.utils.data.DataLoader.__init__).parameters))
        trained(mlp())

    trace_rank(program, world_size=2)
    assert {"dataset", "batch_size", "num_workers"} <= found[0]


def test_a_model_on_the_meta_device_has_no_memory() -> None:
    def program(width: int) -> Any:
        def run() -> None:
            dist.init_process_group("gloo")
            with torch.device("meta"):
                reference = nn.Linear(width, width)
            model = mlp()
            trained(model, after=lambda loss: sum(each.numel() for each in reference.parameters()))

        return run

    assert trace_rank(program(8), world_size=2).peak().nbytes == trace_rank(program(4096), world_size=2).peak().nbytes


# What is printed, picked and copied


def test_a_loss_is_formatted_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def after(loss: Tensor) -> None:
        print(f"{loss:.4f}", loss.detach(), round(loss.item(), 3), float(loss.detach().cpu().numpy()))

    def program() -> None:
        dist.init_process_group("gloo")
        trained(mlp(), after=after)

    trace_rank(program, world_size=2)
    assert capsys.readouterr().out == "0.0000 tensor(0.) 0.0 0.0\n"


def of_slices(length: Any) -> Any:
    """nanoGPT's way: a batch of slices of the data that begin at random places."""

    def program() -> None:
        dist.init_process_group("gloo")
        model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = torch.randint(0, 50, (1000,))
        for _ in range(3):
            places = torch.randint(0, 900, (4,))
            x = torch.stack([data[i : i + length(places)] for i in places])
            F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            optimizer.step()

    return program


def test_slices_keep_their_length() -> None:
    ledger = trace_rank(of_slices(lambda places: 16), world_size=2)
    assert ledger.tokens == 4 * 16
    assert ledger.matmul_flops == 3 * 2 * 64 * 8 * 50


def test_an_empty_batch_is_refused_with_its_line() -> None:
    with pytest.raises(Exception, match=r"the batch is empty: the slice at .*test_programs_of_others.py:\d+ begins"):
        trace_rank(of_slices(lambda places: places.max().item()), world_size=2)


def test_an_average_and_a_buffer_are_copied() -> None:
    """The manner of torchmetrics, Lightning and moving averages."""
    kept: list[Any] = []

    def program() -> None:
        dist.init_process_group("gloo")
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        average = copy.deepcopy(model)
        whole = torch.zeros(4, 6)
        parts = copy.deepcopy({"first": whole[0], "last": whole[3], "turned": whole.t()})

        def after(loss: Tensor) -> None:
            kept.append((average, copy.deepcopy(model[1].running_mean), copy.deepcopy(loss.detach()), parts, whole))
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.data.lerp_(theirs.data, 0.1)

        trained(model, after=after)

    trace_rank(program, world_size=2)
    average, mean, loss, parts, whole = kept[0]
    assert [each.shape for each in average.parameters()] == [(8, 8), (8,), (8,), (8,)]
    assert (mean.shape, loss.shape) == ((8,), ())
    memory = {each.untyped_storage()._cdata for each in parts.values()}
    assert len(memory) == 1
    assert whole.untyped_storage()._cdata not in memory
    assert [(tuple(each.stride()), each.storage_offset()) for each in parts.values()] == [
        ((1,), 0),
        ((1,), 18),
        ((1, 6), 0),
    ]


# Masks


class Routed(nn.Module):
    """Experts that pick their tokens by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).topk(2, -1)
        out = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            row, place = torch.where(chosen.indices == at)
            out.index_add_(0, row, expert(x[row]) * chosen.values[row, place, None])
        return out


def routed() -> None:
    dist.init_process_group("gloo")
    trained(Routed(), batch=lambda: torch.randn(32, 8))


@pytest.mark.parametrize(("assume", "tokens"), [((), 64), (("nonzero=1/4",), 16), (("nonzero=10",), 10)])
def test_experts_that_pick_their_tokens_are_followed(assume: tuple[str, ...], tokens: int) -> None:
    router, expert = 3 * 2 * 32 * 8 * 4 - 2 * 32 * 8 * 4, 3 * 2 * tokens * 8 * 8 - 2 * tokens * 8 * 8
    rank = trace_rank(routed, world_size=2, assume=assume)
    alone = tl.trace(Routed(), torch.zeros(32, 8), loss=lambda y: y.square().mean(), assume=assume)
    for ledger in (rank, alone):
        assert ledger.partial == ""
        assert ledger.matmul_flops == router + 4 * expert
        (note,) = (each for each in ledger.notes if "found" in each)
        assert ("upper bound" in note) == (not assume)
        assert "test_programs_of_others.py:" in note


def test_an_assumption_may_be_of_one_line() -> None:
    line = next(
        at for at, each in enumerate(Path(__file__).read_text().splitlines(), 1) if "torch.where(chosen" in each
    )
    here, elsewhere = (
        trace_rank(routed, world_size=2, assume=(f"nonzero@test_programs_of_others.py:{at}=1/4",)) for at in (line, 1)
    )
    assert here.matmul_flops < elsewhere.matmul_flops


@pytest.mark.parametrize("given", ["nonzero", "nonzero=0", "nonzero=3/2", "zeros=1", "nonzero=-1"])
def test_an_assumption_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(InvalidInput, match="must be a share of the elements, or a count"):
        tl.trace(Routed(), torch.zeros(4, 8), assume=(given,))


# Scripts

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch import nn
if __name__ == "__main__":
    dist.init_process_group("nccl")
    model = nn.Linear(int(sys.argv[1]), 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        model(torch.randn(4, int(sys.argv[1]))).sum().backward()
        optimizer.step()
    sys.exit()
"""


def test_a_script_is_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    assert main(["trace", str(file), "--world-size", "4", "--args", "16", "--json"]) == 0
    assert f'"parameters": {16 * 8 + 8}' in capsys.readouterr().out
    assert main(["trace", str(file)]) == 2
    assert "with --world-size a rank" in capsys.readouterr().err
    assert main(["trace", "torch.nn:Identity", "--args", "16"]) == 2
    assert "are those of a script that runs as a rank" in capsys.readouterr().err


def test_what_a_library_wants_is_said_with_the_line_that_called_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    file = tmp_path / "train.py"
    file.write_text("import numpy\nwords = numpy.load('nowhere.npy')\n")
    assert main(["trace", str(file), "--world-size", "4"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "No such file or directory: 'nowhere.npy'" in said
    assert f"called at {file}:2" in said


# Optimizers and kernels of their own


class Filled(torch.autograd.Function):
    """Its backward makes tensors on the GPU, and gives one gradient less than it has inputs, as compiled code may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Any) -> Tensor:
        assert x.is_cuda
        y = torch.empty(x.shape, device="cuda")
        kernel((1, 1, 1), (32, 1, 1), (x, y))
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return (g + torch.ones(g.shape, device="cuda"),)


def own_kernels() -> None:
    kernel = torch.cuda._compile_kernel("__global__ void fill(const float *x, float *y) {}", "fill")
    model = mlp().cuda()
    trained(model, batch=lambda: Filled.apply(model(torch.randn(4, 8, device="cuda")), kernel))


def test_a_rank_launches_kernels_of_its_own() -> None:
    ledger = trace_rank(own_kernels, world_size=RANKS)
    assert not ledger.partial
    assert ledger.uncounted == (("cuda::fill", 1),)
    assert [each.kind for each in ledger if each.name == "cuda::fill"] == ["unknown"]
    assert any("backward of Filled returns 1 gradients of 2 inputs" in each for each in ledger.notes)


def own_optimizer() -> None:
    model = mlp()
    for _ in range(100):
        model(torch.randn(4, 8)).square().mean().backward()
        with torch.no_grad():
            for each in model.parameters():
                each.sub_(each.grad, alpha=0.1)


def test_an_optimizer_that_is_none_of_torch_is_refused_where_it_writes() -> None:
    with pytest.raises(Refused, match="written here by an optimizer that is none of torch"):
        trace_rank(own_optimizer, world_size=RANKS)
