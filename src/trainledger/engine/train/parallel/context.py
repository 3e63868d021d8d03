"""The tokens of a sequence spread over context ranks: each has some, and attends to those of all.

ring: each rank keeps its queries, and keys and values go round; what queries made of each rank's part is joined by its
logsumexp (Liu et al. 2023, Ring Attention). Under a causal mask a rank with the last tokens would have the most to do,
so each has an early and a late part (zigzag). all-to-all: inside attention each rank has all tokens for a part of the
heads (Jacobs et al. 2023, DeepSpeed-Ulysses), and outside, tokens in a row. torch's own context parallelism has no rule
for the attention kernel of CPUs (as of 2.13).

Shapes: B sequences, T tokens (queries) of this rank, S keys, C ranks, H query heads, G key-value heads, K query and key
width, W value width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from trainledger.engine.nn.attention import Attend, Scores, attend
from trainledger.engine.nn.feed_forward import Experts
from trainledger.engine.nn.positions import Rotary
from trainledger.engine.nn.routing import Dispatch
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.train.step import Batch
from trainledger.spec.layout import Layout

_BLOCKS, _SUMS = 0, 1  # tags: blocks and their sums are under way at the same time


# torch's own context parallelism has no rule for the attention kernel of CPUs (2.13), on which all of this is tested.
class Ring:
    """The ranks of a group in a circle, each of which sends to the next and receives from the one before."""

    def __init__(self, group: Any) -> None:
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        self.next, self.before = (dist.get_global_rank(group, (self.rank + at) % self.ranks) for at in (1, -1))

    def blocks(self, here: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each rank's block and whose it is, this rank's first; the next one is on its way meanwhile."""
        for step in range(self.ranks - 1):
            coming = torch.empty_like(here)
            works = self.pass_on(here, coming, _BLOCKS)
            yield (self.rank - step) % self.ranks, here
            _wait_for(works)
            here = coming
            del coming
        yield (self.rank + 1) % self.ranks, here

    def pass_on(self, sent: Tensor, coming: Tensor, tag: int) -> list[Any]:
        """Begin to send to the next rank, and to receive from the one before."""
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, self.next, self.group, tag),
                dist.P2POp(dist.irecv, coming, self.before, self.group, tag),
            ]
        )


class Sums:
    """What ranks add up for each block, behind which it goes round; at last it arrives where the block is from."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._under_way: tuple[Tensor, Tensor, list[Any]] | None = None

    def pass_on(self, total: Tensor) -> None:
        """Send on the sum for the block that is here."""
        coming = torch.empty_like(total)
        self._under_way = total, coming, self.ring.pass_on(total, coming, _SUMS)

    def arrived(self) -> Tensor:
        """The sum that ranks before have for the block that is here now; after the last, that of the own block."""
        assert self._under_way is not None
        (_, coming, works), self._under_way = self._under_way, None
        _wait_for(works)
        return coming


def _wait_for(works: list[Any]) -> None:
    """Wait, and let go of what holds on to the tensors."""
    while works:
        works.pop().wait()


def flatly(*tensors: Tensor) -> Tensor:
    """Tensors as one message."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def parts_of(block: Tensor, *like: Tensor) -> Iterator[Tensor]:
    """The tensors of a message, views of the shapes of others."""
    sizes = [prod(tensor.shape) for tensor in like]
    return (part.view(tensor.shape) for part, tensor in zip(torch.split(block, sizes), like, strict=True))


# Attention over some keys at a time


def kernel_of(q: Tensor, scores: Scores) -> Kernel:
    """The fused kernel that runs on these queries."""
    if q.device.type == "cpu":
        return Kernel("flash_for_cpu", scores.scale)
    efficient = scores.implementation == "efficient" or q.dtype == torch.float32
    return Kernel("efficient" if efficient else "flash", scores.scale)


