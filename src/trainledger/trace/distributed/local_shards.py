"""FSDP2 and DTensor in a world of many ranks: only this rank's shard of a parameter is made."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from trainledger.trace.patches import all_replaced, inside


@contextmanager
def own_shard_only() -> Iterator[None]:
    """Inside, FSDP2 and DTensor make of each tensor this rank's shard alone, not those of all ranks."""
    with all_replaced(
        (_module("fsdp._fully_shard._fsdp_param"), "_chunk_with_empty", lambda _: Shards),
        (Shard, "_shard_tensor", _own_shard),
    ):
        yield


def _own_shard(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The rank's own shard of a tensor, which in a real run the first rank sends to all."""

    def own(self: Shard, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, *more: Any, **options: Any) -> Tensor:
        coordinate = mesh.get_coordinate()
        if type(self) is not Shard or coordinate is None:
            return make(self, tensor, mesh, mesh_dim, *more, **options)
        shard = Shards(tensor, mesh.size(mesh_dim), self.dim)[coordinate[mesh_dim]]
        if not shard.numel():
            shard = tensor.narrow(self.dim, 0, 0)
        return shard.clone(memory_format=torch.contiguous_format)

    return own


class Shards(Sequence[Tensor]):
    """What ``torch.chunk`` gives of a dim, filled up with empty tensors; each shard is made when it is read.

    >>> [tuple(each.shape) for each in Shards(torch.empty(5, 2), 4, dim=0)]
    [(2, 2), (2, 2), (1, 2), (0,)]
    """

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim
        self._rows = -(-tensor.size(dim) // num_chunks)

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


@contextmanager
def communication_marked(
    during: Callable[[], AbstractContextManager[None]], at: Callable[[nn.Module], AbstractContextManager[None]]
) -> Iterator[None]:
    """Run what FSDP2 does to gather parameters and to reduce gradients inside of ``during()`` and ``at(module)``."""

    marked = inside(during)

    def placed(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(group: Any, *args: Any, **kwargs: Any) -> Any:
            with at(group.modules[0]):
                return method(group, *args, **kwargs)

        return called

    groups = _module("fsdp._fully_shard._fsdp_param_group")
    parameter = getattr(_module("fsdp._fully_shard._fsdp_param"), "FSDPParam", None)
    names = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")
    methods = ("init_all_gather_outputs", "alloc_all_gather_outputs")
    of_group = getattr(groups, "FSDPParamGroup", None)
    with all_replaced(
        *((groups, each, marked) for each in names), *((parameter, each, marked) for each in methods),
        *((of_group, each, placed) for each in ("unshard", "wait_for_unshard", "post_backward")),
    ):  # fmt: skip
        yield


def _module(name: str) -> Any:
    """A part of torch.distributed that has no public name; None where this version has it elsewhere."""
    try:
        return importlib.import_module(f"torch.distributed.{name}")
    except ImportError:
        return None
