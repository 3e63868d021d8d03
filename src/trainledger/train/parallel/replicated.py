"""Replicas of a model that sum their gradients: DDP."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

# What DDP calls sending buffers in every forward: since torch 2.13 an option that leaves the first sending alone. All
# ranks work out the same buffers, so that none need be sent at all.
_NEW, _OLD = "forward_sync_buffers", "broadcast_buffers"
_DDP = signature(nn.parallel.DistributedDataParallel.__init__).parameters
_BUFFERS: dict[str, Any] = {_NEW if _NEW in _DDP else _OLD: False}


def replicate(model: nn.Module, mesh: DeviceMesh) -> nn.parallel.DistributedDataParallel:
    """The model wrapped in DDP over the mesh's replicas."""
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("replicate"), **_BUFFERS)
