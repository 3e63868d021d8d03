"""What `train --replicas` needs is said in a sentence before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import commanded
import pytest

from trainledger.cli import main
from trainledger.engine.train.launch_replicas import code_of


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    commanded.write(tmp_path, layout="replicate = 2", ranks=2)
    return tmp_path / "run.toml"


def refused(run_file: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said of a command that is refused; nothing was begun."""
    assert main(["train", str(run_file), *words]) == 2
    assert not (run_file.parent / "runs").exists()
    return capsys.readouterr().err


def test_without_torchft_a_sentence_names_what_to_install(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)  # an import of it fails, whether it is installed or not
    said = refused(run_file, capsys, "--replicas", "2")
    assert "needs torchft" in said
    assert "pip install 'trainledger[replicas]'" in said


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--replicas", "3"), "must be layout.replicate (2)"),
        (("--replicas", "1"), "must be layout.replicate (2)"),
        (("--replicas", "2", "--first-replica", "1"), "must be layout.replicate (2)"),
        (("--replicas", "2", "--ranks", "2"), "of one process each"),
        (("--replicas", "2", "--set", "layout.replicate=1", "--set", "layout.shard=2"), "layout of replicas alone"),
        (("--replicas", "2", "--set", "recipe.guard.beyond.kind=roll-back"), "recipe.guard.beyond"),
        (("--replicas", "2", "--set", "layout.overlap=gradients,tensor"), "layout.overlap"),
    ],
)
def test_what_replicas_cannot_be_is_refused(
    run_file: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str
) -> None:
    assert named in refused(run_file, capsys, *words)


def test_a_replica_that_others_do_not_count_is_refused(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:1")
    assert "begins at replica 1 of 2" in refused(run_file, capsys, "--replicas", "2", "--first-replica", "1")


@pytest.mark.parametrize(
    ("codes", "code"),
    [((0, 0), 0), ((137, 0), 0), ((143, 143), 143), ((5, 137), 137), ((3, 143), 3), ((4, 5), 4), ((1, 5), 5)],
)
def test_the_exit_code_of_a_run_is_that_which_a_restart_does_not_mend(codes: tuple[int, ...], code: int) -> None:
    assert code_of(codes) == code
