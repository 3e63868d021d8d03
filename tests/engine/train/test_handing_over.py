"""A run in progress that is handed to another process goes on there as it would have here."""

from __future__ import annotations

import json
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import StopAfter
from tiny_run import CountingFeed, tiny_run

from trainledger.engine.train.engine import train
from trainledger.engine.train.handed_files import HandedFiles
from trainledger.engine.train.handing_over import figures, give, take
from trainledger.engine.train.metrics import Lines, Metrics, NoMetrics
from trainledger.engine.train.observer import Observer, TrainingState
from trainledger.engine.train.saving import model_tensors, optimizer_tensors
from trainledger.engine.train.stop import Interrupted
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run

FP16 = {"precision": "fp16-mixed"}
SOON = timedelta(seconds=1)
MASTER = {"precision": "bf16", "optimizer": "adamw"}


class Keeping(Observer):
    """Keeps what it has seen of a run."""

    def on_start(self, state: TrainingState) -> None:
        self.state = state


def after(run: Run, folder: Path, step: int) -> TrainingState:
    """A run as it is after a step."""
    keeping = Keeping()
    with pytest.raises(Interrupted):
        train(run, folder, open_feed=CountingFeed, observers=[keeping, StopAfter(step)], say=lambda _: None)
    return keeping.state


def tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    return model_tensors(state.model) | optimizer_tensors(state.model, state.optimizer)


def sent(run_dir: Path, given: dict[str, Any]) -> dict[str, Any]:
    """What another process gets of it."""
    sender, receiver = (HandedFiles(run_dir, index) for index in range(2))
    sender.send_checkpoint([1], 4, {"user": {"run": given}, "torchft": {"step": 4}}, SOON)
    found = receiver.recv_checkpoint(0, sender.metadata(), 4, SOON)
    assert found["torchft"] == {"step": 4}
    run: dict[str, Any] = found["user"]["run"]
    return run


@pytest.mark.parametrize("fields", [{}, FP16, MASTER, {"optimizer": "lion"}])
def test_who_takes_a_run_has_all_of_it(tmp_path: Path, fields: dict[str, Any]) -> None:
    run = tiny_run(**fields)
    feed = CountingFeed(run, torch.device("cpu"))
    here, there = after(run, tmp_path / "here", 4), after(run, tmp_path / "there", 1)
    assert any(not each.equal(other) for each, other in zip(*map(list, _pair(here, there)), strict=True))
    lines, taken = deque([{"step": 4, "loss": 1.0}]), deque([{"step": 1, "loss": 2.0}])
    take(there, feed, taken, sent(tmp_path / "there", give(here, feed, lines)))
    ours, theirs = tensors(here), tensors(there)
    assert ours.keys() == theirs.keys()
    assert all(each.equal(theirs[name]) for name, each in ours.items())
    assert figures(here) == figures(there)
    assert here.guard == there.guard
    assert taken == lines
    if here.scaler is not None and there.scaler is not None:
        assert here.scaler.facts() == there.scaler.facts()


def _pair(here: TrainingState, there: TrainingState) -> tuple[Any, Any]:
    return tensors(here).values(), tensors(there).values()


def test_who_trains_something_else_takes_nothing(tmp_path: Path) -> None:
    run, other = tiny_run(), tiny_run(learning_rate=1e-3)
    feed = CountingFeed(run, torch.device("cpu"))
    here, there = after(run, tmp_path / "here", 2), after(other, tmp_path / "there", 1)
    before = {name: each.clone() for name, each in tensors(there).items()}
    with pytest.raises(InvalidInput, match=r"run file: is .* for this replica, and .* for those that train"):
        take(there, feed, deque(), give(here, feed, deque()))
    assert all(each.equal(before[name]) for name, each in tensors(there).items())


def test_lines_that_a_lost_first_has_not_written_are_written_once(tmp_path: Path) -> None:
    lost, kept = Metrics(tmp_path, after=0), Lines()
    other = NoMetrics(kept)
    for step in (1, 2, 3):
        for each in (lost, other) if step < 3 else (other,):
            each.write({"step": step, "loss": 1.0 / step})
    lost.event("replicas", 2, took=[0, 1])  # and the others took step 2 again
    other.event("replicas", 2, took=[1])
    with lost.path.open("a") as torn:
        torn.write('{"step": 3, "lo')
    goes_on = Metrics(tmp_path, after=3, kept=kept)
    goes_on.event("replicas", 4, took=[1])
    goes_on.write({"step": 4, "loss": 0.25})
    written = [json.loads(each) for each in goes_on.path.read_text().splitlines()]
    assert [(each["step"], "loss" in each) for each in written] == [
        (1, True), (2, True), (2, False), (3, True), (4, False), (4, True),
    ]  # fmt: skip
    assert [each["took"] for each in written if "took" in each] == [[1], [1]]
    assert len(kept) == 6


def test_lines_that_the_file_lacks_stand_at_their_step(tmp_path: Path) -> None:
    """One that came again before the others missed it has noted who took its first step, and they have not."""
    lost, kept = Metrics(tmp_path, after=0), Lines()
    other = NoMetrics(kept)
    other.event("replicas", 2, took=[0, 1])
    lost.event("replicas", 3, took=[0])
    for step in (1, 2, 3):
        lost.write({"step": step, "loss": 1.0 / step})
    goes_on = Metrics(tmp_path, after=3, kept=kept)
    written = [json.loads(each) for each in goes_on.path.read_text().splitlines()]
    assert [(each["step"], each.get("took")) for each in written] == [
        (1, None), (2, None), (2, [0, 1]), (3, [0]), (3, None),
    ]  # fmt: skip


def test_one_file_of_a_process_is_there_and_none_after_it(tmp_path: Path) -> None:
    def names() -> set[str]:
        return {each.name for each in (tmp_path / ".handed-over").glob("*")}

    given = {"model": {"w": torch.ones(2)}, "optimizer": {}, "lines": []}
    one = HandedFiles(tmp_path / "run", 3)
    for step in (1, 2):
        one.send_checkpoint([0], step, {"user": {"run": given}, "torchft": {}}, SOON)
    assert names() == {f"{one.metadata()}-2"}
    again = HandedFiles(tmp_path / "run", 3)  # the same replica, started again after it was killed
    assert names() == set()
    again.send_checkpoint([0], 2, {"user": {"run": given}, "torchft": {}}, SOON)
    again.shutdown()
    assert names() == set()


def test_a_name_leads_nowhere_else_and_a_state_that_does_not_come_is_said(tmp_path: Path) -> None:
    other, own = HandedFiles(tmp_path / "others" / "run", 0), HandedFiles(tmp_path / "own" / "run", 1)
    given = {"model": {"w": torch.ones(2)}, "optimizer": {}}
    other.send_checkpoint([1], 1, {"user": {"run": given}, "torchft": {}}, SOON)
    with pytest.raises(TimeoutError, match="do all replicas see the same directory"):
        own.recv_checkpoint(0, f"../../others/.handed-over/{other.metadata()}", 1, timedelta(0))
