"""The moving average on several real ranks: that of one process, each rank a part, and metered as accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import run_of, train_on_ranks
from test_guard_ranks import LAYOUTS
from tiny_run import CountingFeed

from trainledger.engine.train.engine import train
from trainledger.engine.train.run_directory import all_checkpoints
from trainledger.engine.train.trained import load_trained

pytestmark = pytest.mark.process
FIELDS: dict[str, Any] = {
    "steps": 8, "global_batch": 4, "micro_batch": 1, "checkpoints.every": 4, "evaluation.every": None, "ema.decay": 0.7,
}  # fmt: skip


def averages(run_dir: Path) -> dict[str, torch.Tensor]:
    return dict(load_trained(all_checkpoints(run_dir)[-1], print, averaged=True).model.named_parameters())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layout whole, and stopped, then gone on with in one process."""
    where = tmp_path_factory.mktemp("averages")
    train(run_of({"fields": FIELDS}), where / "alone", open_feed=CountingFeed)
    runs = []
    for name, layout in LAYOUTS.items():
        common = {"layout": layout, "fields": FIELDS}
        runs += [
            common | {"dir": str(where / name)},
            common | {"dir": str(where / f"{name}, then alone"), "stop_after": 5},
        ]
    assert train_on_ranks(where, runs, 2) == [[0, 0], [143, 143]] * len(LAYOUTS)
    for name in LAYOUTS:
        train(run_of({"fields": FIELDS}), where / f"{name}, then alone", open_feed=CountingFeed, resume=True)
    return where


@pytest.mark.parametrize("then", ["", ", then alone"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_average_of_ranks_is_that_of_one_process(trained: Path, name: str, then: str) -> None:
    ours, alone = averages(trained / f"{name}{then}"), averages(trained / "alone")
    assert ours.keys() == alone.keys()
    for each, value in alone.items():
        # Adam divides a gradient by its own size: where that is rounding, so is the direction of an update of 1e-2.
        torch.testing.assert_close(ours[each], value, rtol=1e-3, atol=5e-4)
