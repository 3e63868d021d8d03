"""Blocks that go round a ring of ranks, and the attention kernels that tell the logsumexp by which parts are joined.

Shapes: B sequences, T queries, S keys, H query heads, G key-value heads, K query and key width, W value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainledger.engine.nn.attention import Scores

_BLOCKS, _SUMS = 0, 1  # tags: blocks and their sums are under way at the same time


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
        return dist.batch_isend_irecv([
            dist.P2POp(dist.isend, sent, self.next, self.group, tag),
            dist.P2POp(dist.irecv, coming, self.before, self.group, tag),
        ])  # fmt: skip


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
    return torch.cat([each.reshape(-1) for each in tensors])


def parts_of(block: Tensor, *like: Tensor) -> Iterator[Tensor]:
    """The tensors of a message, views of the shapes of others."""
    sizes = [prod(each.shape) for each in like]
    return (part.view(each.shape) for part, each in zip(torch.split(block, sizes), like, strict=True))


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
                k, v = (_repeated(each, q_BHTK) for each in (k_BGSK, v_BGSW))
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
                k, v = (_repeated(each, q_BHTK) for each in (k_BGSK, v_BGSW))
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
