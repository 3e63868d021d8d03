"""The device mesh of a layout."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainledger.spec.layout import Layout

_c10d: Any = c10d
AXES = ("pipeline", "replicate", "shard", "context", "tensor")


def mesh_of(layout: Layout, device_type: str = "cpu") -> DeviceMesh:
    """The device mesh of a layout: pipeline stages outermost, tensor ranks next to each other (they talk the most)."""
    return init_device_mesh(device_type, tuple(getattr(layout, each) for each in AXES), mesh_dim_names=AXES)


def shard_mesh(layout: Layout, mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that share parameters, gradients or optimizer state, as one axis: those of shard x context."""
    return mesh["shard"] if layout.context == 1 else mesh["shard", "context"]._flatten("shard_context")


def with_replicas(layout: Layout, mesh: DeviceMesh, sharing: DeviceMesh) -> DeviceMesh:
    """The same ranks, with an axis of the replicas before them where there are any."""
    return DeviceMesh._concatenate([mesh["replicate"], sharing]) if layout.replicate > 1 else sharing


def expert_mesh(layout: Layout, mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that share state as two axes: those with the same experts (expert_shard), and those with others'.

    The latter are next to each other, as they talk the most. It makes process groups: once for a model.
    """
    sizes = (layout.shard_ranks // layout.expert, layout.expert)
    return shard_mesh(layout, mesh)._unflatten(0, sizes, ("expert_shard", "expert"))


def data_rank(layout: Layout, mesh: DeviceMesh) -> int:
    """Which part of each global batch this rank reads: ranks of other axes read the same sequences."""
    return int(mesh.get_local_rank("replicate")) * layout.shard + int(mesh.get_local_rank("shard"))


def limit_waiting(seconds: float) -> None:
    """Have collectives of all groups wait so long for a rank: torch gives those of a mesh half an hour."""
    for group in _c10d._world.pg_map:
        _c10d._set_pg_timeout(timedelta(seconds=seconds), group)
