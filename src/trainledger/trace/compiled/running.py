"""The compiler's code as it runs, on fake tensors or really: what it allocates, reads, writes and frees."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.ledger.entry import Event, Storage
from trainledger.trace.compiled.kernels import Work
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.source_lines import plain_name
from trainledger.trace.recorder.storages import dtype_name

Moved = dict[str, str]  # from a module that code was compiled for to the one that it runs for
NEXT = "trainledger_next"  # how the code says which call comes next
SOURCE = "torch._inductor"
_ALLOCATIONS = ("empty_strided_cpu", "empty_strided_cpu_pinned", "empty_strided")
_CHECKS = ("assert_size_stride", "assert_alignment")


class Owners:
    """The modules and the parameters of a model by what a compiler sees of them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(each): plain_name(name) for name, each in model.named_modules()}
        named = [*model.named_parameters(), *model.named_buffers()]
        self._tensors = {each.untyped_storage()._cdata: plain_name(name) for name, each in named}
        self._of_node: dict[int, Moved] = {}

    def path(self, module: int | None) -> str | None:
        """The path of the module with this ``id``, None where it is no part of the model."""
        return None if module is None else "" if module == 0 else self._modules.get(module)

    def names(self, arguments: Iterable[Any]) -> list[str]:
        """The parameters among the arguments of a graph by position, "" for what is none."""
        names = self._tensors
        return [names.get(each.untyped_storage()._cdata, "") if isinstance(each, Tensor) else "" for each in arguments]

    def moved(self, first: Sequence[str], now: Sequence[str]) -> Moved:
        """Which modules replace those of the first run of a forward; remembered for the backward of this one."""
        moved = replacements(first, now)
        # The node of backward is made just before its forward runs.
        self._of_node[torch.autograd._get_sequence_nr() - 1] = moved  # type: ignore[attr-defined]
        return moved

    def moved_in_forward(self) -> Moved:
        """The same for a backward that runs now."""
        node = torch._C._current_autograd_node()
        return {} if node is None else self._of_node.get(int(node._sequence_nr()), {})


def replacements(first: Sequence[str], now: Sequence[str]) -> Moved:
    """Where names differ by position, which replaces which.

    >>> replacements(["layers.0.mlp.up.weight", "norm.weight"], ["layers.3.mlp.up.weight", "norm.weight"])
    {'layers.0': 'layers.3'}
    """
    moved: Moved = {}
    for before, after in zip(first, now, strict=False):
        if before and after and before != after:
            old, new = before.split("."), after.split(".")
            while len(old) > 1 and len(new) > 1 and old[-1] == new[-1]:
                old.pop()
                new.pop()
            moved.setdefault(".".join(old), ".".join(new))
    return moved


