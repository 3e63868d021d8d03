"""Parameters, gradients and optimizer state sharded over ranks and gathered block by block: FSDP2 (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
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
