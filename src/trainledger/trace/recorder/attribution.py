"""Attributes an operation to its module, to the line of the user's code, and to a phase of the step.

In backward, line and module are those of its forward. Autograd numbers its nodes in the order of the forward, and a
node that runs in backward has its number. Torch's dispatch modes belong to a thread: threads that traced code starts
get those of their starter, and what several do is recorded in the order in which it comes, one operation at a time.
"""

from __future__ import annotations

import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as pools
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules import module as module_hooks
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainledger.ledger.entry import Event, Storage, keep_what_lives
from trainledger.trace.patches import Args, all_replaced, around
from trainledger.trace.recorder.source_lines import BY_AUTOGRAD, TORCH, Lines, callers, makers_in_sequences, plain_name
from trainledger.trace.recorder.storages import Storages

OUTSIDE = "loss"  # what runs outside of all modules in a forward
# Nodes that add to a parameter's gradient have the largest number there is
_NO_NUMBER = 2**63
# Of a pool, which outlives what is submitted to it
_WORKER = getattr(pools, "_worker", None)
_COMPILER = tuple(os.path.join(TORCH, each) + os.sep for each in ("_inductor", "_functorch"))
_NEEDED = ("_get_current_dispatch_mode_stack", "_push_mode", "_pop_mode")


class _Thread:
    """What a thread runs, and what ran when it made which autograd node."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.begins = False
        # From which node on which module ran, and the line of each node.
        self.first_nodes: list[int] = []
        self.path_from: list[str] = []
        self.line_of_node: dict[int, str] = {}

    def mark(self, path: str) -> None:
        """From the next node on this path runs."""
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if self.first_nodes and self.first_nodes[-1] == number:  # no node was made since
            self.path_from[-1] = path
            return
        self.first_nodes.append(number)
        self.path_from.append(path)

    def path_of_node(self, number: int) -> str:
        at = bisect_right(self.first_nodes, number) - 1
        return self.path_from[at] if at >= 0 else OUTSIDE

    def forget_before(self, number: int) -> None:
        gone = max(0, bisect_right(self.first_nodes, number) - 1)
        del self.first_nodes[:gone], self.path_from[:gone]
        self.line_of_node = {node: line for node, line in self.line_of_node.items() if node >= number}


class _Here(threading.local):
    """The thread that asks."""

    def __init__(self) -> None:
        self.thread = _Thread()


class Attribution:
    """Follows which modules are running. ``left(module, output)`` is called when one is done."""

    def __init__(self, root: nn.Module, lines: Lines | None, left: Callable[[nn.Module, Any], None]) -> None:
        self._here = _Here()
        self._latest = self._here.thread  # the one that made the nodes of a backward that begins now
        self._backwards: list[tuple[_Thread, str]] = []  # those that run: who made their nodes, and where they began
        self._paths = {id(module): plain_name(name) for name, module in root.named_modules()}
        self._lines = lines
        self._made_at = {} if lines is None else makers_in_sequences(root)
        self._left = left
        self._last_path = self._last_line = ""
        self._hooks = ExitStack()

    @property
    def running(self) -> list[str]:
        """The paths of the modules that this thread runs, the innermost last."""
        return self._here.thread.paths

    def begin_elsewhere(self, inside: list[str]) -> None:
        """This thread runs what another one started, inside of these modules."""
        self._here.thread.paths, self._here.thread.begins = list(inside), True

    def is_first_elsewhere(self) -> bool:
        """Whether the operation that runs now is the first that this thread runs for another one."""
        first, self._here.thread.begins = self._here.thread.begins, False
        return first

    def follow(self) -> None:
        """Begin to follow modules, all there are."""
        for each in (
            module_hooks.register_module_forward_pre_hook(self.enter),
            module_hooks.register_module_forward_hook(self.exit, always_call=True),
        ):
            self._hooks.callback(each.remove)
        self._hooks.enter_context(all_replaced((torch.autograd, "_engine_run_backward", around(self._backward))))

    def leave(self) -> None:
        """Follow no longer."""
        self._hooks.close()

    def _backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        makers, inside = self._latest, self.running
        self._backwards.append((makers, inside[-1] if inside else OUTSIDE))
        try:
            return run(*args, **kwargs)
        finally:
            self._backwards.pop()
            # Whatever was recomputed meanwhile
            self._latest = makers

    def enter(self, module: nn.Module, args: Any) -> None:
        """A module begins to run."""
        path = self._paths.get(id(module))
        self.running.append(path if path is not None else (self.running[-1] if self.running else ""))
        self._mark(self.running[-1])

    def exit(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module is done."""
        if self.running:
            self.running.pop()
            self._mark(self.running[-1] if self.running else OUTSIDE)
        self._left(module, output)

    def _mark(self, path: str) -> None:
        self._latest = self._here.thread
        self._latest.mark(path)

    def path_of(self, module: nn.Module) -> str | None:
        """The path of a module of the root; None of any other."""
        return self._paths.get(id(module))

    def forget_before(self, number: int) -> None:
        """Drop nodes of this thread with a smaller number: past steps of a long program have no backward any more."""
        self._here.thread.forget_before(number)

    def path(self, phase: str) -> str:
        """The module path of the operation that runs now."""
        if self.running:
            return self.running[-1]
        # A backward inside of it runs where it began
        if phase in ("forward", "other"):
            return self._backwards[-1][1] if self._backwards and _number_of_node() is not None else OUTSIDE
        if phase != "backward":
            return ""
        number = _number_of_node()
        if number is None:
            return OUTSIDE
        if number < _NO_NUMBER:
            self._last_path = self._makers().path_of_node(number)
        return self._last_path

    def _makers(self) -> _Thread:
        """The thread that made the nodes of the backward that runs now."""
        return self._backwards[-1][0] if self._backwards else self._here.thread

    def line(self) -> str:
        """The line of the operation that runs now, remembered for its backward; to be called at each operation."""
        if self._lines is None:
            return ""
        line = self._lines.here()
        if line == "" and _number_of_node() is not None:
            # Of a device that has a thread of its own, on which no Python called
            line = BY_AUTOGRAD
        if line is not BY_AUTOGRAD:
            line = self._made_at.get(self.running[-1], line) if self.running else line
            # The node that autograd has just made for it, if it made one. That of an own Function is there before
            # its forward, which runs without gradients.
            made = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            self._here.thread.line_of_node.setdefault(made, line)
            return line
        number = _number_of_node()
        # What backward does before it runs any node, such as the gradient that it starts from
        if number is None:
            return self._lines.here(past_engine=True) or ""
        if number < _NO_NUMBER:
            self._last_line = self._makers().line_of_node.get(number, "")
        return self._last_line


