"""Steps of a loop that are recorded: one operation by operation as a ledger, some after it line by line.

Recording begins and ends at updates, where a loop is inside of nothing of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from trainledger.ledger.ledger import Ledger
from trainledger.observe.measure.rank_recorder import RealRankRecorder, recorded
from trainledger.observe.meter.script import main_script
from trainledger.observe.meter.shapes import odd_shapes
from trainledger.observe.meter.watch import Finding
from trainledger.trace.annotate.annotate import watched_code
from trainledger.trace.compiled import metered
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.source_lines import Lines

_LINES = 5  # steps line by line: a graph that is kept alive is found from the fourth on


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

    def before(self, number: int) -> None:
        """Begin what is recorded of the step of that number."""
        if number in self.slowed:
            self._stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")  # they are ours
        if number == self.slowed[0]:
            for each in self._optimizers:  # gradients that are there already are not followed
                each.zero_grad(set_to_none=True)
            kind = Recorder if self._alone else RealRankRecorder
            self._recorder = kind(self._model, self._optimizers, clocked=self._on_cpu, find_phases=True, lines=Lines())
            self._stack.enter_context(
                recorded(self._recorder) if isinstance(self._recorder, RealRankRecorder) else self._recorder
            )
            self._stack.enter_context(metered(self._model, self._recorder))
        elif number == self.slowed[1]:
            self._watched = self._stack.enter_context(watched_code(main_script() or "<loop>"))

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
        if number == self.slowed[0] and self._recorder is not None:
            self._stack.close()
            found = self._recorder.ledger(tokens=tokens, writer="measure")
            self.ledger, self.recorded = replace(found, micro_batches=forwards or found.micro_batches), True
            self._recorder = None
            yield from odd_shapes(self.ledger, number)
        elif number == self.slowed[-1]:
            self._stack.close()
            for each in self._watched():
                yield Finding(each.kind, number, f"{each.line}: {each.what}: {each.why}; {each.instead}.")
        self.before(number + 1)

    def stop(self) -> None:
        """Record no more."""
        self._stack.close()
