"""Steps whose loss or gradient is not finite: left out and counted, then the way back or the end.

The numbers that are not finite are real: a row of an embedding is so large that the mean of its token overflows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import StopAfter
from safetensors.torch import load_file
from tiny_run import CountingFeed, Poisoned, poisoned, tiny_run

from trainledger.engine.train import saving
from trainledger.engine.train.engine import train
from trainledger.engine.train.observer import GuardRecord, Observer, StepRecord, TrainingState
from trainledger.engine.train.records import read_lines
from trainledger.engine.train.run_directory import all_checkpoints, read_facts
from trainledger.engine.train.stop import Diverged, Interrupted
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run
from trainledger.spec.runfile import parse, resolved, validated


def guarded(**recipe: Any) -> Run:
    """A run of twelve steps whose norms take a mean, which overflows."""
    usual = {"steps": 12, "evaluation.every": None, "checkpoints.every": 2, "checkpoints.keep_last": 9}
    return tiny_run({"norm": "layernorm"}, **usual | recipe)


def bits(path: Path) -> dict[str, torch.Tensor]:
    return {**load_file(path / "model.safetensors"), **load_file(path / "optimizer.safetensors")}


def assert_same_bits(a: Path, b: Path) -> None:
    ours, theirs = bits(a), bits(b)
    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        assert torch.equal(each, theirs[name]), name


def lines(run_dir: Path, kind: str = "loss") -> list[dict[str, Any]]:
    return [each for each in read_lines(run_dir / "metrics.jsonl") if kind in each]


def events(run_dir: Path, event: str) -> list[dict[str, Any]]:
    return [each for each in lines(run_dir, "event") if each["event"] == event]


class Weights(Observer):
    """The weights after each step."""

    def __init__(self) -> None:
        self.after: dict[int, list[torch.Tensor]] = {}

    def on_start(self, state: TrainingState) -> None:
        self.model = state.model

    def on_step_end(self, record: StepRecord) -> None:
        self.after[record.step] = [each.detach().clone() for each in self.model.parameters()]


@pytest.mark.parametrize(("grad_clip", "reads"), [(1.0, 2), (None, 1)])
def test_a_step_reads_loss_and_norm_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grad_clip: float | None, reads: int
) -> None:
    """Each `item` waits for an accelerator: the guard waits no more than the record of a step does."""
    read, counted = torch.Tensor.item, [0]

    def item(tensor: torch.Tensor) -> Any:
        counted[0] += 1
        return read(tensor)

    class Counting(Observer):
        def __init__(self) -> None:
            self.by_step: list[int] = []

        def on_step_end(self, record: StepRecord) -> None:
            self.by_step.append(counted[0])
            counted[0] = 0

    watch = Counting()
    monkeypatch.setattr(torch.Tensor, "item", item)
    run = tiny_run(grad_clip=grad_clip, **{"evaluation.every": None, "checkpoints.every": None})
    train(run, tmp_path, open_feed=CountingFeed, observers=[watch])
    assert watch.by_step[2:] == [reads] * 4  # the first steps of fused Adam are no other; saving is after the last


@pytest.mark.parametrize("grad_clip", [1.0, None])
def test_a_bad_step_is_left_out_and_counted(tmp_path: Path, grad_clip: float | None) -> None:
    said: list[str] = []
    weights = Weights()
    run = guarded(grad_clip=grad_clip)
    train(run, tmp_path, open_feed=poisoned([4, 9]), observers=[Poisoned(), weights], say=said.append)
    found = lines(tmp_path)
    assert [each["step"] for each in found if each["skipped"]] == [5, 10]
    assert [each["step"] for each in found if each["loss"] is None] == [5, 10]
    assert all(map(torch.equal, weights.after[4], weights.after[5]))
    assert not all(map(torch.equal, weights.after[5], weights.after[6]))
    assert (events(tmp_path, "finish")[0]["skipped_steps"], events(tmp_path, "finish")[0]["roll_backs"]) == (2, 0)
    assert read_facts(all_checkpoints(tmp_path)[-1])["guard"]["recent"] == [5, 10]
    assert said[0].startswith(
        "Step 5 gave loss nan at" if grad_clip is None else "Step 5 gave loss nan, gradient norm "
    )
    left_out = "; its update was left out (1 of at most 3 in 100 steps); its batch is of document 4 (batch 4)."
    assert said[0].endswith(left_out)
    assert [(each["step"], each["documents"]) for each in events(tmp_path, "skip")] == [
        (5, ["4 (batch 4)"]), (10, ["9 (batch 9)"]),
    ]  # fmt: skip


def test_one_too_many_in_the_window_ends_the_run(tmp_path: Path) -> None:
    run = guarded(**{"guard.skips": 2, "guard.window": 6})
    with pytest.raises(Diverged) as caught:
        train(run, tmp_path, open_feed=poisoned([1, 4, 7, 8]), observers=[Poisoned()])
    # Steps 2, 5 and 8: step 2 is not of the last 6 steps when step 8 comes. Step 9 is the third of 4 to 9.
    assert caught.value.exit_code == 3
    assert str(caught.value).startswith("Step 9 gave loss nan")
    assert "the 3rd such step of the last 6" in str(caught.value)
    assert "the last good checkpoint is" in str(caught.value)
    assert "step-00000008" in str(caught.value)


def test_no_skips_ends_with_the_first(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="Step 4 gave loss nan, gradient norm nan"):
        train(guarded(**{"guard.skips": 0}), tmp_path, open_feed=poisoned([3]), observers=[Poisoned()])


def test_a_checkpoint_that_is_being_written_is_kept_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = saving._write

    def slowly(*args: Any) -> saving.Files:
        time.sleep(0.5)
        return written(*args)

    monkeypatch.setattr(saving, "_write", slowly)
    run = guarded(**{"guard.skips": 0, "checkpoints.asynchronous": True})
    with pytest.raises(Diverged, match=r"the last good checkpoint is .*step-00000002\."):
        train(run, tmp_path, open_feed=poisoned([2]), observers=[Poisoned()])
    assert [each["step"] for each in events(tmp_path, "checkpoint")] == [2]


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    """What was left out before the stop counts after it: the run ends at the step at which it ends uninterrupted."""
    run = guarded(**{"guard.skips": 2})
    feed = poisoned([1, 3, 8])
    with pytest.raises(Diverged) as whole:
        train(run, tmp_path / "whole", open_feed=feed, observers=[Poisoned()])
    with pytest.raises(Interrupted):
        train(run, tmp_path / "parts", open_feed=feed, observers=[Poisoned(), StopAfter(6)])
    with pytest.raises(Diverged) as parts:
        train(run, tmp_path / "parts", open_feed=feed, resume=True)
    assert str(whole.value).split(";")[0] == str(parts.value).split(";")[0]
    assert [each["skipped"] for each in lines(tmp_path / "whole")] == [
        each["skipped"] for each in lines(tmp_path / "parts")
    ]
    assert_same_bits(all_checkpoints(tmp_path / "whole")[-1], all_checkpoints(tmp_path / "parts")[-1])


ROLLS = {"guard.skips": 1, "guard.beyond": "roll-back", "guard.beyond.times": 2}


def test_a_roll_back_goes_on_past_the_bad_data(tmp_path: Path) -> None:
    """The run is that of data in which the batches from the checkpoint to the bad one never were."""
    said: list[str] = []
    run = guarded(**ROLLS)
    finished = train(run, tmp_path / "rolled", open_feed=poisoned([5, 7]), observers=[Poisoned()], say=said.append)
    # Step 6 is left out, step 8 is one too many: back to step 4, and the batches of steps 5 to 8 are left out.
    clean = train(run, tmp_path / "clean", open_feed=poisoned([], left_out=(4, 8)), observers=[Poisoned()])
    assert_same_bits(finished.checkpoint, clean.checkpoint)
    assert [each["step"] for each in lines(tmp_path / "rolled")] == list(range(1, 13))
    assert [each["loss"] for each in lines(tmp_path / "rolled")] == [each["loss"] for each in lines(tmp_path / "clean")]
    (event,) = events(tmp_path / "rolled", "roll-back")
    assert (event["to"], event["from"], event["step"]) == ("step-00000004", 8, 5)
    assert (event["skipped_steps"], event["roll_backs"], event["batches_left_out"]) == (2, 1, 4)
    assert said[-1].endswith(
        "back to step-00000004, the batches of steps 5 to 8 are left out (roll-back 1 of at most 2)."
    )
    assert [each["skipped"] for each in lines(tmp_path / "rolled")] == [False] * 12


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stop", [5, 7, 9])
def test_a_run_stopped_around_a_roll_back_ends_with_the_same_bits(
    tmp_path: Path, stop: int, asynchronous: bool
) -> None:
    """Though the stop has saved a step at which no checkpoint is due, before or between the bad ones."""
    run = guarded(**ROLLS, **{"checkpoints.asynchronous": asynchronous, "checkpoints.keep_last": 2})
    feed = poisoned([5, 7])
    whole = train(run, tmp_path / "whole", open_feed=feed, observers=[Poisoned()])
    with pytest.raises(Interrupted):
        train(run, tmp_path / "parts", open_feed=feed, observers=[Poisoned(), StopAfter(stop)])
    parts = train(run, tmp_path / "parts", open_feed=feed, resume=True)
    assert_same_bits(whole.checkpoint, parts.checkpoint)
    for event in ("roll-back", "finish"):
        found = [events(tmp_path / each, event) for each in ("whole", "parts")]
        assert [[(each["step"], each["skipped_steps"], each["roll_backs"]) for each in of_one] for of_one in found] == [
            [(found[0][0]["step"], 2, 1)]
        ] * 2


def test_a_checkpoint_among_the_bad_steps_is_not_gone_back_to(tmp_path: Path) -> None:
    """A checkpoint of step 6, which was left out, would be as good as what led to it; its step is saved anew."""
    run = guarded(**ROLLS)
    finished = train(run, tmp_path, open_feed=poisoned([5, 6]), observers=[Poisoned()])
    assert events(tmp_path, "roll-back")[0]["to"] == "step-00000004"
    assert finished.step == 12
    assert [int(each.name[5:]) for each in all_checkpoints(tmp_path)] == [2, 4, 6, 8, 10, 12]


def test_roll_backs_end(tmp_path: Path) -> None:
    run = guarded(**ROLLS)
    with pytest.raises(Diverged, match=r"Step 6 .*, after 2 roll-backs \(recipe.guard.beyond.times\)") as caught:
        train(run, tmp_path, open_feed=poisoned(range(4, 99)), observers=[Poisoned()])
    assert "step-00000004" in str(caught.value)
    assert len(events(tmp_path, "roll-back")) == 1  # of the two the last one, as both tried step 5 anew
    assert events(tmp_path, "roll-back")[0]["batches_left_out"] == 4


def test_where_the_checkpoint_from_before_is_deleted_the_oldest_is_taken(tmp_path: Path) -> None:
    run = guarded(**ROLLS | {"checkpoints.every": 4, "checkpoints.keep_last": 1})
    finished = train(run, tmp_path / "a", open_feed=poisoned([1, 6]), observers=[Poisoned()])
    (event,) = events(tmp_path / "a", "roll-back")
    assert (event["to"], event["from"], event["recent"]) == ("step-00000004", 7, [2])
    whole = train(run, tmp_path / "b", open_feed=poisoned([1], left_out=(4, 7)), observers=[Poisoned()])
    assert_same_bits(finished.checkpoint, whole.checkpoint)


def test_no_checkpoint_ends_the_run(tmp_path: Path) -> None:
    run = guarded(**ROLLS | {"checkpoints.every": 6})
    with pytest.raises(Diverged, match="there is no checkpoint to go back to; there is no checkpoint yet"):
        train(run, tmp_path, open_feed=poisoned([1, 3]), observers=[Poisoned()])


class Broken(Observer):
    """Once, after a step, a weight that is not finite."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_start(self, state: TrainingState) -> None:
        self.model = state.model

    def on_step_end(self, record: StepRecord) -> None:
        if record.step == self.step:
            self.step = 0
            with torch.no_grad():
                next(self.model.parameters())[0, 0] = float("nan")


