"""Parameters, gradients and optimizer state sharded over ranks and gathered block by block: FSDP2 (ZeRO-3)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from trainledger.spec.layout import Layout
from trainledger.spec.precision import Precision
from trainledger.train.parallel.mesh import shard_mesh, with_replicas
from trainledger.train.precision import TORCH


def shard(model: nn.Module, layout: Layout, mesh: DeviceMesh, precision: Precision) -> None:
    """FSDP2: each block a group of its own, all else one group that stays gathered until its backward is over.

    Where the precision gathers in another format than it holds, FSDP2 makes the copies and widens the gradients.
    """
    policy = MixedPrecisionPolicy()
    if precision.copies == "gathered":
        policy = MixedPrecisionPolicy(TORCH[precision.compute], TORCH[precision.gradients])
    groups = with_replicas(layout, mesh, shard_mesh(layout, mesh))
    for block in model.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=groups, reshard_after_forward=layout.reshards, mp_policy=policy)
    fully_shard(model, mesh=groups, mp_policy=policy)
    if layout.prefetch != 1:
        _prefetch(list(model.layers), layout.prefetch)  # type: ignore[arg-type]


def _prefetch(blocks: list[Any], ahead: int) -> None:
    """Say which blocks are gathered while one runs backward: by default FSDP2 takes the one before it."""
    for index, block in enumerate(blocks):
        block.set_modules_to_backward_prefetch(blocks[max(0, index - ahead) : index][::-1])
