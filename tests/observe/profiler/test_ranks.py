"""Several ranks of one program: who waits for whom, planted in a public trace and in two processes that really wait."""

import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from ports import free_ports
from trainledger.forecast.plan.plan import make_plan
from trainledger.ledger.ranks import account_run
from trainledger.observe.profiler.beside_forecast import beside
from trainledger.observe.profiler.causes import BUBBLE, STRAGGLERS
from trainledger.observe.profiler.ranks import Ranks, ranks_of
from trainledger.observe.profiler.step_time import COPY, EXPOSED
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.parts import with_fields
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run

TRACES = Path(__file__).parent / "traces"
LATE_US = 400.0


@cache
def public_trace() -> bytes:
    return gzip.decompress((TRACES / "mi300_resnet_checkpointed_ddp8.json.gz").read_bytes())


def written(
    folder: Path, rank: int, *, early_us: float = 0.0, without: str = "", ranks: int = 3, of: Sequence[int] = range(6)
) -> None:
    """A public trace of rank 0 as that of another rank, whose all-reduces (``of`` the six) begin so much earlier."""
    trace = json.loads(public_trace())
    trace["distributedInfo"] |= {"rank": rank, "world_size": ranks}
    sums = [each for each in trace["traceEvents"] if each["args"].get("Collective name") == "allreduce"]
    for at, each in enumerate(sorted(sums, key=lambda each: each["ts"])):
        each["args"]["Group size"] = ranks
        if at in of:
            each["ts"] -= early_us
            each["dur"] += early_us
    trace["traceEvents"] = [each for each in trace["traceEvents"] if not without or each["name"] != without]
    (folder / f"rank{rank}.json").write_text(json.dumps(trace))


@pytest.mark.long
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
        written(tmp_path, rank, ranks=2)
    found = ranks_of(tmp_path)
    assert found.stragglers == ()
    assert found.by_turns == ""
    assert [each.compared for each in found.ranks] == [6, 6]
    assert all(not any(each.waited_in_median_ns.values()) for each in found.ranks)


@pytest.mark.long
def test_ranks_that_are_late_by_turns_are_no_stragglers(tmp_path):
    written(tmp_path, 0, early_us=LATE_US, ranks=2, of=(2, 3, 4, 5))
    written(tmp_path, 1, early_us=LATE_US, ranks=2, of=(0, 1))
    found = ranks_of(tmp_path)
    assert [each.last for each in found.ranks] == [2, 4]
    assert found.stragglers == ()
    assert "by turns" in str(found)


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


def trained(folder: Path, way: str, delay_seconds: float = 0.0) -> Ranks:
    """Two processes that really train, read back."""
    (port,) = free_ports(1)
    words = [sys.executable, str(Path(__file__).parent / "two_ranks.py"), str(folder)]
    processes = [
        subprocess.Popen([*words, str(rank), str(port), way, str(delay_seconds)], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    said = [each.communicate()[1] for each in processes]
    assert [each.returncode for each in processes] == [0, 0], said
    found = ranks_of(folder)
    assert len(found.steps) == 3
    for each in found.ranks:
        assert sum(bar.nanoseconds for bar in each.waterfall) == each.profile.step.nanoseconds
    return found


@pytest.mark.process
def test_a_rank_that_is_held_back_is_named_and_no_other(tmp_path):
    found = trained(tmp_path, "ddp", delay_seconds=0.1)
    assert [each.rank for each in found.stragglers] == [1]
    assert found.ranks[1].last == found.ranks[1].compared == 3
    assert found.ranks[1].caused_ns > 3 * 0.5 * 0.1 * 1e9  # on a busy machine the other rank is late as well
    for each in found.ranks:
        assert sum(sent.count for sent in each.profile.collectives if sent.collective == "all-reduce") == 1


@pytest.mark.process
@pytest.mark.parametrize(("way", "axis"), [("ddp", "replicate"), ("fsdp", "shard")])
def test_what_two_ranks_send_is_what_their_account_sends(tmp_path, way, axis):
    from two_ranks import RECIPE, SPEC

    spread = with_fields(Layout(), {axis: 2})
    run = Run(model=SPEC, recipe=RECIPE, layout=spread, cluster=with_fields(Cluster(), {"count": 2}))
    found = beside(trained(tmp_path, way), make_plan(account_run(run, backend="cpu"), None))
    rows = {each.kind: each for each in found.operations if each.unit == "bytes"}
    assert all(each.equal for each in found.operations if each.unit == "FLOPs")
    if way == "ddp":
        assert rows["all-reduce"].equal
        assert rows["broadcast"].difference == "not in the account"  # DDP sends buffers again; our engine does not
        return
    assert rows["all-gather"].equal
    assert rows["reduce-scatter"].measured == 0  # gloo runs them as all-reduces of the same bytes
    assert rows["all-reduce"].measured_count == rows["reduce-scatter"].predicted_count
    assert rows["all-reduce"].measured == rows["reduce-scatter"].predicted
    assert any("gloo runs a reduce-scatter as an all-reduce" in each for each in found.notes)
