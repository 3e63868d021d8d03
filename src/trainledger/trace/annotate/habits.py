"""Habits that cost no byte and make a result wrong: what a step uses, what is timed, what does not overlap.

A loss that is not divided by the micro-batches, gradients clipped after the step, evaluation in train mode, times taken
without waiting for the device, and copies that are asked not to block from memory that is not pinned.
"""

from __future__ import annotations

import ast
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook

from trainledger.ledger.entry import Storage
from trainledger.spec.plain import table_beside
from trainledger.spec.units import counted
from trainledger.trace.annotate.annotation import Finding
from trainledger.trace.annotate.copies import called
from trainledger.trace.annotate.graphs import Gradients, RecordOf, gradients_of
from trainledger.trace.annotate.source import Caller, Callers, Chain, Files
from trainledger.trace.patches import all_replaced, around

_MEAN = 1  # torch's number of the reduction
_CLOCKS = ("time", "perf_counter", "monotonic", "perf_counter_ns", "time_ns")
# Libraries that run a forward in train mode without gradients because they mean to.
_ON_PURPOSE = ("torch/utils/checkpoint.py", "torch/optim/swa_utils.py")
UNDIVIDED, LATE_CLIP, TRAINING = "loss not divided", "clipped after the step", "evaluated in train mode"
UNSYNCHRONIZED, PAGEABLE = "timed without synchronize", "non_blocking without pinned memory"
# Of each kind why, what instead, and its weight.
_SAYS: dict[str, dict[str, Any]] = table_beside(__file__)


