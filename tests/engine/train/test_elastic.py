"""A run that goes from layout to layout: the same rows of text at each step, the losses of one that never stopped."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from rank_runs import train_on_ranks
from spread_runs import go_on, told

pytestmark = pytest.mark.process

FIELDS: dict[str, Any] = {
    "model": {"vocab_size": 257}, "steps": 18, "global_batch": 8, "micro_batch": 1, "checkpoints.every": 4,
}  # fmt: skip
LEGS: list[dict[str, Any]] = [
    {"stop_after": 2},
    {"layout": {"shard": 2}, "stop_after": 4},
    {"layout": {"replicate": 2, "shard": 2}, "stop_after": 7},
    {"layout": {"shard": 2}, "stop_after": 9},
    {"layout": {"tensor": 2}, "stop_after": 12},
    {"layout": {"pipeline": 2, "schedule": "1f1b"}, "stop_after": 15},
    {},
]


def a_text(folder: Path) -> str:
    folder.mkdir()
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"sentence {each} of a text, which is {each * each % 97} long" for each in range(3000)))
    return str(text)


def rows(folder: Path) -> dict[int, set[str]]:
    """The hashes of the rows of each step, of all ranks together."""
    found: dict[int, set[str]] = defaultdict(set)
    for file in folder.glob("text.[0-9]*"):
        for line in file.read_text().splitlines():
            seen = json.loads(line)
            found[seen["step"]].update(seen["rows"])
    return found


def test_a_run_that_changes_its_layout_six_times_has_the_rows_and_losses_of_one_process(tmp_path: Path) -> None:
    alone = {"dir": str(tmp_path / "alone"), "fields": FIELDS, "text": a_text(tmp_path / "of-one")}
    assert train_on_ranks(tmp_path, [alone], 1) == [[0]]
    text = a_text(tmp_path / "of-many")
    for leg in LEGS:
        go_on(tmp_path, leg | {"text": text}, FIELDS)
    assert told(tmp_path / "run", "loss") == pytest.approx(told(tmp_path / "alone", "loss"), rel=1e-5)
    once, often = rows(tmp_path / "of-one"), rows(tmp_path / "of-many")
    assert sorted(once) == list(range(FIELDS["steps"]))
    assert all(len(each) > FIELDS["global_batch"] // 2 for each in once.values())  # some rows are the same words
    assert {step: often[step] for step in once} == once  # the last leg may have fetched a batch more
