"""Memory over a step, beside the allocator's events as they stand in the file."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainledger.observe.profiler.profile import memory_of, profile_of
from trainledger.observe.profiler.read import read_profile
from trainledger.observe.profiler.steps import steps_of

TRACE = Path(__file__).parent / "traces" / "h100_qwen_forward.json.gz"


def test_the_peak_is_the_most_that_the_allocator_had_handed_out():
    events = json.loads(gzip.decompress(TRACE.read_bytes()))["traceEvents"]
    allocated = [each["args"]["Total Allocated"] for each in events if each["name"] == "[memory]"]
    found = profile_of(TRACE).memory
    assert len(allocated) == 2450
    assert found.peak_nbytes == max(allocated) == max(found.allocated_nbytes)
    assert set(found.reserved_nbytes) == {2_629_828_608}
    assert list(found.times_ns) == sorted(found.times_ns)
    assert len(found.times_ns) == 600


def test_without_its_events_there_is_none():
    recording = read_profile(TRACE)
    nothing = replace(recording, memory=recording.memory.where(np.zeros(len(recording.memory), dtype=bool)))
    assert memory_of(nothing, steps_of(nothing).steps[0]) is None


def test_a_matmuls_bytes_are_those_of_its_operands_and_its_result():
    by_shape = {each.shape: each for each in profile_of(TRACE).matmuls}
    m, k, n = 8944, 1024, 2816
    assert by_shape["8944 x 1024 x 2816"].intensity == 2 * m * k * n / (2 * (m * k + k * n + m * n))
    tokens, width = 559, 64
    attention = by_shape["16 x 16 heads, 559 x 559 x 64"]
    assert attention.intensity == 4 * tokens * tokens * width / (2 * 4 * tokens * width)
