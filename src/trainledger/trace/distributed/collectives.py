"""What a dispatched operator of torch.distributed sends: which collective, how many bytes, among whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from trainledger.frozen import frozen
from trainledger.trace.operators.table import operator_of
from trainledger.trace.recorder.tensor_facts import tensors_in

AXES: dict[str, str] = {}  # the mesh axis of a process group, by the group's name

Payload = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


def _first(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    return args[0]


def _second(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    return args[1]


def _fourth(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    return args[3]


def _made(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    return out


# By the operator's name: the collective, and the tensors that are its message (`Entry.payload`).
_KINDS: dict[str, tuple[str, Payload]] = {
    "allgather_": ("all_gather", _first), "_allgather_base_": ("all_gather", _first),
    "allgather_coalesced_": ("all_gather", _first), "allgather_into_tensor_coalesced_": ("all_gather", _first),
    "all_gather_into_tensor": ("all_gather", _made), "all_gather_into_tensor_out": ("all_gather", _made),
    "all_gather_into_tensor_coalesced": ("all_gather", _made),
    "reduce_scatter_": ("reduce_scatter", _second), "_reduce_scatter_base_": ("reduce_scatter", _second),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _second),
    "reduce_scatter_tensor": ("reduce_scatter", _first), "reduce_scatter_tensor_out": ("reduce_scatter", _first),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _first),
    "allreduce_": ("all_reduce", _first), "allreduce_coalesced_": ("all_reduce", _first),
    "all_reduce": ("all_reduce", _first), "all_reduce_": ("all_reduce", _first),
    "all_reduce_coalesced": ("all_reduce", _first), "all_reduce_coalesced_": ("all_reduce", _first),
    "alltoall_": ("all_to_all", _second), "alltoall_base_": ("all_to_all", _second),
    "all_to_all_single": ("all_to_all", _first), "shard_dim_alltoall": ("all_to_all", _first),
    "broadcast_": ("broadcast", _first), "broadcast": ("broadcast", _first), "reduce_": ("reduce", _first),
    "gather_": ("gather", _first), "scatter_": ("scatter", _second),
    "send": ("send", _first), "recv_": ("recv", _first), "recv_any_source_": ("recv", _first),
    "isend": ("send", _first), "irecv": ("recv", _first), "batch_p2p_ops": ("send and recv", _fourth),
    "barrier": ("barrier", lambda args, kwargs, out: ()), "monitored_barrier_": ("barrier", lambda *_: ()),
}  # fmt: skip


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


def is_collective(func: OpOverload) -> bool:
    """Whether an operator sends anything."""
    return operator_of(func).kind == "collective"


def collective_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Collective:
    """What an operator that `is_collective` sends; one that is not known by name sends what it reads."""
    name = func._schema.name.split("::")[1]
    kind, message = _KINDS.get(name, (name.strip("_"), _first))
    group = group_of(func, args, kwargs)
    asynchronous = _argument(func, args, kwargs, "async_op")  # functional ones have none, and are waited for
    return Collective(
        name=kind,
        payload=sum(nbytes(each) for each in tensors_in(message(args, kwargs, out))),
        group=_name(group),
        ranks=1 if group is None else group.size(),
        waits=asynchronous is not True,
    )


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _argument(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    for index, each in enumerate(func._schema.arguments):
        if each.name == name:
            if index < len(args):
                return args[index]
            return kwargs.get(name, each.default_value)
    return None


def group_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.ProcessGroup | None:
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
