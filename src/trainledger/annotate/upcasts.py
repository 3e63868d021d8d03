"""Logits in half precision that are turned into fp32, whole, on their way to the loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trainledger.annotate.copies import DTYPE
from trainledger.ledger.core.record import Storage

_HALVES = (torch.bfloat16, torch.float16)


class Upcast:
    """Wider copies made at one place."""

    __slots__ = ("expression", "line", "nbytes", "of_loss", "shape", "times", "was")

    def __init__(self, line: str, expression: str, source: Tensor) -> None:
        self.line, self.expression = line, expression
        self.shape, self.was = tuple(source.shape), source.dtype
        self.times = self.nbytes = self.of_loss = 0


class Upcasts:
    """Follows fp32 copies of half-precision tensors, and copies of them, until a loss reads one."""

    losses = frozenset({
        "_log_softmax", "nll_loss_forward", "nll_loss2d_forward", "logsumexp", "mse_loss", "binary_cross_entropy",
        "binary_cross_entropy_with_logits", "smooth_l1_loss", "huber_loss",
    })  # fmt: skip

    def __init__(self) -> None:
        self.found: dict[tuple[str, str, tuple[int, ...]], Upcast] = {}
        self._from: dict[Storage, Upcast] = {}

    def gone(self, record: Storage) -> None:
        self._from.pop(record, None)

    def copied(
        self, source: Storage | None, made: Storage | None, why: str, before: Tensor, after: Tensor, line: str,
        expression: str,
    ) -> None:  # fmt: skip
        """A tensor was copied, for whatever reason."""
        if made is None:
            return
        if why == DTYPE and before.dtype in _HALVES and after.dtype == torch.float32 and before.dim() > 1:
            key = (line, expression, tuple(before.shape))  # a call of a library may convert many tensors
            upcast = self.found.setdefault(key, Upcast(line, expression, before))
            upcast.times += 1
            upcast.nbytes += made.nbytes
            self._from[made] = upcast
        elif source is not None and source in self._from:
            self._from[made] = self._from[source]

    def reached_loss(self, records: Iterable[Storage | None]) -> None:
        """A loss, or the softmax of one, reads tensors."""
        for each in records:
            if each is not None and each in self._from:
                self._from[each].of_loss += 1
