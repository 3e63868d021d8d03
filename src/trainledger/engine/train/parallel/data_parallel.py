"""Ranks with other sequences: state sharded over them and gathered block by block (FSDP2, ZeRO-3), or replicas.

Replicas sum their gradients by DDP, or in its buckets what DDP cannot wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from trainledger.engine.train.parallel.expert import stacks_of
from trainledger.engine.train.parallel.mesh import shard_mesh, with_replicas
from trainledger.engine.train.precision import TORCH
from trainledger.spec.layout import Layout
from trainledger.spec.precision import Precision

_common: Any = _fsdp_common
# What shards parameters of one module over ranks of their own; older versions shard all of a module over the same.
_PLACEMENT: Any = getattr(_common, "ShardPlacementResult", None)


def shard(
    model: nn.Module, layout: Layout, mesh: DeviceMesh, precision: Precision, experts: DeviceMesh | None = None
) -> None:
    """FSDP2: each block a group of its own, all else one group that stays gathered until its backward is over.

    Where the precision gathers in another format than it holds, FSDP2 makes the copies and widens the gradients.
    Experts that are spread over ranks (``experts`` has both axes) are sharded over those that have the same, and whole
    where there is no other.
    """
    policy = MixedPrecisionPolicy()
    if precision.copies == "gathered":
        policy = MixedPrecisionPolicy(TORCH[precision.compute], TORCH[precision.gradients])
    given: dict[str, Any] = {"mesh": with_replicas(layout, mesh, shard_mesh(layout, mesh)), "mp_policy": policy}
    alike = None if experts is None else experts["expert_shard"]
    if alike is not None and alike.size() == 1:
        given["ignored_params"] = {each for stack in stacks_of(model) for each in stack.parameters()}
    elif alike is not None and _PLACEMENT is None:
        for stack in stacks_of(model):
            own = given | {"mesh": with_replicas(layout, mesh, alike)}
            fully_shard(stack, reshard_after_forward=layout.reshards, **own)
    elif alike is not None:
        given["shard_placement_fn"] = _placement(model, with_replicas(layout, mesh, alike))
    for block in model.layers:  # type: ignore[union-attr]
        fully_shard(block, reshard_after_forward=layout.reshards, **given)
    fully_shard(model, **given)
    if layout.prefetch != 1:
        _prefetch(list(model.layers), layout.prefetch)  # type: ignore[arg-type]


def _placement(model: nn.Module, alike: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Experts over ranks of their own, all else as it is; FSDP2 then gathers both at once."""
    info: Any = _common.HSDPMeshInfo(alike, 1, 0) if alike.ndim == 2 else _common.FSDPMeshInfo(alike, 0)
    over, experts = _PLACEMENT(Shard(0), info), {id(each) for stack in stacks_of(model) for each in stack.parameters()}
    return lambda parameter: over if id(parameter) in experts else None


def _prefetch(blocks: list[Any], ahead: int) -> None:
    """Say which blocks are gathered while one runs backward: by default FSDP2 takes the one before it."""
    for index, block in enumerate(blocks):
        block.set_modules_to_backward_prefetch(blocks[max(0, index - ahead) : index][::-1])


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
