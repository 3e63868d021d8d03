"""A run of replicas worked out anew by one process: its run file and its membership log in, its weights out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rank_runs import StopAfter
from safetensors.torch import load_file
from torch import Tensor, nn

import trainledger as tl
from trainledger.engine.train import engine
from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.step import Alone, Clock, Feed, Together
from trainledger.engine.train.stop import Interrupted
from trainledger.spec.run import DataSpec


@dataclass
class _Shares(Alone):
    """A step as several replicas take it, one after the other: the gradients of each by themselves, then their sum."""

    model: Any = None
    lengths: list[int] = field(default_factory=list)  # micro-batches of each
    done: int = 0
    sums: list[list[Tensor | None]] = field(default_factory=list)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        yield
        self.done += 1
        if self.done == self.lengths[0]:
            self.sums.append([each.grad for each in self.model.parameters()])
            self.model.zero_grad(set_to_none=True)
            self.lengths, self.done = self.lengths[1:], 0

    def finish_gradients(self, model: nn.Module, clock: Clock) -> None:
        for parameter, *grads in zip(model.parameters(), *self.sums, strict=True):
            parameter.grad = sum(grads[1:], start=grads[0])
        self.sums = []


@dataclass(frozen=True)
class _Replayed(Ranks):
    """One process in the place of the replicas that took each step."""

    log: Sequence[tuple[int, list[int]]] = ()
    shares: _Shares = field(default_factory=_Shares)
    attached: list[Any] = field(default_factory=list)

    def attach(self, state: Any, feed: Feed) -> None:
        self.attached.append(state)
        self.shares.model = state.model

    @property
    def with_whole_model(self) -> Together:
        return self.shares

    def dealt(self, whole: Sequence[Any]) -> Sequence[Any]:
        step = self.attached[0].step + 1
        (*_, n) = (len(which) for first, which in self.log if first <= step)
        dealt = [whole[each::n] for each in range(n)]
        self.shares.lengths = [len(each) for each in dealt]
        return [each for share in dealt for each in share]


def replayed(run_file: Path, folder: Path, log: Sequence[tuple[int, list[int]]], step: int) -> dict[str, Tensor]:
    """The weights after a step of a run, by the log of who took its steps."""
    run = tl.load(run_file)
    assert isinstance(run.data, DataSpec)

    @contextmanager
    def alone(*_: object, **__: object) -> Iterator[Ranks]:
        yield _Replayed(log=log)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run_file.parent)
        patch.setattr(engine, "joined", alone)
        try:
            path = engine.train(run, folder, observers=[StopAfter(step)], say=lambda _: None).checkpoint
        except Interrupted:
            (*_, path) = sorted((folder / "checkpoints").iterdir())
    assert path.name == f"step-{step:08d}"
    return load_file(path / "model.safetensors")
