"""How a run begins, is refused, is stopped, and what it leaves to read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import CountingFeed, tiny_run

from trainledger.answers.closed_loop import Forecasting
from trainledger.engine.train import loop
from trainledger.engine.train.device import refuse_launches
from trainledger.engine.train.engine import train
from trainledger.engine.train.observer import PHASES, EvaluationRecord, Finished, Observer, StepRecord, TrainingState
from trainledger.engine.train.records import read_lines
from trainledger.engine.train.run_directory import all_checkpoints, damage
from trainledger.engine.train.stop import Diverged, Interrupted, OutOfMemory
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run
from trainledger.spec.runfile import read as read_run


def state_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "state.json").read_text())
    return found


def test_a_finished_run_tells_how_it_ended(tmp_path: Path) -> None:
    run = tiny_run()
    finished = train(run, tmp_path, open_feed=CountingFeed)
    assert (finished.step, finished.tokens) == (6, 6 * 4 * 16)
    assert state_of(tmp_path)["state"] == "finished"
    assert state_of(tmp_path)["checkpoint"] == finished.checkpoint.name == "step-00000006"
    assert read_run(tmp_path / "run.toml") == run


@pytest.mark.parametrize(("every", "first"), [(None, 6), (5, 5), (100, 6), (3, None), (2, None)])
@pytest.mark.parametrize("unsaved", [0.0, 600.0])
def test_how_long_nothing_is_saved_is_said_where_that_is_long(
    every: int | None, first: int | None, unsaved: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "UNSAVED_SECONDS", unsaved)
    said: list[str] = []
    run = tiny_run(**{"checkpoints.every": every, "checkpoints.keep_every": None})
    train(run, tmp_path, open_feed=CountingFeed, say=said.append)
    told = [sentence for sentence in said if sentence.startswith("The first checkpoint is in about")]
    assert len(told) == (first is not None and not unsaved)
    assert not told or f"(step {first})" in told[0]


def test_metrics_hold_every_step_with_its_phases(tmp_path: Path) -> None:
    train(tiny_run(), tmp_path, open_feed=CountingFeed)
    lines = list(read_lines(tmp_path / "metrics.jsonl"))
    steps = [each for each in lines if "loss" in each]
    assert [each["step"] for each in steps] == [1, 2, 3, 4, 5, 6]
    assert [each["tokens"] for each in steps] == [64, 128, 192, 256, 320, 384]
    for each in steps:
        assert set(each["phase_seconds"]) == {"data", "forward", "backward", "clip", "optimizer"}
        assert sum(each["phase_seconds"].values()) <= each["seconds"]
        assert each["grad_norm"] > 0
    evaluations = [each for each in lines if "validation_loss" in each]
    assert [each["step"] for each in evaluations] == [3, 6]
    assert all(set(each["phase_seconds"]) == {"evaluation"} for each in evaluations)
    assert [each["step"] for each in lines if each.get("event") == "checkpoint"] == [2, 4, 6]


def test_a_begun_run_is_not_begun_again(tmp_path: Path) -> None:
    run = tiny_run()
    train(run, tmp_path, open_feed=CountingFeed)
    with pytest.raises(InvalidInput, match="is already finished"):
        train(run, tmp_path, open_feed=CountingFeed)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    said: list[str] = []
    assert train(run, tmp_path, open_feed=CountingFeed, resume=True, say=said.append).step == 6
    assert said == [f"{tmp_path} is already finished."]
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_an_unfinished_run_asks_for_resume(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(tiny_run(), tmp_path, open_feed=CountingFeed, observers=[Signal(2, signal.SIGTERM)])
    with pytest.raises(InvalidInput, match="--resume"):
        train(tiny_run(), tmp_path, open_feed=CountingFeed)


def test_another_run_file_is_refused_field_by_field(tmp_path: Path) -> None:
    train(tiny_run(), tmp_path, open_feed=CountingFeed)
    with pytest.raises(InvalidInput) as caught:
        train(tiny_run({"feed_forward.d_ff": 64}, learning_rate=0.5), tmp_path, open_feed=CountingFeed, resume=True)
    assert [each.field for each in caught.value.problems] == ["model.feed_forward.d_ff", "recipe.learning_rate"]
    assert "recipe.learning_rate = 0.5" in str(caught.value)
    assert "0.01" in str(caught.value)


def test_a_run_that_never_started_leaves_its_directory_free(tmp_path: Path) -> None:
    def no_feed(run: Run, device: torch.device, **parts: int) -> CountingFeed:
        raise InvalidInput([])

    with pytest.raises(InvalidInput):
        train(tiny_run(steps=3), tmp_path, open_feed=no_feed)
    assert train(tiny_run(), tmp_path, open_feed=CountingFeed).step == 6


def test_a_missing_device_is_refused_with_what_there_is(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    run = Run(model=tiny_run().model, recipe=tiny_run().recipe, cluster=Cluster(backend="cuda"))
    with pytest.raises(InvalidInput, match=r"cluster.backend = 'cuda': .* nearest that works: (cpu|mps)"):
        train(run, tmp_path, open_feed=CountingFeed)


@pytest.mark.process
def test_a_second_process_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    """The lock is held by a live process here and asked for by another."""
    outcome: list[subprocess.CompletedProcess[str]] = []

    class Elsewhere(Observer):
        def on_start(self, state: TrainingState) -> None:
            child = Path(__file__).with_name("train_tiny.py")
            command = [sys.executable, str(child), str(tmp_path), "{}", "resume"]
            outcome.append(subprocess.run(command, capture_output=True, text=True))

    train(tiny_run(), tmp_path, open_feed=CountingFeed, observers=[Elsewhere()])
    assert outcome[0].returncode == 2
    assert "another process is training" in outcome[0].stderr
    assert "Traceback" not in outcome[0].stderr


class Signal(Observer):
    def __init__(self, step: int, signum: int, times: int = 1) -> None:
        self.step, self.signum, self.times = step, signum, times

    def on_step_end(self, record: StepRecord) -> None:
        if record.step == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), self.signum)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_after_the_step_with_a_checkpoint(signum: int, code: int, tmp_path: Path) -> None:
    handler = signal.getsignal(signum)
    with pytest.raises(Interrupted, match=r"after step 3 of 6.*--resume") as caught:
        train(tiny_run(), tmp_path, open_feed=CountingFeed, observers=[Signal(3, signum)])
    assert caught.value.exit_code == code
    assert all_checkpoints(tmp_path)[-1].name == "step-00000003"
    assert state_of(tmp_path)["state"] == "interrupted"
    assert signal.getsignal(signum) == handler


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="at once"):
        train(tiny_run(), tmp_path, open_feed=CountingFeed, observers=[Signal(3, signal.SIGINT, times=2)])
    assert all_checkpoints(tmp_path)[-1].name == "step-00000002"


@pytest.mark.process
def test_ctrl_c_from_a_terminal_ends_the_process_with_130(tmp_path: Path) -> None:
    fields = json.dumps({"steps": 100000, "checkpoints.keep_last": 1, "checkpoints.every": 1000})
    command = [sys.executable, str(Path(__file__).with_name("train_tiny.py")), str(tmp_path), fields]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "--resume" in err
    assert "Traceback" not in err


def test_a_loss_that_is_no_number_ends_with_the_last_good_checkpoint(tmp_path: Path) -> None:
    class Poison(Observer):
        def on_start(self, state: TrainingState) -> None:
            self.model = state.model

        def on_step_end(self, record: StepRecord) -> None:
            if record.step == 4:
                with torch.no_grad():
                    next(self.model.parameters()).fill_(float("nan"))

    with pytest.raises(Diverged) as caught:
        train(tiny_run(**{"checkpoints.every": 3}), tmp_path, open_feed=CountingFeed, observers=[Poison()])
    sentence = str(caught.value)
    assert caught.value.exit_code == 3
    assert "Step 5 gave loss nan, gradient norm nan at learning rate" in sentence
    assert "step-00000003" in sentence
    assert state_of(tmp_path)["state"] == "failed"
    lines = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [each["loss"] for each in lines if "loss" in each][-1] is None
    assert [each["event"] for each in lines[-2:]] == ["skip", "failed"]
    assert [each.name for each in all_checkpoints(tmp_path)] == ["step-00000003"]


def test_weights_that_are_no_numbers_are_never_saved(tmp_path: Path) -> None:
    """Without clipping no gradient norm gives warning: the step before the bad loss could be the one that saves."""

    class Poison(Observer):
        def on_start(self, state: TrainingState) -> None:
            self.model = state.model

        def on_step_end(self, record: StepRecord) -> None:
            if record.step == 4:
                with torch.no_grad():
                    next(self.model.parameters())[0, 0] = float("inf")

    with pytest.raises(Diverged, match="Step 4 gave weights that are not finite"):
        train(
            tiny_run(grad_clip=None, **{"evaluation.every": None}),
            tmp_path,
            open_feed=CountingFeed,
            observers=[Poison()],
        )
    assert [each.name for each in all_checkpoints(tmp_path)] == ["step-00000002"]


def test_observers_see_every_step_and_phase_in_order(tmp_path: Path) -> None:
    class Diary(Observer):
        def __init__(self) -> None:
            self.lines: list[str] = []

        def on_start(self, state: TrainingState) -> None:
            self.lines.append(f"start after {state.step}")

        @contextmanager
        def around_step(self, step: int) -> Any:
            self.lines.append(f"step {step}")
            yield
            self.lines.append(f"end of step {step}")

        @contextmanager
        def around_phase(self, phase: str) -> Any:
            assert phase in PHASES
            self.lines.append(phase)
            yield

        def on_evaluation(self, record: EvaluationRecord) -> None:
            self.lines.append(f"evaluated {record.step}")

        def on_checkpoint(self, step: int, path: Path, seconds: float) -> None:
            self.lines.append(f"saved {step}")

        def on_finish(self, finished: Finished) -> None:
            self.lines.append("finish")

        def on_stop(self) -> None:
            self.lines.append("stop")

    diary = Diary()
    run = tiny_run(steps=2, micro_batch=2, **{"checkpoints.every": None, "schedule.warmup_steps": 0})
    train(run, tmp_path, open_feed=CountingFeed, observers=[diary])
    # A checkpoint is begun and finished, which in the background lie apart.
    # The optimizer's phase stands first as well: it is where gradients are let go, or buffers of them set to zero.
    phases = ["data", "optimizer", "forward", "backward", "forward", "backward", "clip", "optimizer"]
    assert diary.lines == [
        "start after 0",
        "step 1", *phases, "end of step 1",
        "step 2", *phases, "end of step 2",
        "evaluation", "evaluated 2", "checkpoint", "checkpoint", "saved 2", "finish", "stop",
    ]  # fmt: skip


def test_a_damaged_state_file_is_a_sentence(tmp_path: Path) -> None:
    train(tiny_run(), tmp_path, open_feed=CountingFeed)
    (tmp_path / "state.json").write_text('{"state": "fin')
    with pytest.raises(InvalidInput, match="delete this file to resume"):
        train(tiny_run(), tmp_path, open_feed=CountingFeed, resume=True)
    (tmp_path / "state.json").unlink()
    assert train(tiny_run(), tmp_path, open_feed=CountingFeed, resume=True).step == 6


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ({"state": "finished"}, "lacks step"),
        ({"step": "six"}, "step = 'six' is not a number of steps"),
        ({"step": True}, "step = true is not a number of steps"),
        ({"seconds": None}, "seconds = None is not a time"),
        ({"loss": [1]}, r"loss = \[1\] is not a loss"),
        ({"checkpoint": "../../elsewhere"}, "is not the name of a checkpoint"),
        ({"state": "sleeping"}, "unknown state 'sleeping'"),
    ],
)
def test_a_state_file_edited_by_hand_is_a_sentence(damage: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    train(tiny_run(steps=2), tmp_path, open_feed=CountingFeed)
    whole = state_of(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps(damage if damage == {"state": "finished"} else whole | damage))
    with pytest.raises(InvalidInput, match=rf"is damaged \(.*{sentence}.*delete this file to resume"):
        train(tiny_run(steps=2), tmp_path, open_feed=CountingFeed, resume=True)


def test_a_layout_of_several_devices_asks_for_as_many_processes(tmp_path: Path) -> None:
    run = replace(tiny_run(), layout=Layout(shard=2))
    rule = "layout: takes 2 processes, and this is one; add --ranks 2, or start it by torchrun --nproc-per-node 2"
    with pytest.raises(InvalidInput, match=rule):
        train(run, tmp_path / "run", open_feed=CountingFeed)
    assert not (tmp_path / "run").exists()


def test_a_layout_that_is_to_be_searched_for_is_refused(tmp_path: Path) -> None:
    run = replace(tiny_run(), layout=Layout(auto=True))
    with pytest.raises(InvalidInput, match=r"layout.auto = true: .* the engine trains a layout that is written down"):
        train(run, tmp_path / "run", open_feed=CountingFeed)


def test_a_checkpoint_in_the_background_holds_the_same_bytes(tmp_path: Path) -> None:
    changes = {"checkpoints.every": 2, "checkpoints.keep_last": 10}
    for name, background in (("foreground", False), ("background", True)):
        run = tiny_run(**changes, **{"checkpoints.asynchronous": background})
        train(run, tmp_path / name, open_feed=CountingFeed)
    for one, other in zip(*(all_checkpoints(tmp_path / each) for each in ("foreground", "background")), strict=True):
        assert one.name == other.name
        assert (damage(one), damage(other)) == (None, None)
        for file in ("model.safetensors", "optimizer.safetensors"):
            assert (one / file).read_bytes() == (other / file).read_bytes()


def test_kernels_that_are_to_wait_need_the_environment_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_run(launch_blocking=True).recipe
    refuse_launches(recipe, "cpu")
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    with pytest.raises(InvalidInput, match="launch_blocking = true: needs CUDA_LAUNCH_BLOCKING=1 in the environment"):
        refuse_launches(recipe, "cuda:0")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    refuse_launches(recipe, "cuda:0")


def test_memory_that_runs_out_is_a_sentence(tmp_path: Path) -> None:
    """The allocator's own refusal, of a petabyte asked for in the middle of a step."""

    class Hungry(Observer):
        def on_step_end(self, record: StepRecord) -> None:
            if record.step == 3:
                torch.empty(2**50, dtype=torch.int8).fill_(1)

    with pytest.raises(OutOfMemory, match=r"out of memory \(.*\); a smaller recipe\.micro_batch") as caught:
        train(tiny_run(), tmp_path, open_feed=CountingFeed, observers=[Hungry()])
    assert caught.value.exit_code == 6
    assert state_of(tmp_path)["state"] == "failed"
    assert "out of memory" in state_of(tmp_path)["why"]
    assert train(tiny_run(), tmp_path, open_feed=CountingFeed, resume=True).step == 6


