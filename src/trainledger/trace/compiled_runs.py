"""The compiler's code as it runs, on fake tensors or really: what each call computes, moves, allocates and frees.

What a fused kernel computes and moves is known at compile time, from the loops it was made of.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.ledger.entry import Event, Storage
from trainledger.trace.operators.table import operator_of
from trainledger.trace.patches import Args
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.source_lines import is_users, plain_name, shown_file
from trainledger.trace.recorder.storages import dtype_name

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_NOT_COMPUTED = ("copy", "allocate", "embedding", "random")


@dataclass(frozen=True)
class Work:
    """One call of a graph: its FLOPs, those of them that are recomputation, and where it comes from.

    ``owner`` is the ``id`` of the module, None where the compiler does not know one, 0 for code outside of all.
    ``reads`` and ``writes`` are elements by position of the call's arguments; both are empty for a call of an operator,
    which is accounted for when it runs.
    """

    name: str
    kind: str = ""
    flops: int = 0
    flops_recomputed: int = 0
    recomputed: bool = False
    owner: int | None = None
    line: str = ""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


def work_of_operator(node: Any, in_backward: bool) -> Work:
    """The call of a library's kernel: which module and line it belongs to, and whether it is recomputation."""
    overload = getattr(node, "op_overload", None)
    name = str(getattr(node, "python_kernel_name", None) or overload or "")
    origins = list(node.get_origins())
    own = [origin for origin in origins if origin.target is overload and overload is not None]
    if not own and getattr(node, "origin_node", None) is not None:
        own = [node.origin_node]
    origins = own or origins
    owner, line = _place_of(origins)
    recomputed = in_backward and bool(origins) and all(map(_of_forward, origins))
    return Work(name, recomputed=recomputed, owner=owner, line=line)


def work_of_kernel(
    name: str, nodes: Iterable[Any], places: list[set[str]], in_backward: bool, number: Callable[[Any], int]
) -> Work:
    """The call of a kernel that the compiler made of these scheduled loops.

    ``places`` are the buffers by position of the arguments, one that is reused under all its names; ``number`` makes
    an integer of a size. Each operation of the graph counts once per element, however often the kernel's loops repeat
    it, and what the compiler makes of one reduction counts as that reduction, as it does where it is not compiled. What
    is read more than once counts once, and what the kernel itself has written does not count as read.
    """
    loops = [loop for node in nodes for loop in node.get_nodes()]
    origins: list[Any] = list(dict.fromkeys(origin for loop in loops for origin in loop.node.get_origins()))
    computing = [origin for origin in origins if origin.op == "call_function"]
    owner, line = _place_of(computing)
    made = {write.name for loop in loops for write in loop.read_writes.writes}
    read = {each for loop in loops for each in loop.read_writes.reads if each.name not in made}
    written = {write for loop in loops for write in loop.read_writes.writes}
    real = loops[0].scheduler.mutation_real_name if loops else {}  # of what is written over
    flops = _flops_of(computing)
    share = _recomputed_share(computing) if in_backward else 0.0

    def touched(dependencies: set[Any], place: set[str]) -> int:
        """Elements of one buffer that loops touch: of a table that is looked up in, at most as many as come out."""
        elements = 0
        for access in dependencies:
            if access.name in place or real.get(access.name) in place:
                indirect = hasattr(access, "size") and access.is_indirect()
                elements += math.prod(map(number, access.size)) if indirect else number(access.get_numel())
        return elements

    return Work(
        name=name,
        kind="reduction" if any(loop.is_reduction() for loop in loops) else "elementwise" if flops else "copy",
        flops=flops,
        flops_recomputed=round(flops * share),
        recomputed=share == 1.0,
        owner=owner,
        line=line,
        # A buffer that is read and written over is two of the arguments.
        reads=tuple(0 if place in places[:at] else touched(read, place) for at, place in enumerate(places)),
        writes=tuple(0 if place in places[at + 1 :] else touched(written, place) for at, place in enumerate(places)),
    )


def _recomputed_share(origins: list[Any]) -> float:
    """Which part of the operations of a kernel in a backward graph answers none but repeats one of the forward."""
    recomputed = total = 0
    for origin in origins:
        flops = _flops(origin)
        total += flops
        recomputed += flops if _of_forward(origin) else 0
    if not total:
        return float(bool(origins) and all(map(_of_forward, origins)))
    return recomputed / total


def _flops_of(nodes: Iterable[Any]) -> int:
    # Inductor takes a reduction of the program apart, such as var_mean into sums and squares: it counts once, as
    # uncompiled.
    flops, reductions = 0, dict[Any, int]()
    for node in nodes:
        original = node.meta.get("original_aten")
        if isinstance(original, OpOverload) and operator_of(original).kind == "reduction":
            names = tuple(getattr(of, "name", "") for of in node.meta.get("from_node") or ())
            call = str(original), node.meta.get("seq_nr"), _of_forward(node), names
            reductions[call] = max(reductions.get(call, 0), _flops(node))
        else:
            flops += _flops(node)
    return flops + sum(reductions.values())


