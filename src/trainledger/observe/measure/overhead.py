"""What a training step costs beyond arithmetic and memory: the program around each operation and each tensor.

Steps of the engine on a model so small that its operations do nothing else. Bare calls of small operations would show
a third of it: modules, autograd and the optimizer's loop over tensors do the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import build
from trainledger.engine.train.device import synchronize
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.step import Clock, optimizer_step
from trainledger.ledger.step import account
from trainledger.spec.attention import MultiHead
from trainledger.spec.feed_forward import Dense
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

_RECIPE = Recipe(seq_len=8, global_batch=1, steps=1)
_FEW, _MANY = 2, 8  # blocks
_WARM_UP = 3


@dataclass(frozen=True)
class StepOverhead:
    """Seconds per operation, per call of the optimizer, and per tensor of such a call."""

    operation: float
    update: float
    update_tensor: float


class TinySteps:
    """Two tiny models, of few and of many tensors, ready to be stepped again and again."""

    def __init__(self, device: torch.device) -> None:
        self._steppers = [_Stepper(device, blocks) for blocks in (_FEW, _MANY)]

    def __call__(self, steps: int = 10) -> StepOverhead:
        """Mean overhead over so many steps of each model."""
        few, many = (each.seconds(steps) for each in self._steppers)
        fewer, more = self._steppers
        operation = (few.rest + many.rest) / (fewer.operations + more.operations)
        tensor = max(0.0, (many.update - few.update) / (more.tensors - fewer.tensors))
        once = few.update - tensor * fewer.tensors - operation * fewer.update_operations
        return StepOverhead(operation, max(0.0, once), tensor)


@dataclass
class _Seconds:
    update: float = 0.0
    rest: float = 0.0


class _Stepper:
    def __init__(self, device: torch.device, blocks: int) -> None:
        spec = ModelSpec(
            vocab_size=16,
            d_model=8,
            n_layers=blocks,
            max_seq_len=8,
            attention=MultiHead(n_heads=2),
            feed_forward=Dense(d_ff=16),
        )
        with device:
            self._model = build(spec, _RECIPE)
            ids_BT = torch.arange(8).view(1, 8)
        initialize(self._model, seed=0)
        self._optimizer = build_optimizer(self._model, _RECIPE)
        self._batches = [(ids_BT, ids_BT)]
        self._device = device
        ledger = account(Run(model=spec, recipe=_RECIPE), backend="cpu" if device.type == "cpu" else "cuda")
        count = {True: 0, False: 0}
        for each in ledger:
            if each.kind != "allocate":
                count[each.phase == "optimizer"] += each.times
        self.operations, self.update_operations = count[False], count[True]
        self.tensors = sum(1 for _ in self._model.parameters())
        for _ in range(_WARM_UP):
            self._step(self._no_clock)

    def seconds(self, steps: int) -> _Seconds:
        """Mean seconds of a step; on an accelerator those of the program, which is what such a step waits for."""
        spent = _Seconds()

        @contextmanager
        def clock(phase: str) -> Iterator[None]:
            start = time.perf_counter()
            yield
            took = time.perf_counter() - start
            if phase == "optimizer":
                spent.update += took / steps
            else:
                spent.rest += took / steps

        for _ in range(steps):
            synchronize(self._device)
            self._step(clock)
        return spent

    def _step(self, clock: Clock) -> None:
        optimizer_step(self._model, self._optimizer, self._batches, _RECIPE, clock=clock)

    @staticmethod
    @contextmanager
    def _no_clock(phase: str) -> Iterator[None]:
        yield