def of_loss(path: str) -> bool:
    """Whether a module, or what runs outside of all, takes a loss."""
    return path == OUTSIDE or path.endswith(".loss")


def _number_of_node() -> int | None:
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


@contextmanager
def threads_follow(attribution: Attribution) -> Iterator[None]:
    """Let threads and pools that are given work dispatch as who gives it, inside of the same modules."""
    if any(not hasattr(dispatch, each) for each in _NEEDED):
        yield
        return

    def start(before: Callable[..., None], thread: threading.Thread) -> None:
        if getattr(thread, "_target", None) is not _WORKER or _WORKER is None:
            thread.run = _within(thread.run, attribution)  # type: ignore[method-assign]
        before(thread)

    def submit(
        before: Callable[..., Any], pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        return before(pool, _within(function, attribution), *args, **kwargs)

    with all_replaced((threading.Thread, "start", around(start)), (ThreadPoolExecutor, "submit", around(submit))):
        yield


def _within(function: Callable[..., Any], attribution: Attribution) -> Callable[..., Any]:
    """A function under the modes that are active here, wherever it runs."""
    modes = dispatch._get_current_dispatch_mode_stack()
    # The threads of torch's own compiler have nothing to do with the model.
    if not modes or any(frame.f_code.co_filename.startswith(_COMPILER) for frame in callers()):
        return function
    inside = list(attribution.running)

    def run(*args: Any, **kwargs: Any) -> Any:
        if dispatch._get_current_dispatch_mode_stack():
            return function(*args, **kwargs)
        attribution.begin_elsewhere(inside)
        for mode in modes:
            dispatch._push_mode(mode)
        try:
            return function(*args, **kwargs)
        finally:
            for each in reversed(modes):
                dispatch._pop_mode(getattr(each, "_mode_key", None))

    return run


_ADD = torch.ops.aten.add.Tensor
_DISPATCH = ("__torch_dispatch__", "_dispatched", "_record", "of_operation", "_is_recomputation")
_AROUND = ("_dynamo/eval_frame.py", "_compile.py")
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
            gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
            self._storages.categorize(gradients, "gradients")
        if before == "data":
            for record in self._storages.live.values():
                if record.phase == "data":
                    record.category = "batch"
        if phase == "backward":
            self.micro_batches += 1
            live = self._storages.live.values()
            keep_what_lives(live, "forward")
            keep_what_lives((storage for storage in live if id(storage) in self._of_graph), "backward")

    def notice(self, events: list[Event]) -> None:
        """Before something is recorded: forward or backward, by whether autograd runs (its last callbacks too)."""
        if not self._find or self.current not in _FOUND:
            return
        phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        if phase == self.current:
            return
        if phase == "backward" and events and events[-1].facts["name"] == "ones_like":
            # The gradient that backward starts from is made just before it
            seed = events[-1]
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
            self._of_graph |= {id(storage) for storage in made}
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


def added_into(func: OpOverload, args: Args) -> Tensor | None:
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
    if older.layout is not torch.strided or newer.layout is not torch.strided:
        return None
    sole = alone()
    if sole is None or _references(older) != sole or older.dtype != newer.dtype or not _is_dense(older):
        return None
    return older


def engine_calls(frame: Any) -> bool:
    """Whether the engine itself called, and no Python of a backward or of a hook."""
    # A dispatch mode's own code, and what torch wraps it in (torch._disable_dynamo), stand between the two.
    while frame is not None and (frame.f_code.co_name in _DISPATCH or frame.f_code.co_filename.endswith(_AROUND)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in ("_engine_run_backward", "backward")


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
