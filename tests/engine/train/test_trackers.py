"""Trackers: each step once where it can be looked at, also after a resume, and never the end of a run."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tiny_run import CountingFeed, tiny_run

from trainledger.cli import main
from trainledger.engine.train import progress
from trainledger.engine.train.engine import train
from trainledger.engine.train.observer import Observer, StepRecord
from trainledger.engine.train.progress import MLflow, TensorBoard, WeightsAndBiases
from trainledger.engine.train.records import read_lines
from trainledger.engine.train.stop import Interrupted


class StopAfter(Observer):
    """Asks this process to stop after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, record: StepRecord) -> None:
        if record.step == self.step:
            os.kill(os.getpid(), 15)


def interrupted_and_resumed(run_dir: Path, tracker) -> dict[int, float]:
    """Train six steps, stopped after the third, each time with a tracker made anew; the losses of the steps."""
    run = tiny_run()
    with pytest.raises(Interrupted):
        train(run, run_dir, open_feed=CountingFeed, observers=[tracker(), StopAfter(3)])
    time.sleep(1)  # TensorBoard reads its files in the order of their names, which have the second and a counter
    train(run, run_dir, open_feed=CountingFeed, observers=[tracker()], resume=True)
    return {each["step"]: each["loss"] for each in read_lines(run_dir / "metrics.jsonl") if "loss" in each}


def test_tensorboard_has_each_step_once(tmp_path):
    hook = threading.excepthook
    losses = interrupted_and_resumed(tmp_path / "run", lambda: TensorBoard(print))
    assert threading.excepthook is hook
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    assert {each.step: each.value for each in found.Scalars("loss")} == pytest.approx(losses)
    assert [each.step for each in found.Scalars("validation_loss")] == [3, 6]


def test_mlflow_has_one_run_with_every_step(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    losses = interrupted_and_resumed(tmp_path / "run", lambda: MLflow("tiny", print))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert {each.step: each.value for each in client.get_metric_history(run.info.run_id, "loss")} == pytest.approx(
        losses
    )
    assert run.info.status == "FINISHED"
    assert run.data.params["recipe.global_batch"] == "4"


def test_weights_and_biases_has_every_step(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    said: list[str] = []
    interrupted_and_resumed(tmp_path / "run", lambda: WeightsAndBiases("tiny", said.append))
    assert not said
    names = {each.name.rpartition("-")[2] for each in (tmp_path / "run" / "wandb").glob("offline-run-*")}
    assert len(names) == 1  # the same run of theirs, twice


def test_a_tracker_that_fails_is_said_once_and_the_run_goes_on(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "tensorboard").write_text("not a directory")
    said: list[str] = []
    finished = train(tiny_run(), run_dir, open_feed=CountingFeed, observers=[TensorBoard(said.append)])
    assert finished.step == 6
    assert len(said) == 1
    assert said[0].startswith("TensorBoard gets nothing more of this run, which goes on: ")


@pytest.mark.parametrize(("flag", "package"), [("--wandb", "wandb"), ("--mlflow", "mlflow")])
def test_a_tracker_that_is_not_installed_is_a_sentence(monkeypatch, tmp_path, flag, package, capsys):
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "run.toml"]) == 0
    assert main(["train", "run.toml", flag, "mine"]) == 2
    said = capsys.readouterr().err
    assert f"{flag} = 'mine': needs the package {package}, which is not installed" in said
    assert f"pip install {package}" in said
    assert not (tmp_path / "runs").exists()


def test_trackers_are_not_imported_unless_asked_for():
    look = "print([name for name in ('wandb', 'mlflow') if name in sys.modules])"
    program = f"import sys; import trainledger.engine.train.progress; {look}"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout.replace("'", '"')) == []
