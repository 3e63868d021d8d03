"""Tensors that are converted to a wider format and straight back: two copies that change nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from trainledger.ledger.core.record import Storage
from trainledger.trace.recorder.tensor_facts import dtype_name

_WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
    torch.int32: (torch.int64, torch.float64),
}


class RoundTrip:
    """Conversions back at one place."""

    __slots__ = ("expression", "formats", "line", "nbytes", "shape", "times")

    def __init__(self, line: str, expression: str, formats: tuple[str, str, str], shape: tuple[int, ...]) -> None:
        self.line, self.expression, self.formats, self.shape = line, expression, formats, shape
        self.times = self.nbytes = 0


class Conversions:
    """Follows copies in a wider format until they are written to or converted back."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], RoundTrip] = {}
        self._from: dict[Storage, torch.dtype] = {}

    @property
    def watches(self) -> bool:
        return bool(self._from)

    def gone(self, record: Storage) -> None:
        self._from.pop(record, None)

    def written(self, record: Storage | None) -> None:
        """A tensor is changed in place: it is no mere copy any more."""
        if record is not None:
            self._from.pop(record, None)

    def converted(
        self, source: Storage | None, made: Storage, before: Tensor, after: Tensor, line: str, expression: str
    ) -> None:  # fmt: skip
        """A tensor was copied in another format."""
        if source is not None and self._from.get(source) is after.dtype and line:
            formats = (dtype_name(after.dtype), dtype_name(before.dtype), dtype_name(after.dtype))
            found = self.found.setdefault(
                (line, expression), RoundTrip(line, expression, formats, tuple(after.shape))
            )  # fmt: skip
            found.times += 1
            found.nbytes += source.nbytes + made.nbytes
        if after.dtype in _WIDER.get(before.dtype, ()):
            self._from[made] = before.dtype