@dataclass(frozen=True)
class Kernel:
    """Fused attention that gives the logsumexp of scores too, and takes that of all keys in backward.

    ``kind``: ``flash_for_cpu``, ``flash`` or ``efficient``, the last two on accelerators.
    """

    kind: str
    scale: float

    def forward(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSW: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        """The mixtures [B, H, T, W] and logsumexps [B, H, T] of queries over some keys."""
        aten, n_queries = torch.ops.aten, q_BHTK.shape[2]
        match self.kind:
            case "flash_for_cpu":
                run: Any = aten._scaled_dot_product_flash_attention_for_cpu
                y, lse = run(q_BHTK, k_BGSK, v_BGSW, 0.0, causal, scale=self.scale)
            case "flash":
                run = aten._scaled_dot_product_flash_attention
                y, lse, *_ = run(q_BHTK, k_BGSK, v_BGSW, 0.0, causal, False, scale=self.scale)
            case _:
                run = aten._scaled_dot_product_efficient_attention
                k, v = (_repeated(tensor, q_BHTK) for tensor in (k_BGSK, v_BGSW))
                y, lse, *_ = run(q_BHTK, k, v, None, True, 0.0, causal, scale=self.scale)
        return y, lse[:, :, :n_queries]  # the kernel may pad its rows

    def backward(
        self, g: Tensor, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSW: Tensor, y: Tensor, lse_BHT: Tensor, *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values; ``y`` and ``lse`` are over all keys."""
        aten, lse = torch.ops.aten, lse_BHT.contiguous()
        match self.kind:
            case "flash_for_cpu":
                run: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward
                dq, dk, dv = run(g, q_BHTK, k_BGSK, v_BGSW, y, lse, 0.0, causal, scale=self.scale)
            case "flash":
                run = aten._scaled_dot_product_flash_attention_backward
                most, unused = (q_BHTK.shape[2], k_BGSK.shape[2]), q_BHTK.new_empty(2, dtype=torch.int64)
                dq, dk, dv = run(
                    g, q_BHTK, k_BGSK, v_BGSW, y, lse, None, None, *most, 0.0, causal, unused, unused, scale=self.scale
                )
            case _:
                run = aten._scaled_dot_product_efficient_attention_backward
                k, v = (_repeated(tensor, q_BHTK) for tensor in (k_BGSK, v_BGSW))
                lse, unused = F.pad(lse, (0, -lse.shape[2] % _ROWS)), q_BHTK.new_empty((), dtype=torch.int64)
                wanted = (True, True, True, False)
                dq, dk, dv, _ = run(
                    g, q_BHTK, k, v, None, y, lse, unused, unused, 0.0, wanted, causal, scale=self.scale
                )
                dk, dv = (each.unflatten(1, (k_BGSK.shape[1], -1)).sum(2) for each in (dk, dv))
        return dq, dk, dv


_ROWS = 32  # the efficient kernel reads logsumexps in whole rows of so many


def _repeated(x_BGSK: Tensor, q_BHTK: Tensor) -> Tensor:
    """Shared heads once for each query's."""
    return x_BGSK.repeat_interleave(q_BHTK.shape[1] // x_BGSK.shape[1], dim=1)


def own_tokens(layout: Layout, rank: int, n_tokens: int) -> list[slice]:
    """Where in a sequence the tokens of a context rank are, in their order on that rank.

    >>> own_tokens(Layout(context=2), 0, 16), own_tokens(Layout(context=2, context_kind="all-to-all"), 1, 16)
    ([slice(0, 4, None), slice(12, 16, None)], [slice(8, 16, None)])
    """
    ranks = layout.context
    if layout.context_kind == "all-to-all":
        size = n_tokens // ranks
        return [slice(rank * size, (rank + 1) * size)]
    size = n_tokens // (2 * ranks)
    return [slice(each * size, (each + 1) * size) for each in (rank, 2 * ranks - 1 - rank)]


def own_part(layout: Layout, rank: int, batch: Batch) -> Batch:
    """Of a micro-batch this rank's tokens and their targets."""
    inputs_BT, targets_BT = (
        torch.cat([each_BT[:, some] for some in own_tokens(layout, rank, each_BT.shape[1])], dim=1) for each_BT in batch
    )
    return inputs_BT, targets_BT


def spread_tokens(model: Transformer, layout: Layout, mesh: DeviceMesh, n_tokens: int) -> None:
    """Give a model the positions of this rank's tokens, and attention that sees those of all ranks, in place."""
    rank = mesh.get_local_rank("context")
    own = own_tokens(layout, rank, n_tokens)
    for module in model.modules():
        if isinstance(module, Rotary):
            _put_first(module, own)
    if model.embed_positions is not None:
        model.unused_rows += own[0].start
    over_ranks: Attend
    if layout.context_kind == "all-to-all":
        over_ranks = partial(_attend_by_heads, mesh.get_group("context"))
    else:
        over_ranks = partial(_attend_around, Ring(mesh.get_group("context")))
    for layer in model.layers:
        attention: Any = layer.self_attn
        attention.attend = over_ranks
    _share_over(model, mesh.get_group("context"))


# Without this sum the load-balance loss is another one (0.4 % in the loss of a test).
def _share_over(model: nn.Module, group: Any) -> None:
    """Let the load-balance loss see the routes of all tokens of a sequence, which are on several ranks."""

    def shares(where: Dispatch, n_routes: int) -> Tensor:
        share_E = (where.ends_E - where.starts_E) / n_routes
        dist.all_reduce(share_E, group=group)
        return share_E.div_(group.size())

    for module in model.modules():
        if isinstance(module, Experts):
            there: Any = module
            there.shares = shares


def _put_first(rotary: Rotary, own: Sequence[slice]) -> None:
    """Move the angles of some positions before those of all others."""
    position_T = torch.arange(rotary.cos_TJ.shape[0], device=rotary.cos_TJ.device)
    others_T = torch.ones_like(position_T, dtype=torch.bool)
    for some in own:
        others_T[some] = False
    order_T = torch.cat([*(position_T[some] for some in own), position_T[others_T]])
    for angles_TJ in (rotary.cos_TJ, rotary.sin_TJ):
        angles_TJ.copy_(angles_TJ[order_T])


# All tokens for a part of the heads


def _attend_by_heads(
    group: Any,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGW: Tensor,
    mask: Tensor | None,
    scores: Scores,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """As `attend`, for this rank's part of the heads in between."""
    assert mask is None
    assert sinks_H is None
    width = v_BTGW.shape[-1]
    q_BTHK, k_BTGK, v_BTGW = (_exchange(tensor, group, to_heads=True) for tensor in (q_BTHK, k_BTGK, v_BTGW))
    y_BTHW = attend(q_BTHK, k_BTGK, v_BTGW, None, scores).unflatten(-1, (-1, width))  # type: ignore[no-untyped-call]
    return _exchange(y_BTHW, group, to_heads=False).flatten(-2)


def _exchange(x: Tensor, group: Any, *, to_heads: bool) -> Tensor:
    exchanged: Tensor = _Exchanged.apply(x, group, to_heads)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchanged(Function):
    """This rank's tokens of all heads for all tokens of its part of the heads, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _all_to_all(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradients[0], ctx.group, not ctx.to_heads), None, None


def _all_to_all(x: Tensor, group: Any, to_heads: bool) -> Tensor:
    """[B, T, C H, K] to [B, C T, H, K], or back; a copy where it does not lie as it is sent or as it is read."""
    split, joined = (2, 1) if to_heads else (1, 2)
    whole: Any = x.unflatten(split, (group.size(), -1))  # type: ignore[no-untyped-call]
    sent = whole.movedim(split, 0).contiguous()
    del whole
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=group)
    del sent
    return arrived.movedim(0, joined).flatten(joined, joined + 1)


# Keys and values go round


def _attend_around(
    ring: Ring,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGW: Tensor,
    mask: Tensor | None,
    scores: Scores,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """As `attend`, for this rank's queries and the keys and values of all."""
    assert mask is None
    assert sinks_H is None
    kernel = kernel_of(q_BTHK, scores)
    y_BTHW: Tensor = _Around.apply(q_BTHK, k_BTGK, v_BTGW, ring, kernel)  # type: ignore[no-untyped-call]
    return y_BTHW.flatten(-2)


class _Around(Function):
    """Attention of this rank's queries to what comes round the ring."""

    @staticmethod
    def forward(ctx: Any, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGW: Tensor, ring: Ring, kernel: Kernel) -> Tensor:
        q = q_BTHK.transpose(1, 2)
        y = lse = None
        for source, block in ring.blocks(flatly(k_BTGK, v_BTGW)):
            queries, keys = _seen(ring.rank, source, q.shape[2])
            k, v = (tensor[:, keys].transpose(1, 2) for tensor in parts_of(block, k_BTGK, v_BTGW))
            part, its_lse = kernel.forward(q[:, :, queries], k, v, causal=source == ring.rank)
            del block, k, v
            if y is None or lse is None:
                y, lse = part.float(), its_lse
            else:
                _join(y[:, :, queries], lse[:, :, queries], part, its_lse)
            del part, its_lse
        assert y is not None
        assert lse is not None
        y = y.to(q.dtype)
        ctx.save_for_backward(q_BTHK, k_BTGK, v_BTGW, y, lse)
        ctx.ring, ctx.kernel = ring, kernel
        return y.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_BTHK, k_BTGK, v_BTGW, y, lse = ctx.saved_tensors
        ring, kernel, sums = ctx.ring, ctx.kernel, Sums(ctx.ring)
        q, g, dq = q_BTHK.transpose(1, 2), gradients[0].transpose(1, 2), None
        for source, block in ring.blocks(flatly(k_BTGK, v_BTGW)):
            queries, keys = _seen(ring.rank, source, q.shape[2])
            k, v = (part[:, keys].transpose(1, 2) for part in parts_of(block, k_BTGK, v_BTGW))
            some, *of_block = kernel.backward(
                *(each[:, :, queries] for each in (g, q)),
                k,
                v,
                *(each[:, :, queries] for each in (y, lse)),
                causal=source == ring.rank,
            )
            del block, k, v
            if dq is None:
                dq, total = some, flatly(*(each.transpose(1, 2) for each in of_block))
            else:
                dq[:, :, queries].add_(some)
                total = sums.arrived()
                for whole in parts_of(total, k_BTGK, v_BTGW):
                    whole[:, keys].add_(of_block.pop(0).transpose(1, 2))
                del whole
            del some, of_block
            sums.pass_on(total)
            del total
        assert dq is not None
        dk_BTGK, dv_BTGW = parts_of(sums.arrived(), k_BTGK, v_BTGW)
        return dq.transpose(1, 2), dk_BTGK, dv_BTGW, None, None


# Of C ranks a causal ring leaves out (C - 1) / 2C of attention's FLOPs so: later halves of later ranks are never looked
# at. The account counts them dense, and figures of ranks take that off before they are compared.
def _seen(rank: int, source: int, n_tokens: int) -> tuple[slice, slice]:
    """Which of this rank's queries see which keys of a rank, where not all see all: halves are early and late."""
    early, late, both = slice(0, n_tokens // 2), slice(n_tokens // 2, n_tokens), slice(0, n_tokens)
    if source == rank:
        return both, both
    return (both, early) if source < rank else (late, both)


# In fp32 whatever the format of the kernel's output: the sum over C parts would else be rounded C times. It costs 2.5 %
# of a step of an 8B model at 32K tokens on a ring of 4 (predicted).
def _join(y: Tensor, lse: Tensor, part: Tensor, its_lse: Tensor) -> None:
    """Mixtures over some keys become those over more keys, in place."""
    share = torch.sigmoid(its_lse - lse).unsqueeze(-1)
    y.lerp_(part.float(), share)
    lse.copy_(torch.logaddexp(lse, its_lse))
