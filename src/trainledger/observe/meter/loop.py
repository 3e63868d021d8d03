"""`meter_loop`: what a training loop does, step by step, kept in a run's directory and watched as it happens."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from trainledger.forecast.predict.forecast import Forecast
from trainledger.ledger.ledger import Ledger, write_ledger
from trainledger.observe.meter.deep import DeepSteps, Piles
from trainledger.observe.meter.directory import RunDirectory, begin, send
from trainledger.observe.meter.phases import (
    DATA,
    EVALUATION,
    FORWARD,
    OUTSIDE,
    Guest,
    Hooks,
    LoopClock,
    StepClock,
    guest,
)
from trainledger.observe.meter.usage import Speed, Usage
from trainledger.observe.meter.watch import MEMORY_GROWS, Finding, RankTimes, Seen, Watch
from trainledger.spec.problem import InvalidInput, Problem

T = TypeVar("T")

_LOG = logging.getLogger("trainledger")


def meter_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
    run_dir: str | Path | None = None,
    *,
    tokens_per_step: int | None = None,
    model_flops_per_step: int | None = None,
    forecast: Forecast | Ledger | None = None,
    deep: int | None = None,
    first_step: int = 1,
    say: Callable[[str], None] = _LOG.warning,
    hear_model: bool = True,
) -> LoopMeter:
    """Meter a training loop from here on: its phases, memory, tokens per second and MFU, each step, in ``run_dir``.

    ``model`` is what the loop calls (compiled, wrapped by DDP or FSDP), ``optimizer`` what it steps; of several a step
    ends with the last. Nothing is waited for: on an accelerator times are those of events in its stream. Lines go to
    ``metrics.jsonl`` of the directory (``runs/SCRIPT-DATE`` where none is named), which `trainledger runs` and
    `trainledger reconcile` read, and to TensorBoard, W&B or MLflow where the loop uses them. What leaves the usual or
    the ``forecast`` is said at once, through ``say``: of `trainledger.predict`, or a ledger of the loop's step, as
    `trainledger.trace` gives it of one rank, whose time is at the rates of this machine.

    ``tokens_per_step`` is of all ranks; None: the integers that the model of this rank takes. FLOPs for MFU are
    ``model_flops_per_step``, else those of the recorded step, else 6 per parameter and token. ``deep`` is the number of
    a step that is recorded operation by operation, and the five after it line by line: a wait for the device in a
    loop, a hidden copy, a graph kept alive are named; these steps take several times as long.

    ``hear_model`` False leaves the model without hooks, for a loop that tells the phases by ``begin``.

    Ends with the program, or with ``close()``, or as a context. A loop has the same bits with it as without, but for a
    compiled one in its recorded step. What fails in it is said once, and then it is off. Where the directory holds a
    run, the next of its name (NAME-2) is taken, which is said.

    >>> import tempfile
    >>> model = nn.Linear(4, 4)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder, meter_loop(model, optimizer, f"{folder}/run") as meter:
    ...     for batch in meter.data(torch.ones(3, 2, 4)):
    ...         model(batch).sum().backward()
    ...         optimizer.step()
    ...     meter.steps
    3
    """
    problems: list[Problem] = []
    if not isinstance(model, nn.Module):
        problems.append(Problem("model", None, f"must be a torch module, not {type(model).__name__}"))
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if not optimizers or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        rule = f"must be an optimizer of torch or several, not {type(optimizer).__name__}"
        problems.append(Problem("optimizer", None, rule))
    numbers = {"tokens_per_step": tokens_per_step, "model_flops_per_step": model_flops_per_step}
    for name, value in (numbers | {"deep": deep, "first_step": first_step}).items():
        if value is not None and (not isinstance(value, int) or value < 1):
            problems.append(Problem(name, value, "must be a whole number, at least 1", 1))
    if problems:
        raise InvalidInput(problems)
    facts = (run_dir, tokens_per_step, model_flops_per_step, forecast, deep, first_step)
    return LoopMeter(say, model, optimizers, *facts, hear_model)


class LoopMeter:
    """What `meter_loop` gives: tell it of data, of checkpoints and of losses, and close it."""

    def __init__(self, say: Callable[[str], None], *facts: Any) -> None:
        self.guest = Guest(self._failed)
        self._say, self._stack, self._closed, self.rank = say, ExitStack(), False, 0
        self.directory: RunDirectory | None = None
        self._deep: DeepSteps | None = None
        self._refused: set[str] = set()  # names of logged values that cannot be kept
        self._clock = LoopClock(torch.device("cpu"))
        self._begin_run(*facts)

    @guest
    def _begin_run(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        run_dir: str | Path | None,
        tokens: int | None,
        model_flops: int | None,
        forecast: Forecast | Ledger | None,
        deep: int | None,
        first_step: int,
        hear_model: bool,
    ) -> None:
        self._optimizer = optimizers[-1]
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        ranks = dist.is_available() and dist.is_initialized()
        self.rank, self._world = (dist.get_rank(), dist.get_world_size()) if ranks else (0, 1)
        self._tokens_given = tokens
        self._speed = Speed(model, device, model_flops, self._world)
        self._usage = Usage(device)
        self._piles = Piles()
        self._ranks = RankTimes(self.rank, self._world)
        traced = forecast if isinstance(forecast, Ledger) and not forecast.partial else None
        if traced is not None:
            forecast = self._speed.forecast(traced, traced=True)
        if not isinstance(forecast, Forecast | None):
            kind = type(forecast).__name__ if not isinstance(forecast, Ledger) else "a trace that ended early"
            rule = "must be what trainledger.predict gives, or a whole trace of a step"
            self._say(f"forecast = {kind}: {rule}; the loop is metered without it")
            forecast = None
        expected = forecast if forecast is not None else Forecast()
        self._watch = Watch(expected.step_seconds, expected.step_seconds_by_phase)
        self._held: tuple[StepClock, dict[str, float]] | None = None  # the last step whose time is known: not written
        self._tokens = 0
        self._time = 0.0
        self._clock = LoopClock(device, first_step)
        if self.rank == 0:
            self.directory = self._stack.enter_context(begin(run_dir, device, first_step - 1, forecast, self._say))
            if traced is not None:
                write_ledger(traced, self.directory.path / "predicted-ledger.json.gz")
        self._hears_model, self._unheard = hear_model, 0  # steps since a forward of the model was heard
        self._hooks = Hooks(model if hear_model else None, optimizers, self._clock, self._updated, self.guest)
        self._stack.callback(self._hooks.remove)
        self._hooks.inputs = lambda args, kwargs: self.count((args, kwargs))
        atexit.register(self.close)
        if deep is not None:
            self._deep = DeepSteps(deep, model, optimizers, device, alone=self._world == 1)
            self._stack.callback(self._deep.stop)
            self._hooks.around_update = self._deep.update
            for finding in self._deep.before(first_step):
                self._find(finding)

    @property
    def steps(self) -> int:
        """The number of the last step that is over, 0 before any."""
        return self._clock.step.number - 1

    @property
    def run_dir(self) -> Path | None:
        """Where lines are kept; None on ranks but the first."""
        return None if self.directory is None else self.directory.path

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; the time in which the loop waits for one counts as waiting for data."""
        iterator = iter(batches)
        while True:
            with self.phase(DATA):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def phase(self, name: str) -> AbstractContextManager[None]:
        """What runs inside is of this phase: "data", "checkpoint", "evaluation", or a name of the loop's own."""
        return self._clock.inside(name) if self.guest.hears else nullcontext()

    @guest
    def log(self, /, **facts: float | Tensor) -> None:
        """Numbers of this step, such as ``loss`` and ``grad_norm``; tensors are read later, without waiting.

        A name that each line has already, or what is no single number, is left out, which is said once.
        """
        begun = any(phase == FORWARD for phase, _ in self._clock.step.begins)
        step = self._clock.step if begun or self._clock.last is None else self._clock.last
        for name, value in facts.items():
            if name in _OWN:
                self._refuse(name, f"each line has a field of this name already; another name works: my_{name}")
            else:
                step.facts |= self._kept(name, _on_its_way if isinstance(value, Tensor) else _number, value)

    def _kept(self, name: str, read: Callable[[Any], Any], value: Any) -> dict[str, Any]:
        """A logged value as it is read, by its name; empty where that is no single number, which is said once."""
        try:
            return {name: read(value)}
        except Exception:  # of any object that a loop logs
            self._refuse(name, f"must be a single number, not {type(value).__name__}")
            return {}

    def _refuse(self, name: str, why: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            self._say(f"meter.log({name}=...) is left out: {why}.")

    @guest
    def saved(self, nbytes: int) -> None:
        """How many bytes the checkpoint of this step has, so that the speed of its disk is known."""
        self._clock.step.facts["saved_nbytes"] = nbytes

    def close(self, state: str | None = None) -> None:
        """Write what is left and let go of model and optimizer; ``state`` is finished unless an error ends the run."""
        if not self._closed:
            self._end(state)
            self._let_go()

    @guest
    def _end(self, state: str | None) -> None:
        self._take(wait=True)
        if self._held is not None:
            self._write(*self._held)
        self._measured(state or ("failed" if getattr(sys, "last_value", None) is not None else "finished"))

    def _measured(self, state: str) -> None:
        if self.directory is not None:
            ledger = None if self._deep is None else self._deep.ledger
            self.directory.end(state, self.steps, self._time, self._speed.parameters, ledger)

    def _let_go(self) -> None:
        """Leave the loop as if it had never been metered."""
        atexit.unregister(self.close)
        self._closed = True
        with suppress(Exception):
            self._stack.close()

    def _failed(self, error: Exception) -> None:
        """A part of the meter failed: say so, keep what there is, and be off."""
        with suppress(Exception):
            self._say(f"Metering is off, and the loop goes on without it: {type(error).__name__}: {error}")
        with suppress(Exception):
            self._measured("interrupted")
        self._let_go()

    def __enter__(self) -> LoopMeter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = "finished" if kind is None else "interrupted" if issubclass(kind, KeyboardInterrupt) else "failed"
        self.close(ended)

    @guest
    def begin(self, phase: str) -> None:
        """What follows is of this phase; for frameworks that say what they begin."""
        self._clock.begin(phase)

    @guest
    def was(self, phase: str) -> None:
        """What ran since the last beginning was of this phase."""
        self._clock.was(phase)

    @guest
    def count(self, batch: Any) -> None:
        """Count the tokens of a micro-batch: of the first integers [B, T] in it."""
        self._speed.see_format()
        for tree_leaf in tree_leaves(batch):
            if isinstance(tree_leaf, Tensor) and tree_leaf.dim() == 2 and not tree_leaf.is_floating_point():
                self._clock.step.tokens += tree_leaf.numel()
                return

    def _updated(self) -> None:
        step = self._clock.end_step()
        rate = self._optimizer.param_groups[0].get("lr")
        if isinstance(rate, int | float):
            step.facts.setdefault("learning_rate", float(rate))
        step.facts |= self._usage.now()
        heard = any(phase in (FORWARD, EVALUATION) for phase, _ in step.begins)
        self._unheard = 0 if heard else self._unheard + 1
        if self._hears_model and self._unheard == _UNHEARD:
            self._hears_model = False  # said once
            self._find(Finding("unheard model", step.number, _NOT_HEARD))
        if self._deep is not None:
            forwards = sum(phase == FORWARD for phase, _ in step.begins)
            for finding in self._deep.after(step.number, self._tokens_of(step), forwards):
                self._find(finding)
            if self._deep.recorded and self._deep.ledger is not None:
                self._speed.record(self._deep.ledger)
                told = self._speed.forecast(self._deep.ledger)
                if self.directory is not None and told is not None:
                    self.directory.forecast(told)
        self._take()

    def _tokens_of(self, step: StepClock) -> int:
        return self._tokens_given or step.tokens * self._world

    def _take(self, *, wait: bool = False) -> None:
        """Write the steps whose time has become known; the last of them is held, as facts of it may still come."""
        for step, seconds in self._clock.ended(wait=wait):
            if self._held is not None:
                self._write(*self._held)
            self._held = step, seconds

    def _write(self, step: StepClock, phases: dict[str, float]) -> None:
        outside = {name: phases.pop(name) for name in OUTSIDE if name in phases}
        facts: dict[str, Any] = {}
        for name, value in step.facts.items():
            facts |= self._kept(name, _number, value)
        seconds = sum(phases.values())
        self._time += seconds
        tokens = self._tokens_of(step)
        self._tokens += tokens
        metered = self._deep is not None and step.number in self._deep.slowed
        speed = self._speed.of(tokens, seconds)
        known = {name: facts.get(name) for name in ("memory_nbytes", "others", "saved_nbytes", "slowdown")}
        seen = Seen(step.number, seconds, phases, outside=outside, **known)
        if self.directory is not None:
            line = {"step": step.number, "loss": facts.pop("loss", None), "tokens": self._tokens, "seconds": seconds}
            line |= {"time": self._time, **facts, **speed, "phase_seconds": phases}
            self.directory.write(line, outside, metered=metered)
            send({**{name: each for name, each in line.items() if isinstance(each, float)}, **speed}, step.number)
        if not metered:
            for finding in self._watch.see(seen):
                self._find(finding)
                if finding.name == MEMORY_GROWS:
                    self._piles.begin()
        for finding in (*self._piles.look(step.number), *self._ranks.exchange(step.number, phases)):
            self._find(finding)

    def _find(self, finding: Finding) -> None:
        if self.rank == 0:
            self._say(finding.sentence)
            if self.directory is not None:
                self.directory.event("finding", finding.step, name=finding.name, sentence=finding.sentence)


_UNHEARD = 2  # steps: a first one may prepare the states of an optimizer
_NOT_HEARD = (
    "No forward of the metered model was heard, so that steps have no phases: the loop calls another module, such as "
    "torch.compile(model) made after meter_loop, or the model's forward itself. Give meter_loop what the loop calls."
)
# Fields of a line that the meter writes itself; a learning rate is also the loop's to log.
_OWN = {"event", "step", "tokens", "seconds", "time", "phase_seconds", "tokens_per_second", "mfu", "memory_nbytes"}
_OWN |= {"peak_memory_nbytes", "others", "slowdown", "saved_nbytes"}


def _on_its_way(value: Tensor) -> Tensor:
    """A number of the device, copied to the host: nothing waits for it, and no recorder sees it."""
    with _disable_current_modes():
        one = value.detach().reshape(())
        if one.device.type != "cuda":
            return one.clone()
        return torch.empty((), dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True)


def _number(value: Any) -> Any:
    """A number that JSON has, of a tensor, of an array of one element, or of any real number; None is itself."""
    if hasattr(value, "item"):
        with _disable_current_modes():
            value = value.item()
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Real):
        return float(value)
    raise TypeError
