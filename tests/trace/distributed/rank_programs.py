"""Programs for torchrun as users write them, that a trace of one rank and real processes both run as they are.

Sizes: B sequences, T tokens of each, D width of the stream, F inner width, E experts.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from trainledger.engine.nn.lora import AdaptedLinear
from trainledger.spec.savings import Lora

BACKEND = os.environ.get("PROGRAM_BACKEND", "nccl")
DEVICE = os.environ.get("PROGRAM_DEVICE", "cuda")
STEPS = 4


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width, inner)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.mlp(self.norm(x_BTD))


class Model(nn.Module):
    def __init__(self, width: int = 32, inner: int = 64, blocks: int = 3, vocab: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(blocks))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embed(ids_BT)
        for each in self.blocks:
            x_BTD = each(x_BTD)
        return self.head(x_BTD)


def begin() -> int:
    dist.init_process_group(BACKEND)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    return dist.get_world_size()


def train(model: nn.Module, *, accumulate: int = 1, clip: bool = True, foreach: bool = True) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for index in range(accumulate):
            ids_BT = torch.randint(0, 48, (4, 16), device=DEVICE)
            last = index == accumulate - 1
            if not last and isinstance(model, DistributedDataParallel):
                with model.no_sync():
                    loss_of(model, ids_BT).backward()
            else:
                loss_of(model, ids_BT).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    # Groups end when the models of a program are gone: the last reference to a gloo group that DDP's reducer holds is
    # let go with Python's lock held, for which gloo's own thread may wait then (a deadlock, seen with torch 2.13).


def loss_of(model: nn.Module, ids_BT: Tensor) -> Tensor:
    return F.cross_entropy(model(ids_BT).flatten(0, 1).float(), ids_BT.flatten())


def fsdp() -> None:
    mesh = init_device_mesh(DEVICE, (begin(),), mesh_dim_names=("shard",))
    model = Model().to(DEVICE)
    for each in model.blocks:
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model)


def fsdp_in_proportion() -> None:
    """Rows go with the number of ranks, so that pieces are the same in a world of any size."""
    ranks = begin()
    mesh = init_device_mesh(DEVICE, (ranks,), mesh_dim_names=("shard",))
    model = nn.Sequential(*(nn.Linear(16, 8 * ranks) if at % 2 == 0 else _Back(8 * ranks) for at in range(4)))
    for each in model:
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(STEPS):
        model(torch.randn(4, 16, device=DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class _Back(nn.Module):
    """Takes the mean over pieces of 16 columns, and multiplies."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(wide, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.scale


