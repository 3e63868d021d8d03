"""Experts spread over ranks: each has some, and tokens go to the ranks of their experts, and back (GShard).

The ranks are some of those that share state, with other tokens each; what a rank sends to another depends on the
router, so numbers of rows go first (dropless). With a capacity all numbers are the same, and so is every message.

Shapes: E experts of this rank, P ranks, S rows that tokens of this rank are in, A rows that arrive, D width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainledger.engine.nn.feed_forward import ExpertStack
from trainledger.engine.nn.routing import Dispatch, Moved
from trainledger.engine.train.parallel.mesh import local
from trainledger.spec.layout import Layout


def spread_experts(model: nn.Module, experts: DeviceMesh) -> None:
    """Leave a rank its experts of every layer, in place, and send it the tokens of those; ``experts`` is one axis."""
    for stack in stacks_of(model):
        for name, parameter in list(stack.named_parameters()):
            own = parameter.detach().chunk(experts.size())[experts.get_local_rank()].clone()
            part = DTensor.from_local(own, experts, (Shard(0),), run_check=False)
            setattr(stack, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        there: Any = stack
        there.stack = partial(_local_stack, stack)
        there.forward = partial(_forward, stack, experts.get_group())


def stacks_of(model: nn.Module) -> list[ExpertStack]:
    """The stacks of experts in a model."""
    return [module for module in model.modules() if isinstance(module, ExpertStack)]


# The mean is over all ranks and not over those with the same experts: every rank's tokens reach an expert, and each
# rank's loss is a mean over its own tokens.
def finish_expert_gradients(model: nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
    """Once a step: the experts' gradients are of the tokens of all ranks, and the loss is a mean over those.

    FSDP2 has taken the mean over the ranks that have the same experts, where it shards these.
    """
    sharded = layout.shard_ranks > layout.expert
    for stack in stacks_of(model):
        for parameter in stack.parameters():
            if parameter.grad is None:
                continue
            gradient = local(parameter.grad)
            if not sharded and layout.replicate > 1:
                dist.all_reduce(gradient, group=mesh.get_group("replicate"))
            gradient.div_(layout.expert * (1 if sharded else layout.replicate))


def _local_stack(stack: ExpertStack, name: str) -> Tensor | None:
    each = getattr(stack, name, None)
    return None if each is None else local(each)


# The way of tokens


# Rows that are told first are 8 E bytes a rank, and only where a capacity does not make all numbers equal.
def _forward(stack: ExpertStack, group: Any, x_SD: Tensor, where: Dispatch, routed: int) -> Tensor:
    """As `ExpertStack.forward` of rows of all experts."""
    if where.expert_S is None:
        return _with_places(stack, group, x_SD, where, routed)
    ranks = group.size()
    counts_PE = (where.ends_E - where.starts_E).view(ranks, -1)
    arriving_PE = counts_PE.clone()
    dist.all_to_all_single(arriving_PE, counts_PE, group=group)
    sent, arriving = (tensor.sum(1).tolist() for tensor in (counts_PE, arriving_PE))
    x_AD = _exchange(x_SD, group, sent, arriving)
    own = _by_expert(arriving_PE)
    x_AD = _moved(x_AD, own.route_S, own.place_R)
    y_AD = ExpertStack.forward(stack, x_AD, own, x_AD.shape[0])
    del x_AD
    y_AD = _moved(y_AD, own.place_R, own.route_S)
    return _exchange(y_AD, group, arriving, sent)


# A stable sort: rows of one expert keep the order of their ranks, so that sums over them have the same bits each time.
def _by_expert(arriving_PE: Tensor) -> Dispatch:
    """Where rows that come rank by rank, and of each rank expert by expert, go to be expert by expert."""
    ranks, n_experts = arriving_PE.shape
    counts_E = arriving_PE.sum(0)
    expert_N = torch.arange(n_experts, device=arriving_PE.device).repeat(ranks)
    expert_A, route_A = expert_N.repeat_interleave(arriving_PE.flatten()).sort(stable=True)
    ends_E = counts_E.cumsum(0)
    return Dispatch(route_A, route_A.argsort(), ends_E - counts_E, ends_E, expert_S=expert_A)


def _with_places(stack: ExpertStack, group: Any, x_SD: Tensor, where: Dispatch, routed: int) -> Tensor:
    """The same where every expert has as many places of each rank."""
    ranks, n_experts = group.size(), where.ends_E.shape[0] // group.size()
    x_AD = _swapped(_exchange(x_SD, group, None, None), ranks, n_experts)
    y_AD = ExpertStack.forward(stack, x_AD, where, routed)
    del x_AD
    y_AD = _swapped(y_AD, n_experts, ranks)
    return _exchange(y_AD, group, None, None)


def _swapped(x: Tensor, outer: int, inner: int) -> Tensor:
    swapped: Tensor = _Swapped.apply(x, outer, inner)  # type: ignore[no-untyped-call]
    return swapped


class _Swapped(Function):
    """Rows that lie in ``outer`` parts of ``inner`` parts, the other way round; a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, outer: int, inner: int) -> Tensor:
        ctx.sizes = outer, inner
        return x.view(outer, inner, -1, x.shape[-1]).transpose(0, 1).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (outer, inner) = gradients, ctx.sizes
        return g.view(inner, outer, -1, g.shape[-1]).transpose(0, 1).reshape(g.shape), None, None


def _moved(x: Tensor, index: Tensor, back: Tensor) -> Tensor:
    moved: Tensor = Moved.apply(x, index, None, back, None, 1)  # type: ignore[no-untyped-call]
    return moved


def _exchange(x: Tensor, group: Any, sent: list[int] | None, arriving: list[int] | None) -> Tensor:
    exchanged: Tensor = _Exchanged.apply(x, group, sent, arriving)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchanged(Function):
    """Rows to all ranks, and from all; ``sent`` and ``arriving`` are how many for each, None where equally many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, sent: list[int] | None, arriving: list[int] | None) -> Tensor:
        ctx.group, ctx.sent, ctx.arriving = group, sent, arriving
        return _all_to_all(x, group, sent, arriving)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradients[0], ctx.group, ctx.arriving, ctx.sent), None, None, None


def _all_to_all(x: Tensor, group: Any, sent: list[int] | None, arriving: list[int] | None) -> Tensor:
    out = x.new_empty(x.shape[0] if arriving is None else sum(arriving), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), arriving, sent, group=group)
    return out
