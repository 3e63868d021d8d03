"""What an operator of torch.distributed sends: which collective, how many bytes, among whom; and counts of tokens.

Programs of expert parallelism count tokens by expert, send the other ranks the counts, and read them to know how large
the parts of an all-to-all are. A count is made a tensor whose values are known, the same for each expert; fake tensors
compute on with those by themselves. All ranks are assumed to be alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.spec.frozen import frozen
from trainledger.trace.patches import replaced
from trainledger.trace.recorder.tensor_facts import tensors_in

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
        0: "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_",
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
            continue  # a mesh without groups of its own


def collective_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Collective:
    """What an operator of kind ``collective`` sends; one that is not known by name sends what it reads."""
    name = func._schema.name.split("::")[1]
    kind, place = _KINDS.get(name, (name.strip("_"), 0))
    message = () if kind == "barrier" else out if place is None else args[place]
    group = _group_of(func, args, kwargs)
    asynchronous = _argument(func, args, kwargs, "async_op")  # functional ones have none, and are waited for
    return Collective(
        name=kind,
        payload=sum(each.nbytes for each in tensors_in(message)),
        group=_name(group),
        ranks=1 if group is None else group.size(),
        waits=asynchronous is not True,
    )


def _argument(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    for index, each in enumerate(func._schema.arguments):
        if each.name == name:
            return args[index] if index < len(args) else kwargs.get(name, each.default_value)
    return None


def _group_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.ProcessGroup | None:
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


def give_values(func: OpOverload, args: tuple[Any, ...], out: Any) -> None:
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
