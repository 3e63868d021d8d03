"""A measured ledger: of a step of the engine's run, or of anybody's loop."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed import Work
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.engine.train.device import host_threads
from trainledger.engine.train.observer import Observer, StepRecord, TrainingState
from trainledger.engine.train.precision import gradient_buffers
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.observe.measure.hardware import SLOWED, Pace, Sample, pace_of, watched
from trainledger.trace.compiled import follows_compiled, metered
from trainledger.trace.distributed.rank_recorder import COMMUNICATION, RankRecorder
from trainledger.trace.loss import optimizers_in
from trainledger.trace.operators.scratch import sums_of_matmul
from trainledger.trace.patches import all_replaced, inside
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.source_lines import Lines
from trainledger.trace.recorder.storages import tensors_in
from trainledger.trace.step import phases_of

_WAIT = torch.ops._c10d_functional.wait_tensor.default


class RealRankRecorder(RankRecorder):  # type: ignore[no-untyped-call]
    """Records a rank as it runs, in processes that really send: ``with recorder: ...``."""

    def _begins_forward(self, func: OpOverload, args: tuple[Any, ...]) -> bool:
        return False  # the step says which phase it is in

    def is_of_backend(self, args: tuple[Any, ...]) -> bool:
        """Whether an operation is the backend's own: gloo reduces in a copy, of which FSDP2 knows nothing."""
        return bool(self._communicating) and any(
            tensor.untyped_storage()._cdata not in self.storages.live for tensor in tensors_in(args)
        )

    def _add_unseen(self, inputs: list[Tensor]) -> None:
        """What backward finds without having made it is memory to send from: the buckets of DDP."""
        if self.phases.current == "backward":
            self.resident(
                [tensor for tensor in inputs if tensor.untyped_storage()._cdata not in self.storages.live],
                COMMUNICATION,
            )
        super()._add_unseen(inputs)


@contextmanager
def recorded(recorder: RealRankRecorder) -> Iterator[None]:
    """Record what this rank runs inside."""
    gate = _Gate(recorder)
    unseen = inside(gate.unseen)  # DTensor runs an operator on fake tensors of the whole size, to know its shape
    names = ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta")
    # gloo takes a rank's part out of the copy that it has reduced once its result is waited for.
    waits = (Work, "wait", inside(recorder.communicating))
    with all_replaced(*((ShardingPropagator, name, unseen) for name in names), waits), gate:
        recorder.begin()
        try:
            yield
        finally:
            recorder.end()


