"""Recorded steps of a loop: one operation by operation as a ledger, some line by line, and what piles up in memory.

Recording begins and ends at updates, where a loop is inside of nothing of its own.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from trainledger.ledger.ledger import Ledger
from trainledger.observe.measure.meter import RealRankRecorder, recorded
from trainledger.observe.meter.directory import main_script
from trainledger.observe.meter.watch import Finding
from trainledger.spec.units import counted, format_nbytes, format_percent, round_up
from trainledger.trace.annotate.annotate import watched_code
from trainledger.trace.annotate.annotation import Finding as Watched
from trainledger.trace.annotate.source import Files, Holder, holder_of
from trainledger.trace.compiled import backend_failed, compiled_calls, follows_compiled, is_compiled, metered
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.source_lines import Lines

MULTIPLE = 8  # 16 bytes of two-byte numbers: what tensor cores load at once (NVIDIA, matrix multiplication guide)
_GOOD = 64
_SHARE = 0.05  # of the FLOPs of matmuls


def odd_shapes(ledger: Ledger, step: int) -> Iterator[Finding]:
    """A finding where much of the matmuls' FLOPs has a size that is no multiple of 8."""
    sizes: dict[int, int] = {}
    total = odd = 0
    for entry in ledger:
        if entry.kind != "matmul" or len(entry.shape) != 4:
            continue
        flops = entry.flops * entry.times
        total += flops
        wrong = {size for size in entry.shape[1:] if size > 1 and size % MULTIPLE}
        odd += flops if wrong else 0
        for size in wrong:
            sizes[size] = sizes.get(size, 0) + flops
    if not total or odd <= _SHARE * total:
        return
    worst = max(sizes, key=lambda size: sizes[size])
    sentence = (
        f"{format_percent(odd / total)} of the FLOPs of matmuls have a size that is no multiple of {MULTIPLE}, most "
        f"of them {worst}: kernels of matrix units are made for multiples of {MULTIPLE} and of {_GOOD}; "
        f"{round_up(worst, _GOOD)} is the next good size."
    )
    yield Finding("odd sizes", step, sentence)


_STEPS = 5  # between two looks at all tensors
_ASKED = 8  # tensors of a kind that are asked who holds them


class Kind(NamedTuple):
    """Tensors that are alike."""

    shape: tuple[int, ...]
    dtype: str
    made_by: str  # the autograd node of it


class Piles:
    """Two looks at the tensors that Python knows, some steps apart, and what there is more of at the second."""

    def __init__(self) -> None:
        self._before: Counter[Kind] | None = None
        self._until = 0
        self._begun = False

    def begin(self) -> None:
        """Look at the next step, and some steps later."""
        self._begun, self._before = True, None

    def look(self, step: int) -> list[Finding]:
        """What piles up, at the step of the second look."""
        if not self._begun:
            return []
        if self._before is None:
            self._before, self._until = _census(), step + _STEPS
            return []
        if step < self._until:
            return []
        before, self._before, self._begun = self._before, None, False
        now = _census()
        more = {kind: count - before[kind] for kind, count in now.items() if count - before[kind] >= _STEPS}
        if not more:
            sentence = (
                "No tensor that Python holds piles up: what grows is held by a library, by an autograd graph that a "
                "closure keeps, or is no tensor."
            )
            return [Finding("leak", step, sentence)]
        return [Finding("leak", step, _sentence(more))]


def _tensors() -> list[Tensor]:
    # isinstance asks some objects for a property and wakes it
    return [value for value in gc.get_objects() if issubclass(type(value), Tensor)]


def _kind(tensor: Tensor) -> Kind:
    node = tensor.grad_fn
    return Kind(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "" if node is None else node.name())


def _census() -> Counter[Kind]:
    return Counter(_kind(tensor) for tensor in _tensors())


def _holder(alike: list[Tensor]) -> Holder | None:
    """What holds one of these together with others: a list, a dict, an attribute, not the variable of the last one."""
    files = Files(main_script() or "<loop>")
    for tensor in alike[:_ASKED]:
        found = holder_of(tensor, sys._getframe(), files)
        if found is not None and found.kind != "variable":
            return found
    return None


def _sentence(more: dict[Kind, int]) -> str:
    """Of the kinds of which there is more: the one that something named holds, else the one with the most bytes."""
    piles: dict[Kind, list[Tensor]] = {kind: [] for kind in more}
    for tensor in _tensors():
        if (kind := _kind(tensor)) in piles:
            piles[kind].append(tensor)
    by_size = sorted(piles, key=lambda kind: -sum(pile.nbytes for pile in piles[kind]))
    held = next(((kind, found) for kind in by_size if (found := _holder(piles[kind])) is not None), None)
    kind, holder = held if held is not None else (by_size[0], None)
    what = f"{kind.dtype}{list(kind.shape)}" + (f" of {kind.made_by}" if kind.made_by else "")
    sentence = (
        f"Since {_STEPS} steps there are {counted(more[kind], 'tensor')} {what} more, {len(piles[kind]):,} now "
        f"({format_nbytes(sum(pile.nbytes for pile in piles[kind]))})"
    )
    if holder is not None:
        sentence += f", in `{holder.name}` ({holder.kind})" + (f", added at {holder.line}" if holder.line else "")
    if kind.made_by:
        sentence += "; each keeps its whole graph alive: keep .detach() of it, or read numbers with .item()"
    return f"{sentence}."


