"""What may be traced as a rank: loops, step functions, the parts of a step; and what is said of anything else."""

from __future__ import annotations

import gc
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

import trainledger as tl
from trainledger.trace.command import trace_rank_target
from trainledger.trace.distributed import fake_world, trace_rank
from trainledger.trace.distributed.collectives import Shards

pytestmark = pytest.mark.torch


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


def sharded() -> nn.Module:
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("data",))
    return fully_shard(mlp().cuda(), mesh=mesh)


def own_loop() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.randn(4, 8, device="cuda")).square().mean().backward()
        optimizer.step()


def step_function() -> Any:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8, device="cuda")).square().mean().backward()
        optimizer.step()

    return step


def parts() -> Any:
    model = sharded()
    return model, torch.optim.SGD(model.parameters(), 0.1), torch.zeros(4, 8), lambda y: y.square().mean()


def collectives(ledger: tl.Ledger) -> list[Any]:
    return [(each.phase, each.name, each.payload, each.group) for each in ledger if each.kind == "collective"]


def test_a_loop_a_step_and_its_parts_are_the_same_step() -> None:
    ledgers = [trace_rank(each, world_size=64, rank=3) for each in (own_loop, step_function, parts)]
    assert collectives(ledgers[0])[0] == ("forward", "all_gather", (64 * 8 + 64 + 64 * 32 + 64) * 4, "data")
    for each in ledgers[1:]:
        assert collectives(each) == collectives(ledgers[0])
        assert each.by("kind")["matmul"] == ledgers[0].by("kind")["matmul"]
        assert each.parameters == ledgers[0].parameters == 8 + 1 + 32 + 1


def test_a_model_alone_takes_what_else_is_given() -> None:
    ledger = tl.trace_rank(
        sharded, world_size=4, batch=torch.zeros(4, 8), loss=lambda y: y.sum(), optimizer=torch.optim.AdamW
    )
    assert dict(ledger.resident)["optimizer state"] > 2 * dict(ledger.resident)["parameters"]
    assert ledger.total("payload") > 0


def test_the_first_step_makes_the_optimizers_state() -> None:
    def program() -> Any:
        model = sharded()
        return model, torch.optim.AdamW(model.parameters()), torch.zeros(4, 8), lambda y: y.sum()

    ledger = trace_rank(program, world_size=4, first_step=True)
    assert "optimizer state" not in dict(ledger.resident)
    assert trace_rank(program, world_size=4).peak().nbytes >= ledger.peak().nbytes


def test_nothing_is_left_behind() -> None:
    before = dict(os.environ)
    trace_rank(own_loop, world_size=16)
    assert dict(os.environ) == before
    assert not dist.is_initialized()
    assert type(torch.zeros(1)) is torch.Tensor
    assert dist.Reducer.__module__.startswith("torch._C")
    assert torch.zeros(2).untyped_storage().resize_(0).nbytes() == 0


def test_a_world_alone_shows_what_a_rank_has() -> None:
    with fake_world(1024, 5) as world:
        assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == ("5", "5", "1024")
        model = sharded()
        assert world.rank == dist.get_rank() == 5
        assert [each.to_local().shape[0] for each in model.parameters()] == [1, 1, 1, 1]
    assert not dist.is_initialized()


@pytest.mark.parametrize(("size", "rank", "said"), [
    (0, 0, "world_size = 0: is not a number of ranks"),
    (8, 8, "rank = 8: is not a rank of 8, which are counted from 0"),
    (8, -1, "rank = -1: is not a rank of 8"),
])  # fmt: skip
def test_ranks_outside_of_the_world_are_refused(size: int, rank: int, said: str) -> None:
    with pytest.raises(tl.InvalidInput) as found:
        trace_rank(own_loop, world_size=size, rank=rank)
    assert said.split(":")[1].strip() in str(found.value)


def test_a_world_inside_a_world_is_refused() -> None:
    with fake_world(2):
        dist.init_process_group("gloo")
        with pytest.raises(tl.InvalidInput, match="no process group is there yet"), fake_world(4):
            pass


