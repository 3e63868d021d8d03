"""What one layout has saved another goes on from, with the losses of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

RANK = Path(__file__).with_name("layout_rank.py")
STEPS = 20
ONE: dict[str, Any] = {}
FSDP = {"shard": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 1": {"shard": 2, "zero": 1},
    "zero 2": {"shard": 2, "zero": 2},
    "zero 1, replicated": {"shard": 2, "replicate": 2, "zero": 1},
    "zero 2 over four": {"shard": 4, "zero": 2},
}


def train_in(folder: Path, layout: dict[str, Any], steps: int, path: str | None = None) -> tuple[list[float], str]:
    """The mean losses of some steps in a layout, from a checkpoint on, and the checkpoint that it ends with."""
    folder.mkdir(exist_ok=True)
    world = layout.get("shard", 1) * layout.get("replicate", 1) * layout.get("context", 1)
    what = folder / "what.json"
    recipe = {"micro_batch": 1, "global_batch": 8, "steps": STEPS}
    what.write_text(
        json.dumps({"layout": layout, "recipe": recipe, "steps": steps, "path": path, "run_dir": str(folder)})
    )
    outs = [folder / f"rank{rank}.json" for rank in range(world)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(what), str(rank), str(out)], env=environment, stderr=subprocess.PIPE,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    errors = [each.communicate(timeout=300)[1] for each in processes]
    assert all(out.exists() for out in outs), "\n".join(errors)[-4000:]
    told = [json.loads(out.read_text()) for out in outs]
    assert all(each == told[0] for each in told)
    return told[0]["losses"], told[0]["path"]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], str]:
    """Losses of one process, and its checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("one")
    first, path = train_in(folder / "first", ONE, STEPS // 2)
    second, _ = train_in(folder / "second", ONE, STEPS // 2, path)
    return first + second, path


@pytest.mark.parametrize(
    "name", [each if each == "zero 1" else pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS]
)
def test_a_layout_has_the_losses_of_one_process_and_others_go_on_from_it(
    tmp_path: Path, one: tuple[list[float], str], name: str
) -> None:
    losses, middle = one
    half = STEPS // 2
    mine, path = train_in(tmp_path / "mine", LAYOUTS[name], half)
    assert mine == pytest.approx(losses[:half], rel=1e-6)
    for other in (ONE, FSDP):
        later, _ = train_in(tmp_path / f"to {len(other)}", other, half, path)
        assert later == pytest.approx(losses[half:], rel=1e-6)
    back, _ = train_in(tmp_path / "back", LAYOUTS[name], half, middle)
    assert back == pytest.approx(losses[half:], rel=1e-6)


def test_fully_sharded_ranks_are_gone_on_from_with_whole_parameters(
    tmp_path: Path, one: tuple[list[float], str]
) -> None:
    losses, _ = one
    half = STEPS // 2
    _, path = train_in(tmp_path / "fully", FSDP, half)
    later, _ = train_in(tmp_path / "later", LAYOUTS["zero 1"], half, path)
    assert later == pytest.approx(losses[half:], rel=1e-6)
