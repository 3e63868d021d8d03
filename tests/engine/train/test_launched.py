"""Steps that are launched before the last one is read: the same run as one that reads each before its update.

An accelerator runs so. A CPU has nothing to wait for, and the loop is told that it has; kernels and bits are those of
a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import StopAfter
from test_guard import assert_same_bits
from tiny_run import CountingFeed, Poisoned, poisoned, tiny_run, unreadable

from trainledger.engine.train import loop
from trainledger.engine.train.engine import train
from trainledger.engine.train.guard import Agreed, JudgedOnDevice
from trainledger.engine.train.observer import Observer, StepRecord
from trainledger.engine.train.optimizer import leaves_out_on_device
from trainledger.engine.train.records import read_lines
from trainledger.engine.train.run_directory import all_checkpoints, read_state
from trainledger.engine.train.stop import Diverged, Interrupted
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run

RUN = {"steps": 23, "checkpoints.every": 5, "evaluation.every": 7, "checkpoints.keep_last": 9}


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(loop, "asynchronous", lambda device: True)


def told(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of the metrics without what depends on the clock."""
    timed = ("seconds", "time", "phase_seconds", "tokens_per_second")
    lines = [each for each in read_lines(run_dir / "metrics.jsonl") if each.get("event") != "checkpoint"]
    return [{name: each for name, each in line.items() if name not in timed} for line in lines]


def assert_same_run(ours: Path, theirs: Path) -> None:
    assert told(ours) == told(theirs)
    assert_same_bits(*(all_checkpoints(each)[-1] for each in (ours, theirs)))


