"""The witness: records every dispatched operation and the life of every storage, on fake or on real tensors.

Memory is followed by storages, not tensors: a storage is live from the operation that made it until the
last reference to it is gone, whoever holds it (a Python variable, autograd, an optimizer). What died between
two operations counts as freed by the earlier one.
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.ledger.entry import HOST, Ledger
from trainledger.ledger.record import Event, Storage, amounts, keep_what_lives
from trainledger.trace.operators import operator_of, tensors_in

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
DTYPE_NAMES |= {torch.int64: "int64", torch.int32: "int32", torch.uint8: "uint8", torch.int8: "int8"}
DTYPE_NAMES |= {torch.bool: "bool"}
DTYPE_NAMES |= {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}

_DEVICE = torch.ops.prim.device.default
_NO_NUMBER = 2**63  # nodes that add to a parameter's gradient have the largest number there is

MODEL_PHASES = ("forward", "backward", "other")  # whose matrix products are the model's own

GATHERS = ("embedding", "index_select", "gather")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is dispatched while it is active.

    The model's parameters and buffers and the optimizer's state are resident: there before. ``resident`` tells
    more such tensors; what is read without having been made or told was there as well, as part of the batch.
    ``phase("backward")`` names what runs inside; with ``find_phases`` the recorder tells forward from backward
    itself (autograd runs the latter). Operations that autograd runs with gradients enabled are recomputation.
    ``clocked`` times each operation (real tensors on a synchronous device only).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        clocked: bool = False,
        find_phases: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.uncounted: dict[str, int] = {}
        self.micro_batches = 0
        self._clocked = clocked
        self._live: dict[int, Storage] = {}
        self._guards: dict[int, Any] = {}
        self._resident: list[Storage] = []
        self._phase = "other"
        self._find_phases = find_phases
        self._recomputing = False
        self._root = model
        self._paths = {id(each): name for name, each in model.named_modules()}
        self._stack: list[str] = []
        # From which autograd node on which module ran: nodes are numbered in the order of the forward.
        self._first_nodes: list[int] = []
        self._path_from: list[str] = []
        self._last_path = ""
        self._hooks: list[Any] = []
        self.resident([each for each in model.parameters() if each.requires_grad], "parameters")
        self.resident([each for each in model.parameters() if not each.requires_grad], "frozen weights")
        self.resident(list(model.buffers()), "buffers")
        if optimizer is not None:
            self.resident([each for state in optimizer.state.values() for each in tensors_in(state)], "optimizer state")

    # What was there before

    def resident(self, tensors: Iterator[Tensor] | list[Tensor], category: str) -> None:
        """Tell which live tensors belong to which category before the step; a storage is counted once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live:
                record = Storage(storage.nbytes(), "resident", category)
                self._watch(storage, record)
                self._resident.append(record)

    def categorize(self, tensors: Iterator[Tensor] | list[Tensor], category: str) -> None:
        """Say what live storages turned out to be, back to their birth."""
        for tensor in tensors:
            record = self._live.get(tensor.untyped_storage()._cdata)
            if record is not None:
                record.category = category

    # Phases and modules

    @property
    def current_phase(self) -> str:
        return self._phase

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
        if before == "backward":
            gradients = [each.grad for each in self._root.parameters() if each.grad is not None]
            self.categorize(gradients, "gradients")
        if before == "data":
            for each in self._live.values():
                if each.phase == "data":
                    each.category = "batch"
        if phase == "backward":
            self.micro_batches += 1
            keep_what_lives(self._live.values(), "forward")

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
        self._hooks = [
            module_hooks.register_module_forward_pre_hook(self._enter_module),
            module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for each in self._hooks:
            each.remove()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        path = self._paths.get(id(module))
        self._stack.append(path if path is not None else (self._stack[-1] if self._stack else ""))
        self._mark(self._stack[-1])

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
            self._mark(self._stack[-1] if self._stack else "loss")
        if module is self._root and self._phase == "forward":
            for tensor in tensors_in(output):
                record = self._live.get(tensor.untyped_storage()._cdata)
                if record is not None and record.category == "scratch":
                    record.category = "logits and loss"

    def _mark(self, path: str) -> None:
        self._first_nodes.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._path_from.append(path)

    def _where(self, phase: str) -> str:
        """The module path of the operation that runs now; in backward, that of the forward operation it answers."""
        if self._stack:
            return self._stack[-1]
        if phase in ("forward", "other"):
            return "loss"
        if phase != "backward":
            return ""
        node = torch._C._current_autograd_node()
        if node is None:
            return "loss"
        number: int = node._sequence_nr()
        if number < _NO_NUMBER:
            at = bisect_right(self._first_nodes, number) - 1
            self._last_path = self._path_from[at] if at >= 0 else "loss"
        return self._last_path

    # Operations

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # most of what is dispatched on fake tensors
            return args[0].fake_device
        kwargs = kwargs or {}
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented
        if not self._clocked:
            out, seconds = func(*args, **kwargs), None
        else:
            start = time.perf_counter()
            out = func(*args, **kwargs)
            seconds = time.perf_counter() - start
        self._record(func, args, kwargs, out, seconds)
        return out

    def _record(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, seconds: float | None
    ) -> None:
        if self._find_phases:
            self._notice_phase()
        made: list[Storage] = []
        written = 0
        live = self._live
        operator = operator_of(func)
        # The argument of lift_fresh is a number that has just become a tensor.
        inputs = [] if operator.name == "lift_fresh" else tensors_in(args) + tensors_in(kwargs)
        for tensor in inputs:
            if tensor.untyped_storage()._cdata not in live:
                self.resident([tensor], "batch")
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in live and storage.nbytes():
                record = Storage(storage.nbytes(), self._phase)
                self._watch(storage, record)
                made.append(record)
                written += storage.nbytes()
        if made and inputs and func.is_view:
            # A real tensor met among fake ones is converted where it is read; its own storage is counted already.
            for record in made:
                record.phase, record.nbytes = "resident", 0
            return
        changes = func._schema.is_mutable
        if not made and not changes and operator.kind not in ("transfer", "reduction"):
            return  # a view: no work, no bytes
        phase = self._phase
        if phase == "backward" and self._again():
            phase = "recompute"
            for record in made:
                record.phase = phase
            self._recomputing = True
        elif self._recomputing:
            self._recomputing = False
            keep_what_lives(self._live.values(), "recompute")
        read = sum(touched_nbytes(each) for each in inputs)
        if changes:
            targets = _written_arguments(func, args, kwargs)
            written += sum(touched_nbytes(each) for each in targets)
        if operator.name in GATHERS:  # of the table, only the rows that come out are read
            read += written - touched_nbytes(inputs[0])
        flops, model_flops = operator.flops((*args, kwargs) if operator.kind == "update" else args, out)
        path = self._where(phase)
        if _of_loss(path) or any(_of_loss(each) for each in self._stack):
            for record in made:
                record.category = "logits and loss"
        if operator.name == "to_host":
            made[0].category = HOST
        if operator.kind == "unknown":
            self.uncounted[operator.name] = self.uncounted.get(operator.name, 0) + 1
        if operator.kind == "allocate":
            read = written = 0
        self.events.append(
            Event(
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
                seconds=seconds,
                basis="assumed" if operator.assumed else "exact",
                source=f"aten::{operator.name}",
            )
        )

    def _again(self) -> bool:
        """Whether a forward runs inside backward: with gradients, or (in an own Function's forward) in a module."""
        if torch._C._current_autograd_node() is None:
            return False
        return torch.is_grad_enabled() or bool(self._stack)

    def _watch(self, storage: Any, record: Storage) -> None:
        key = storage._cdata
        self._live[key] = record
        self._guards[key] = weakref.ref(storage, self._died(key))

    def _died(self, key: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            record = self._live.pop(key)
            del self._guards[key]
            if self.events:
                self.events[-1].freed.append((record, 1))
            else:
                self._resident.remove(record)

        return gone

    # The ledger

    def ledger(self, *, tokens: int, writer: str) -> Ledger:
        """What was recorded so far, as entries in the order they ran."""
        return Ledger(
            entries=tuple(each.entry() for each in self.events),
            resident=amounts((each, 1) for each in self._resident),
            parameters=sum(each.numel() for each in self._root.parameters() if each.requires_grad),
            tokens=tokens,
            micro_batches=max(1, self.micro_batches),
            uncounted=tuple(sorted(self.uncounted.items())),
            writer=writer,
        )


def _of_loss(path: str) -> bool:
    """Whether a module, or what runs outside of all, takes a loss."""
    return path == "loss" or path.endswith(".loss")


def touched_nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, those of a broadcast dim counted once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            elements *= size
    return elements * tensor.element_size()


def _written_arguments(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "grads":  # fused optimizers write gradients only where a loss scale is taken off
            continue
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written.extend(tensors_in(value))
    return written
