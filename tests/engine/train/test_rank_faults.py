"""A rank killed or stopped in a step or a save, or with a full disk: the earlier checkpoint stays whole, all ranks end.

Two real processes each, which the test stops (SIGSTOP), wakes (SIGCONT) and kills.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_runs import start_ranks, train_on_ranks

from trainledger.engine.train.run_directory import all_checkpoints, damage

pytestmark = pytest.mark.process
SECONDS = 25.0  # how long a rank waits for another, here
# Some MB a rank, so that a save takes long enough to be met.
LARGE = {"vocab_size": 2048, "d_model": 256, "n_layers": 2, "feed_forward.d_ff": 704, "attention.n_heads": 4}
Ranks = list[subprocess.Popen[str]]


def described(run_dir: Path, **more: Any) -> dict[str, Any]:
    fields = {
        "model": LARGE,
        "steps": 12,
        "checkpoints.every": 1,
        "checkpoints.keep_last": 20,
        "evaluation.every": None,
    }
    return {"dir": str(run_dir), "layout": {"shard": 2}, "fields": fields, "seconds": SECONDS, **more}


def weights(run_dir: Path) -> list[bytes]:
    return [each.read_bytes() for each in sorted(all_checkpoints(run_dir)[-1].glob("model*.safetensors"))]


def until(found: Callable[[], object], ranks: Ranks) -> None:
    """Wait for a moment of a run."""
    deadline = time.monotonic() + 120
    while not found():
        assert time.monotonic() < deadline
        assert all(each.poll() is None for each in ranks), [each.communicate() for each in ranks if each.poll()]
        time.sleep(0.0005)


def saving(run_dir: Path, after: int) -> Callable[[], object]:
    """Whether the second rank is writing its optimizer's state, once there are so many checkpoints."""
    name = "checkpoints/.tmp-step-*/optimizer-00002-of-00002.safetensors"
    return lambda: len(all_checkpoints(run_dir)) >= after and next(run_dir.glob(name), None)


def between_saves(run_dir: Path, after: int) -> Callable[[], object]:
    """Whether there are so many checkpoints, and none is being written."""
    return lambda: len(all_checkpoints(run_dir)) >= after and not any((run_dir / "checkpoints").glob(".tmp-*"))


def ends(asked: Path, ranks: Ranks, seconds: float) -> tuple[list[int | None], list[str]]:
    """The exit code of the run on each rank that lives, None for another, and what each said."""
    said = [each.communicate(timeout=seconds)[1] for each in ranks]
    codes = [asked.with_suffix(f".{rank}") for rank in range(len(ranks))]
    return [json.loads(each.read_text())[0] if each.exists() else None for each in codes], said


def assert_goes_on(tmp_path: Path, run_dir: Path) -> None:
    """What was saved is whole, and the run ends as one that nothing happened to."""
    checkpoints = all_checkpoints(run_dir)
    assert checkpoints
    assert [damage(each) for each in checkpoints] == [None] * len(checkpoints)
    codes = train_on_ranks(tmp_path, [described(run_dir, resume=True), described(tmp_path / "whole")], 2)
    assert codes == [[0, 0], [0, 0]]
    assert weights(run_dir) == weights(tmp_path / "whole")
    assert not list((run_dir / "checkpoints").glob(".tmp-*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_during_a_save(tmp_path: Path, rank: int) -> None:
    run_dir = tmp_path / "run"
    asked, ranks = start_ranks(tmp_path, [described(run_dir)], 2)
    until(saving(run_dir, 3), ranks)
    ranks[rank].kill()
    codes, said = ends(asked, ranks, SECONDS + 30)
    assert codes == [None if each == rank else 5 for each in range(2)]
    assert "Another rank is gone" in said[1 - rank]
    assert "Traceback" not in "".join(said)
    assert_goes_on(tmp_path, run_dir)


def test_a_rank_stopped_for_less_than_the_time_out_changes_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    asked, ranks = start_ranks(tmp_path, [described(run_dir)], 2)
    for at, moment in ((2, saving), (5, between_saves)):
        until(moment(run_dir, at), ranks)
        ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(SECONDS / 4)
        ranks[1].send_signal(signal.SIGCONT)
    codes, _ = ends(asked, ranks, 300)
    assert codes == [0, 0]
    assert train_on_ranks(tmp_path, [described(tmp_path / "whole")], 2) == [[0, 0]]
    assert weights(run_dir) == weights(tmp_path / "whole")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", [saving, between_saves])
def test_a_rank_stopped_for_longer_ends_all_in_time(
    tmp_path: Path, rank: int, moment: Callable[[Path, int], Callable[[], object]]
) -> None:
    run_dir = tmp_path / "run"
    asked, ranks = start_ranks(tmp_path, [described(run_dir)], 2)
    until(moment(run_dir, 3), ranks)
    ranks[rank].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    other = ranks[1 - rank]
    try:
        other.wait(timeout=SECONDS + 30)
    finally:
        took = time.monotonic() - stopped
        os.kill(ranks[rank].pid, signal.SIGCONT)
    codes, said = ends(asked, ranks, SECONDS + 30)
    assert codes[1 - rank] == 5
    assert f"silent for more than {SECONDS:.0f} s" in said[1 - rank]
    assert codes[rank] in (0, 5), "it wakes up alone"
    assert took > SECONDS / 2, "it waited"
    assert "Traceback" not in "".join(said)
    assert_goes_on(tmp_path, run_dir)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_rank_with_a_full_disk_ends_all_with_4(tmp_path: Path, asynchronous: bool) -> None:
    run_dir = tmp_path / "run"
    begun = described(run_dir)
    begun["fields"] = begun["fields"] | {"checkpoints.every": 4, "checkpoints.asynchronous": asynchronous}
    assert train_on_ranks(tmp_path, [begun | {"stop_after": 5}], 2) == [[143, 143]]
    before = all_checkpoints(run_dir)
    assert [each.name for each in before] == ["step-00000004", "step-00000006"]
    (codes,) = train_on_ranks(tmp_path, [begun | {"resume": True, "largest_file": {"1": 1_000_000}}], 2)
    assert codes == [4, 4]
    state = json.loads((run_dir / "state.json").read_text())
    assert (state["state"], state["exit_code"]) == ("failed", 4)
    assert all_checkpoints(run_dir) == before
    assert [damage(each) for each in before] == [None, None]
    assert train_on_ranks(tmp_path, [begun | {"resume": True}], 2) == [[0, 0]]
