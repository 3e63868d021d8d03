"""Several real ranks leave out the same steps and go back together, though one alone has the bad sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_runs import run_of, train_on_ranks
from tiny_run import Poisoned, poisoned

from trainledger.engine.train.engine import train
from trainledger.engine.train.records import read_lines
from trainledger.engine.train.run_directory import all_checkpoints, damage
from trainledger.engine.train.stop import Diverged

pytestmark = pytest.mark.process

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"replicate": 2},
    "shards": {"shard": 2},
    "whole parameters, shared update": {"shard": 2, "zero": 1},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
}
FIELDS: dict[str, Any] = {
    "model": {"norm": "layernorm"}, "steps": 10, "global_batch": 4, "micro_batch": 1, "checkpoints.every": 2,
    "checkpoints.keep_last": 9, "evaluation.every": None, "guard.skips": 1,
}  # fmt: skip
ROLLS = {"guard.beyond": "roll-back"}
BAD = [1, 4, 6]  # of the steps 2, 5 and 7


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [each for each in read_lines(run_dir / "metrics.jsonl") if "loss" in each]


def went_back(run_dir: Path) -> list[tuple[Any, ...]]:
    events = [each for each in read_lines(run_dir / "metrics.jsonl") if each.get("event") == "roll-back"]
    return [tuple(each[name] for name in ("to", "from", "skipped_steps", "batches_left_out")) for each in events]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layout: with a roll-back; stopped after it and resumed; without, which ends it."""
    where = tmp_path_factory.mktemp("guarded")
    rolls = FIELDS | ROLLS | {"guard.window": 3}
    train(run_of({"fields": rolls}), where / "alone", open_feed=poisoned(BAD), observers=[Poisoned()])
    runs = []
    for name, layout in LAYOUTS.items():
        common = {"layout": layout, "fields": rolls, "bad": BAD}
        runs.append(common | {"dir": str(where / name)})
        runs.append(common | {"dir": str(where / f"{name}, resumed"), "stop_after": 8})
        runs.append(common | {"dir": str(where / f"{name}, resumed"), "resume": True})
        runs.append(common | {"dir": str(where / f"{name}, ended"), "fields": FIELDS})
    codes = train_on_ranks(where, runs, 2)
    assert codes == [[0, 0], [143, 143], [0, 0], [3, 3]] * len(LAYOUTS)
    return where


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_leave_out_the_same_steps_and_go_back_together(trained: Path, name: str) -> None:
    assert went_back(trained / "alone") == [("step-00000004", 7, 3, 3)]
    assert went_back(trained / name) == went_back(trained / "alone")
    for field in ("step", "skipped"):
        assert [each[field] for each in lines(trained / name)] == [each[field] for each in lines(trained / "alone")]
    alone, ranks = ([each["loss"] for each in lines(trained / one)] for one in ("alone", name))
    assert [each is None for each in ranks] == [number == 1 for number in range(10)]
    assert [each for each in ranks if each] == pytest.approx([each for each in alone if each], rel=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resumed_run_of_ranks_has_the_losses_of_one_that_never_stopped(trained: Path, name: str) -> None:
    assert went_back(trained / f"{name}, resumed") == went_back(trained / name)
    assert [each["loss"] for each in lines(trained / f"{name}, resumed")] == [
        each["loss"] for each in lines(trained / name)
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_too_many_ends_all_ranks_with_good_checkpoints(trained: Path, name: str) -> None:
    assert [each["skipped"] for each in lines(trained / f"{name}, ended")] == [number in (1, 4) for number in range(5)]
    assert [damage(each) for each in all_checkpoints(trained / f"{name}, ended")] == [None, None]


def test_one_process_ends_at_the_same_step(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"Step 5 gave loss nan, gradient norm nan .*the 2nd such step of the last 100"):
        train(run_of({"fields": FIELDS}), tmp_path, open_feed=poisoned(BAD), observers=[Poisoned()])