@dataclass
class Habits:
    """Counts what is seen by kind and line; ``files`` and ``callers`` say whose lines, ``device_of`` where tensors are.

    ``launched`` and ``waited`` are how much the device was given to do and how often the program waited for it.
    """

    files: Files
    callers: Callers
    gradients: Gradients
    record_of: RecordOf
    device_of: Callable[[Tensor], str]

    def __post_init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[str, int]] = {}  # what was seen first, and how often, by kind and line
        self._backwards: Counter[Chain] = Counter()  # of undivided means, since the last step
        self._lines: dict[Chain, str] = {}
        self._scaled = False
        self.launched = self.waited = 0
        self._clock: dict[tuple[str, int], tuple[int, int]] = {}
        self._pairs: dict[str, dict[int, set[int]]] = {}
        self._pinned: set[Storage] = set()

    def gone(self, record: Storage) -> None:
        self._pinned.discard(record)

    def backward(self, node: Any, caller: Caller | None) -> None:
        """A backward begins at this node, which has made the loss."""
        self._scaled = False
        # Divided by the micro-batches its node would be a division, and of a sum of losses an addition.
        mean = node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN
        if caller is not None and mean and called(caller.expression) == "backward":
            # One helper may run the backwards of several losses, which are not micro-batches of one.
            chain = self.callers.chain()
            self._backwards[chain] += 1
            self._lines[chain] = caller.at

    def scaled(self) -> None:
        """The program multiplies something in place by a number, as it may gradients."""
        self._scaled = True

    def step(self) -> None:
        """An optimizer is about to use the gradients."""
        for chain, times in self._backwards.items():
            if times > 1 and not self._scaled:
                what = f"{times} backward passes of an undivided mean before a step"
                self._saw(UNDIVIDED, self._lines[chain], what)
        self._backwards.clear()
        self._scaled = False

    @contextmanager
    def seen(self) -> Iterator[None]:
        """While inside, calls of these kinds are seen."""
        clocks = [(time, clock, around(self._timed)) for clock in _CLOCKS]
        clips = [
            (owner, name, around(self._clipped))
            for owner in (nn.utils, nn.utils.clip_grad)
            for name in ("clip_grad_norm_", "clip_grad_value_")
        ]
        waits = [
            (owner, "synchronize", around(self._waits)) for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream)
        ]
        moves = [(Tensor, name, around(self._moved)) for name in ("to", "cuda")]
        with ExitStack() as stack:
            stack.enter_context(
                all_replaced(*clocks, *clips, *waits, *moves, (Tensor, "pin_memory", around(self._pins)))
            )
            hook = register_module_forward_pre_hook(self._forward)
            stack.callback(hook.remove)
            yield

    def _clipped(self, before: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        # Between the steps of two optimizers the gradients of the second are still to be used.
        records = gradients_of(parameters, self.record_of)
        caller = self.callers.now()
        if caller is not None and records and all(self.gradients.unchanged(record) for record in records):
            self._saw(LATE_CLIP, caller.at, "clips gradients that a step has used")
        return before(parameters, *args, **kwargs)

    def _forward(self, module: nn.Module, inputs: Any) -> None:
        drops = isinstance(module, _DropoutNd) and module.p > 0
        if not module.training or torch.is_grad_enabled() or not (drops or isinstance(module, _BatchNorm)):
            return
        # The line that calls the model, and not that of a forward inside of it, is where eval() is missing.
        frame, line = sys._getframe(1), ""
        while frame is not None:
            name = self.files.name(frame.f_code.co_filename)
            if frame.f_code.co_filename.replace("\\", "/").endswith(_ON_PURPOSE):
                return
            if name and not line and frame.f_code.co_name != "forward":
                line = f"{name}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        if line:
            what = f"a forward without gradients runs {type(module).__name__} in train mode"
            self._saw(TRAINING, line, what)

    def _waits(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.waited += 1
        return before(*args, **kwargs)

    def _pins(self, before: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = before(tensor, *args, **kwargs)
        if (record := self.record_of(out)) is not None:
            self._pinned.add(record)
        return out

    def _moved(self, before: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("non_blocking") is True and self.device_of(tensor).startswith("cpu")
        # Where a GPU is only pretended, pinned memory is like any other to torch.
        pinned = asked and (self.record_of(tensor) in self._pinned or _is_pinned(tensor))
        out = before(tensor, *args, **kwargs)
        caller = self.callers.now() if asked and not pinned else None
        if caller is not None and not self.device_of(out).startswith("cpu") and not self._pins_elsewhere(caller):
            self._saw(PAGEABLE, caller.at, f"`{caller.expression}` copies from pageable memory")
        return out

    def _pins_elsewhere(self, caller: Caller) -> bool:
        # A loader or a factory that pins is not followed where there is no GPU
        lines = self.files.shape(caller.frame.f_code.co_filename).lines
        return any("pin_memory=" in line.replace(" ", "") for line in lines)

    def _timed(self, before: Callable[..., Any], *args: Any) -> Any:
        frame = sys._getframe(2)  # behind the function that `around` makes
        name = self.files.name(frame.f_code.co_filename)
        if name:
            now = (self.launched, self.waited)
            for first in self._pairs_of(frame.f_code.co_filename).get(frame.f_lineno, ()):
                launched, waited = self._clock.get((name, first), now)
                # One wait anywhere between the two leaves little of the work out.
                if launched < now[0] and waited == now[1]:
                    what = f"takes the time since line {first}, in which the device was given work"
                    self._saw(UNSYNCHRONIZED, f"{name}:{frame.f_lineno}", what)
            self._clock[name, frame.f_lineno] = now
        return before(*args)

    def _pairs_of(self, file: str) -> dict[int, set[int]]:
        """Lines that take a second time, with those that take the first, as differences of a file have them."""
        found = self._pairs.get(file)
        if found is None:
            found = self._pairs[file] = {}
            tree = self.files.shape(file).tree
            taken: dict[str, set[int]] = {}
            nodes = [] if tree is None else list(ast.walk(tree))
            for node in nodes:
                if isinstance(node, ast.Assign) and _is_clock(node.value) and isinstance(node.targets[0], ast.Name):
                    taken.setdefault(node.targets[0].id, set()).add(node.value.lineno)
            for node in nodes:
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and isinstance(node.right, ast.Name):
                    ends = {node.left.lineno} if _is_clock(node.left) else taken.get(getattr(node.left, "id", ""), ())
                    for end in ends:
                        found.setdefault(end, set()).update(taken.get(node.right.id, ()))
        return found

    def _saw(self, kind: str, line: str, what: str) -> None:
        first, times = self._seen.get((kind, line), (what, 0))
        self._seen[kind, line] = first, times + 1

    def findings(self) -> Iterator[Finding]:
        """One for each kind and line, with how often."""
        for (kind, line), (what, times) in self._seen.items():
            yield Finding(kind, line, f"{what}, {counted(times, 'time')}", times=times, **_SAYS[kind])


def _is_clock(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and called(ast.unparse(node)) in _CLOCKS


def _is_pinned(tensor: Tensor) -> bool:
    return torch.cuda.is_available() and type(tensor) is Tensor and tensor.is_pinned()