def fsdp_bf16() -> None:
    mesh = init_device_mesh(DEVICE, (begin(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = Model().to(DEVICE)
    for each in model.blocks:
        fully_shard(each, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    train(model, accumulate=2, clip=False)


def fsdp_adapters() -> None:
    """Frozen weights in 4 bits beside adapters: blocks are gathered as bytes, and only adapters are reduced."""
    mesh = init_device_mesh(DEVICE, (begin(),))
    model = Model().requires_grad_(False)
    for each in model.blocks:
        for name in ("gate", "up", "down"):
            layer = AdaptedLinear(getattr(each.mlp, name), Lora(rank=2, base_format="nf4"), adapted=True)
            setattr(each.mlp, name, layer)
            nn.init.normal_(layer.lora_a)
    model.to(DEVICE)
    for each in model.blocks:
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, accumulate=2)


def fsdp_from_meta() -> None:
    """Built on the meta device and materialized after sharding, as large models are."""
    mesh = init_device_mesh(DEVICE, (begin(),), mesh_dim_names=("shard",))
    with torch.device("meta"):
        model = Model(width=36)
    for each in model.blocks:
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=DEVICE)
    for each in model.parameters():
        nn.init.normal_(each, std=0.02)
    train(model)


def hybrid() -> None:
    mesh = init_device_mesh(DEVICE, (2, begin() // 2), mesh_dim_names=("replicate", "shard"))
    model = Model().to(DEVICE)
    for each in model.blocks:
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model)


def _split(model: Model, mesh: Any, *, sequence: bool) -> None:
    whole = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=whole),
        "head": ColwiseParallel(input_layouts=whole, output_layouts=Replicate()),
    }
    for at in range(len(model.blocks)):
        if sequence:
            plan[f"blocks.{at}.norm"] = SequenceParallel()
        plan[f"blocks.{at}.mlp"] = PrepareModuleInput(input_layouts=whole, desired_input_layouts=Replicate())
        plan |= {f"blocks.{at}.mlp.{each}": ColwiseParallel() for each in ("gate", "up")}
        plan[f"blocks.{at}.mlp.down"] = RowwiseParallel(output_layouts=whole)
    parallelize_module(model, mesh, plan)


def tensor() -> None:
    ranks = begin()
    mesh = init_device_mesh(DEVICE, (ranks,), mesh_dim_names=("tensor",))
    model = Model(inner=32 * ranks, vocab=48 * ranks).to(DEVICE)  # the same on each rank in a world of any size
    _split(model, mesh, sequence=False)
    train(model, clip=False, foreach=False)


def tensor_sequence() -> None:
    mesh = init_device_mesh(DEVICE, (begin(),), mesh_dim_names=("tensor",))
    model = Model().to(DEVICE)
    _split(model, mesh, sequence=True)
    train(model, clip=False, foreach=False)


def fsdp_tensor() -> None:
    mesh = init_device_mesh(DEVICE, (begin() // 2, 2), mesh_dim_names=("shard", "tensor"))
    model = Model().to(DEVICE)
    _split(model, mesh["tensor"], sequence=True)
    for each in model.blocks:
        fully_shard(each, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    train(model, clip=False)


def ddp() -> None:
    begin()
    model = DistributedDataParallel(Model(width=256, inner=1024, blocks=6).to(DEVICE))
    train(model)


def ddp_accumulated() -> None:
    begin()
    model = Model(width=128, inner=512, blocks=3).to(DEVICE)
    train(DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True), accumulate=3)


def ddp_unused() -> None:
    begin()
    model = Model()
    model.extra = nn.Linear(4, 4)
    model.register_buffer("seen", torch.zeros(7))
    train(DistributedDataParallel(model.to(DEVICE), find_unused_parameters=True))


def _pipeline(schedule: Any, told: bool) -> None:
    ranks = begin()
    rank = dist.get_rank()
    whole = Model(blocks=2 * ranks)
    parts: list[nn.Module] = list(whole.blocks[2 * rank : 2 * rank + 2])
    parts = ([whole.embed] if rank == 0 else []) + parts + ([whole.head] if rank == ranks - 1 else [])
    model = nn.Sequential(*parts).to(DEVICE)
    shapes = {}
    if told:  # of a micro-batch
        ids_BT = torch.zeros(2, 16, dtype=torch.int64, device=DEVICE)
        x_BTD, logits_BTV = (torch.zeros(2, 16, each, device=DEVICE, requires_grad=True) for each in (32, 48))
        shapes["input_args"] = ids_BT if rank == 0 else x_BTD
        shapes["output_args"] = logits_BTV if rank == ranks - 1 else x_BTD
    stage = PipelineStage(model, rank, ranks, torch.device(DEVICE), **shapes)
    runs = schedule(stage, n_microbatches=4, loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ids_BT = torch.randint(0, 48, (8, 16), device=DEVICE)
        if rank == 0:
            runs.step(ids_BT)
        elif rank == ranks - 1:
            runs.step(target=ids_BT)
        else:
            runs.step()
        optimizer.step()


def pipeline_gpipe() -> None:
    _pipeline(ScheduleGPipe, told=True)


def pipeline_1f1b() -> None:
    _pipeline(Schedule1F1B, told=False)


class Experts(nn.Module):
    """Each rank has one expert, and sends every other an equal share of its tokens."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.expert = Mlp(width, inner)

    def forward(self, x_BTD: Tensor) -> Tensor:
        rows = _Exchange.apply(x_BTD.flatten(0, 1))
        return x_BTD + _Exchange.apply(self.expert(rows)).view_as(x_BTD)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        out = torch.empty_like(g)
        dist.all_to_all_single(out, g.contiguous())
        return out


def experts() -> None:
    begin()
    model = nn.Sequential(nn.Embedding(48, 32), Experts(32, 64), Experts(32, 64), nn.Linear(32, 48)).to(DEVICE)
    train(model, clip=False)


class _Functional(nn.Module):
    """Tokens go to their experts, as many to each, by functional collectives."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.expert = Mlp(width, inner)

    def forward(self, x_BTD: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        x = x_BTD.flatten(0, 1)
        sizes = [x.shape[0] // dist.get_world_size()] * dist.get_world_size()
        rows = all_to_all_single_autograd(x, sizes, sizes, dist.group.WORLD)
        back = all_to_all_single_autograd(self.expert(rows), sizes, sizes, dist.group.WORLD)
        return x_BTD + back.view_as(x_BTD)


def experts_functional() -> None:
    begin()
    model = nn.Sequential(nn.Embedding(48, 32), _Functional(32, 64), nn.Linear(32, 48)).to(DEVICE)
    train(model, clip=False)


class _Routed(nn.Module):
    """Two experts on each rank; which tokens go where is told by counts, as it is where a router decides it."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp(width, inner) for _ in range(2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x, ranks = x_BTD.flatten(0, 1), dist.get_world_size()
        expert_of = torch.arange(x.shape[0], device=x.device) % (2 * ranks)
        counts = torch.histc(expert_of.float(), bins=2 * ranks, min=0, max=2 * ranks - 1).int()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sending = counts.view(ranks, 2).sum(1).tolist()
        coming = arriving.view(ranks, 2).sum(1).tolist()
        rows = _Uneven.apply(x[torch.argsort(expert_of)], sending, coming)
        split = arriving.view(ranks, 2).sum(0).tolist()
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, rows.split(split), strict=True)])
        return x_BTD + _Uneven.apply(rows, coming, sending).view_as(x_BTD)


class _Uneven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sending: list[int], coming: list[int]) -> Tensor:
        ctx.sizes = sending, coming
        out = x.new_empty(sum(coming), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), coming, sending)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        sending, coming = ctx.sizes
        out = g.new_empty(sum(sending), g.shape[1])
        dist.all_to_all_single(out, g.contiguous(), sending, coming)
        return out, None, None


def experts_routed() -> None:
    begin()
    model = nn.Sequential(nn.Embedding(48, 32), _Routed(32, 64), nn.Linear(32, 48)).to(DEVICE)
    train(model, clip=False)