def _flops(node: Any) -> int:
    """One for each element of the largest of its operands and results."""
    func, out = node.target, node.meta.get("val")
    if not isinstance(func, OpOverload) or func.is_view or operator_of(func).kind in _NOT_COMPUTED:
        return 0
    name = func._schema.name
    if name == "prims::convert_element_type" or name.startswith(("prims::inductor", "prims::iota")):
        # As a cast, a draw and an arange are elsewhere
        return 0
    outs = out if isinstance(out, (list, tuple)) else [out]
    values = [*outs, *(each.meta.get("val") for each in node.all_input_nodes)]
    sizes = [value.numel() for value in values if isinstance(value, torch.Tensor)]
    # Of a size that varies, the one that it was compiled with.
    return max((size if isinstance(size, int) else int(size.node.hint or 0) for size in sizes), default=0)


def _of_forward(node: Any) -> bool:
    return bool(node.meta.get("partitioner_tag") == "is_forward")


def _place_of(nodes: list[Any]) -> tuple[int | None, str]:
    """The module and the line of the last of these operations, in the order of the graph, that has a line."""
    for each in sorted(nodes, key=lambda node: getattr(node, "_sort_key", ()), reverse=True):
        line = _line(each.meta.get("stack_trace") or "")
        stack = each.meta.get("nn_module_stack") or each.meta.get("fwd_nn_module_stack")
        if line or stack:
            return _owner(stack), line
    return None, ""


def _owner(stack: dict[str, Any] | None) -> int | None:
    # Dynamo's nn_module_stack has the modules' id as keys, with how often the module ran before.
    if not stack:
        return 0
    match = re.match(r"\d+", next(reversed(stack)))
    return None if match is None else int(match[0])


def _line(stack_trace: str) -> str:
    users = [f"{shown_file(file)}:{number}" for file, number in _FRAME.findall(stack_trace) if is_users(file)]
    return users[-1] if users else ""


Moved = dict[str, str]  # from a module that code was compiled for to the one that it runs for
NEXT = "trainledger_next"  # how the code says which call comes next
SOURCE = "torch._inductor"
_ALLOCATIONS = ("empty_strided_cpu", "empty_strided_cpu_pinned", "empty_strided")
_CHECKS = ("assert_size_stride", "assert_alignment")


class Owners:
    """The modules and the parameters of a model by what a compiler sees of them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(module): plain_name(name) for name, module in model.named_modules()}
        named = [*model.named_parameters(), *model.named_buffers()]
        self._tensors = {tensor.untyped_storage()._cdata: plain_name(name) for name, tensor in named}
        self._of_node: dict[int, Moved] = {}

    def path(self, module: int | None) -> str:
        """The path of the module with this ``id``, "" where it is no part of the model."""
        return self._modules.get(module or 0, "")

    def names(self, arguments: Iterable[Any]) -> list[str]:
        """The parameters among the arguments of a graph by position, "" for what is none."""
        names = self._tensors
        return [names.get(x.untyped_storage()._cdata, "") if isinstance(x, Tensor) else "" for x in arguments]

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
            "reinterpret_tensor": lambda tensor, size, stride, offset=0: tensor.as_strided(
                size, stride, tensor.storage_offset() + offset
            ),
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

    def _called(self, arguments: Args, seconds: float | None) -> None:
        """A fused kernel was called. What of it is recomputation is an entry of its own."""
        work, recorder = self._work, self._recorder
        if work is None:
            return
        recorder.phases.notice(recorder.events)
        dtypes = [dtype_name(argument.dtype) for argument in arguments if isinstance(argument, Tensor)]
        made = self._claim(len(recorder.events))
        known = [recorder.storages.of(argument) for argument in arguments if isinstance(argument, Tensor)]
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
        phase = "recompute" if phase == "backward" and work.recomputed else phase
        touched = _touched(work.reads, arguments), _touched(work.writes, arguments)
        note(made, phase, work.flops - recomputed, *touched, seconds)
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
        for record in event.allocated:
            if record.origin is not None:
                record.origin.name, record.origin.born = event.facts["name"], at
                record.origin.path, record.origin.line = event.facts["path"], event.facts.get("line", "")

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


def _touched(elements: tuple[int, ...], arguments: Args) -> int:
    """Bytes of so many elements of each argument; what several loops of a kernel need counts once."""
    pairs = [(count, x) for count, x in zip(elements, arguments, strict=False) if isinstance(x, Tensor)]
    return sum(min(count, tensor.numel()) * tensor.element_size() for count, tensor in pairs)