@pytest.mark.parametrize("step", [5, 6])
def test_weights_that_are_not_finite_are_rolled_back_at_once(tmp_path: Path, step: int) -> None:
    """No skip mends them: found by the next step, or before they are saved."""
    run = guarded(**ROLLS | {"guard.skips": 3}, grad_clip=None)
    found = train(run, tmp_path / "a", open_feed=poisoned([]), observers=[Broken(step)])
    (event,) = events(tmp_path / "a", "roll-back")
    assert (event["to"], event["from"]) == ("step-00000004", 6)
    assert_same_bits(found.checkpoint, train(run, tmp_path / "b", open_feed=poisoned([], left_out=(4, 6))).checkpoint)


def test_a_learning_rate_without_measure_ends_with_a_diagnosis(tmp_path: Path) -> None:
    run = tiny_run(optimizer="sgd", learning_rate=1e18, steps=12, **{"checkpoints.every": 4, "evaluation.every": None})
    with pytest.raises(Diverged, match=r"gave loss .* at learning rate .*smaller recipe\.learning_rate"):
        train(run, tmp_path, open_feed=CountingFeed)
    assert json.loads((tmp_path / "state.json").read_text())["exit_code"] == 3


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"guard.skips": 5, "guard.window": 5}, "recipe.guard.skips = 5: must be below recipe.guard.window = 5"),
        ({"guard.beyond": "roll-back", "checkpoints.every": None}, "recipe.guard.beyond .*recipe.checkpoints.every"),
        ({"guard.beyond": "give up"}, "must be one of stop, roll-back"),
    ],
)
def test_a_guard_that_cannot_work_is_refused(fields: dict[str, Any], sentence: str) -> None:
    overrides = {f"recipe.{name}": each for name, each in fields.items()}
    with pytest.raises(InvalidInput, match=sentence):
        parse(resolved(tiny_run()), overrides)
    assert validated(guarded(**ROLLS)) == guarded(**ROLLS)


def test_the_window_forgets() -> None:
    record, guard = GuardRecord(), guarded(**{"guard.skips": 1, "guard.window": 3}).recipe.guard
    steps: Sequence[int] = (1, 4, 7, 9)
    assert [record.skip(each, guard) for each in steps] == [False, False, False, True]
    assert (record.recent, record.skipped_steps) == ([7, 9], 4)
