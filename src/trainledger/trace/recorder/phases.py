"""What autograd's engine does in a step: phases, recomputation, and gradients that it adds up in place.

Where a tensor was used twice, the engine adds up the gradients that come back: into the older one if no one else refers
to it, else into new memory (torch/csrc/autograd/input_buffer.cpp). Under a dispatch mode, and for fake tensors, it
always takes new memory. From the reference counts of the older one the recorder knows what happens without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainledger.ledger.entry import Event, Storage, keep_what_lives
from trainledger.trace.recorder.attribution import Attribution
from trainledger.trace.recorder.storages import Storages

_ADD = torch.ops.aten.add.Tensor
_DISPATCH = ("__torch_dispatch__", "_dispatched", "_record", "of_operation", "_is_recomputation")
_FOUND = ("other", "forward", "backward")  # phases that are distinguished by whether autograd runs


class Phases:
    """The phase that runs now, and the number of backwards so far."""

    def __init__(self, model: nn.Module, storages: Storages, attribution: Attribution, *, find: bool = False) -> None:
        self.current = "other"
        self.latest = "forward"  # the last one that `begin` was called with
        self.micro_batches = 0
        self._find = find  # else the step says it
        self._model = model
        self._storages = storages
        self._attribution = attribution
        self._recomputing = False
        self._of_graph: set[int] = set()  # ids of records of what a backward made that makes a graph itself

    def begin(self, phase: str) -> None:
        """Leave one phase for another: what a forward leaves live at the beginning of a backward is saved for it."""
        before, self.current = self.current, phase
        self.latest = self.latest if phase == "other" else phase
        if before == "backward":
            gradients = [each.grad for each in self._model.parameters() if each.grad is not None]
            self._storages.categorize(gradients, "gradients")
        if before == "data":
            for each in self._storages.live.values():
                if each.phase == "data":
                    each.category = "batch"
        if phase == "backward":
            self.micro_batches += 1
            live = self._storages.live.values()
            keep_what_lives(live, "forward")
            keep_what_lives((each for each in live if id(each) in self._of_graph), "backward")

    def notice(self, events: list[Event]) -> None:
        """Before something is recorded: forward or backward, by whether autograd runs (its last callbacks too)."""
        if not self._find or self.current not in _FOUND:
            return
        phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        if phase == self.current:
            return
        if phase == "backward" and events and events[-1].facts["name"] == "ones_like":
            seed = events[-1]  # the gradient that backward starts from is made just before it
            seed.facts["phase"] = phase
            for record in seed.allocated:
                record.phase = phase
        self.begin(phase)

    def of_operation(self, made: Iterable[Storage]) -> str:
        """The phase of an operation that runs now and made these: a forward that runs in backward is recomputation."""
        phase = self.current
        if phase == "backward" and self._is_recomputation():
            phase = "recompute"
            for record in made:
                record.phase = phase
            self._recomputing = True
        elif phase == "backward" and torch.is_grad_enabled():  # with create_graph another backward will come
            self._of_graph |= {id(each) for each in made}
        elif self._recomputing:
            self._recomputing = False
            keep_what_lives(self._storages.live.values(), "recompute")
        return phase

    def _is_recomputation(self) -> bool:
        # Whether a forward runs inside backward: with gradients, or (in an own Function's forward) in a module.
        # What the engine itself calls is none, though with ``create_graph`` it makes a graph too.
        if torch._C._current_autograd_node() is None:
            return False
        if self._attribution.running:
            return True
        return torch.is_grad_enabled() and not engine_calls(sys._getframe(1))


def added_into(func: OpOverload, args: tuple[Any, ...]) -> Tensor | None:
    """The gradient whose memory takes the sum, where this operation is the engine's and no one else refers to it.

    A ``__torch_dispatch__`` calls this before it runs the operation.
    """
    if func is not _ADD or len(args) != 2 or torch.is_grad_enabled():
        return None
    older, newer = args
    if not (isinstance(older, Tensor) and isinstance(newer, Tensor)) or older.shape != newer.shape:
        return None
    if torch._C._current_autograd_node() is None or not engine_calls(sys._getframe(1)):
        return None
    sole = alone()
    if sole is None or _references(older) != sole or older.dtype != newer.dtype or not _is_dense(older):
        return None
    return older


def engine_calls(frame: Any) -> bool:
    """Whether the engine itself called, and no Python of a backward or of a hook."""
    while frame is not None and _is_dispatch(frame.f_code):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in ("_engine_run_backward", "backward")


def _is_dispatch(code: Any) -> bool:
    # Whether this is a dispatch mode's own code, or what torch wraps it in.
    return bool(code.co_name in _DISPATCH or code.co_filename.endswith(("_dynamo/eval_frame.py", "_compile.py")))


def _references(tensor: Tensor) -> tuple[int, int]:
    """References to a tensor and to its memory, as `alone` counts them."""
    storage = tensor.untyped_storage()._cdata
    return tensor._use_count(), torch._C._storage_Use_Count(storage)  # type: ignore[attr-defined]


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill its memory without a gap, in any order of its dims."""
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    step = 1
    for stride, size in dims:
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return True


@cache
def alone() -> tuple[int, int] | None:
    """The `_references` to a gradient that only the engine has; None in a torch that does not count them.

    The first call must be outside of any dispatch, as it runs a backward of its own.
    """
    if not hasattr(Tensor, "_use_count") or not hasattr(torch._C, "_storage_Use_Count"):
        return None
    found: list[tuple[int, int]] = []

    class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD and torch._C._current_autograd_node() is not None:
                found.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    with _disable_current_modes(), torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        with Look():  # type: ignore[no-untyped-call]
            (y.exp() * y.sin()).sum().backward()  # type: ignore[no-untyped-call]
    return found[0] if found else None
