"""What a rank holds of a tensor (FSDP2, DTensor), what it sends (torch.distributed), and counts of tokens.

Programs of expert parallelism count tokens by expert, send the other ranks the counts, and read them to know how large
the parts of an all-to-all are. A count is made a tensor whose values are known, the same for each expert; fake tensors
compute on with those by themselves. All ranks are assumed to be alike.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.spec.frozen import frozen
from trainledger.spec.units import ceil_div
from trainledger.trace.patches import Args, Kwargs, Patch, all_replaced, around, inside, replaced
from trainledger.trace.recorder.storages import tensors_in

AXES: dict[str, str] = {}  # the mesh axis of a process group, by the group's name

# By collective and place of the argument that is its message (`Entry.payload`; None: its result), the operators.
_OPERATORS: dict[str, dict[int | None, str]] = {
    "all_gather": {
        0: "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_",
        None: "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced",
    },
    "reduce_scatter": {
        0: "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced",
        1: "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_",
    },
    "all_reduce": {
        0: "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_"
    },
    "all_to_all": {0: "all_to_all_single shard_dim_alltoall", 1: "alltoall_ alltoall_base_"},
    "broadcast": {0: "broadcast_ broadcast"},
    "reduce": {0: "reduce_"},
    "gather": {0: "gather_"},
    "scatter": {1: "scatter_"},
    "send": {0: "send isend"},
    "recv": {0: "recv_ recv_any_source_ irecv"},
    "send and recv": {3: "batch_p2p_ops"},
    "barrier": {0: "barrier monitored_barrier_"},
}
_KINDS = {
    operator: (kind, place)
    for kind, places in _OPERATORS.items()
    for place, operators in places.items()
    for operator in operators.split()
}
COUNTS = (torch.ops.aten.histc.default, torch.ops.aten.bincount.default)
_INTO_FIRST = torch.ops.c10d.alltoall_base_.default
_EXCHANGES = (_INTO_FIRST, torch.ops._c10d_functional.all_to_all_single.default)
_MOST_COUNTS = 4096  # elements of a tensor whose values are followed


@frozen
class Collective:
    """One collective as a rank calls it; ``waits`` says whether the caller goes on only when it is over."""

    name: str
    payload: int
    group: str
    ranks: int
    waits: bool


def name_groups(mesh: DeviceMesh) -> None:
    """Remember which axis of a mesh a process group belongs to; a mesh of all ranks has the default group."""
    for axis in mesh.mesh_dim_names or ():
        try:
            AXES.setdefault(mesh.get_group(axis).group_name, axis)
        except (RuntimeError, KeyError, AssertionError, AttributeError):
            # A mesh without groups of its own
            continue


def collective_of(func: OpOverload, args: Args, kwargs: Kwargs, out: Any) -> Collective:
    """What an operator of kind ``collective`` sends; one that is not known by name sends what it reads."""
    name = func._schema.name.split("::")[1]
    kind, place = _KINDS.get(name, (name.strip("_"), 0))
    message = () if kind == "barrier" else out if place is None else args[place]
    group = _group_of(func, args, kwargs)
    # Functional ones have none, and are waited for
    asynchronous = _argument(func, args, kwargs, "async_op")
    return Collective(
        name=kind,
        payload=sum(tensor.nbytes for tensor in tensors_in(message)),
        group=_name(group),
        ranks=1 if group is None else group.size(),
        waits=asynchronous is not True,
    )


def _argument(func: OpOverload, args: Args, kwargs: Kwargs, name: str) -> Any:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    return None


def _group_of(func: OpOverload, args: Args, kwargs: Kwargs) -> dist.ProcessGroup | None:
    """The process group that an operator is called with; None where it has none."""
    for name in ("process_group", "group_name"):
        found = _argument(func, args, kwargs, name)
        if isinstance(found, str):
            resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
            return resolve(found)  # type: ignore[no-any-return]
        if isinstance(found, dist.ProcessGroup):
            return found
        if isinstance(found, torch.ScriptObject):
            return dist.ProcessGroup.unbox(found)
    return None


def _name(group: dist.ProcessGroup | None) -> str:
    """The mesh axis that a group was made for; ``world`` for all ranks."""
    if group is not None and group.group_name in AXES:
        return AXES[group.group_name]
    described = "" if group is None else (getattr(group, "group_desc", "") or "")
    if described in ("default_pg", "mesh_default"):
        return "world"
    name = described.removeprefix("mesh_")
    return "" if name == "undefined" else name


@contextmanager
def counts_have_values() -> Iterator[None]:
    """Let fake tensors of a few integers keep values that are known, not only those of one."""
    with replaced(fake_tensor, "CONSTANT_NUMEL_LIMIT", lambda _: _MOST_COUNTS, needed=False):
        yield


def give_values(func: OpOverload, args: Args, out: Any) -> None:
    """Give a count, or the counts that arrive from all ranks, its assumed values."""
    if func in COUNTS and isinstance(out, FakeTensor):
        out.constant = even(args[0].numel(), out.shape[0], out.dtype)
    if func not in _EXCHANGES:
        return
    source, target = (args[1], args[0]) if func is _INTO_FIRST else (args[0], out)
    known = getattr(source, "constant", None)
    if known is None or not isinstance(target, FakeTensor) or known.numel() != target.numel():
        return
    group = _group_of(func, args, {})
    if group is None or known.numel() % group.size():
        return
    with _disable_current_modes():
        mine = known.reshape(group.size(), -1)[group.rank()]
        target.constant = mine.repeat(group.size()).view(target.shape)


def even(total: int, pieces: int, dtype: torch.dtype) -> Tensor:
    """A total in parts that differ by one at most.

    >>> even(10, 4, torch.int64)
    tensor([3, 3, 2, 2])
    """
    with _disable_current_modes():
        each, rest = divmod(total, pieces)
        return torch.tensor([each + (at < rest) for at in range(pieces)], dtype=dtype)


_ELEMENTWISE = (
    "add sub mul div lerp addcmul addcdiv sqrt neg reciprocal abs sign zero pow maximum minimum rsqrt exp log"
)


def _module(name: str) -> Any:
    # FSDP2's parts have no public name, and versions move them.
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
    # In a real run the first rank cuts the tensor and sends each rank its shard (Shard._shard_tensor scatters).
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
    func: OpOverload, args: Args, kwargs: Kwargs, within: Callable[[], AbstractContextManager[Any]]
) -> Any:
    """An operation on each of many DTensors that lie alike, on the local parts at once; NotImplemented of any other.

    DTensor derives this for each of them again, which takes most of an optimizer's step.
    """
    name = func._schema.name
    operation = name.removeprefix("aten::_foreach_").removesuffix("_")
    if operation not in _ELEMENTWISE.split() or kwargs.get("out") is not None:
        return NotImplemented
    specs = [argument._spec for argument in args[0] if isinstance(argument, DTensor)]
    if len(specs) != len(args[0]) or not all(_alike(specs, argument) for argument in (*args[1:], *kwargs.values())):
        return NotImplemented
    if any(placement.is_partial() for spec in specs for placement in spec.placements):
        return NotImplemented
    parts = [_local_parts(argument) for argument in args]
    with within():
        made = func(*parts, **{name: _local_parts(value) for name, value in kwargs.items()})
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
