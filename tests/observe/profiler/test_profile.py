"""Public traces beside what another analyser says of them, and faults of files."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainledger.observe.profiler.kinds import RECOMPUTATION
from trainledger.observe.profiler.profile import profile, profile_of
from trainledger.observe.profiler.read import read_profile
from trainledger.observe.profiler.recording import Spans
from trainledger.observe.profiler.step_time import EXPOSED, HOST
from trainledger.spec.problem import InvalidInput

TRACES = Path(__file__).parent / "traces"
ALL = sorted(each.name.removesuffix(".json.gz") for each in TRACES.glob("*.json.gz"))


def path(name: str) -> Path:
    return TRACES / f"{name}.json.gz"


@pytest.mark.parametrize("name", ALL)
def test_parts_sum_to_each_step(name):
    for step in profile_of(path(name)).steps:
        assert sum(step.parts_ns.values()) == step.nanoseconds
        assert min(step.parts_ns.values()) >= 0


def test_a_forward_takes_what_another_analyser_says():
    """TraceLens 171dd74, gpu_timeline.csv: total 34.892, busy 31.905 ms; its README: matmuls at 610 TFLOP/s."""
    found = profile_of(path("h100_qwen_forward"))
    assert found.step.nanoseconds / 1e6 == pytest.approx(34.8924189453125, abs=1e-3)
    assert found.step.busy_ns / 1e6 == pytest.approx(31.905483154296874, abs=1e-3)
    assert found.step.communication_ns == 0
    by_shape = {each.shape: each for each in found.matmuls}
    assert by_shape["8944 x 1024 x 2816"].flops_per_second == pytest.approx(610e12, rel=0.01)
    assert by_shape["8944 x 2816 x 1024"].flops_per_second == pytest.approx(675e12, rel=0.01)
    # 24 layers of Qwen1.5-0.5B: four matmuls of d_model, three of d_ff, and attention counted dense.
    layer = 8944 * 1024 * (4 * 1024 + 3 * 2816) * 2 + 4 * 16 * 16 * 559 * 559 * 64
    assert sum(each.flops for each in found.matmuls if each.dtype == "bf16") == 24 * layer
    assert found.hfu == pytest.approx(24 * layer / found.step.nanoseconds * 1e9 / 989.5e12, rel=1e-3)


def test_a_checkpointed_step_over_ranks_takes_what_another_analyser_says():
    """TraceLens 171dd74, gpu_timeline.csv: in all 56.518 ms, computation 15.112 and, run again, 4.122; collectives run
    for 47.200 ms."""
    found = profile_of(path("mi300_resnet_checkpointed_ddp8"))
    assert sum(each.nanoseconds for each in found.steps) / 1e6 == pytest.approx(56.51760302734375, rel=1e-4)
    assert sum(each.communication_ns for each in found.steps) / 1e6 == pytest.approx(47.2003100585937, rel=1e-3)
    again = sum(each.parts_ns[RECOMPUTATION] for each in found.steps)
    assert again / 1e6 == pytest.approx(4.12223779296875, rel=0.01)
    assert 0 < found.model_flops < found.flops
    computing = sum(each.busy_ns - each.parts_ns[EXPOSED] - each.parts_ns["copies"] for each in found.steps)
    assert computing / 1e6 == pytest.approx(15.11189404296875 + 4.12223779296875, rel=0.01)
    assert [(each.collective, each.elements_in, each.ranks) for each in found.collectives[:2]] == [
        ("all-reduce", 8816192, 8), ("all-reduce", 2873320, 8),
    ]  # fmt: skip


def test_a_host_that_is_late_is_named():
    found = profile_of(path("a100_ddp_2ranks"))
    assert max(found.step.parts_ns, key=lambda each: found.step.parts_ns[each]) == HOST
    assert {each.elements_in for each in found.collectives} >= {6637568}
    assert found.flops == 0
    assert found.hfu is None
    assert any("Shapes were not recorded" in each for each in found.doubts)


@pytest.mark.parametrize(
    ("name", "first", "says"),
    [
        ("a100_ddp_2ranks", "host too late", "the next of 900 launches"),
        ("h100_qwen_forward", "memory-bound kernels", "torch.compile or fused kernels"),
        ("mi300_resnet_checkpointed_ddp8", "exposed communication", "25.1 % of communication lie beside computation"),
    ],
)
def test_the_gravest_cause_comes_first_and_says_what_changes_it(name, first, says):
    found = profile_of(path(name))
    assert found.causes[0].name == first
    assert says in found.causes[0].sentence
    at_stake = [each.nanoseconds for each in found.causes]
    assert at_stake == sorted(at_stake, reverse=True)
    assert first in str(found)
    assert all(each.code in str(found) for each in found.causes[:4])
    assert {each.name for each in found.causes if not each.code} <= {"exposed communication", "matmuls below the peak"}


def test_matmuls_far_below_the_peak_are_named_with_their_shapes():
    (cause,) = (each for each in profile_of(path("h100_qwen_forward")).causes if each.name.startswith("matmuls"))
    assert "16 x 16 heads, 559 x 559 x 64 in bf16 reaches 18.2 %" in cause.sentence


@pytest.mark.parametrize("name", ["a100_ddp_2ranks", "mi300_resnet_checkpointed_ddp8"])
def test_steps_are_found_without_marks(name):
    recording = read_profile(path(name))
    marked = profile(recording)
    for kept in ("Optimizer.step", None):
        annotations = recording.annotations
        names = [number for number, each in enumerate(recording.names) if kept and each.startswith(kept)]
        bare = profile(replace(recording, annotations=annotations.where(np.isin(annotations.names, names))))
        assert bare.found_by != marked.found_by
        assert len(bare.steps) == len(marked.steps) - 1
        # The first of the unmarked steps is between two updates or occurrences: one whole step.
        assert bare.steps[0].nanoseconds == pytest.approx(marked.steps[0].nanoseconds, rel=0.02)


def test_layers_are_no_steps():
    recording = read_profile(path("h100_qwen_forward"))
    nothing = recording.annotations.where(slice(0, 0))
    assert isinstance(nothing, Spans)
    assert len(profile(replace(recording, annotations=nothing)).steps) == 1


def test_a_file_that_breaks_off_says_so_and_gives_what_it_has(tmp_path):
    text = gzip.decompress(path("a100_ddp_2ranks").read_bytes())
    (tmp_path / "cut.json").write_bytes(text[: len(text) * 2 // 3])
    (tmp_path / "cut.json.gz").write_bytes(path("a100_ddp_2ranks").read_bytes()[:200_000])
    for name in ("cut.json", "cut.json.gz"):
        found = profile_of(tmp_path / name)
        assert found.doubts[0].startswith("The file breaks off")
        assert str(found).split("\n\n")[0].count("The file breaks off") == str(found).count("The file breaks off") == 1
        assert len(found.steps) >= 1


def test_events_that_cannot_be_are_counted_and_left_out(tmp_path):
    good = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.5, "dur": 2}
    bad = [
        {**good, "ts": "now"}, {**good, "dur": -1}, {**good, "dur": 1e300}, {**good, "name": None},
        {**good, "ts": 1e400}, {key: each for key, each in good.items() if key != "ts"},
    ]  # fmt: skip
    odd = [7, None, "text", [], {"ph": "i"}, {**good, "args": 3}, {**good, "tid": [1]}]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [good, *bad, *odd]}))
    found = read_profile(tmp_path / "trace.json")
    assert found.malformed == len(bad)
    assert len(found.operators) == 3


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (b"", "is no Chrome trace"), (b"PK\x03\x04", "is no Chrome trace"), (b"\x1f\x8bxxxx", "is no Chrome trace"),
        (b"{}", "has no event with a beginning and an end"), (b'{"traceEvents": 3}', "has no event"),
        (b'{"traceEvents": [{"ph": "M"}]}', "has no event"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_in_a_sentence(tmp_path, text, rule):
    (tmp_path / "trace.json").write_bytes(text)
    with pytest.raises(InvalidInput, match=rule):
        profile_of(tmp_path / "trace.json")


def test_a_file_that_is_not_there_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        profile_of(tmp_path / "trace.json")
    with pytest.raises(InvalidInput, match="cannot be read: Is a directory"):
        profile_of(tmp_path)


def test_what_metadata_say_is_nowhere(tmp_path):
    trace = json.loads(gzip.decompress(path("h100_qwen_forward").read_bytes()))
    trace |= {"metadata": {"env": "TOKEN=hunter2"}, "hostname": "hunter2", "traceName": "/home/hunter2"}
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    found = profile_of(tmp_path / "trace.json")
    assert "hunter2" not in str(found)
    assert "hunter2" not in json.dumps(found.document().data())
