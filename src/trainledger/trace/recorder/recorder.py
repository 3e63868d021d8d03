"""Records every dispatched operation and the life of every storage, on fake or on real tensors.

Memory is followed by storages, not tensors: a storage is live from the operation that made it until the last reference
to it is gone, whether a Python variable, autograd or an optimizer has it. What dies between two operations counts as
freed by the earlier one.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.ledger.entry import HOST, Event, Storage, amounts
from trainledger.ledger.ledger import Ledger
from trainledger.trace.loss import NoScalarLossError, that_hold_state
from trainledger.trace.operators.custom import Operator
from trainledger.trace.operators.matmuls import flex_facts
from trainledger.trace.operators.table import assumed_of, operator_of
from trainledger.trace.patches import Args, Kwargs, around, dispatching, inside, replaced
from trainledger.trace.recorder import storages
from trainledger.trace.recorder.attribution import Attribution, Phases, added_into, alone, of_loss
from trainledger.trace.recorder.source_lines import Lines, makers_of_parameters, notes_of, plain_name, why_it_stopped
from trainledger.trace.recorder.storages import AssumedSizes, Storages, has_no_memory, tensors_in, touched_nbytes

_DEVICE = torch.ops.prim.device.default
_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd
MODEL_PHASES = ("forward", "backward", "other")  # whose matmuls are the model's own
RESIZES = ("resize_", "resize_as_", "set_", "_resize_output_")  # in place, of memory that is another afterwards
GATHERS = ("embedding", "index_select", "gather")
_AROUND_ONE = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state", "run_dtensor_rng_op")


Observe = Callable[[OpOverload, Args, Kwargs, Any, Event | None], None]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is dispatched while it is active.

    The model's parameters and buffers and the optimizer's state are resident: live before the step. ``resident`` adds
    more such tensors; what is read without having been made or added was live before as well, as part of the batch.
    ``phase("backward")`` names what runs inside; with ``find_phases`` the recorder distinguishes forward and backward
    itself (autograd runs the latter). Operations that autograd runs with gradients enabled are recomputation.
    ``clocked`` times each operation (real tensors on a synchronous device only). ``lines`` finds the line of the user's
    code that an operation comes from, in backward that of the forward operation it answers. On a CPU, unless
    ``kernels`` are others', entries have as ``scratch`` what kernels allocate besides their results
    (`operators.scratch`), and gradients that autograd would add up in the memory of one of them are recorded so
    (`phases`); without ``hidden``, neither. What rests on assumed ``sizes`` has their basis. Two modules or more are
    traced as the children of an ``nn.ModuleDict``.

    ``observe`` is called after each operation, on the thread that dispatches, with its record (None for a view), and
    ``freed`` when the last reference to memory is gone; neither may run operations that are dispatched. For them only
    the last event is kept: no ledger is made of a whole program. With ``appeared`` memory that no operation has made is
    live from the first one that reads it, and that function gets its event.
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
        observe: Observe | None = None,
        freed: Callable[[Storage], None] | None = None,
        appeared: Callable[[Event], None] | None = None,
        kernels: str = "cpu",
        hidden: bool = True,
        sizes: AssumedSizes | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.uncounted: dict[str, int] = {}
        self.partial = ""
        self.is_guest = False  # of somebody's loop, which an error of the record does not end
        self.notes: list[str] = []
        self.sees_compiled = False  # whether compiled modules run as compiled, which no dispatch mode does by itself
        self.compiling = False  # whether the compiler follows a part of the step, in which nothing runs
        self._clocked, self._observe, self._appeared = clocked, observe, appeared
        self.higher_order_ran: Callable[[Event], object] = lambda event: None  # no operator that ``observe`` knows
        self._kernels, self._hidden = kernels, hidden
        self.sizes = sizes or AssumedSizes()
        self._adds_in_place = hidden and alone() is not None
        self._one_at_a_time = RLock()
        self._unseen = self._in_threads = 0
        self._root = model
        self.storages = Storages(self.events, self.local, freed)
        self.attribution = Attribution(model, lines, self._left_module)
        self.phases = Phases(model, self.storages, self.attribution, find=find_phases)
        named = {plain_name(name): each for name, each in model.named_parameters()}
        trained: dict[str, Tensor] = {name: each for name, each in named.items() if each.requires_grad}
        frozen: dict[str, Tensor] = {name: each for name, each in named.items() if not each.requires_grad}
        buffers = dict(model.named_buffers())
        for category, tensors in (("parameters", trained), ("frozen weights", frozen), ("buffers", buffers)):
            self.resident(tensors.values(), category, tensors)
        made_at = makers_of_parameters(model)
        for record in self.storages.there_before if made_at else ():
            if record.origin is not None:
                record.origin.line = made_at.get(record.origin.name, "")
        names = {id(each): name for name, each in named.items()}
        for each in that_hold_state(optimizer):
            for parameter, state in each.state.items():
                owner = names.get(id(parameter), "")
                for key, value in state.items():
                    states = tensors_in(value)
                    self.resident(states, "optimizer state", [f"{owner}.{key}" if owner else key] * len(states))

    # Memory

    def resident(self, tensors: Iterable[Tensor], category: str, names: Iterable[str] = ()) -> None:
        """Add live tensors of a category that were there before the step; a storage is counted once."""
        self.storages.resident(tensors, category, names)

    def record_of(self, tensor: Any) -> Storage | None:
        """The record of a tensor's memory; None where it is not followed."""
        return self.storages.of(tensor) if isinstance(tensor, Tensor) else None

    @staticmethod
    def local(tensor: Tensor) -> Tensor:
        """The part of a tensor that lives here: all of it."""
        return tensor

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Operations inside belong to this phase."""
        before = self.phases.current
        self.phases.begin(name)
        try:
            yield
        finally:
            self.phases.begin(before)

    @contextmanager
    def as_far_as_it_goes(self) -> Iterator[None]:
        """Let an error of the traced code end the trace and not more; one before anything ran is raised as it is."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if isinstance(error, NoScalarLossError) or not self.events:
                raise
            self.end_here(error, self.phases.latest)

    def end_here(self, error: BaseException, phase: str) -> None:
        """Mark what is recorded as partial with a sentence, and warn of it."""
        self.partial = why_it_stopped(error, phase)
        warnings.warn(f"the trace is partial: {self.partial}", RuntimeWarning, stacklevel=5)

    def _left_module(self, module: nn.Module, output: Any) -> None:
        is_model = module is self._root or self.attribution.path_of(module) == "reference"  # of preferences
        if is_model and self.phases.current == "forward":
            for tensor in tensors_in(output):
                record = self.storages.of(tensor)
                if record is not None and record.category == "scratch":
                    record.category = "logits and loss"

    def __enter__(self) -> Recorder:
        self.attribution.follow()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self.attribution.leave()

    # Operations

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        # Most of what is dispatched on fake tensors is this question: each kernel's rule asks it of its arguments.
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        with self._one_at_a_time:
            return self._dispatched(func, types, args, kwargs or {})

    def _dispatched(self, func: OpOverload, types: Any, args: Args, kwargs: Kwargs) -> Any:
        # A tensor of parts (DTensor, torchao's) dispatches first; what it does with its parts comes here again.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if not isinstance(func, OpOverload):
            return self._higher_order(func, args, kwargs)
        if torch.is_inference_mode_enabled() and func._can_decompose() and operator_of(func).kind == "unknown":
            # Without autograd's keys what torch composes of others (matmul) comes whole: its parts are dispatched here
            with dispatching(self):
                return func._op_dk(_COMPOSED, *args, **kwargs)
        into = added_into(func, args) if self._adds_in_place else None
        if not self._clocked:
            out, seconds = func(*args, **kwargs), None
        else:
            start = time.perf_counter()
            out = func(*args, **kwargs)
            seconds = time.perf_counter() - start
        if has_no_memory(out) or (self.is_guest and self.partial):
            return out
        try:
            event = self._record(func, args, kwargs, out, seconds, into)
            if self._observe is not None:
                self._observe(func, args, kwargs, out, event)
        except Exception as error:
            if not self.is_guest:
                raise
            self.partial = why_it_stopped(error, self.phases.latest)
        return out

    def _higher_order(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator that calls others: one that it only wraps is recorded, of any other what it makes."""
        name = func.name() if callable(getattr(func, "name", None)) else str(func)
        wraps = name.rpartition("::")[2] in _AROUND_ONE
        if wraps:
            args = tuple(
                inside(partial(dispatching, self))(argument) if isinstance(argument, OpOverload) else argument
                for argument in args
            )
        out = func(*args, **kwargs)
        made = [tensor for tensor in tensors_in(out) if self.storages.of(tensor) is None]
        flex = flex_facts(name.rpartition("::")[2], args)
        if not wraps and not flex:
            self._count_unknown(name)
        if made or not wraps:
            kind = "attention" if flex else "copy" if wraps else "unknown"
            basis = self.sizes.of_records(map(self.storages.of, tensors_in(args)))
            self.higher_order_ran(self.add(name, made, kind=kind, source=name, basis=basis, **flex))
        return out

    def _record(
        self, func: OpOverload, args: Args, kwargs: Kwargs, out: Any, seconds: float | None, into: Tensor | None = None
    ) -> Event | None:
        """Record an operation that has run; None for a view. ``into`` is the gradient that it was added into."""
        self.phases.notice(self.events)
        self._in_threads += self.attribution.is_first_elsewhere()
        operator = operator_of(func)
        line = self.attribution.line()
        # The argument of lift_fresh is a number that has just become a tensor.
        inputs = [] if operator.name == "lift_fresh" else tensors_in(args) + tensors_in(kwargs)
        self._add_unseen(inputs)
        if into is not None:
            self.storages.move(into.untyped_storage()._cdata, out.untyped_storage())
        made = self._made(func, operator, out, line)
        written = sum(storage.nbytes for storage in made)
        basis = self.sizes.basis(func, args, kwargs, out, made, self.storages)
        if made and inputs and func.is_view:
            # A real tensor met among fake ones is converted where it is read; its own storage is counted already.
            for record in made:
                record.phase, record.nbytes = "resident", 0
            return None
        if isinstance(out, FakeTensor) and out.layout is not torch.strided and not storages.is_followed(out):
            self._count_unknown(f"memory of a {str(out.layout).removeprefix('torch.')} result of {operator.name}")
        changes = func._schema.is_mutable
        is_view = not made and not changes and into is None
        if is_view and operator.kind not in ("transfer", "reduction", "collective"):
            return None
        phase = self.phases.of_operation(made)
        read = sum(touched_nbytes(tensor) for tensor in inputs) - sum(
            map(touched_nbytes, tensors_in(kwargs.get("out")))
        )
        if into is not None:
            written += touched_nbytes(out)
        if changes:
            written += sum(
                touched_nbytes(written_argument) for written_argument in storages.written_arguments(func, args, kwargs)
            )
        # Of the table, only the rows that come out are read
        if operator.name in GATHERS:
            read += written - touched_nbytes(inputs[0])
        if operator.kind == "allocate":
            read = written = 0
        flops, model_flops = operator.counted(args, kwargs, out)
        path = self.attribution.path(phase)
        self._place(made, operator, path)
        if operator.kind == "unknown":
            self._count_unknown(operator.name)
        facts: Kwargs = {"name": operator.name, "kind": operator.kind, "shape": operator.shape(args)}
        facts |= {"flops": flops, "model_flops": model_flops if phase in MODEL_PHASES else 0, "read": read}
        facts |= {"written": written, "line": line, "seconds": seconds, "source": operator.source or func._schema.name}
        facts |= {"basis": storages.ASSUMED if operator.assumed else basis, "path": path, "phase": phase}
        facts["dtype"] = storages.arithmetic_dtype(inputs[0], operator.kind) if inputs else ""
        if operator.scratch is not None and self._on_cpu(inputs):
            facts["scratch"] = operator.scratch(args, out)
        event = Event(made, **facts)
        self._append(event)
        return event

    def _add_unseen(self, inputs: list[Tensor]) -> None:
        # What is read without having been made here was there before the step, or an operation of another thread made
        # it.
        for tensor in inputs:
            if tensor.untyped_storage()._cdata not in self.storages.live:
                self._unseen += tensor.grad_fn is not None
                if self._appeared is None:
                    self.resident([tensor], "batch")
                else:
                    self.appear([tensor], "read first")

    def appear(self, tensors: Iterable[Tensor], name: str) -> None:
        """Follow memory that no operation has made from now on."""
        new = [tensor for tensor in tensors if self.storages.of(tensor) is None]
        if new and self._appeared is not None:
            self._appeared(self.add(name, new, kind="allocate", source=name, written=0, flops=0, read=0))

    def _made(self, func: OpOverload, operator: Operator, out: Any, line: str) -> list[Storage]:
        """Records of the memory that an operation has made."""
        # What is written in place is its argument's memory, even where a fake tensor comes back as another.
        if operator.name.endswith("_") and operator.name not in RESIZES and func._schema.is_mutable:
            return []
        made = []
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.storages.live and storage.nbytes():
                made.append(self.storages.born(tensor, operator.name, self.phases.current, line))
        return made

    def _place(self, made: list[Storage], operator: Operator, path: str) -> None:
        """Attribute records to the module that made them, and to a category where that decides it."""
        is_of_loss = of_loss(path) or any(map(of_loss, self.attribution.running))
        for record in made:
            if record.origin is not None:
                record.origin.path = path
            if is_of_loss:
                record.category = "logits and loss"
        if operator.name == "to_host":
            made[0].category = HOST

    def _count_unknown(self, name: str) -> None:
        self.uncounted[name] = self.uncounted.get(name, 0) + 1

    def _on_cpu(self, inputs: list[Tensor]) -> bool:
        return self._hidden and self._kernels == "cpu" and bool(inputs) and inputs[0].device.type == "cpu"

    def add(self, name: str, made: list[Tensor], *, kind: str, source: str, **facts: Any) -> Event:
        """Record something that dispatch does not show, with the memory that it made."""
        unseen = (tensor for tensor in made if self.storages.of(tensor) is None)
        born = [self.storages.born(tensor, name, self.phases.current) for tensor in unseen]
        phase = self.phases.of_operation(born)
        path, line = self.attribution.path(phase), self.attribution.line()
        facts.setdefault("written", sum(storage.nbytes for storage in born))
        self._append(Event(born, name=name, path=path, phase=phase, kind=kind, source=source, line=line, **facts))
        return self.events[-1]

    def _append(self, event: Event) -> None:
        self.events.append(event)
        if self._observe is not None:
            del self.events[:-1]
            self.storages.forget_freed()

    @contextmanager
    def random_states(self) -> Iterator[None]:
        """Inside, each state that is read off the CPU's generator is an entry: it is memory that no operation makes."""

        def get_rng_state(before: Callable[[], Tensor]) -> Tensor:
            state = before()
            self.add("get_rng_state", [state], kind="random", source="get_rng_state")
            return state

        with replaced(torch, "get_rng_state", around(get_rng_state)):
            yield

    # The ledger

    def ledger(self, *, tokens: int, writer: str, tensors: bool = False) -> Ledger:
        """What was recorded so far, as entries in the order they ran; with ``tensors`` also each piece of memory."""
        return Ledger(
            entries=tuple(event.entry() for event in self.events),
            resident=amounts((storage, 1) for storage in self.storages.there_before),
            parameters=sum(
                self.local(parameter).numel() for parameter in self._root.parameters() if parameter.requires_grad
            ),
            tokens=tokens,
            micro_batches=max(1, self.phases.micro_batches),
            uncounted=tuple(sorted(self.uncounted.items())),
            writer=writer,
            tensors=tuple(self.storages.lives()) if tensors else (),
            partial=self.partial,
            notes=(
                *self.notes,
                *notes_of(None if self.sees_compiled else self._root, self.uncounted, self._unseen, self._in_threads),
                *assumed_of(event.facts["name"] for event in self.events),
            ),
        )
