"""A layout applied to a model: tensor parallelism by DTensor, sharding by FSDP2, replicas by DDP.

What is done here is what `ledger.ranks` accounts for; the tests run both. Stages of a pipeline are cut in between.
Where whole parameters are kept and their update is shared (ZeRO-1 and 2), nothing is done to the model: see `zero`.
The tokens of context ranks are spread before (`context`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainledger.engine.train.parallel.expert import spread_experts
from trainledger.engine.train.parallel.mesh import expert_mesh
from trainledger.engine.train.parallel.replicated import replicate
from trainledger.engine.train.parallel.sharded import shard
from trainledger.engine.train.parallel.tensor import refuse_to_split, split
from trainledger.spec.layout import Layout
from trainledger.spec.precision import Precision
from trainledger.spec.problem import InvalidInput, Problem

Cut = Callable[[], Sequence[nn.Module]]


def spread(model: nn.Module, layout: Layout, mesh: DeviceMesh, precision: Precision) -> nn.Module:
    """The model as this rank holds it: divided, then replicated.

    A model that is only replicated comes back wrapped in DDP. Raises `InvalidInput` for what cannot be applied yet.
    """
    if layout.pipeline > 1:
        raise InvalidInput([Problem("layout.pipeline", layout.pipeline, "leaves a rank with several models", 1)])
    divide(model, layout, mesh, precision)
    return replicate(model, mesh) if layout.shard_ranks == 1 and layout.replicate > 1 else model


def divide(
    model: nn.Module, layout: Layout, mesh: DeviceMesh, precision: Precision, cut: Cut | None = None
) -> Sequence[nn.Module]:
    """Split a model over ``tensor``, then shard it over ``shard``, in place; its parameters may be without memory.

    With a ``pipeline`` the model is ``cut`` between the two. The modules that are called: the model, or its stages.

    Raises `InvalidInput` for what cannot be applied yet.
    """
    applied = {"gather": "block", "sequence_gather": "kept"}
    problems = [
        Problem(f"layout.{name}", getattr(layout, name), "is accounted for, but not applied to a model yet", one)
        for name, one in applied.items()
        if getattr(layout, name) != one
    ]
    if layout.overlap != ("gradients",):  # what DDP and FSDP2 do
        problems.append(
            Problem("layout.overlap", layout.overlap, "is accounted for, but not applied to a model yet", "gradients")
        )
    if layout.shard_ranks > 1 and layout.zero != 3 and (layout.tensor > 1 or layout.pipeline > 1):
        split_over = "tensor ranks" if layout.tensor > 1 else "stages"
        rule = f"is accounted for, but not applied to a model yet that is split over {split_over}"
        problems.append(Problem("layout.zero", layout.zero, rule, 3))
    if layout.zero == 0 and layout.shard * layout.context > 1:
        rule = "is accounted for, but not applied to a model yet; layout.replicate trains copies of the whole model"
        problems.append(Problem("layout.zero", 0, rule, 3))
    if problems:
        raise InvalidInput(problems)
    if layout.tensor > 1:
        refuse_to_split(model, precision)
        split(model, mesh["tensor"], sequence_parallel=layout.sequence_parallel)
    experts = None
    if layout.expert > 1:
        experts = expert_mesh(layout, mesh)
        spread_experts(model, experts["expert"])
    parts: Sequence[nn.Module] = [model] if cut is None else cut()
    if layout.shard_ranks > 1 and layout.zero == 3:
        for each in parts:
            shard(each, layout, mesh, precision, experts)
    elif layout.replicate > 1 and layout.tensor > 1 and layout.shard_ranks == 1:
        rule = "with layout.tensor is applied to a model only where layout.shard is above 1"
        raise InvalidInput([Problem("layout.replicate", layout.replicate, rule, 1)])
    return parts