class Order(Observer):
    """What is begun and what is read, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        self.seen.append(f"begin {step}")
        yield

    def on_step_end(self, record: StepRecord) -> None:
        self.seen.append(f"read {record.step}")


def test_a_step_is_read_when_the_next_is_launched(tmp_path: Path, ahead: Callable[[], None]) -> None:
    ahead()
    order = Order()
    run = tiny_run(**{**RUN, "steps": 12, "evaluation.every": 3, "checkpoints.every": None})
    train(run, tmp_path, open_feed=CountingFeed, observers=[order])
    assert order.seen[:8] == ["begin 1", "begin 2", "read 1", "begin 3", "read 2", "read 3", "begin 4", "begin 5"]
    tenth = order.seen.index("begin 10")  # is clocked phase by phase: nothing else may run meanwhile
    assert order.seen[tenth - 1 : tenth + 2] == ["read 9", "begin 10", "read 10"]
    assert order.seen[-2:] == ["read 11", "read 12"]


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"optimizer": "adam", "grad_clip": None},
        {"dropout": 0.2, "micro_batch": 2},
        {"checkpoints.asynchronous": True, "precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_the_run_is_the_same(tmp_path: Path, ahead: Callable[[], None], recipe: dict[str, Any]) -> None:
    run = tiny_run(**RUN | recipe)
    train(run, tmp_path / "waits", open_feed=CountingFeed)
    ahead()
    train(run, tmp_path / "ahead", open_feed=CountingFeed)
    assert_same_run(tmp_path / "ahead", tmp_path / "waits")


def guarded(**recipe: Any) -> Run:
    return tiny_run({"norm": "layernorm"}, **{**RUN, "evaluation.every": None, "checkpoints.every": 2} | recipe)


@pytest.mark.parametrize("bad", [[0], [4, 9], [3, 4], [8, 9, 10], [21], [22]], ids=str)
@pytest.mark.parametrize("grad_clip", [1.0, None])
def test_a_bad_step_is_left_out_by_the_device(
    tmp_path: Path, ahead: Callable[[], None], bad: list[int], grad_clip: float | None
) -> None:
    """Also the first one, and around those that are clocked, saved or last."""
    run = guarded(grad_clip=grad_clip)
    train(run, tmp_path / "waits", open_feed=poisoned(bad), observers=[Poisoned()])
    ahead()
    train(run, tmp_path / "ahead", open_feed=poisoned(bad), observers=[Poisoned()])
    assert [each["step"] for each in told(tmp_path / "ahead") if each.get("skipped")] == [each + 1 for each in bad]
    assert_same_run(tmp_path / "ahead", tmp_path / "waits")


@pytest.mark.parametrize("bad", [[5, 7], [4, 6], [5, 6], [4, 5]], ids=str)
def test_a_roll_back_leaves_out_the_same_data(tmp_path: Path, ahead: Callable[[], None], bad: list[int]) -> None:
    """A step that was launched before the bad one was read does not count."""
    rolls = {"guard.skips": 1, "guard.beyond": "roll-back", "guard.beyond.times": 2}
    said: dict[str, list[str]] = {"waits": [], "ahead": []}
    for name, each in said.items():
        run = guarded(**rolls)
        train(run, tmp_path / name, open_feed=poisoned(bad), observers=[Poisoned()], say=each.append)
        ahead()
    assert_same_run(tmp_path / "ahead", tmp_path / "waits")
    assert said["ahead"] == said["waits"]


def test_a_run_that_ends_says_the_same(tmp_path: Path, ahead: Callable[[], None]) -> None:
    ends = []
    run = guarded(**{"guard.skips": 1})
    for name in ("waits", "ahead"):
        with pytest.raises(Diverged) as caught:
            train(run, tmp_path / name, open_feed=poisoned([3, 6]), observers=[Poisoned()])
        state = read_state(tmp_path / name)
        assert state is not None
        ends.append((str(caught.value).split(";")[0], caught.value.exit_code, state["state"], state["step"]))
        ahead()
    assert ends[0] == ends[1]
    assert ends[0][3] == 7


def test_a_batch_that_cannot_be_read_leaves_the_lines_of_all_steps_before(
    tmp_path: Path, ahead: Callable[[], None]
) -> None:
    ends = []
    for name in ("waits", "ahead"):
        with pytest.raises(InvalidInput, match="is corrupt"):
            train(tiny_run(**RUN), tmp_path / name, open_feed=unreadable("steps", 0, 3))
        state = read_state(tmp_path / name)
        assert state is not None
        ends.append((state["state"], state["step"], [each["step"] for each in told(tmp_path / name) if "loss" in each]))
        ahead()
    assert ends == [("failed", 3, [1, 2, 3])] * 2


@pytest.mark.parametrize("stop", [1, 4, 9, 10, 14])
def test_a_stop_reads_what_was_launched_and_saves_it(tmp_path: Path, ahead: Callable[[], None], stop: int) -> None:
    run = tiny_run(**RUN)
    train(run, tmp_path / "waits", open_feed=CountingFeed)
    ahead()
    with pytest.raises(Interrupted, match=rf"after step {stop if stop == 10 else stop + 1} of 23"):
        # It comes when step ``stop`` is read: the next one is launched by then, but for a clocked one.
        train(run, tmp_path / "ahead", open_feed=CountingFeed, observers=[StopAfter(stop)])
    train(run, tmp_path / "ahead", open_feed=CountingFeed, resume=True)
    steps = [[each["step"] for each in told(tmp_path / name) if "loss" in each] for name in ("ahead", "waits")]
    assert steps == [list(range(1, 24))] * 2
    assert_same_bits(*(all_checkpoints(tmp_path / name)[-1] for name in ("ahead", "waits")))


@pytest.mark.parametrize(
    ("recipe", "can"),
    [
        ({}, True),
        ({"optimizer": "adam"}, True),
        ({"optimizer.implementation": "foreach"}, False),
        ({"optimizer": "momentum"}, False),
        ({"precision": "fp16-mixed"}, False),
        ({"precision": "bf16", "precision.master_weights": True}, False),
        ({"ema.decay": 0.9}, False),
    ],
    ids=str,
)
def test_who_leaves_out_on_the_device(recipe: dict[str, Any], can: bool) -> None:
    assert leaves_out_on_device(tiny_run(**recipe).recipe) is can


def test_what_cannot_leave_out_on_the_device_waits(tmp_path: Path, ahead: Callable[[], None]) -> None:
    ahead()
    order = Order()
    run = tiny_run(**RUN | {"optimizer": "momentum", "steps": 2})
    train(run, tmp_path, open_feed=CountingFeed, observers=[order])
    assert order.seen == ["begin 1", "read 1", "begin 2", "read 2"]


@pytest.mark.gpu
def test_on_a_gpu_the_judge_does_not_wait() -> None:
    judge = JudgedOnDevice(lambda loss, norm: Agreed(loss, norm, True))
    busy = torch.ones(4096, 4096, device="cuda")
    for _ in range(200):
        busy = busy @ busy * 1e-4
    left_out = judge(busy.sum() * float("nan"), torch.ones((), device="cuda"))
    assert not torch.cuda.current_stream().query()  # the device is still at work
    read = judge.read()
    assert (read.loss != read.loss, read.grad_norm) == (True, 1.0)
    assert left_out.item() == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [[0], [4, 9], [22]], ids=str)
def test_on_a_gpu_a_bad_step_is_left_out_as_on_a_cpu(tmp_path: Path, bad: list[int]) -> None:
    run = guarded()
    skipped = []
    for backend in ("cpu", "cuda"):
        on_it = replace(run, cluster=replace(run.cluster, backend=backend))
        train(on_it, tmp_path / backend, open_feed=poisoned(bad), observers=[Poisoned()])
        lines = [each for each in told(tmp_path / backend) if "loss" in each]
        skipped.append([(each["step"], each["skipped"]) for each in lines])
    assert skipped[0] == skipped[1]
