"""A batch that one rank cannot read: all ranks end with the code of its sentence, wherever they are just then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rank_runs import start_ranks
from tiny_run import tiny_run, unreadable

from trainledger.engine.train.engine import train
from trainledger.engine.train.run_directory import all_checkpoints
from trainledger.spec.problem import InvalidInput

CORRUPT = "00000.train.u16': is corrupt: its CRC-32 is not the recorded one"
LAYOUTS: dict[str, dict[str, Any]] = {
    "shards": {"shard": 2},
    "replicas": {"replicate": 2},
    "zero": {"shard": 2, "zero": 1},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
}


@pytest.mark.parametrize(("what", "index", "step"), [("steps", 3, 3), ("held-out", 1, 3)])
def test_one_process_ends_with_the_sentence(what: str, index: int, step: int, tmp_path: Path) -> None:
    run = tiny_run(micro_batch=2)
    with pytest.raises(InvalidInput, match="is corrupt"):
        train(run, tmp_path, open_feed=unreadable(what, 0, index), say=lambda _: None)
    assert json.loads((tmp_path / "state.json").read_text())["state"] == "failed"
    assert [each.name for each in all_checkpoints(tmp_path)] == ["step-00000002"]


@pytest.mark.process
def test_all_ranks_end_with_its_code(tmp_path: Path) -> None:
    """Tensor, stage and context ranks read the batches of one data rank, and all fail; of others the last one does."""
    described, sayer = [], [0, 0]
    for name, layout in LAYOUTS.items():
        reader = 1 if name in ("shards", "replicas", "zero") else 0
        fields = {"micro_batch": 1}
        for what, index in (("steps", 3), ("held-out", 1)):
            directory = str(tmp_path / f"{name}-{what}")
            described.append(
                {"dir": directory, "layout": layout, "fields": fields, "unreadable": [what, reader, index]}
            )
            sayer[reader] += 1
    asked, processes = start_ranks(tmp_path, described, 2)
    said = [each.communicate(timeout=500)[1] for each in processes]
    assert [each.returncode for each in processes] == [0, 0], said
    assert [json.loads(asked.with_suffix(f".{rank}").read_text()) for rank in range(2)] == [[2] * len(described)] * 2
    # The lowest rank that failed says it, once for each run.
    assert [text.count(CORRUPT) for text in said] == sayer
    for each in described:
        directory = Path(each["dir"])
        assert json.loads((directory / "state.json").read_text())["state"] == "failed"
        assert all_checkpoints(directory)[-1].name == "step-00000002"  # of the third no update was made, or none kept
