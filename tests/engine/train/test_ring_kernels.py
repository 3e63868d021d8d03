"""Attention around a ring of threads, whose blocks are handed over in queues: that of the whole sequence.

What ranks send each other is in `test_context_ranks`; here are the kernels, those of accelerators with data where there
is one. Shapes: B sequences, T tokens, H query heads, G key-value heads, K and W widths.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainledger.engine.train.parallel.context import Kernel, Ring, _Around

KERNELS = [
    pytest.param("flash_for_cpu", torch.float32, "cpu", id="cpu"),
    pytest.param("flash", torch.bfloat16, "cuda", id="flash", marks=pytest.mark.gpu),
    pytest.param("efficient", torch.bfloat16, "cuda", id="efficient in bf16", marks=pytest.mark.gpu),
    pytest.param("efficient", torch.float32, "cuda", id="efficient", marks=pytest.mark.gpu),
]


class Threads(Ring):
    """A ring whose ranks are threads of this process."""

    def __init__(self, rank: int, queues: list[Queue[Tensor]]) -> None:
        self.rank, self.ranks, self.queues = rank, len(queues) // 2, queues

    def pass_on(self, sent: Tensor, coming: Tensor, tag: int) -> list[Any]:
        after = (self.rank + 1) % self.ranks
        self.queues[2 * after + tag].put(sent.clone())
        mine = self.queues[2 * self.rank + tag]
        return [SimpleNamespace(wait=lambda: coming.copy_(mine.get(timeout=60)))]


class Context(SimpleNamespace):
    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def parts(x_BTHK: Tensor, ranks: int) -> list[Tensor]:
    """Each rank's tokens: an early part and the late one that takes as long together."""
    pieces = x_BTHK.chunk(2 * ranks, dim=1)
    return [torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]], dim=1) for rank in range(ranks)]


def whole(of_ranks: list[Tensor]) -> Tensor:
    halves = [each.chunk(2, dim=1) for each in of_ranks]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim=1)


@pytest.mark.torch
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize(("kind", "dtype", "device"), KERNELS)
def test_parts_join_to_attention_over_all_keys(
    kind: str, dtype: torch.dtype, device: str, heads: tuple[int, int], ranks: int
) -> None:
    B, T, (H, G), K = 2, 40 * ranks, heads, 64
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(B, T, count, K, device=device, dtype=dtype) for count in (H, G, G, H))
    queues: list[Queue[Tensor]] = [Queue() for _ in range(2 * ranks)]
    kernel = Kernel(kind, K**-0.5)

    def on_rank(rank: int) -> tuple[Tensor, ...]:
        ctx = Context()
        own = [parts(each, ranks)[rank] for each in (q, k, v)]
        y = _Around.forward(ctx, *own, Threads(rank, queues), kernel)
        gradients = _Around.backward(ctx, parts(g, ranks)[rank])[:3]
        return y, *(each for each in gradients if each is not None)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(on_rank, range(ranks)))
    exact = [each.double().transpose(1, 2).requires_grad_() for each in (q, k, v)]
    y = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    y.backward(g.double().transpose(1, 2))
    expected = [y.detach(), *(each.grad for each in exact)]
    limit = 1e-5 if dtype == torch.float32 else 1.2e-2
    for at, of_all in enumerate(expected):
        assert of_all is not None
        joined = whole([each[at] for each in found]).transpose(1, 2).double()
        assert (joined - of_all).norm() / of_all.norm() < limit, at
