"""What the ranks of a layout do together in a step: gradients that are summed late, one norm, one loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from trainledger.engine.train.parallel.context import own_part
from trainledger.engine.train.parallel.expert import finish_expert_gradients
from trainledger.engine.train.parallel.mesh import local
from trainledger.engine.train.parallel.pipeline import Pipeline
from trainledger.engine.train.parallel.tensor import finish_gradients
from trainledger.engine.train.parallel.zero import ShardedUpdate
from trainledger.engine.train.step import Batch, Clock
from trainledger.spec.layout import Layout


@dataclass(frozen=True)
class RanksTogether:
    """A step of one rank of a layout (`trainledger.engine.train.step.Together`).

    ``replicas`` is the model inside DDP, ``update`` what ranks with whole parameters share of their update (ZeRO-1, 2).
    """

    layout: Layout
    mesh: DeviceMesh
    replicas: nn.parallel.DistributedDataParallel | None = None
    update: ShardedUpdate | None = None
    pipeline: Pipeline | None = None

    def around(self) -> AbstractContextManager[object]:
        """With tensor ranks each has its rows of the logits, and the loss is taken of those."""
        return loss_parallel() if self.layout.tensor > 1 else nullcontext()

    def called(self, model: nn.Module) -> nn.Module:
        return model if self.replicas is None else self.replicas

    def own(self, batch: Batch) -> Batch:
        """Context ranks have each a part of every sequence."""
        if self.layout.context == 1:
            return batch
        return own_part(self.layout, self.mesh.get_local_rank("context"), batch)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """Replicas sum their gradients once a step."""
        if self.update is not None:
            return self.update.micro_batch()
        return nullcontext() if self.replicas is None or last else self.replicas.no_sync()

    def finish_gradients(self, model: nn.Module, clock: Clock) -> None:
        if self.layout.tensor > 1:
            with clock("backward"):
                finish_gradients(model)
        if self.layout.expert > 1:
            with clock("backward"):
                finish_expert_gradients(model, self.layout, self.mesh)
        if self.update is not None:
            with clock("backward"):
                self.update.finish_gradients()

    @torch.no_grad()
    def clip(self, parameters: list[nn.Parameter], most: float) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, but each rank scales its own parts."""
        gradients = [each.grad for each in parameters if each.grad is not None]
        foreach = gradients[0].device.type != "cpu"
        by_mesh: dict[Any, list[Tensor]] = {}  # experts may be on ranks of their own
        for each in gradients:
            by_mesh.setdefault(each.device_mesh if isinstance(each, DTensor) else None, []).append(each)
        norms = [joint_norm(mesh, some, foreach=foreach) for mesh, some in by_mesh.items()]
        whole = norms[0] if len(norms) == 1 else torch.stack(norms).square().sum().sqrt()
        if self.pipeline is not None:
            whole = _root_of_sum(_squares(whole), self.pipeline.group)
        smaller = (most / (whole + 1e-6)).clamp(max=1.0)
        own = [local(each) for each in gradients]
        if foreach:
            torch._foreach_mul_(own, smaller)
        else:
            for each in own:
                each.mul_(smaller)
        return whole


def joint_norm(mesh: DeviceMesh | None, gradients: list[Tensor], *, foreach: bool) -> Tensor:
    """The L2 norm of gradients that are whole (mesh None), or of which the ranks of a mesh have parts.

    As `torch.nn.utils.get_total_norm` of DTensors, whose dispatch takes longer than the norms of a small model.
    """
    own = [local(each) for each in gradients]
    norms = torch.stack(torch._foreach_norm(own) if foreach else [torch.linalg.vector_norm(each) for each in own])
    axes = [] if mesh is None else [(mesh.get_group(dim), mesh.size(dim)) for dim in range(mesh.ndim)]
    for dim, (group, ranks) in enumerate(axes):
        whole = [isinstance(each, DTensor) and each.placements[dim].is_replicate() for each in gradients]
        if all(whole):
            continue
        squares = _squares(norms)
        if any(whole):  # each rank has them, and the sum counts them once
            squares /= squares.new_tensor([ranks if each else 1 for each in whole])
        norms = _root_of_sum(squares, group)
    joint: Tensor = torch.linalg.vector_norm(norms)
    return joint


def _squares(norms: Tensor) -> Tensor:
    """In fp32: a sum in bf16 over a thousand ranks would lose half of it."""
    return norms.float().square()


def _root_of_sum(squares: Tensor, group: Any) -> Tensor:
    """The norms over a group, of the squares on each of its ranks."""
    dist.all_reduce(squares, group=group)
    return squares.sqrt()