class Runs:
    """Records the calls of compiled graphs. What is allocated before a call belongs to its entry.

    A call of an operator is dispatched and recorded as ever, and only its place is added here. A fused kernel is not
    dispatched.
    """

    def __init__(self, recorder: Recorder, mode: FakeTensorMode | None, owners: Owners) -> None:
        self.really = mode is None
        self._recorder = recorder
        self._mode = mode or nullcontext()
        self._owners = owners
        self._moved: Moved = {}
        self._waiting: list[Storage] = []  # allocated, and its call has not run yet
        self._frees_before = 0  # of the last event when the first of them was allocated
        self._events_before = 0  # how many events are settled
        self._work: Work | None = None

    def names(self, works: list[Work]) -> dict[str, Any]:
        """What the code of a graph that makes these calls finds under the names of the compiler's own functions."""

        def following(index: int) -> None:
            self._settle()
            self._work = works[index]

        return {
            **dict.fromkeys(_ALLOCATIONS, self._empty),
            **dict.fromkeys(_CHECKS, lambda *arguments: None),
            "reinterpret_tensor": _view,
            NEXT: following,
        }

    def graph(self, call: Callable[[list[Any]], Any], *, is_backward: bool) -> Callable[[list[Any]], Any]:
        """A graph's code, whose last call is settled when it is over."""
        first: list[str] = []  # the parameters of the first run, by the modules of which the code is named

        def run(arguments: list[Any]) -> Any:
            if is_backward:
                self._moved = self._owners.moved_in_forward()
            else:
                names = self._owners.names(arguments)
                first.extend(names if not first else ())
                self._moved = self._owners.moved(first, names)
            self._work, self._events_before = None, len(self._recorder.events)
            try:
                return call(arguments)
            finally:
                self._settle()
                self._leftover()

        return run

    def kernel(self, run: Callable[..., None] | None) -> Callable[..., None]:
        """What stands for a fused kernel in the code of a graph: it runs, where there is one, and is recorded."""

        def called(*arguments: Any) -> None:
            begin = time.perf_counter()
            if run is not None:
                run(*arguments)
            self._called(arguments, None if run is None else time.perf_counter() - begin)

        return called

    def _called(self, arguments: tuple[Any, ...], seconds: float | None) -> None:
        """A fused kernel was called. What of it is recomputation is an entry of its own."""
        work, recorder = self._work, self._recorder
        if work is None:
            return
        recorder.phases.notice(recorder.events)
        dtypes = [dtype_name(each.dtype) for each in arguments if isinstance(each, Tensor)]
        made = self._claim(len(recorder.events))
        known = [recorder.storages.of(each) for each in arguments if isinstance(each, Tensor)]
        basis = recorder.sizes.of_records(known, made)
        phase = recorder.phases.of_operation(made)
        recomputed = work.flops_recomputed if phase == "backward" and not work.recomputed else 0

        def note(made: list[Storage], phase: str, flops: int, read: int, written: int, seconds: float | None) -> None:
            facts = {"name": work.name, "kind": work.kind, "line": work.line, "source": SOURCE, "seconds": seconds}
            facts |= {"dtype": dtypes[0] if dtypes else "", "basis": "assumed" if recomputed else basis, "flops": flops}
            path = self._path(phase, work)
            self._append(Event(made, path=path, phase=phase, read=read, written=written, **facts))

        if recomputed:
            note([], "recompute", recomputed, 0, 0, None if seconds is None else 0.0)
        note(
            made,
            "recompute" if phase == "backward" and work.recomputed else phase,
            work.flops - recomputed,
            _touched(work.reads, arguments),
            _touched(work.writes, arguments),
            seconds,
        )
        self._work, self._events_before = None, len(recorder.events)

    def _empty(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, **where: Any) -> Tensor:
        events = self._recorder.events
        if len(events) > self._events_before:
            self._settle()
        with _disable_current_modes(), self._mode:
            tensor = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
        self._recorder.phases.notice(events)
        if not self._waiting:
            self._frees_before = len(events[-1].freed) if events else 0
        if tensor.untyped_storage().nbytes():
            self._waiting.append(self._recorder.storages.born(tensor, "empty_strided", self._recorder.phases.current))
        return tensor

    def _settle(self) -> None:
        """Add what the compiler knows of the operators that have run since the last call."""
        work, events, before = self._work, self._recorder.events, self._events_before
        self._events_before = len(events)
        if work is None or len(events) == before:
            return
        self._work = None
        events[before].allocated[:0] = self._claim(before)
        for at, event in enumerate(events[before:], before):
            phase = event.facts["phase"]
            event.facts["path"] = self._path(phase, work)
            event.facts["line"] = work.line or event.facts["line"]
            if phase == "backward" and work.recomputed:
                event.facts.update(phase="recompute", model_flops=0)
            self._set_origins(event, at)

    def _claim(self, at: int) -> list[Storage]:
        # What is allocated before something is freed was live with it: it belongs to the event before.
        made, self._waiting = self._waiting, []
        events = self._recorder.events
        if made and at and len(events[at - 1].freed) > self._frees_before:
            events[at - 1].allocated += made
            self._set_origins(events[at - 1], at - 1)
            return []
        return made

    def _leftover(self) -> None:
        """What was allocated for no call at all, as a result that nothing is written to."""
        made = self._claim(len(self._recorder.events))
        if made:
            phase = self._recorder.phases.of_operation(made)
            path = self._recorder.attribution.path(phase)
            self._append(Event(made, name="empty_strided", path=path, phase=phase, kind="allocate", source=SOURCE))

    def _append(self, event: Event) -> None:
        self._recorder.events.append(event)
        self._set_origins(event, len(self._recorder.events) - 1)

    def _set_origins(self, event: Event, at: int) -> None:
        for each in event.allocated:
            if each.origin is not None:
                each.origin.name, each.origin.born = event.facts["name"], at
                each.origin.path, each.origin.line = event.facts["path"], event.facts.get("line", "")

    def _path(self, phase: str, work: Work) -> str:
        """The module of a call, that of this run where blocks share the code."""
        path = self._owners.path(work.owner)
        if not path:
            return self._recorder.attribution.path(phase)
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            instead = self._moved.get(".".join(parts[:length]))
            if instead is not None:
                return ".".join([instead, *parts[length:]])
        return path


def _touched(elements: tuple[int, ...], arguments: tuple[Any, ...]) -> int:
    """Bytes of so many elements of each argument; what several loops of a kernel need counts once."""
    pairs = [(count, each) for count, each in zip(elements, arguments, strict=False) if isinstance(each, Tensor)]
    return sum(min(count, each.numel()) * each.element_size() for count, each in pairs)


def _view(tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)
