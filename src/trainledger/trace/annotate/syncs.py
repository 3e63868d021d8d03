"""Where a program waits for a value of a tensor: operators that read one, lists, arrays, prints, copies to hosts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trainledger.trace.annotate.copies import called
from trainledger.trace.annotate.source import Caller
from trainledger.trace.patches import all_replaced

SYNCHRONIZING = frozenset({
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_consecutive", "unique_dim",
    "nonzero_numpy",
})  # fmt: skip
_READS = "reads a number off a tensor"
_SAID = {
    "nonzero": "counts what is not zero", "masked_select": "counts what a mask picks", "equal": "compares values",
    "index": "counts what a mask picks", "_unique2": "counts distinct values",
}  # fmt: skip


@dataclass(slots=True)
class Sync:
    """One place that waits for a device: how often, in how many steps, the last of these; ``inside`` which library."""

    caller_line: str
    what: str
    device: str
    inside: str
    times: int = 0
    steps: int = 0
    last: int = -1


class Syncs:
    """Counts by line and expression. Of a program that uses an accelerator, only what waits for that counts.

    ``accelerated`` is set as soon as the program has a tensor there.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Sync] = {}
        self.accelerated = False

    def take(self, caller: Caller, name: str, device: str, step: int) -> None:
        """Count one; ``step`` is how many steps have ended before."""
        self.accelerated = self.accelerated or not device.startswith("cpu")
        what = words(name, caller.expression)
        found = self.found.get((caller.at, what))
        if found is None:
            found = self.found[caller.at, what] = Sync(caller.at, what, device, caller.inside)
        found.times += 1
        if found.last != step:
            found.steps += 1
            found.last = step

    def waits(self) -> list[Sync]:
        """Those that wait for a device, of a program that uses one; else all."""
        return [each for each in self.found.values() if not (self.accelerated and each.device.startswith("cpu"))]


def words(name: str, expression: str) -> str:
    """A wait in words.

    >>> words("_local_scalar_dense", "loss.item()"), words("_local_scalar_dense", "x > 0"), words("cpu", "x.cpu()")
    ('.item()', 'reads a number off a tensor', '.cpu()')
    """
    if not name.startswith("_") and name not in _SAID:
        return {"print": "print of a tensor"}.get(name) or (name if "." in name else f".{name}()")
    call = called(expression)
    if call in ("item", "tolist", "nonzero", "equal", "unique", "masked_select", "allclose", "cpu", "numpy"):
        return f".{call}()" if call not in ("equal", "allclose") else f"torch.{call}"
    if call in ("float", "int", "bool", "print", "range", "math"):
        return f"{call}(tensor)"
    return _SAID.get(name, _READS)


@contextmanager
def reads_seen(synchronized: Callable[[str, list[Tensor]], None], guessed: Callable[[], None]) -> Iterator[None]:
    """Call ``synchronized`` at reads that no operator shows. Of fake tensors a list is of zeros, after a call of
    ``guessed``, and a numpy array is refused.
    """

    inside = False

    def noticed(name: str, before: Callable[..., Any]) -> Callable[..., Any]:
        """The method, noticed once where a mode that it passes through calls it again."""

        @functools.wraps(before)
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            # Operators print tensors into the words of an error that they may need; that is no print of the program.
            if inside or (name == "print" and sys._getframe(1).f_code.co_filename == torch._ops.__file__):
                return before(self, *args, **kwargs)
            synchronized(name, [self])
            if isinstance(self, FakeTensor) and name == "tolist" and self.constant is None:
                guessed()
                return _zeros(tuple(self.shape), 0.0 if self.is_floating_point() else 0)
            inside = True
            try:
                return before(self, *args, **kwargs)
            finally:
                inside = False

        return read

    def made(name: str) -> Callable[[Any], Callable[..., Any]]:
        return lambda before: noticed(name, before)

    methods = {"tolist": "tolist", "numpy": "numpy", "cpu": "cpu", "__repr__": "print"}
    patched = [(torch.Tensor, method, made(name)) for method, name in methods.items()]
    with all_replaced(*patched, (FakeTensor, "tolist", made("tolist"))):
        yield


def _zeros(shape: tuple[int, ...], value: float) -> Any:
    if not shape:
        return value
    return [_zeros(shape[1:], value) for _ in range(shape[0])]
