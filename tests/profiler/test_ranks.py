"""Several ranks of one program: who waits for whom, planted in a public trace and in two processes that really wait."""

import gzip
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainledger.profiler.ranks import ranks_of
from trainledger.profiler.step_time import COPY, EXPOSED
from trainledger.profiler.waterfall import BUBBLE, STRAGGLERS
from trainledger.spec.problem import InvalidInput

TRACES = Path(__file__).parent / "traces"
LATE_US = 400.0


def written(folder: Path, rank: int, *, early_us: float = 0.0, without: str = "") -> None:
    """A public trace of rank 0 as that of another rank, whose all-reduces begin so much earlier."""
    trace = json.loads(gzip.decompress((TRACES / "mi300_resnet_checkpointed_ddp8.json.gz").read_bytes()))
    trace["distributedInfo"] |= {"rank": rank, "world_size": 3}
    for each in trace["traceEvents"]:
        if each["args"].get("Collective name") == "allreduce":
            each["ts"] -= early_us
            each["dur"] += early_us
            each["args"]["Group size"] = 3
    trace["traceEvents"] = [each for each in trace["traceEvents"] if not without or each["name"] != without]
    (folder / f"rank{rank}.json").write_text(json.dumps(trace))


def test_the_rank_whose_kernels_are_shortest_came_last(tmp_path):
    for rank in range(3):
        written(tmp_path, rank, early_us=0.0 if rank == 1 else LATE_US)
    found = ranks_of(tmp_path)
    assert [each.rank for each in found.ranks] == [0, 1, 2]
    assert found.steps == ("15", "16", "17")
    late = found.ranks[1]
    assert [each.rank for each in found.stragglers] == [1]
    assert late.last == late.compared == 6  # two all-reduces in each of three steps
    assert late.caused_ns == 2 * 6 * LATE_US * 1000
    assert sum(sum(each.values()) for each in late.waited_ns.values()) == 0
    assert "Rank 1 came last to 6 of 6 collectives" in found.said_of(late)
    for each in found.ranks:
        assert sum(bar.nanoseconds for bar in each.waterfall) == each.profile.step.nanoseconds
        exposed = sum(bar.nanoseconds for bar in each.waterfall if bar.cause == EXPOSED and bar.detail != COPY)
        waited = sum(bar.nanoseconds for bar in each.waterfall if bar.cause == STRAGGLERS)
        assert exposed + waited == each.profile.step.parts_ns[EXPOSED]
        assert not any(bar.cause == BUBBLE for bar in each.waterfall)
        # Two waits in a step, of which a part lies beside computation.
        assert waited <= 2 * LATE_US * 1000
        assert (waited > 0) == (each.rank != 1)
    assert "Rank 1 came last" in str(found)
    data = json.loads(json.dumps(found.document().data()))
    assert [each["rank"] for each in data["stragglers"]] == [1]


def test_ranks_that_are_alike_have_no_straggler(tmp_path):
    for rank in range(2):
        written(tmp_path, rank)
    found = ranks_of(tmp_path)
    assert found.stragglers == ()
    assert all(not any(each.waited_in_median_ns.values()) for each in found.ranks)


def test_only_steps_that_all_ranks_have_are_compared(tmp_path):
    written(tmp_path, 0, early_us=LATE_US)
    written(tmp_path, 1, without="ProfilerStep#16")
    found = ranks_of(tmp_path)
    assert set(found.steps) <= {"15", "17"}
    assert any("2 of 3 ranks have traces" in each for each in found.doubts)


def test_a_directory_without_traces_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "notes.txt").write_text("no trace")
    with pytest.raises(InvalidInput, match="has no traces"):
        ranks_of(tmp_path)


@pytest.mark.process
@pytest.mark.parametrize("delay_seconds", [0.0, 0.1])
def test_a_rank_that_is_held_back_is_named_and_no_other(tmp_path, delay_seconds):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).parent / "two_ranks.py"
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(rank), str(port), str(delay_seconds)],
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    assert [each.communicate()[1] and each.returncode for each in processes] == [0, 0]
    found = ranks_of(tmp_path)
    assert len(found.steps) == 3
    for each in found.ranks:
        assert sum(bar.nanoseconds for bar in each.waterfall) == each.profile.step.nanoseconds
        assert sum(sent.count for sent in each.profile.collectives if sent.collective == "all-reduce") == 1
    if delay_seconds:
        assert [each.rank for each in found.stragglers] == [1]
        assert found.ranks[1].last == found.ranks[1].compared == 3
        assert found.ranks[1].caused_ns > 3 * 0.9 * delay_seconds * 1e9
