"""The whole loop on real text: forecast before, metered while, reconciled after, in real run directories."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from thinned import thinned
from trainledger import catalog
from trainledger.answers import closed_loop
from trainledger.answers.closed_loop import is_it
from trainledger.answers.pages.record import read_run
from trainledger.cli import main
from trainledger.cli import train as cli_train
from trainledger.ledger.ranks import read_ranks
from trainledger.observe.measure.hardware import title
from trainledger.spec.units import GIB

RUN = """
[model]
name = "small"
vocab_size = 300
d_model = 48
n_layers = 3
attention.n_heads = 4
attention.n_kv_heads = 2
feed_forward.d_ff = 96
max_seq_len = 32
tie_embeddings = true
[recipe]
seq_len = 32
global_batch = 8
micro_batch = 4
steps = 12
learning_rate = 1e-2
evaluation = { every = 4, sequences = 8 }
checkpoints.every = 3
[data]
path = "corpus/*.txt"
tokenizer = "bpe"
validation_fraction = 0.1
"""
WHOLE = ("parameters", "flops", "kept_nbytes", "peak_nbytes")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("machine") / "machine.toml"
    assert main(["measure", "machine", "--quick", "--backend", "cpu", "--output", str(path), "--json"]) == 0
    return path


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calibration: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINLEDGER_CALIBRATION", str(calibration))
    (tmp_path / "corpus").mkdir()
    for number in range(80):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"{number} times {number} is {number**2}, they say. " * 25)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def only_run() -> Path:
    (run_dir,) = Path("runs").iterdir()
    return run_dir


def rows(run_dir: Path) -> dict[str, Any]:
    return {each.quantity: each for each in read_run(run_dir).reconciliation.rows}


@pytest.mark.parametrize(
    "changes",
    thinned([["recipe.precision=bf16-mixed", "recipe.activation_checkpointing=full", "recipe.dropout=0.1"], []]),
)
def test_forecast_and_measurement_agree_to_the_byte(
    run_file: Path, calibration: Path, capsys: pytest.CaptureFixture[str], changes: list[str]
) -> None:
    flags = [part for change in changes for part in ("--set", change)]
    assert main(["train", str(run_file), "--set", "cluster.backend=cpu", *flags]) == 0
    said = capsys.readouterr().out
    assert "validation loss" in said
    assert "unigram entropy" in said
    assert "unexplained" in said

    found = rows(only_run())
    for name in WHOLE[:3]:
        assert found[name].predicted == found[name].measured, name
    for name in ("peak_nbytes", "allocator_peak_nbytes"):
        assert abs(found[name].measured / found[name].predicted - 1) < 0.02, name
    assert found["step_seconds"].measured > 0
    if (
        changes and 'dtype = "bf16"' not in calibration.read_text()
    ):  # too slow on this processor for a quick measurement
        assert "No predicted step time: no matmul in bf16 was measured" in said
    else:
        assert found["step_seconds"].predicted > 0
        assert found["mfu"].measured is not None
    html = (only_run() / "report.html").read_text()
    assert "kept for backward" in html


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_loss_is_metered_as_it_runs(run_file: Path) -> None:
    changes = ("cluster.backend=cpu", "recipe.steps=4", "recipe.loss=compiled")
    assert main(["train", str(run_file), *(part for change in changes for part in ("--set", change))]) == 0
    found = rows(only_run())
    assert found["parameters"].measured == found["parameters"].predicted
    assert found["peak_nbytes"].measured == pytest.approx(found["peak_nbytes"].predicted, rel=0.01)
    assert found["kept_nbytes"].measured == pytest.approx(found["kept_nbytes"].predicted, rel=0.01)
    assert not any("torch.compile" in each for each in json.loads((only_run() / "measured.json").read_text())["notes"])


@pytest.mark.process
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler")
def test_compiled_ranks_are_measured_as_far_as_no_step_runs_eagerly(run_file: Path) -> None:
    changes = ("cluster.backend=cpu", "cluster.count=2", "layout.replicate=2", "recipe.compile=true", "recipe.steps=6")
    words = [sys.executable, "-m", "trainledger", "train", str(run_file), "--ranks", "2"]
    done = subprocess.run(
        [*words, *(part for change in changes for part in ("--set", change))],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = rows(only_run())
    assert {name for name in (*WHOLE, "allocator_peak_nbytes") if found[name].measured is None} == {*WHOLE[1:]}
    for name in ("parameters", "allocator_peak_nbytes"):
        assert found[name].predicted == found[name].measured, name
    assert "would run compiled code eagerly here" in (only_run() / "measured.json").read_text()
    assert not read_ranks(only_run())


@pytest.mark.process
def test_a_killed_run_keeps_its_forecast_and_is_measured_in_the_end(run_file: Path) -> None:
    words = [sys.executable, "-m", "trainledger", "train", str(run_file), "--set", "recipe.steps=400"]
    process = subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    metrics = None
    for _ in range(3000):
        time.sleep(0.1)
        found = list(Path("runs").glob("*/metrics.jsonl"))
        if found and found[0].read_text().count('"grad_norm"') > 8:
            metrics = found[0]
            break
    assert metrics is not None, "the run did not begin within five minutes"
    process.send_signal(signal.SIGKILL)
    process.wait()
    run_dir = metrics.parent
    forecast = (run_dir / "forecast.json").read_bytes()
    assert not (run_dir / "measured.json").exists()
    assert main(["reconcile", str(run_dir)]) == 0

    assert main(["train", str(run_file), "--set", "recipe.steps=400", "--resume"]) == 0
    assert (run_dir / "forecast.json").read_bytes() == forecast
    found_rows = rows(run_dir)
    for name in WHOLE[:3]:
        assert found_rows[name].predicted == found_rows[name].measured, name


def test_without_a_calibration_there_is_no_step_time_and_a_sentence_why(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRAINLEDGER_CALIBRATION")
    monkeypatch.setenv("XDG_CACHE_HOME", str(run_file.parent / "nowhere"))
    assert main(["train", str(run_file), "--json"]) == 0
    forecast = json.loads((only_run() / "forecast.json").read_text())
    assert forecast.get("step_seconds") is None
    assert any("not measured yet" in each for each in forecast["notes"])
    assert rows(only_run())["mfu"].predicted is None


def test_the_demo_does_all_of_it(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default run, cut down: the same verbs on a corpus of a few kilobytes."""
    cut = [
        "data.path=['corpus/*.txt']", "model.n_layers=1", "model.vocab_size=300", "recipe.steps=6",
        "recipe.schedule.warmup_steps=1", "recipe.evaluation.every=3", "recipe.seq_len=32",
        "data.validation_fraction=0.1",
    ]  # fmt: skip
    flags = [part for change in cut for part in ("--set", change)]
    assert main(["demo", *flags]) == 0
    said = capsys.readouterr().out
    for heading in ("What it will cost", "Training it", "What the model writes", "Forecast and measurement"):
        assert heading in said
    assert "def read(self, path):" in said
    assert main(["demo", *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


@pytest.mark.parametrize(
    ("name", "code"),
    [("forecast.json", 2), ("predicted-ledger.json.gz", 2), ("metrics.jsonl", 1), (".tmp-state.json", 1),
     ("measured.json", 0), ("report.html", 0)],
)  # fmt: skip
def test_a_directory_where_a_file_belongs_is_a_sentence_and_loses_no_result(
    name: str, code: int, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is written before the first step ends the run there; what is written after the last one does not."""
    words = ["train", "run.toml", "--set", "recipe.steps=2"]
    assert main([*words, "--resume"]) == 2
    run_dir = Path(re.findall(r"\((runs/.+?)\)", capsys.readouterr().err)[0])
    (run_dir / name / "other").mkdir(parents=True)
    assert main(words) == code
    said = capsys.readouterr()
    assert name in said.err
    assert ("2 steps" in said.out) == (code == 0)


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"])
def test_what_a_launcher_never_sets_is_refused(
    variable: str, run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv(variable, "x")
    assert main(["train", "run.toml"]) == 2
    assert f"{variable} = 'x': in the environment must be a whole number" in capsys.readouterr().err


def test_a_run_directory_must_be_utf_8(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.toml", "--dir", os.fsdecode(b"runs\xff")]) == 2
    assert "must be UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "step"), [(0.0, 1), (1e6, 4)])
@pytest.mark.long
def test_a_demo_without_time_has_its_whole_report(
    seconds: float, step: int, run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at its deadline, or begun anew with fewer steps (here as few as there are)."""
    monkeypatch.setattr(cli_train, "_SECONDS_TO_TRAIN", seconds)
    monkeypatch.setattr(closed_loop, "_SHARE_OF_STEPS", 0.0)
    begin = closed_loop.Deadline.on_start

    def as_if_endless(self: closed_loop.Deadline, state: Any) -> None:
        begin(self, state)
        self._last *= 10**9 if self._last == 300 else 1

    monkeypatch.setattr(closed_loop.Deadline, "on_start", as_if_endless)
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    cut = ["data.path=['corpus/*.txt']", "model.vocab_size=300", "recipe.evaluation.sequences=4",
           "data.validation_fraction=0.1"]  # fmt: skip
    assert main(["demo", *(part for change in cut for part in ("--set", change))]) == 0
    said = capsys.readouterr()
    assert all(each in said.out for each in ("What the model writes", "Forecast and measurement"))
    assert json.loads((only_run() / "state.json").read_text())["step"] == step, "what was begun too long is gone"
    assert ("4 instead of 300" in said.err) == (step == 4)


def test_an_evaluation_is_forecast_with_the_text_there_is(run_file: Path) -> None:
    few, many = "recipe.evaluation.sequences=4", "recipe.evaluation.sequences=1000000"
    seconds = []
    for number, change in enumerate((few, many)):
        words = ["train", str(run_file), "--set", change, "--set", "recipe.steps=3", "--dir", f"runs{number}"]
        assert main([*words, "--json"]) == 0
        (run_dir,) = Path(f"runs{number}").iterdir()
        forecast = json.loads((run_dir / "forecast.json").read_text())
        seconds.append(forecast["seconds_by_phase"]["evaluation"])
    (note,) = [each for each in forecast["notes"] if "an evaluation takes" in each]
    there = int(note.split("the ")[1].split(" held-out")[0].replace(",", ""))
    assert note == f"an evaluation takes the {there:,} held-out sequences there are, not 1,000,000"
    assert seconds[1] / seconds[0] == pytest.approx(there / 4)


def test_a_run_file_of_another_machine_is_forecast_for_this_one(run_file: Path) -> None:
    words = ["train", str(run_file), "--set", "cluster.device=h100-sxm", "--set", "cluster.backend=cpu"]
    assert main([*words, "--set", "recipe.steps=3", "--json"]) == 0
    forecast = json.loads((only_run() / "forecast.json").read_text())
    here = title(torch.device("cpu"))
    assert forecast["device"] == here
    assert forecast["notes"][0] == f"run.toml names h100-sxm; this ran on {here} and is forecast for it"
    assert forecast["basis"]["step_seconds"] == "assumed"


@pytest.mark.parametrize(
    ("name", "torch_name", "gib", "same"),
    [
        ("h100-sxm", "NVIDIA H100 80GB HBM3", 79.2, True),
        ("h100-sxm", "NVIDIA H100 PCIe", 79.2, False),
        ("h100-pcie", "NVIDIA H100 PCIe", 79.2, True),
        ("h100-sxm", "NVIDIA H200", 139.8, False),
        ("h200", "NVIDIA H200", 139.8, True),
        ("a100-sxm-40gb", "NVIDIA A100-SXM4-80GB", 79.2, False),
        ("a100-sxm-80gb", "NVIDIA A100-SXM4-80GB", 79.2, True),
        ("rtx-4090", "NVIDIA GeForce RTX 4090", 23.6, True),
        ("l4", "NVIDIA L40S", 44.4, False),
        ("t4", "Tesla T4", 14.7, True),
    ],
)
def test_a_device_is_known_by_its_name_and_memory(name: str, torch_name: str, gib: float, same: bool) -> None:
    assert is_it(catalog.device(name), torch_name, int(gib * GIB)) == same