@pytest.mark.parametrize(("program", "said"), [
    (lambda: None, "took 0 optimizer steps and returned nothing"),
    (lambda: 3, "returned int"),
    (mlp, "a model alone makes no step"),
    (lambda: (mlp(), torch.zeros(2, 8)), "the loss must be a scalar tensor"),
    (lambda: lambda: None, "has called no module that has parameters"),
])  # fmt: skip
def test_programs_that_take_no_step_are_told_what_to_return(program: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trace_rank(program, world_size=2)


@pytest.mark.parametrize("first_step", [False, True])
def test_what_is_no_loss_is_told_as_without_a_world(first_step: bool) -> None:
    with pytest.raises(ValueError, match=r"must be a scalar tensor, not fp32") as alone:
        tl.trace(mlp(), torch.zeros(2, 8))
    with pytest.raises(ValueError, match=re.escape(str(alone.value))):
        trace_rank(lambda: (mlp(), torch.zeros(2, 8)), world_size=2, first_step=first_step)
    with pytest.raises(tl.InvalidInput, match="--loss: the loss must be a scalar tensor") as found:
        trace_rank_target(lambda: (mlp(), torch.zeros(2, 8)), world_size=2)
    assert "nearest that works: --loss mean" in str(found.value)


def test_a_value_that_is_read_in_the_loop_is_told() -> None:
    def program() -> Any:
        step, seen = step_function(), []

        def logged() -> None:
            step()
            seen.append(torch.ones(2).sum().item())

        return logged

    ledger = trace_rank(program, world_size=2)
    (note,) = ledger.notes
    assert "1 value read at" in note
    assert "test_rank_programs_traced.py" in note


def test_a_step_that_fails_leaves_what_ran_before() -> None:
    def program() -> Any:
        step, calls = step_function(), []

        def failing() -> None:
            calls.append(1)
            step()
            if len(calls) > 1:
                raise RuntimeError("no more")

        return failing

    with pytest.warns(RuntimeWarning, match="the trace is partial"):
        ledger = trace_rank(program, world_size=2)
    assert "RuntimeError: no more" in ledger.partial
    assert collectives(ledger)


def test_modules_can_be_converted_and_materialized() -> None:
    with fake_world(2):
        model = mlp()
        model[2].weight = nn.Parameter(model[0].weight.T.contiguous())
        model.to(torch.bfloat16)
        assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
        with torch.device("meta"):
            later = mlp()
        later.to_empty(device="cuda")
        assert {each.device.type for each in later.parameters()} == {"cpu"}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert later(torch.zeros(2, 8, device="cuda:1")).dtype == torch.bfloat16


def test_objects_come_from_the_rank_that_sends_them() -> None:
    def program() -> Any:
        dist.init_process_group("gloo")
        rank, told = dist.get_rank(), [None]
        if rank > 0:
            dist.recv_object_list(told, src=rank - 1)
        if rank < dist.get_world_size() - 1:
            dist.send_object_list([(told[0] or 1) * 2], dst=rank + 1)
        shared = [rank * 10 + 7]
        dist.broadcast_object_list(shared, src=2)
        assert shared == [27]
        model = nn.Linear(told[0] or 1, 1)
        return model, torch.zeros(1, told[0] or 1), lambda y: y.sum()

    assert [trace_rank(program, world_size=4, rank=rank).parameters for rank in range(4)] == [2, 3, 5, 9]


def test_ranks_that_wait_for_each_other_are_told() -> None:
    def program() -> None:
        dist.init_process_group("gloo")
        dist.recv_object_list([None], src=1 - dist.get_rank())

    with pytest.raises(ValueError, match="wait for an object of each other"):
        trace_rank(program, world_size=2)


@given(rows=st.integers(1, 40), ranks=st.integers(1, 17), dim=st.integers(0, 1))
def test_pieces_are_torchs_chunks(rows: int, ranks: int, dim: int) -> None:
    tensor = torch.arange(rows * 6).view((rows, 6) if dim == 0 else (6, rows))
    pieces = Shards(tensor, ranks, dim)
    expected = _chunk_with_empty(tensor, ranks, dim)
    assert len(pieces) == len(expected)
    assert all(torch.equal(each, other) for each, other in zip(pieces, expected, strict=True))
    assert torch.equal(pieces[-1], expected[-1])


def test_a_group_of_one_sends_nothing() -> None:
    assert trace_rank(own_loop, world_size=1).total("payload") == 0


def test_the_example_of_the_page_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "distributed_traces.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python")[1].split("```")[0], names)
    ledger = names["ledger"]
    assert Counter(each.name for each in ledger if each.kind == "collective") == {"all_gather": 8, "reduce_scatter": 4}
    assert {each.group for each in ledger if each.kind == "collective"} == {"shard"}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.long
def test_the_garbage_collector_is_left_as_it_was(frozen: bool) -> None:
    gc.unfreeze()
    try:
        if frozen:
            gc.freeze()
        before = gc.get_freeze_count()
        with fake_world(4):
            pass
        # what was frozen may be freed meanwhile, but is not thawed, and nothing is added to it
        assert (gc.get_freeze_count() > before * 0.9) if frozen else gc.get_freeze_count() == 0
        assert gc.get_freeze_count() <= before
    finally:
        gc.unfreeze()


# Compiled modules


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def compiled_loop(how: str) -> None:
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("data",))
    blocks = nn.Sequential(Branch(), Branch()).cuda()
    for at, each in enumerate(blocks):
        if how == "in place":
            each.compile()
        elif how == "wrapped":
            blocks[at] = torch.compile(each)  # type: ignore[assignment]
        fully_shard(blocks[at], mesh=mesh)
    model = fully_shard(blocks, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.randn(64, 8, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("how", ["in place", "wrapped"])
@pytest.mark.long
def test_compiled_modules_of_a_rank_are_followed_as_the_compiler_writes_them(how: str) -> None:
    compiled, eager = (trace_rank(lambda way=way: compiled_loop(way), world_size=4) for way in (how, "not"))  # type: ignore[misc]
    assert (compiled.partial, compiled.notes, compiled.uncounted) == ("", (), ())
    fused = [each for each in compiled if each.source == "torch._inductor"]
    assert {each.phase for each in fused} >= {"forward", "backward"}
    assert compiled.matmul_flops == eager.matmul_flops
    assert compiled.kept_nbytes == eager.kept_nbytes
    assert sent(compiled) == sent(eager)


def sent(ledger: tl.Ledger) -> list[tuple[str, str, int, int]]:
    return [(each.phase, each.name, each.payload, each.ranks) for each in ledger if each.kind == "collective"]
