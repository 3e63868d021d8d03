"""Reads of a tensor's values that no operator shows: lists, numpy arrays, prints, copies to the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trainledger.annotate.script import Refused
from trainledger.annotate.watcher import Watcher
from trainledger.trace.patches import all_replaced


@contextmanager
def reads_seen(watcher: Watcher, guessed: Callable[[], None]) -> Iterator[None]:
    """Let a watcher know of such reads. Of fake tensors a list is of zeros, which ``guessed`` is told, and a numpy
    array is refused.
    """

    inside = False

    def told(name: str, before: Callable[..., Any]) -> Callable[..., Any]:
        """The method, told; where it is called again by a mode that it passes through, once."""

        @functools.wraps(before)
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return before(self, *args, **kwargs)
            watcher.synchronized(name, [self])
            if isinstance(self, FakeTensor) and name == "tolist" and self.constant is None:
                guessed()
                return _zeros(tuple(self.shape), 0.0 if self.is_floating_point() else 0)
            if isinstance(self, FakeTensor) and name == "numpy":
                raise Refused("a numpy array needs values, which fake tensors do not have; run without --fake")
            inside = True
            try:
                return before(self, *args, **kwargs)
            finally:
                inside = False

        return read

    def made(name: str) -> Callable[[Any], Callable[..., Any]]:
        return lambda before: told(name, before)

    methods = {"tolist": "tolist", "numpy": "numpy", "cpu": "cpu", "__repr__": "print"}
    patched = [(torch.Tensor, method, made(name)) for method, name in methods.items()]
    with all_replaced(*patched, (FakeTensor, "tolist", made("tolist")), (torch.Tensor, "__format__", _formatted)):
        yield


def _formatted(before: Callable[..., str]) -> Callable[..., str]:
    """A single number that is fake is formatted as the number that it is read as, as a real one is."""

    def text(self: Tensor, form: str) -> str:
        if isinstance(self, FakeTensor) and not self.dim():
            return format(self.item(), form)
        return before(self, form)

    return text


def _zeros(shape: tuple[int, ...], value: float) -> Any:
    if not shape:
        return value
    return [_zeros(shape[1:], value) for _ in range(shape[0])]
