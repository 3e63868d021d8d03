"""The phases of a loop that nobody here wrote, heard by hooks of its model and optimizer.

A moment belongs to what began last. So the phases of a step sum to it. On an accelerator a boundary is an event in its
stream, which nothing waits for: a phase is then the time between two events on the device, work and idle.

    data           inside `LoopMeter.data`: the loop waits for its loader
    forward        inside the model
    loss           after the model, until autograd begins: the loss, and what else the loop does before backward()
    backward       autograd, until the last gradient of this rank
    gradient wait  autograd's last callbacks: DDP waits there for gradients of other ranks (FSDP2 inside of backward)
    clip           after the last backward, until the update: clipping, unscaling
    optimizer      the update
    evaluation     from a forward without gradients until the next with them
    checkpoint     inside `LoopMeter.phase("checkpoint")`
    other          everything else: a batch that the loop makes itself, logging, the code of the loop
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainledger.trace.recorder.source_lines import callers

P = ParamSpec("P")
T = TypeVar("T")

DATA, FORWARD, LOSS, BACKWARD, GRADIENT_WAIT = "data", "forward", "loss", "backward", "gradient wait"
CLIP, OPTIMIZER, OTHER = "clip", "optimizer", "other"
EVALUATION, CHECKPOINT = "evaluation", "checkpoint"
OUTSIDE = (EVALUATION, CHECKPOINT)  # of no step


@dataclass
class StepClock:
    """A step as it is timed: what began when, and what is known of it besides."""

    number: int
    begins: list[tuple[str, Any]]  # phase, and seconds or an event
    tokens: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    end: Any = None

    def seconds(self) -> dict[str, float] | None:
        """Seconds by phase; None as long as the device has not come to its end."""
        if not isinstance(self.end, float) and not self.end.query():
            return None
        found: dict[str, float] = {}
        nexts = [*self.begins[1:], ("", self.end)]
        for (phase, begin), (after, end) in zip(self.begins, nexts, strict=True):
            if phase == CLIP and after != OPTIMIZER:
                phase = OTHER  # another micro-batch follows, and nothing is clipped
            seconds = end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
            found[phase] = found.get(phase, 0.0) + seconds
        return found


class LoopClock:
    """Gives each moment of a loop to a phase; `ended` are the steps whose time is known, in their order."""

    def __init__(self, device: torch.device, first: int = 1) -> None:
        self._on_device = device.type == "cuda"
        self._waiting: deque[StepClock] = deque()
        self.step = StepClock(first, [(OTHER, self._now())])
        self.last: StepClock | None = None

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @property
    def phase(self) -> str:
        return self.step.begins[-1][0]

    def begin(self, phase: str) -> None:
        """What follows belongs to this phase."""
        if self.phase != phase:
            self.step.begins.append((phase, self._now()))

    def was(self, phase: str) -> None:
        """What ran since the last beginning was of this phase, as is known now."""
        self.step.begins[-1] = (phase, self.step.begins[-1][1])

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """What runs inside belongs to this phase, what follows to the one before, unless that is over."""
        before = self.phase
        self.begin(phase)
        try:
            yield
        finally:
            self.begin(OTHER if before == CLIP else before)

    def end_step(self) -> StepClock:
        """The step is over; what follows belongs to the next."""
        ended = self.last = self.step
        ended.end = self._now()
        self._waiting.append(ended)
        self.step = StepClock(ended.number + 1, [(OTHER, ended.end)])
        return ended

    def ended(self, *, wait: bool = False) -> Iterator[tuple[StepClock, dict[str, float]]]:
        """Steps that are over, each once, with seconds by phase; ``wait`` for those the device is still busy with."""
        while self._waiting:
            first = self._waiting[0]
            if wait and self._on_device:
                first.end.synchronize()
            seconds = first.seconds()
            if seconds is None:
                return
            self._waiting.popleft()
            yield first, seconds


class Guest:
    """Keeps a meter's own failures out of its loop: the first is told to ``failed``, and it hears nothing from then on.

    So does a process that the loop forks: what it trains is not this run's.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed, self._hears, self._process = failed, True, os.getpid()

    @property
    def hears(self) -> bool:
        return self._hears and os.getpid() == self._process

    def fail(self, error: Exception) -> None:
        """End with this error, once."""
        if self.hears:
            self._hears = False
            self._failed(error)


