"""Follows a program's training steps, and records one of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.modules import module as module_hooks
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.ledger.ledger import Ledger
from trainledger.trace.compiled import captured, compiled_runs_eagerly, no_word_of_hooks
from trainledger.trace.distributed.collectives import COUNTS, counts_have_values, give_values, local, run_on_parts
from trainledger.trace.distributed.rank_recorder import COMMUNICATION, RankRecorder
from trainledger.trace.fakes.own_code import program_followed, record_launch
from trainledger.trace.fakes.rules import Counts
from trainledger.trace.fakes.values import AssumedValues, EmptyBatches, zero_where_picked
from trainledger.trace.patches import Args, Kwargs, all_replaced, around, dispatching, inside, replaced
from trainledger.trace.recorder.source_lines import Lines, Refused, quiet_fake_errors
from trainledger.trace.recorder.storages import has_no_memory, tensors_in

_READ = torch.ops.aten._local_scalar_dense.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


class Finished(BaseException):
    """The step that was to be recorded is over, and the program need not go on."""


class Steps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows by hooks which modules and optimizers a program uses, and in which phase of a step it is.

    Every operation passes it: once there is a recorder, it records. As modes exit in reverse order, it is entered
    before that.
    """

    supports_higher_order_operators = True

    def __init__(self, assume: Sequence[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder: RankRecorder | None = None
        self.between_optimizer_steps = False
        self.root: nn.Module | None = None
        self.n_steps = 0
        # Whether anything ran forward or backward since the last step: what only makes an optimizer's state, as a
        # checkpoint does before it loads one, is no training step.
        self._worked = False
        self._first: torch.optim.Optimizer | None = None
        self._made_optimizer = self._ran_backward = False
        self._used: dict[int, torch.optim.Optimizer] = {}
        self._models: dict[int, nn.Module] = {}
        self._depth = 0
        self._tokens = 0
        self._assumed = AssumedValues()
        self._empty = EmptyBatches(self._assumed.line)
        self._counts = Counts(assume, self._assumed.line)
        self.left_out: dict[str, None] = {}
        self._counted: dict[str, None] = {}
        self._stack = ExitStack()
        self._before = ExitStack()  # until a step is recorded

    def __enter__(self) -> Steps:
        enter, mode = self._stack.enter_context, torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        for hook in (
            module_hooks.register_module_forward_pre_hook(self._enter_module),
            module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self._begin_update),
            optimizers.register_optimizer_step_post_hook(self._end_update),
        ):
            self._stack.callback(hook.remove)
        backward, clip = around(partial(self._during, "backward")), around(partial(self._during, "clip"))
        enter(replaced(torch.autograd, "backward", backward))
        enter(replaced(torch.autograd, "grad", backward))
        # DTensor runs an operator on fake tensors of the whole size, to know its shape
        unseen = inside(self._unseen)
        for owner, names, made in (
            (clip_grad, ("_get_total_norm", "_clip_grads_with_norm_"), clip),
            (ShardingPropagator, ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"), unseen),
        ):
            enter(all_replaced(*((owner, name, made) for name in names)))
        self._before.enter_context(compiled_runs_eagerly())
        self._stack.callback(self._before.close)
        enter(quiet_fake_errors())
        enter(no_word_of_hooks())
        enter(counts_have_values())
        enter(program_followed(mode, self.left_out.setdefault, self._launched, self._counts))
        enter(replaced(torch.optim.Optimizer, "__init__", around(self._made)))
        enter(dispatching(self))
        return self

    def __exit__(self, *error: Any) -> None:
        if self.recorder is not None:
            self.recorder.end()
        self._stack.close()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        recorder = self.recorder
        # Its rule for fake tensors makes a new one; in truth it gives back what it waits for
        if func is _WAIT:
            if recorder is not None:
                recorder.waited(args[0])
            return args[0]
        if func is _READ and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return self._assume(func, args)
        # An operator that calls others
        if not isinstance(func, OpOverload):
            if recorder is None:
                return func(*args, **(kwargs or {}))
            return recorder.__torch_dispatch__(func, types, args, kwargs)
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return run_on_parts(func, args, kwargs or {}, partial(dispatching, self))
        # Of tokens by the expert they are routed to
        if func in COUNTS and recorder is not None:
            self._counted.setdefault(self._assumed.line())
        if recorder is not None:
            out = recorder.__torch_dispatch__(func, types, args, kwargs)
        else:
            out = func(*args, **(kwargs or {}))
            if self._ran_backward and not self._made_optimizer and func._schema.is_mutable:
                self._refuse_own_update(args)
        give_values(func, args, out)
        zero_where_picked(func, out, self._picked)
        self._empty.ran(func, args, out)
        return out

    def _launched(self, name: str, args: Args, kwargs: Kwargs) -> None:
        if self.recorder is not None:
            record_launch(self.recorder, name, args, kwargs)

    def _picked(self) -> None:
        if self.recorder is not None:
            self._assumed.add()

    def _assume(self, func: OpOverload, args: Args) -> float | int:
        # An unknown value is 0; where it scales what an optimizer does, no operation depends on it.
        recorder = self.recorder
        if recorder is not None:
            if recorder.phases.current not in ("optimizer", "clip"):
                self._assumed.add()
            recorder.was_read(func, args)
        return 0.0 if args[0].dtype.is_floating_point else 0

    # The step that is recorded

    def record(self) -> None:
        """Record from here on."""
        root = self._found_root()
        optimizers_used = list(self._used.values())
        self._before.close()
        self._counts.clear()
        self.recorder = recorder = RankRecorder(root, optimizers_used, lines=Lines(), sizes=self._counts.sizes)
        gradients = {name: parameter.grad for name, parameter in root.named_parameters() if parameter.grad is not None}
        recorder.resident(gradients.values(), "gradients", gradients)
        for model in self._models.values():
            reducer = getattr(model, "reducer", None)
            for bucket in getattr(reducer, "_buckets", ()):
                recorder.resident([bucket.flat], COMMUNICATION, ["bucket"])
        recorder.resident(_living(), "batch")
        recorder.begin()
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        self._stack.enter_context(captured(root, recorder, mode))
        recorder.phases.begin("data")
        self._tokens = 0

    def _found_root(self) -> nn.Module:
        if self.root is not None:
            return _unwrapped(self.root)
        models = [_unwrapped(model) for model in self._models.values()]
        models = [model for model in models if any(True for _ in model.parameters())]
        if not models:
            raise ValueError("the program has called no module that has parameters, so there is no step to record")
        return models[0] if len(models) == 1 else nn.ModuleDict({str(at): model for at, model in enumerate(models)})

    def ledger(self) -> Ledger:
        """What was recorded."""
        if self.recorder is None:
            raise ValueError(
                f"the program has ended after {self.n_steps} optimizer steps; the recorded step comes after the first"
            )
        self.recorder.notes += (*self._assumed.notes(), *self._counts.notes())
        self.recorder.notes += self.left_out
        self.recorder.notes += [
            f"{each}: tokens are assumed to be routed evenly to all experts" for each in self._counted
        ]
        return self.recorder.ledger(tokens=self._tokens, writer="trace", tensors=True)

    def live_nbytes(self) -> int:
        """Bytes that are live on this rank now."""
        if self.recorder is not None:
            return sum(record.nbytes for record in self.recorder.storages.live.values())
        here = (local(tensor) for tensor in _living() if not has_no_memory(tensor))
        storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in here)}
        return sum(storages.values())

    # What the program does

    def _during(self, phase: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        self._worked = self._worked or phase == "backward"
        self._ran_backward = self._ran_backward or (phase == "backward" and self.between_optimizer_steps)
        if recorder is None or recorder.compiling or recorder.phases.current == phase:
            return function(*args, **kwargs)
        before = recorder.phases.current
        recorder.phases.begin(phase)
        try:
            return function(*args, **kwargs)
        finally:
            recorder.phases.begin("other" if before == "forward" else before)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        recorder, self.recorder = self.recorder, None
        try:
            yield
        finally:
            self.recorder = recorder

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._empty.refuse(tensors_in(args))
        self._worked = True
        if self.recorder is None:
            self._models.setdefault(id(module), module)
            return
        if self.recorder.phases.current in ("data", "other"):
            self.recorder.phases.begin("forward")
        counted = (tensor for tensor in tensors_in(args) if not tensor.is_floating_point())
        self._tokens += next((local(tensor).numel() for tensor in counted), 0)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)

    def _made(self, before: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._made_optimizer = True
        before(*args, **kwargs)

    def _refuse_own_update(self, args: Args) -> None:
        # Without an optimizer of torch no step is seen, and a program would run to its end for nothing.
        if torch.is_grad_enabled():
            return
        written = {tensor.untyped_storage()._cdata for tensor in tensors_in(args[:1])}
        parameters = (parameter for model in self._models.values() for parameter in model.parameters())
        if any(
            parameter.untyped_storage()._cdata in written
            for parameter in parameters
            if type(parameter.data) is FakeTensor
        ):
            raise Refused(
                "parameters are written here by an optimizer that is none of torch.optim.Optimizer: where its steps "
                "begin and end is not seen on a rank; let it inherit from torch.optim.Optimizer, or take one process: "
                "annotate --fake --steps 2"
            )

    def _begin_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._used.setdefault(id(optimizer), optimizer)
        if self.recorder is not None:
            self.recorder.phases.begin("optimizer")
        return (args[0], *map(self._outside, args[1:])), {name: self._outside(value) for name, value in kwargs.items()}

    def _outside(self, given: Any) -> Any:
        # A closure that an optimizer calls, as Lightning's does, is forward and backward and not its own work.
        if not callable(given):
            return given

        def closure() -> Any:
            if self.recorder is None:
                return given()
            with self.recorder.phase("other"):
                return given()

        return closure

    def _end_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._first = self._first or optimizer
        if self.recorder is not None:
            self.recorder.phases.begin("other")
        if optimizer is not self._first or not self._worked:
            return
        self._worked = False
        self.n_steps += 1
        if not self.between_optimizer_steps:
            return
        if self.recorder is not None:
            raise Finished
        self.record()


def _unwrapped(model: nn.Module) -> nn.Module:
    """A model without what replicates it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _living() -> Iterator[Tensor]:
    """All live fake tensors of this world, including those that a step does not touch."""
    gc.collect()
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    for tensor in gc.get_objects():
        if issubclass(type(tensor), FakeTensor) and tensor.fake_mode is mode:
            yield tensor
