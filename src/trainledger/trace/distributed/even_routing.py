"""How many tokens go to each expert, where only their data tells: as many to each.

Programs of expert parallelism count tokens by expert, tell the other ranks the counts, and read them to know how large
the pieces are that an all-to-all sends. A count is made a tensor whose values are known; fake tensors compute on with
those by themselves. All ranks are taken to be alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.trace.distributed.collectives import group_of
from trainledger.trace.patches import replaced

MOST_COUNTS = 4096  # elements of a tensor whose values are followed

_TO_OTHERS = {
    torch.ops.c10d.alltoall_base_.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}
COUNTS = {torch.ops.aten.histc.default, torch.ops.aten.bincount.default}
SPREAD = COUNTS | _TO_OTHERS


@contextmanager
def counts_have_values() -> Iterator[None]:
    """Let fake tensors of a few integers keep values that are known, not only those of one."""
    with replaced(fake_tensor, "CONSTANT_NUMEL_LIMIT", lambda _: MOST_COUNTS, needed=False):
        yield


def tell(func: OpOverload, args: tuple[Any, ...], out: Any) -> None:
    """Give a count, or what arrives of the counts of all ranks, its values."""
    if func in COUNTS:
        if isinstance(out, FakeTensor):
            out.constant = even(args[0].numel(), out.shape[0], out.dtype)
        return
    source, target = (args[1], args[0]) if func is torch.ops.c10d.alltoall_base_.default else (args[0], out)
    known = getattr(source, "constant", None)
    if known is None or not isinstance(target, FakeTensor) or known.numel() != target.numel():
        return
    group = group_of(func, args, {})
    if group is None or known.numel() % group.size():
        return
    ranks = group.size()
    with _disable_current_modes():
        mine = known.reshape(ranks, -1)[group.rank()]
        target.constant = mine.repeat(ranks).view(target.shape)


def even(total: int, pieces: int, dtype: torch.dtype) -> Tensor:
    """A whole in pieces that differ by one at most.

    >>> even(10, 4, torch.int64)
    tensor([3, 3, 2, 2])
    """
    with _disable_current_modes():
        each, rest = divmod(total, pieces)
        return torch.tensor([each + (at < rest) for at in range(pieces)], dtype=dtype)
