"""The device mesh of a layout; of each tensor the part that this rank holds, and whether it writes that down."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainledger.spec.layout import Layout

_c10d: Any = c10d
AXES = ("pipeline", "replicate", "shard", "context", "tensor")


def mesh_of(layout: Layout, device_type: str = "cpu") -> DeviceMesh:
    """The device mesh of a layout: pipeline stages outermost, tensor ranks next to each other (they talk the most)."""
    return init_device_mesh(device_type, tuple(getattr(layout, axis) for axis in AXES), mesh_dim_names=AXES)


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


# `init_device_mesh` takes no timeout for the groups that it makes (torch 2.13), but for a backend's options.
def limit_waiting(seconds: float) -> None:
    """Have collectives of all groups wait so long for a rank: torch gives those of a mesh half an hour."""
    for group in _c10d._world.pg_map:
        _c10d._set_pg_timeout(timedelta(seconds=seconds), group)


Parts = tuple[dict[str, Tensor], dict[str, list[int]]]


def own_parts(tensors: Mapping[str, Tensor], mesh: DeviceMesh | None) -> Parts:
    """Of tensors by name, this rank's parts that no rank before it holds, and where each part begins.

    Whole tensors have no entry in the second. Every element of every tensor is in exactly one rank's parts.
    """
    found: dict[str, Tensor] = {}
    offsets: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        if mesh is not None and not _is_first_holder(tensor, mesh):
            continue
        part = local(tensor)
        if tensor.numel() and not part.numel():
            continue
        found[name] = part
        if isinstance(tensor, DTensor):
            offsets[name] = offset_of(tensor)
    return found, offsets


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def offset_of(tensor: DTensor) -> list[int]:
    """Where this rank's part begins in the whole, dim by dim."""
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return list(offset)


def put(parameter: Tensor, whole: Tensor) -> None:
    """Write the values of a whole tensor into a parameter, of which this rank may hold a part."""
    if isinstance(parameter, DTensor):
        part = parameter.to_local()
        if part.numel():
            begin = offset_of(parameter)
            part.copy_(whole[tuple(slice(at, at + size) for at, size in zip(begin, part.shape, strict=True))])
    else:
        parameter.copy_(whole)


# A rank whose experts no other rank has once wrote no checkpoint of them, as it was not first on the axis `shard`; a
# test of layouts found it.
def _is_first_holder(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Whether, of the ranks with the same part, this is the first; stages of a pipeline hold other tensors."""
    covered: dict[str, Any] = {}
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        covered = dict(zip(names, tensor.placements, strict=True))
        for name, placement in covered.items():
            if placement.is_replicate() and tensor.device_mesh.get_local_rank(name) > 0:
                return False
    among = {axis for name in covered for axis in name.split("_")}  # "shard_context" is both
    if "expert" in among:  # ranks of shard x context, all of which have other parts
        among |= {"shard", "context"}
    axes = (axis for axis in mesh.mesh_dim_names or () if axis != "pipeline")
    return all(mesh.get_local_rank(axis) == 0 for axis in axes if axis not in among)
