"""Which part of each tensor this rank holds, and whether it is the rank that writes it down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Parts = tuple[dict[str, Tensor], dict[str, list[int]]]


def own_parts(tensors: Mapping[str, Tensor], mesh: DeviceMesh | None) -> Parts:
    """Of tensors by name, this rank's parts that no rank before it holds, and where each part begins.

    Whole tensors have no entry in the second. Every element of every tensor is in exactly one rank's parts.
    """
    found: dict[str, Tensor] = {}
    offsets: dict[str, list[int]] = {}
    for name, each in tensors.items():
        if mesh is not None and not _is_first_holder(each, mesh):
            continue
        part = local(each)
        if each.numel() and not part.numel():
            continue
        found[name] = part
        if isinstance(each, DTensor):
            offsets[name] = offset_of(each)
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
    others = [axis for axis in _axes(mesh) if axis not in among]
    return all(mesh.get_local_rank(axis) == 0 for axis in others)


def _axes(mesh: DeviceMesh) -> Sequence[str]:
    return [each for each in mesh.mesh_dim_names or () if each != "pipeline"]