def guest(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T | None]:
    """A method that the loop calls, of a class with a ``guest``: it raises nothing, and is None once that hears not."""

    @wraps(method)
    def unheard(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        if self.guest.hears and not torch.compiler.is_compiling():
            try:
                result: T = method(self, *args, **kwargs)
                return result
            except Exception as error:  # of any part of the meter: none may end the loop
                self.guest.fail(error)
        return None

    return unheard


# In `_compiled_call_impl` of a module, which torch calls in its place and leaves out of its state: hooks of the module
# would be copied, pickled and compiled with it.
class Heard:
    """Calls a model between two functions; a copy of it, and what pickle makes of it, is None."""

    def __init__(self, model: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._model, self._before, self._after = weakref.ref(model), before, after
        self._take(model)

    def _take(self, model: nn.Module) -> None:
        self._inside = model._compiled_call_impl
        self.compiles = self._inside is not None and getattr(self._inside, "compiles", True)
        vars(model)["_compiled_call_impl"] = self  # a module of torch.compile would set it on the one inside of it

    def stay(self) -> None:
        """Be in the model's place again where ``model.compile()`` has taken it."""
        model = self._model()
        if model is not None and hasattr(model._compiled_call_impl, "_torchdynamo_orig_callable"):
            self._take(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._inside or self._model()._call_impl  # type: ignore[union-attr]
        if torch.compiler.is_compiling():
            return run(*args, **kwargs)
        self._before(args, kwargs)
        output = run(*args, **kwargs)
        self._after(output)
        return output

    def remove(self) -> None:
        """Have the model called as before; where another one hears it around this one, this one stays and is silent."""
        model = self._model()
        self._before = self._after = lambda *args: None
        if model is not None and vars(model).get("_compiled_call_impl") is self:
            del vars(model)["_compiled_call_impl"]
            if self._inside is not None:
                vars(model)["_compiled_call_impl"] = self._inside

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Hooks:
    """Tells a clock what a model (None: others tell that) and its optimizers begin; `remove` takes all hooks off."""

    def __init__(
        self,
        model: nn.Module | None,
        optimizers: list[torch.optim.Optimizer],
        clock: LoopClock,
        updated: Callable[[], None],
        guest: Guest,
    ) -> None:
        self.guest = guest
        self._clock = clock
        self._updated = updated
        self._last = optimizers[-1]
        self._in_backward = self._ends_step = False
        self._running: FrameType | None = None  # of the outermost step of an optimizer
        self._updating = ExitStack()
        self._heard: Heard | None = None
        self.inputs: Callable[[tuple[Any, ...], dict[str, Any]], object] = lambda args, kwargs: None
        self.around_update: Callable[[], AbstractContextManager[None]] = nullcontext
        self._handles: list[Any] = [
            *(optimizer.register_step_pre_hook(self._before_update) for optimizer in optimizers),
            *(optimizer.register_step_post_hook(self._after_update) for optimizer in optimizers),
        ]
        if model is not None:
            self._model = weakref.ref(model)
            self._heard = Heard(model, self._before_forward, self._after_forward)
            self._handles.append(self._heard)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._updating.close()

    @guest
    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        model = self._model()
        if model is None or not (torch.is_grad_enabled() and model.training):
            self._clock.begin(EVALUATION)
            return
        self._clock.begin(FORWARD)
        self.inputs(args, kwargs)

    @guest
    def _after_forward(self, output: Any) -> None:
        if self._clock.phase != FORWARD:
            return
        self._clock.begin(LOSS)
        self._in_backward = False
        # Of nodes and not of tensors: these may be parameters, and one with hooks warns when it is saved.
        nodes = {tree_leaf.grad_fn for tree_leaf in tree_leaves(output) if isinstance(tree_leaf, Tensor)} - {None}
        for node in nodes:
            node.register_prehook(self._at_backward)  # type: ignore[union-attr]

    @guest
    def _at_backward(self, gradients: tuple[Tensor, ...]) -> None:
        """The first gradient of an output: autograd has begun, and says when it ends."""
        if self._in_backward:
            return
        self._in_backward = True
        self._clock.begin(BACKWARD)
        torch.autograd.Variable._execution_engine.queue_callback(self._gradients_done)

    @guest
    def _gradients_done(self) -> None:
        self._clock.begin(GRADIENT_WAIT)
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    @guest
    def _after_backward(self) -> None:
        self._clock.begin(CLIP)

    @guest
    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nested = self._running is not None and any(frame is self._running for frame in callers())
        self._ends_step = optimizer is self._last or (nested and self._ends_step)
        if nested:
            return  # the step of a class calls that of the one above it, or a container those inside of it
        if self._heard is not None:
            self._heard.stay()
        self._updating.close()  # of a step that raised
        self._running = sys._getframe(2)  # torch's wrapper of the step, around this method's own
        if any(map(callable, (*args[1:], *kwargs.values()))):
            return  # a closure: forward and backward are inside of the step
        self._clock.begin(OPTIMIZER)
        self._updating.enter_context(self.around_update())

    @guest
    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if sys._getframe(2) is not self._running:
            return
        self._running = None
        self._updating.close()
        if self._ends_step:
            self._updated()
