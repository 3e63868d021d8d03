"""A metrics file that was written by something else does not stop a run that resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import CountingFeed, tiny_run

from trainledger.answers.pages.record import read_run
from trainledger.engine.train.engine import train
from trainledger.engine.train.records import cut_back, read_lines

LINES = [
    json.dumps({"step": 1, "loss": 2.0}), json.dumps({"step": "two"}), json.dumps({"step": None}), json.dumps([3]),
    json.dumps({"step": True}), json.dumps({"step": -1}), json.dumps("step"), '{"step": 1e99}', "\0" * 30,
    "{", "[" * 100_000, json.dumps({"step": 2, "loss": 1.5}), json.dumps({"step": 3, "loss": 1.0}), '{"step": 4, "lo',
]  # fmt: skip


def test_lines_of_another_type_are_dropped_and_the_others_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(LINES), encoding="utf-8")
    assert cut_back(path, after=2) == len(LINES) - 4, "the torn last line is that of a crash"
    assert [each["step"] for each in read_lines(path)] == [1, 2]


def test_a_resumed_run_says_what_its_curve_lost(tmp_path: Path) -> None:
    whole = train(tiny_run(), tmp_path, open_feed=CountingFeed)
    (whole.checkpoint / "model.safetensors").unlink()
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = lines[2].replace('"step": ', '"step": "')
    path.write_text("\n".join(lines) + "\n")
    said: list[str] = []
    assert train(tiny_run(), tmp_path, open_feed=CountingFeed, resume=True, say=said.append).step == 6
    assert any(each.startswith("Damaged lines of") and each.endswith(": 1.") for each in said)
    assert all(isinstance(each["step"], int) for each in read_lines(path))


@pytest.mark.parametrize(("kept", "lacking"), [(None, 4), (0, 4), (2, 2)])
def test_a_curve_that_was_cut_at_the_end_of_a_line_is_said(kept: int | None, lacking: int, tmp_path: Path) -> None:
    whole = train(tiny_run(), tmp_path, open_feed=CountingFeed)
    (whole.checkpoint / "model.safetensors").unlink()
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if kept is None:
        path.unlink()
    else:
        steps = [at for at, each in enumerate(lines) if '"loss"' in each]
        path.write_text("".join(lines[: steps[kept]] if kept else []))
    assert any(f"metrics.jsonl lacks {lacking + 2} of the 6 steps" in each for each in read_run(tmp_path).missing)
    said: list[str] = []
    train(tiny_run(), tmp_path, open_feed=CountingFeed, resume=True, say=said.append)
    assert sum(f"metrics.jsonl lacks {lacking} of the 4 steps that were done" in each for each in said) == 1
