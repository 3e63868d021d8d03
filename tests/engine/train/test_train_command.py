"""`trainledger train` from the command line, on real text, with the data room's own store."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trainledger.cli import main

pytestmark = pytest.mark.process

RUN = """
[model]
name = "small"
vocab_size = 257
d_model = 32
n_layers = 1
attention.n_heads = 2
feed_forward.d_ff = 64
max_seq_len = 32
[recipe]
seq_len = 32
global_batch = 4
steps = 30
learning_rate = 1e-2
evaluation.sequences = 8
checkpoints.every = 10
[data]
path = "corpus/*.txt"
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for number in range(60):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"{number} times {number} is {number**2}. " * 20)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def test_train_writes_a_run_and_says_what_it_learned(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(run_file)]) == 0
    said = capsys.readouterr()
    assert "validation loss" in said.out
    assert "knowing only each token's frequency" in said.out
    (run_dir,) = Path("runs").iterdir()
    assert run_dir.name.startswith("small-")
    assert (run_dir / "run.toml").is_file()
    assert (run_dir / "tokenizer.json").is_file()
    assert list((run_dir / "tensorboard").iterdir())

    assert main(["train", str(run_file)]) == 2
    assert "is already finished" in capsys.readouterr().err

    assert main(["train", str(run_file), "--resume", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["step"], told["tokens"]) == ("finished", 30, 30 * 4 * 32)
    assert told["validation_loss"] < told["unigram_entropy"]


def test_a_run_that_broke_off_is_listed_with_what_goes_on_with_it(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """As kill -9 leaves it: it says that it runs, and no process holds it."""
    where = ["--dir", "all runs"]
    assert main(["train", str(run_file), *where]) == 0
    (run_dir,) = Path("all runs").iterdir()
    assert main(["runs", *where]) == 0
    assert "--resume" not in capsys.readouterr().out
    (run_dir / "state.json").write_text('{"state": "running", "step": 30}')
    assert main(["runs", *where]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-2:] == [
        f"{run_dir.name} was killed; this resumes it:",
        f"trainledger train '{run_dir}/run.toml' --resume --dir 'all runs'",
    ]
    assert main(["runs", *where, "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["runs"]
    assert listed["resume"] == told[-1]
    run_file.unlink()
    assert main([*shlex.split(told[-1])[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    (run_dir / "state.json").write_text('{"state": "failed", "step": 30}')
    run_dir.rename(run_dir.with_name("renamed"))  # training would look for it under its own name
    assert main(["runs", *where, "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["runs"]
    assert (listed["state"], listed["resume"]) == ("failed", None)


def test_a_changed_corpus_is_not_resumed_on(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(run_file)]) == 0
    (run_dir,) = Path("runs").iterdir()
    (run_dir / "state.json").write_text('{"state": "running", "step": 30}')
    (run_file.parent / "corpus" / "0.txt").write_text("something else")
    assert main(["train", str(run_file), "--resume"]) == 2
    assert "was begun on other text" in capsys.readouterr().err


def test_resume_of_an_edited_run_file_names_the_run_that_was_begun(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = ["train", str(run_file), "--resume"]
    assert main([*resume, "--dir", "elsewhere"]) == 2
    assert "no run of this file was begun" in capsys.readouterr().err
    assert not Path("elsewhere").exists()
    assert main(["train", str(run_file), "--set", "recipe.steps=2"]) == 0
    (begun,) = Path("runs").iterdir()
    capsys.readouterr()
    assert main([*resume, "--set", "recipe.steps=3", "--set", "recipe.seed=7"]) == 2
    said = capsys.readouterr().err
    assert f"nearest that works: {begun}, begun with recipe.steps = 2 (now 3), recipe.seed = 0 (now 7)" in said
    assert list(Path("runs").iterdir()) == [begun]


def test_train_where_standard_error_is_closed(run_file: Path) -> None:
    command = f"{sys.executable} -m trainledger train {run_file} --set recipe.steps=2 --json 2>&-"
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert json.loads(done.stdout)["state"] == "finished"


def test_a_model_larger_than_the_machine_is_refused_before_it_is_built(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = ["--set", "model.d_model=32768", "--set", "model.n_layers=200", "--set", "model.feed_forward.d_ff=131072"]
    for verb in (["train"], ["measure", "step"]):
        assert main([*verb, str(run_file), *wide]) == 2
        said = capsys.readouterr().err
        assert "at the peak of a step" in said
        assert "no micro-batch is small enough" in said
    assert not Path("runs").exists()


def test_a_run_that_is_refused_for_its_text_leaves_no_directory(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in Path("corpus").iterdir():
        each.write_text("short")
    own = Path("runs") / "own"
    own.mkdir(parents=True)
    assert main(["train", str(run_file)]) == 2
    assert "holds out none" in capsys.readouterr().err
    assert list(Path("runs").iterdir()) == [own]


def test_a_corpus_that_is_not_there_leaves_no_begun_run(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", str(run_file), "--set", "recipe.steps=2"]
    (run_file.parent / "corpus").rename(run_file.parent / "away")
    assert main(arguments) == 2
    assert "corpus" in capsys.readouterr().err
    (run_file.parent / "away").rename(run_file.parent / "corpus")
    assert main(arguments) == 0
