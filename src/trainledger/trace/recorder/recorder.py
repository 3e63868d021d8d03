"""The witness: records every dispatched operation and the life of every storage, on fake or on real tensors.

Memory is followed by storages, not tensors: a storage is live from the operation that made it until the
last reference to it is gone, whoever holds it (a Python variable, autograd, an optimizer). What died between
two operations counts as freed by the earlier one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.ledger.core.record import Event, Storage, amounts, keep_what_lives
from trainledger.ledger.entry import HOST
from trainledger.ledger.ledger import Ledger
from trainledger.trace.operators.table import assumed_of, operator_of
from trainledger.trace.optimizers import optimizers_in
from trainledger.trace.recorder.accumulation import added_into, alone, engine_calls
from trainledger.trace.recorder.attribution import OUTSIDE, Places, plain_name
from trainledger.trace.recorder.higher_order import run_higher_order
from trainledger.trace.recorder.source_lines import Lines
from trainledger.trace.recorder.storages import Storages
from trainledger.trace.recorder.tensor_facts import (
    DTYPE_NAMES,
    is_followed,
    tensors_in,
    touched_nbytes,
    written_arguments,
)
from trainledger.trace.recorder.threads import told_of_threads

_DEVICE = torch.ops.prim.device.default
MODEL_PHASES = ("forward", "backward", "other")  # whose matrix products are the model's own

Watch = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Any, Event | None], None]

RESIZES = ("resize_", "resize_as_", "set_", "_resize_output_")  # in place, of memory that is another afterwards
GATHERS = ("embedding", "index_select", "gather")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is dispatched while it is active.

    The model's parameters and buffers and the optimizer's state are resident: there before. ``resident`` tells
    more such tensors; what is read without having been made or told was there as well, as part of the batch.
    ``phase("backward")`` names what runs inside; with ``find_phases`` the recorder tells forward from backward
    itself (autograd runs the latter). Operations that autograd runs with gradients enabled are recomputation.
    ``clocked`` times each operation (real tensors on a synchronous device only). ``lines`` finds the line of the
    user's code that an operation comes from, in backward that of the forward operation it answers. ``watch`` is told
    each operation after it ran, with its event, or None for a view. On a CPU, unless ``kernels`` are others', entries
    have as ``scratch`` what kernels allocate beside their results (`trace.scratch`), and gradients that autograd adds
    up in the memory of one of them when nobody watches are recorded so (`accumulation`); without ``hidden``, neither.
    Two modules or more are traced as the children of an ``nn.ModuleDict``.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        clocked: bool = False,
        find_phases: bool = False,
        lines: Lines | None = None,
        watch: Watch | None = None,
        kernels: str = "cpu",
        hidden: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.uncounted: dict[str, int] = {}
        self.micro_batches = 0
        self._clocked = clocked
        self.storages = Storages(self.events)
        self._phase = "other"
        self.latest_phase = "forward"  # the last one that was begun by name
        self._find_phases = find_phases
        self._watch_each = watch
        self._kernels = kernels
        self._hidden = hidden
        self._adds_in_place = hidden and alone() is not None
        self.partial = ""
        self.notes: list[str] = []
        self.sees_compiled = False  # whether compiled modules run as compiled, which no dispatch mode does by itself
        self.compiling = False  # whether the compiler follows a part of the step, in which nothing runs
        self._recomputing = False
        self._of_graph: set[int] = set()  # records of what a backward made that makes a graph itself
        self._one_at_a_time = RLock()
        self._unseen = self._in_threads = 0
        self._root = model
        self._places = Places(model, lines, self._leave_module)
        trained = {plain_name(name): each for name, each in model.named_parameters() if each.requires_grad}
        names = {id(each): plain_name(name) for name, each in model.named_parameters()}
        self.resident(trained.values(), "parameters", trained)
        frozen = {plain_name(name): each for name, each in model.named_parameters() if not each.requires_grad}
        self.resident(frozen.values(), "frozen weights", frozen)
        buffers = dict(model.named_buffers())
        self.resident(buffers.values(), "buffers", buffers)
        for each in optimizers_in(optimizer):
            for parameter, state in each.state.items():
                owner = names.get(id(parameter), "")
                for key, value in state.items():
                    held = tensors_in(value)
                    self.resident(held, "optimizer state", [f"{owner}.{key}" if owner else key] * len(held))

    # What was there before

    def resident(self, tensors: Iterable[Tensor], category: str, names: Iterable[str] = ()) -> None:
        """Tell which live tensors belong to which category before the step; a storage is counted once."""
        self.storages.resident(tensors, category, names)

    def categorize(self, tensors: Iterable[Tensor], category: str) -> None:
        """Say what live storages turned out to be, back to their birth."""
        self.storages.categorize(tensors, category)

    # Phases and modules

    @property
    def current_phase(self) -> str:
        return self._phase

    @property
    def places(self) -> Places:
        return self._places

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Operations inside belong to this phase."""
        before = self._phase
        self._begin(name)
        try:
            yield
        finally:
            self._begin(before)

    def _begin(self, phase: str) -> None:
        """Leave one phase for another: what a forward leaves alive for the backward is kept by that."""
        before, self._phase = self._phase, phase
        self.latest_phase = self.latest_phase if phase == "other" else phase
        if before == "backward":
            gradients = [each.grad for each in self._root.parameters() if each.grad is not None]
            self.categorize(gradients, "gradients")
        if before == "data":
            for each in self.storages.live.values():
                if each.phase == "data":
                    each.category = "batch"
        if phase == "backward":
            self.micro_batches += 1
            keep_what_lives(self.storages.live.values(), "forward")
            keep_what_lives((each for each in self.storages.live.values() if id(each) in self._of_graph), "backward")

    def _notice_phase(self) -> None:
        if self._phase not in ("other", "forward", "backward"):
            return
        phase = "forward" if torch._C._current_autograd_node() is None else "backward"
        if phase == self._phase:
            return
        if phase == "backward" and self.events and self.events[-1].facts["name"] == "ones_like":
            seed = self.events[-1]  # the gradient that backward starts from is made just before it
            seed.facts["phase"] = phase
            for record in seed.allocated:
                record.phase = phase
        self._begin(phase)

    def __enter__(self) -> Recorder:
        self._places.follow()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._places.leave()

    def _leave_module(self, module: nn.Module, output: Any) -> None:
        if module is self._root and self._phase == "forward":
            for tensor in tensors_in(output):
                record = self.storages.of(tensor)
                if record is not None and record.category == "scratch":
                    record.category = "logits and loss"

    # Operations

    def given_to_a_thread(self) -> Callable[[], None]:
        """What this thread calls will run in another; to be called there when it begins."""
        inside = list(self._places.running)

        return lambda: self._places.begin_elsewhere(inside)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # most of what is dispatched on fake tensors
            return args[0].fake_device
        with self._one_at_a_time:
            return self._dispatched(func, types, args, kwargs or {})

    def _dispatched(self, func: OpOverload, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented
        if not isinstance(func, OpOverload):
            return run_higher_order(self, func, args, kwargs)
        into = added_into(func, args) if self._adds_in_place else None
        if not self._clocked:
            out, seconds = func(*args, **kwargs), None
        else:
            start = time.perf_counter()
            out = func(*args, **kwargs)
            seconds = time.perf_counter() - start
        self._record(func, args, kwargs, out, seconds, into)
        return out

    def _record(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        seconds: float | None,
        into: Tensor | None = None,
    ) -> None:
        if self._find_phases:
            self._notice_phase()
        self._in_threads += self._places.is_first_elsewhere()
        made: list[Storage] = []
        written = 0
        live = self.storages.live
        operator = operator_of(func)
        line = self._places.line()
        # The argument of lift_fresh is a number that has just become a tensor.
        inputs = [] if operator.name == "lift_fresh" else tensors_in(args) + tensors_in(kwargs)
        for tensor in inputs:
            if tensor.untyped_storage()._cdata not in live:
                self._unseen += tensor.grad_fn is not None
                self.resident([tensor], "batch")
        if into is not None:
            self.storages.move(into.untyped_storage()._cdata, out.untyped_storage())
        # What is written in place is its argument's memory, even where a fake tensor comes back as another.
        in_place = operator.name.endswith("_") and operator.name not in RESIZES and func._schema.is_mutable
        for tensor in () if in_place else tensors_in(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in live and storage.nbytes():
                made.append(self.storages.born(tensor, operator.name, self._phase, line))
                written += storage.nbytes()
        if made and inputs and func.is_view:
            # A real tensor met among fake ones is converted where it is read; its own storage is counted already.
            for record in made:
                record.phase, record.nbytes = "resident", 0
            return self._tell(func, args, kwargs, out, None)
        if isinstance(out, FakeTensor) and out.layout is not torch.strided and not is_followed(out):
            told = f"memory of a {str(out.layout).removeprefix('torch.')} result of {operator.name}"
            self.uncounted[told] = self.uncounted.get(told, 0) + 1
        changes = func._schema.is_mutable
        stays = not made and not changes and into is None
        if stays and operator.kind not in ("transfer", "reduction", "collective"):
            return self._tell(func, args, kwargs, out, None)  # a view: no work, no bytes
        phase = self.phase_now(made)
        read = sum(touched_nbytes(each) for each in inputs) - sum(map(touched_nbytes, tensors_in(kwargs.get("out"))))
        if into is not None:
            written += touched_nbytes(out)
        if changes:
            targets = written_arguments(func, args, kwargs)
            written += sum(touched_nbytes(each) for each in targets)
        if operator.name in GATHERS:  # of the table, only the rows that come out are read
            read += written - touched_nbytes(inputs[0])
        flops, model_flops = operator.flops((*args, kwargs) if operator.takes_options else args, out)
        path = self._places.path(phase)
        for record in made:
            if record.origin is not None:
                record.origin.path = path
        if _of_loss(path) or any(_of_loss(each) for each in self._places.running):
            for record in made:
                record.category = "logits and loss"
        if operator.name == "to_host":
            made[0].category = HOST
        if operator.kind == "unknown":
            self.uncounted[operator.name] = self.uncounted.get(operator.name, 0) + 1
        if operator.kind == "allocate":
            read = written = 0
        event = Event(
            made,
            name=operator.name,
            path=path,
            phase=phase,
            kind=operator.kind,
            flops=flops,
            model_flops=model_flops if phase in MODEL_PHASES else 0,
            read=read,
            written=written,
            dtype=DTYPE_NAMES.get(inputs[0].dtype, "") if inputs else "",
            shape=operator.shape(args),
            scratch=operator.scratch(args, out) if operator.scratch is not None and self._on_cpu(inputs) else 0,
            seconds=seconds,
            basis="assumed" if operator.assumed else "exact",
            source=operator.source or func._schema.name,
            line=line,
        )
        self.events.append(event)
        return self._tell(func, args, kwargs, out, event)

    def phase_now(self, made: Iterable[Storage]) -> str:
        """The phase of an operation that runs now and has made these: a forward that runs in backward is recomputed."""
        phase = self._phase
        if phase == "backward" and self._again():
            phase = "recompute"
            for record in made:
                record.phase = phase
            self._recomputing = True
        elif phase == "backward" and torch.is_grad_enabled():  # with create_graph another backward will come
            self._of_graph |= {id(each) for each in made}
        elif self._recomputing:
            self._recomputing = False
            keep_what_lives(self.storages.live.values(), "recompute")
        return phase

    @contextmanager
    def again(self) -> Iterator[None]:
        """Record what is called while an operation of its own is being recorded."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _on_cpu(self, inputs: list[Tensor]) -> bool:
        return self._hidden and self._kernels == "cpu" and bool(inputs) and inputs[0].device.type == "cpu"

    def _tell(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, event: Event | None
    ) -> None:
        if self._watch_each is not None:
            self._watch_each(func, args, kwargs, out, event)

    def _again(self) -> bool:
        """Whether a forward runs inside backward: with gradients, or (in an own Function's forward) in a module.

        What the engine itself calls is none, though with ``create_graph`` it makes a graph too.
        """
        if torch._C._current_autograd_node() is None:
            return False
        return bool(self._places.running) or (torch.is_grad_enabled() and not engine_calls(sys._getframe(1)))

    @property
    def resident_nbytes(self) -> int:
        """Bytes that were there before, as far as is known by now."""
        return sum(each.nbytes for each in self.storages.there_before)

    def forget_told(self) -> None:
        """Let go of all events but the last, and of memory that is gone: no ledger is made of a whole program."""
        del self.events[:-1]
        self.storages.forget_gone()

    def forget_nodes(self, before: int) -> None:
        """Let go of where autograd's nodes with a number below this come from."""
        self._places.forget_before(before)

    # The ledger

    def ledger(self, *, tokens: int, writer: str, tensors: bool = False) -> Ledger:
        """What was recorded so far, as entries in the order they ran; with ``tensors`` also each piece of memory."""
        from trainledger.trace.compiled import ran_eagerly

        return Ledger(
            entries=tuple(each.entry() for each in self.events),
            resident=amounts((each, 1) for each in self.storages.there_before),
            parameters=sum(each.numel() for each in self._root.parameters() if each.requires_grad),
            tokens=tokens,
            micro_batches=max(1, self.micro_batches),
            uncounted=tuple(sorted(self.uncounted.items())),
            writer=writer,
            tensors=tuple(self.storages.lives()) if tensors else (),
            partial=self.partial,
            notes=(
                *self.notes,
                *(() if self.sees_compiled else ran_eagerly(self._root)),
                *_lower_bound(self.uncounted),
                *told_of_threads(self._unseen, self._in_threads),
                *assumed_of(event.facts["name"] for event in self.events),
            ),
        )


def _lower_bound(uncounted: Mapping[str, int]) -> tuple[str, ...]:
    """What the peak lacks where operators ran that nothing is known of but their results."""
    if not uncounted:
        return ()
    return (f"the peak is a lower bound: what has no rule may allocate more than its results ({', '.join(uncounted)})",)


def _of_loss(path: str) -> bool:
    """Whether a module, or what runs outside of all, takes a loss."""
    return path == OUTSIDE or path.endswith(".loss")