_LINES = 5  # steps line by line: a graph that is kept alive is found from the fourth on
_SKIPPED = "recording"  # the name of findings about what is not recorded


class DeepSteps:
    """Records step ``first`` as a ledger and the next ones line by line. ``slowed`` are their numbers."""

    def __init__(
        self,
        first: int,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        device: torch.device,
        *,
        alone: bool,
    ) -> None:
        self.ledger: Ledger | None = None
        self.recorded = False  # whether the last step ended the ledger
        self.slowed = range(first, first + 1 + _LINES)
        self._model, self._optimizers = model, optimizers
        self._on_cpu = device.type == "cpu"
        self._alone = alone
        self._stack = ExitStack()
        self._recorder: Recorder | None = None
        self._calls: list[object] = []
        self._watched: Callable[[], tuple[Watched, ...]] = tuple

    def before(self, number: int) -> Iterator[Finding]:
        """Begin what is recorded of the step of that number; what is to be said of that."""
        if number not in self.slowed[:2]:
            return
        try:
            if reason := _reason():
                raise RuntimeError(reason)
            self._begin(number)
        except Exception as error:  # of what the loop has around its update
            self._stack.close()
            self._recorder, self.slowed = None, self.slowed[:0]
            yield Finding(_SKIPPED, number, f"Step {number} is not recorded: {error}.")

    def _begin(self, number: int) -> None:
        self._stack.enter_context(_no_word_of_hooks())
        if number != self.slowed[0]:
            self._watched = self._stack.enter_context(watched_code(main_script() or "<loop>"))
            return
        kind = Recorder if self._alone else RealRankRecorder
        recorder = kind(self._model, self._optimizers, clocked=self._on_cpu, find_phases=True, lines=Lines())
        recorder.is_guest = True
        there = (parameter.grad for parameter in self._model.parameters() if parameter.grad is not None)
        recorder.resident(there, "gradients")  # the loop may go on to add to them
        self._stack.enter_context(recorded(recorder) if isinstance(recorder, RealRankRecorder) else recorder)
        # Which checkpointing keeps: memory of this device, that no operation makes
        self._stack.enter_context(recorder.random_states() if self._on_cpu else nullcontext())
        self._stack.enter_context(metered(self._model, recorder))
        self._calls = self._stack.enter_context(compiled_calls())
        self._recorder = recorder

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around the optimizer's work."""
        with nullcontext() if self._recorder is None else self._recorder.phase("optimizer"):
            yield

    def after(self, number: int, tokens: int, forwards: int) -> Iterator[Finding]:
        """End what was recorded of the step of that number, begin that of the next; what was found.

        ``forwards`` are its micro-batches: a loss may run several backwards of one.
        """
        self.recorded = False
        if self._recorder is not None:
            self._stack.close()
            ledger, self._recorder = self._recorder.ledger(tokens=tokens, writer="measure"), None
            if self._calls:
                self.slowed = self.slowed[:1]  # code that runs compiled has no lines
                eager = "" if is_compiled(self._model) and follows_compiled(self._model) else _EAGER
                yield Finding(_SKIPPED, number, f"Step {number} of a compiled loop was recorded{eager}; {_AGAIN}.")
            if ledger.partial:
                yield Finding(_SKIPPED, number, f"Step {number} has no ledger: {ledger.partial}")
            else:
                self.ledger, self.recorded = replace(ledger, micro_batches=forwards or ledger.micro_batches), True
                yield from odd_shapes(self.ledger, number)
        elif number in self.slowed[-1:]:
            self._stack.close()
            for finding in self._watched():
                yield Finding(
                    finding.kind, number, f"{finding.line}: {finding.what}: {finding.why}; {finding.instead}."
                )
        yield from self.before(number + 1)

    def stop(self) -> None:
        """Record no more."""
        self._stack.close()


_EAGER = ", for which it ran without torch.compile: its loss may differ in the last bits"
_AGAIN = "the next step is compiled again, and no step is watched line by line"


def _reason() -> str:
    """Why a step cannot be recorded, "" where nothing is known."""
    if modes := _get_current_dispatch_mode_stack():  # the loop would end ours in the place of its own
        return f"its update runs inside of a dispatch mode of the loop, {type(modes[-1]).__name__}"
    if backend_failed():
        return "a backend of torch.compile failed before, which it would not do in a recorded step"
    return ""


@contextmanager
def _no_word_of_hooks() -> Iterator[None]:
    """Inside, torch.compile does not warn of hooks on all modules: they are ours. Other filters may come and go."""
    warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
    ours = warnings.filters[0]
    try:
        yield
    finally:
        if ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]