def test_a_run_that_diverged_says_so_and_what_makes_another_run(tmp_path: Path) -> None:
    run = tiny_run(
        optimizer="sgd", learning_rate=1e30, grad_clip=None, **{"checkpoints.every": None, "evaluation.every": None}
    )
    with pytest.raises(Diverged, match="there is no checkpoint yet"):
        train(run, tmp_path, open_feed=CountingFeed)
    with pytest.raises(InvalidInput, match=r"which failed: Step . gave .*smaller recipe\.learning_rate or another"):
        train(run, tmp_path, open_feed=CountingFeed)
    said: list[str] = []
    with pytest.raises(Diverged):
        train(run, tmp_path, open_feed=CountingFeed, resume=True, say=said.append)
    assert any("failed before: Step" in each for each in said)


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, '{"peak_nbytes": "many"}'])
def test_a_damaged_forecast_is_made_anew_and_a_whole_one_kept(content: str, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(tiny_run(), tmp_path, open_feed=CountingFeed, observers=[Forecasting(), Signal(2, signal.SIGTERM)])
    forecast = tmp_path / "forecast.json"
    whole = forecast.read_bytes()
    forecast.write_text(content)
    with pytest.raises(Interrupted):
        train(
            tiny_run(),
            tmp_path,
            open_feed=CountingFeed,
            resume=True,
            observers=[Forecasting(), Signal(4, signal.SIGTERM)],
        )
    assert forecast.read_bytes() == whole
    os.utime(forecast, (1, 1))
    train(tiny_run(), tmp_path, open_feed=CountingFeed, resume=True, observers=[Forecasting()])
    assert forecast.stat().st_mtime == 1
