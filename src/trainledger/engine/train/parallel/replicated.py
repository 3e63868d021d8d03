"""Replicas of a model that sum their gradients: DDP, and its buckets for what it cannot wrap."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

# What DDP calls sending buffers in every forward: since torch 2.13 an option that leaves the first sending alone. All
# ranks work out the same buffers, so that none need be sent at all.
_NEW, _OLD = "forward_sync_buffers", "broadcast_buffers"
_DDP = signature(nn.parallel.DistributedDataParallel.__init__).parameters
FIRST_BUCKET_NBYTES, BUCKET_NBYTES = 2**20, 25 * 2**20
_BUFFERS: dict[str, Any] = {_NEW if _NEW in _DDP else _OLD: False}


def replicate(model: nn.Module, mesh: DeviceMesh) -> nn.parallel.DistributedDataParallel:
    """The model wrapped in DDP over the mesh's replicas."""
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("replicate"), **_BUFFERS)


def sum_over_replicas(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """The mean over replicas of all gradients, once a step, in buckets as large as DDP's.

    For what DDP cannot wrap: a stage of a pipeline whose backward a schedule runs in parts.
    """
    group, ranks = mesh.get_group("replicate"), mesh.get_group("replicate").size()
    bucket: list[Tensor] = []
    nbytes, limit = 0, FIRST_BUCKET_NBYTES

    def send() -> None:
        flat = torch.cat([each.flatten() for each in bucket]).div_(ranks)
        dist.all_reduce(flat, group=group)
        for each, mean in zip(bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True):
            each.copy_(mean.view_as(each))
        bucket.clear()

    for parameter in reversed(list(parameters)):
        if parameter.grad is None:
            continue
        bucket.append(parameter.grad)
        nbytes += parameter.grad.nbytes
        if nbytes >= limit:
            send()
            nbytes, limit = 0, BUCKET_NBYTES
    if bucket:
        send()
