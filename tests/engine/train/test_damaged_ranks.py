"""A damaged file of any rank: all ranks take the same decision, go on from the checkpoint before, and end the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_runs import train_on_ranks

from trainledger.engine.train.run_directory import all_checkpoints, damage

pytestmark = pytest.mark.process
SHARDED: dict[str, Any] = {"layout": {"shard": 2}}


def weights(run_dir: Path) -> list[bytes]:
    """The files of the last checkpoint's weights."""
    return [each.read_bytes() for each in sorted(all_checkpoints(run_dir)[-1].glob("model*.safetensors"))]


def flip(path: Path) -> None:
    content = path.read_bytes()
    at = len(content) // 2
    path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "an empty model file": lambda last, other: (last / "model-00002-of-00002.safetensors").write_bytes(b""),
    "a flipped bit": lambda last, other: flip(last / "optimizer-00002-of-00002.safetensors"),
    "a file is gone": lambda last, other: (last / "optimizer-00001-of-00002.safetensors").unlink(),
    "a file of another run": lambda last, other: shutil.copy(other / "model-00002-of-00002.safetensors", last),
    "a nested manifest": lambda last, other: (last / "manifest.json").write_bytes(b"[" * 100_000),
}


def test_ranks_agree_on_a_damaged_checkpoint(tmp_path: Path) -> None:
    """One run for each damage, all begun in one start of the ranks and resumed in another."""
    runs = {name: SHARDED | {"dir": str(tmp_path / str(number))} for number, name in enumerate(DAMAGES)}
    other = SHARDED | {"dir": str(tmp_path / "other"), "fields": {"seed": 5}}
    whole = SHARDED | {"dir": str(tmp_path / "whole")}
    codes = train_on_ranks(tmp_path, [whole, other, *runs.values()], 2)
    assert codes == [[0, 0]] * (len(runs) + 2)
    expected = weights(tmp_path / "whole")
    foreign = all_checkpoints(tmp_path / "other")[-1]
    for name, described in runs.items():
        last = all_checkpoints(Path(described["dir"]))[-1]
        DAMAGES[name](last, foreign)
        assert damage(last) is not None, name
    codes = train_on_ranks(tmp_path, [each | {"resume": True} for each in runs.values()], 2)
    assert codes == [[0, 0]] * len(runs)
    for name, described in runs.items():
        run_dir = Path(described["dir"])
        assert weights(run_dir) == expected, name
        assert (run_dir / "checkpoints" / "damaged-1-step-00000006").is_dir(), name
        assert json.loads((run_dir / "state.json").read_text())["state"] == "finished"
