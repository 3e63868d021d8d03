"""Two traces compared: differences of parts sum to that of the steps, kernels and matmuls by name."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from trainledger.observe.profiler.against import against
from trainledger.observe.profiler.profile import Profile, profile, profile_of
from trainledger.observe.profiler.read import read_profile

TRACES = Path(__file__).parent / "traces"
NAMES = sorted(each.name for each in TRACES.glob("*.json.gz"))


@cache
def of(name: str) -> Profile:
    return profile_of(TRACES / name)


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_like_itself(name):
    found = of(name)
    same = against(found, found)
    assert same.difference_ns == 0
    assert all(
        not each.difference_ns
        for each in (*same.changes.parts, *same.changes.kernels, *same.changes.matmuls, *same.changes.collectives)
    )
    assert same.notes == ()


@pytest.mark.parametrize("before", NAMES)
@pytest.mark.parametrize("after", NAMES)
def test_differences_of_parts_sum_to_that_of_the_steps(before, after):
    found = against(of(after), of(before))
    assert sum(each.difference_ns for each in found.changes.parts) == found.difference_ns
    assert sum(each.before_ns for each in found.changes.parts) == found.before.step.nanoseconds
    largest = [abs(each.difference_ns) for each in found.changes.kernels]
    assert largest == sorted(largest, reverse=True)
    data = json.loads(json.dumps(found.document().data()))
    assert data["difference_ns"] == found.difference_ns


def test_kernels_that_are_slower_and_gone_are_named():
    recording = read_profile(TRACES / "h100_qwen_forward.json.gz")
    work = recording.work
    name = recording.names[work.names[np.argmax(np.bincount(work.names)[work.names])]]
    gone = replace(recording, work=work.where(work.names != recording.names.index(name)))
    found = against(profile(gone, "fast"), profile(recording, "slow"))
    (kernel,) = (each for each in found.changes.kernels if each.name == name)
    assert kernel.after_count == 0
    assert kernel.before_count > 0
    assert "1 kernel is gone" in str(found)
    assert found.difference_ns == sum(each.difference_ns for each in found.changes.parts)