class _Gate(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets through to the recorder what runs on this rank's tensors; DTensor makes that of what runs on its own."""

    def __init__(self, recorder: RealRankRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self._unseen = 0

    @contextmanager
    def unseen(self) -> Iterator[None]:
        self._unseen += 1
        try:
            yield
        finally:
            self._unseen -= 1

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented
        if self._unseen or self.recorder.is_of_backend(args):
            return func(*args, **(kwargs or {}))
        if func is _WAIT:
            self.recorder.waited(args[0])
            return func(*args)
        return self.recorder.__torch_dispatch__(func, types, args, kwargs)


# The third step of a session: the optimizer's state exists, and what the first steps warm up is warm.
STEPS_BEFORE = 2


class StepMeter(Observer):
    """Meters two steps of a run: one operation by operation, the next by its allocator's own events.

    ``ledger`` is None until the first of them is done; ``allocator_peak_nbytes`` until the second, or where
    the allocator tells nothing. A run that ends before is simply not metered. ``matmul_sums_nbytes`` are what the sums
    of bf16 matmuls add to the peak on a CPU without instructions for them. No metered step has other bits: where its
    record would run compiled code eagerly, there is none.
    """

    def __init__(self) -> None:
        self.ledger: Ledger | None = None
        self.records = True  # whether a step can be recorded with its bits
        self.parameters: int | None = None  # of this rank, from the watched step
        self.allocator_peak_nbytes: int | None = None
        self.matmul_sums_nbytes = 0
        self._recorder: Recorder | None = None
        self._steps: tuple[int, ...] = ()  # the recorded one, the watched one

    @property
    def metered(self) -> frozenset[int]:
        """Numbers of the steps that were slowed by metering."""
        return frozenset(self._steps)

    def on_start(self, state: TrainingState) -> None:
        self._state = state
        last = state.run.recipe.total_steps
        self.records = not state.run.recipe.compiles or follows_compiled(state.model)
        first = min(state.step + STEPS_BEFORE + 1, last)
        self._steps = tuple(each for each in (first, first + 1)[not self.records :] if each <= last)

    def meters(self, step: int) -> bool:
        return step in self._steps

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        if step not in self._steps:
            yield
        elif self.records and step == self._steps[0]:
            yield from self._recorded()
        else:
            yield from self._watched()

    def _follower(self) -> tuple[Recorder, AbstractContextManager[object]]:
        """A recorder that knows what is there before a step, and the context in which it records."""
        state = self._state
        on_cpu = state.device.type == "cpu"
        recorder: Recorder
        if state.run.layout.alone:
            recorder = Recorder(state.model, state.optimizer, clocked=on_cpu, hidden=False)
            recording: AbstractContextManager[object] = recorder
        else:
            recorder = rank = RealRankRecorder(state.model, state.optimizer, clocked=on_cpu, hidden=False)
            recording = recorded(rank)
        recorder.resident(gradient_buffers(state.optimizer), "gradients")
        if state.scaler is not None:
            recorder.resident([state.scaler.scale, state.scaler.good_steps], "optimizer state")
        return recorder, recording

    def _recorded(self) -> Iterator[None]:
        state, tokens = self._state, self._state.run.recipe.tokens_per_step
        state.optimizer.zero_grad(set_to_none=True)  # as the step itself begins
        self._recorder, recording = self._follower()
        with recording, metered(state.model, self._recorder, compiled=state.run.recipe.compiles):
            yield
        self.ledger, self._recorder = self._recorder.ledger(tokens=tokens, writer="measure"), None
        if state.device.type == "cpu":
            self.matmul_sums_nbytes = with_sums(self.ledger).peak().nbytes - self.ledger.peak().nbytes

    def _watched(self) -> Iterator[None]:
        self._state.optimizer.zero_grad(set_to_none=True)
        before = self.ledger or self._follower()[0].ledger(tokens=0, writer="measure")
        live, self.parameters = sum(nbytes for _, nbytes in before.resident), before.parameters
        if self.ledger is None:  # else it has what the step only reads: the batch, and DDP's buckets
            run, trained = (
                self._state.run,
                (parameter for parameter in self._state.model.parameters() if parameter.requires_grad),
            )
            live += 2 * torch.int64.itemsize * run.device_batch * run.grad_accum * run.recipe.seq_len
            is_ddp = run.layout.shard_ranks == 1 < run.layout.replicate
            live += sum(parameter.nbytes for parameter in trained) if is_ddp else 0
        with AllocatorPeak(self._state.device, live_nbytes=live) as peak:
            yield
        self.allocator_peak_nbytes = peak.nbytes

    def around_phase(self, phase: str) -> AbstractContextManager[Any]:
        if self._recorder is None:
            return nullcontext()
        if phase == self._recorder.phases.latest == "backward":
            return self._going_on(self._recorder)
        return self._recorder.phase(phase)

    @contextmanager
    def _going_on(self, recorder: Recorder) -> Iterator[None]:
        """The rest of the last backward, when ranks add up what it has left: no micro-batch of its own."""
        before, recorder.phases.current = recorder.phases.current, "backward"
        yield
        recorder.phases.current = before

    def on_step_end(self, record: StepRecord) -> None:
        self._recorder = None


def with_sums(ledger: Ledger) -> Ledger:
    """A ledger with the memory that bf16 matmuls have for their sums on this CPU."""

    def summed(entry: Entry) -> Entry:
        if entry.kind != "matmul":
            return entry
        _, m, n, k = map(int, entry.shape)
        return replace(entry, scratch=entry.scratch + sums_of_matmul(entry.dtype, m, n, k))

    return replace(ledger, entries=tuple(map(summed, ledger.entries)))


class Meter:
    """What `meter` gives: the ledger of what ran inside, once the block is left."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def ledger(self) -> Ledger:
        return self._recorder.ledger(tokens=0, writer="measure")


@contextmanager
def meter(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
) -> Iterator[Meter]:
    """A context that records a training step as it runs: ``with meter(model, optimizer) as m: ...``, then ``m.ledger``.

    Forward and backward are distinguished by what runs an operation, the optimizer's step by its hooks. Compiled
    modules run as compiled, made anew for it; on an accelerator and among several ranks they run eagerly inside. Where
    an operation cannot be recorded the step goes on, and the ledger is ``partial``, which is warned of.
    """
    recorder = Recorder(model, optimizer, clocked=True, find_phases=True, lines=Lines())
    recorder.is_guest = True
    recorder.resident((parameter.grad for parameter in model.parameters() if parameter.grad is not None), "gradients")
    with phases_of(optimizers_in(optimizer), recorder), recorder, metered(model, recorder):
        yield Meter(recorder)
    if recorder.partial:
        warnings.warn(f"the ledger is partial: {recorder.partial}", RuntimeWarning, stacklevel=3)


class QuietSteps(Observer):
    """Watches every step; ``disturbed`` are the numbers of those in which others took the processor, or it was slow.

    Where the system does not say (no /proc/stat), no step counts as disturbed and ``unknown`` is true.
    """

    def __init__(self) -> None:
        self.samples: dict[int, Sample] = {}
        self._threads = torch.get_num_threads()
        self._pace: Pace | None = None

    def on_start(self, state: TrainingState) -> None:
        self._threads = host_threads(state.device)
        self._pace = pace_of(state.device)

    @property
    def disturbed(self) -> frozenset[int]:
        return frozenset(step for step, sample in self.samples.items() if sample.disturbed)

    @property
    def slowdowns(self) -> list[float]:
        """Of the steps that a slower processor disturbed, how many times as long it took as at its full speed."""
        return [sample.slowdown for sample in self.samples.values() if sample.slowdown > SLOWED]

    @property
    def unknown(self) -> bool:
        return any(sample.others is None for sample in self.samples.values())

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        with watched(self._threads, self._pace) as sample:
            yield
        self.samples[step] = sample


class AllocatorPeak:
    """The most bytes allocated at once inside the block, on top of ``live_nbytes`` that were there before.

    On CUDA the caching allocator's own maximum; on a CPU the profiler's allocation events of this thread, which are
    ``changes`` in their order: bytes allocated, negative where freed. ``nbytes`` is None where neither tells.
    """

    def __init__(self, device: torch.device, *, live_nbytes: int = 0) -> None:
        self.nbytes: int | None = None
        self.changes: list[int] = []
        self._device = device
        self._live = live_nbytes
        self._profiler: Any = None

    def __enter__(self) -> AllocatorPeak:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it reports each start and stop otherwise
            from torch.profiler import ProfilerActivity, profile

            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profiler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.nbytes = torch.cuda.max_memory_allocated(self._device)
        elif self._profiler is not None:
            self._profiler.__exit__(kind, error, trace)
            self.changes = _changes(self._profiler)
            self.nbytes = self._live + max(accumulate(self.changes, initial=0))


def _changes(profiler: Any) -> list[int]:
    """The sizes of the allocation events so far; frees of what was there before are not among them.

    PyTorch remembers addresses of an earlier profile, and tells a free there with the size of what lay there then.
    """
    events: list[tuple[int, int, int]] = []
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        node = waiting.pop()
        if node.tag.name == "Allocation":
            events.append((node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size))
        waiting.extend(node.children)
    inside: set[int] = set()
    changes = []
    for _, address, nbytes in sorted(events, key=lambda event: event[0]):
        if nbytes > 0:
            inside.add(address)
        elif address in inside:
            inside.remove(address)
        else:
            continue
        changes.append(nbytes)
    return changes
