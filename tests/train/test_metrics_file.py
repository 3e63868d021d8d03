"""A metrics file that was written by something else does not stop a run that resumes."""

from __future__ import annotations

import json
from pathlib import Path

from trainledger.train.metrics import cut_back, read

LINES = [
    json.dumps({"step": 1, "loss": 2.0}), json.dumps({"step": "two"}), json.dumps({"step": None}), json.dumps([3]),
    "{", "[" * 100_000, json.dumps({"step": 2, "loss": 1.5}), json.dumps({"step": 3, "loss": 1.0}), '{"step": 4, "lo',
]  # fmt: skip


def test_lines_of_another_type_are_dropped_and_the_others_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(LINES), encoding="utf-8")
    cut_back(path, after=2)
    assert [each["step"] for each in read(path)] == [1, 2]
