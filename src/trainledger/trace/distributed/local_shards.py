"""FSDP2 and DTensor in a world of many ranks: only this rank's shard of a parameter is made and computed on."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainledger.spec.units import ceil_div
from trainledger.trace.patches import Patch, all_replaced, around, inside

_ELEMENTWISE = (
    "add sub mul div lerp addcmul addcdiv sqrt neg reciprocal abs sign zero pow maximum minimum rsqrt exp log"
)


def _module(name: str) -> Any:
    """A part of FSDP2 that has no public name; None where this version has it elsewhere."""
    try:
        return importlib.import_module(f"torch.distributed.fsdp._fully_shard.{name}")
    except ImportError:
        return None


def _own_shard(
    make: Callable[..., Tensor],
    placement: Shard,
    tensor: Tensor,
    mesh: DeviceMesh,
    mesh_dim: int,
    *rest: Any,
    **kw: Any,
) -> Tensor:
    """The rank's own shard of a tensor, which in a real run the first rank sends to all."""
    coordinate = mesh.get_coordinate()
    if type(placement) is not Shard or coordinate is None:
        return make(placement, tensor, mesh, mesh_dim, *rest, **kw)
    shard = Shards(tensor, mesh.size(mesh_dim), placement.dim)[coordinate[mesh_dim]]
    if not shard.numel():
        shard = tensor.narrow(placement.dim, 0, 0)
    return shard.clone(memory_format=torch.contiguous_format)


class Shards(Sequence[Tensor]):
    """What ``torch.chunk`` gives of a dim, filled up with empty tensors; each shard is made when it is read.

    >>> [tuple(each.shape) for each in Shards(torch.empty(5, 2), 4, dim=0)]
    [(2, 2), (2, 2), (1, 2), (0,)]
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim
        self._rows = ceil_div(tensor.size(dim), num_chunks)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"shard {index} of {self._count}")
        start = index % self._count * self._rows
        rows = min(self._rows, self._tensor.size(self._dim) - start)
        return self._tensor.narrow(self._dim, start, rows) if rows > 0 else self._tensor.new_empty(0)


# FSDP2 and DTensor make of each tensor this rank's shard alone, not those of all ranks.
SHARDS: tuple[Patch, ...] = (
    (_module("_fsdp_param"), "_chunk_with_empty", lambda _: Shards),
    (Shard, "_shard_tensor", around(_own_shard)),
)


@contextmanager
def communication_marked(
    during: Callable[[], AbstractContextManager[None]], at: Callable[[nn.Module], AbstractContextManager[None]]
) -> Iterator[None]:
    """Run what FSDP2 does to gather parameters and to reduce gradients inside of ``during()`` and ``at(module)``."""

    def placed(method: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        with at(group.modules[0]):
            return method(group, *args, **kwargs)

    marked, groups = inside(during), _module("_fsdp_param_group")
    of_group, parameter = getattr(groups, "FSDPParamGroup", None), getattr(_module("_fsdp_param"), "FSDPParam", None)
    with all_replaced(
        *((groups, each, marked) for each in ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")),
        *((parameter, each, marked) for each in ("init_all_gather_outputs", "alloc_all_gather_outputs")),
        *((of_group, each, around(placed)) for each in ("unshard", "wait_for_unshard", "post_backward")),
    ):
        yield


def local(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, or of a result that a collective has not finished yet."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    elem = getattr(tensor, "elem", None)
    return elem if isinstance(elem, Tensor) else tensor


def run_on_parts(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], within: Callable[[], AbstractContextManager[Any]]
) -> Any:
    """An operation on each of many DTensors that lie alike, on the local parts at once; NotImplemented of any other.

    DTensor derives this for each of them again, which takes most of an optimizer's step.
    """
    name = func._schema.name
    operation = name.removeprefix("aten::_foreach_").removesuffix("_")
    if operation not in _ELEMENTWISE.split() or kwargs.get("out") is not None:
        return NotImplemented
    specs = [each._spec for each in args[0] if isinstance(each, DTensor)]
    if len(specs) != len(args[0]) or not all(_alike(specs, each) for each in (*args[1:], *kwargs.values())):
        return NotImplemented
    if any(each.is_partial() for spec in specs for each in spec.placements):
        return NotImplemented
    parts = [_local_parts(each) for each in args]
    with within():
        made = func(*parts, **{name: _local_parts(each) for name, each in kwargs.items()})
    if func._schema.is_mutable or made is None:
        return None
    wrap: Any = DTensor
    return [wrap(each, spec, requires_grad=False) for each, spec in zip(made, specs, strict=True)]


def _alike(specs: list[Any], argument: Any) -> bool:
    """Whether an argument that is a list of tensors lies over the ranks as the first one does."""
    if isinstance(argument, Tensor):
        return not isinstance(argument, DTensor)
    if not isinstance(argument, (list, tuple)) or not any(isinstance(each, Tensor) for each in argument):
        return True
    return len(argument) == len(specs) and all(
        isinstance(each, DTensor) and each._spec.placements == spec.placements and each._spec.mesh == spec.mesh
        for each, spec in zip(argument, specs, strict=True)
    )


def _local_parts(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return [each._local_tensor if isinstance(each, DTensor) else each for each in argument]
    return argument
