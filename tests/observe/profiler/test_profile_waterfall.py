"""The bars of a step: they sum to it, have the planner's names, and split what they come from."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from trainledger.forecast.predict.forecast import BEYOND, IDEAL, RUN_CAUSES, UNEXPLAINED
from trainledger.forecast.predict.step import CAUSES
from trainledger.observe.profiler.causes import BUBBLE, COMPUTE, COUNTED, STRAGGLERS, measured_waterfall
from trainledger.observe.profiler.kinds import SENDS
from trainledger.observe.profiler.profile import Profile, profile, profile_of
from trainledger.observe.profiler.read import read_profile
from trainledger.observe.profiler.step_time import COPY, EXPOSED, HOST, OUTSIDE, QUEUED

TRACES = Path(__file__).parent / "traces"
ALL = sorted(each.name for each in TRACES.glob("*.json.gz"))
NAMES = {IDEAL, COMPUTE, *CAUSES, *RUN_CAUSES, UNEXPLAINED}


@cache
def of(name: str) -> Profile:
    return profile_of(TRACES / name)


@pytest.mark.parametrize("name", ALL)
def test_bars_sum_to_the_step_under_the_planners_names(name):
    found = of(name)
    assert sum(each.nanoseconds for each in found.waterfall) == found.step.nanoseconds
    assert {each.cause for each in found.waterfall} <= NAMES
    assert BEYOND not in {each.cause for each in found.waterfall}
    sent = [each for each in found.waterfall if each.cause == EXPOSED and each.detail != COPY]
    assert sum(each.nanoseconds for each in sent) == found.step.parts_ns[EXPOSED]


def test_the_first_bar_is_mfu_and_shapes_are_what_they_lose():
    found = of("h100_qwen_forward.json.gz")
    bars = {each.detail or each.cause: each.nanoseconds for each in found.waterfall}
    assert bars[IDEAL] == pytest.approx(found.mfu * found.step.nanoseconds, abs=2)
    for rate in found.matmuls[:3]:
        # A kernel begins a little before the one before it has ended, whose moment that is then.
        ideal = round(rate.at_peak_ns(found.peaks))
        moments = bars[f"{rate.shape} {rate.dtype}"] + ideal
        assert 0.95 * rate.nanoseconds < moments <= rate.nanoseconds


def test_without_shapes_matmuls_stand_whole():
    found = of("a100_ddp_2ranks.json.gz")
    (bar,) = (each for each in found.waterfall if each.cause == COMPUTE and each.detail == "convolution")
    assert bar.nanoseconds == found.step.parts_ns["convolution"]
    assert max(found.waterfall, key=lambda each: each.nanoseconds).detail == HOST


def test_model_flops_of_an_account_take_the_place_of_counted_ones():
    found = of("h100_qwen_forward.json.gz")
    ideal = sum(round(each.model_at_peak_ns(found.peaks)) for each in found.matmuls)
    bars = measured_waterfall(
        found.step, found.split, found.matmuls, found.peaks, model_at_peak_ns=ideal - 1000.0, pipeline=False
    )
    assert {each.cause: each.nanoseconds for each in bars}[IDEAL] == ideal - 1000
    assert {each.detail: each.nanoseconds for each in bars}[COUNTED] == 1000
    assert sum(each.nanoseconds for each in bars) == found.step.nanoseconds


def test_sends_and_waiting_are_a_bubble_where_there_are_stages():
    found = of("mi300_resnet_checkpointed_ddp8.json.gz")
    sends = replace(found.split, collectives={SENDS: found.step.parts_ns[EXPOSED]})
    step = replace(found.step, parts_ns={**found.step.parts_ns, QUEUED: 7, OUTSIDE: -7})
    for pipeline, cause in ((None, BUBBLE), (True, BUBBLE), (False, EXPOSED)):
        bars = measured_waterfall(step, sends, found.matmuls, found.peaks, pipeline=pipeline)
        assert next(each for each in bars if each.detail == SENDS).cause == cause
        assert next(each for each in bars if each.detail == QUEUED).cause == (
            UNEXPLAINED if pipeline is False else BUBBLE
        )
        assert sum(each.nanoseconds for each in bars) == step.nanoseconds


def test_waiting_for_the_slowest_rank_is_taken_from_communication():
    found = of("mi300_resnet_checkpointed_ddp8.json.gz")
    bars = measured_waterfall(
        found.step, found.split, found.matmuls, found.peaks, waiting_for_others_ns={"all-reduce": 5000}
    )
    assert sum(each.nanoseconds for each in bars) == found.step.nanoseconds
    assert next(each for each in bars if each.cause == STRAGGLERS).nanoseconds == 5000
    exposed = sum(each.nanoseconds for each in bars if each.cause == EXPOSED and each.detail != COPY)
    assert exposed == found.step.parts_ns[EXPOSED] - 5000


@pytest.mark.parametrize(("name", "part"), [("evaluate", "evaluation"), ("save_checkpoint", "checkpoints")])
@pytest.mark.parametrize("trace", ["mi300_resnet_checkpointed_ddp8.json.gz", "h100_qwen_forward.json.gz"])
def test_what_runs_in_an_annotation_that_evaluates_or_saves_is_that(trace, name, part):
    recording = read_profile(TRACES / trace)
    before = profile(recording)
    marks = [each for each, text in enumerate(recording.names) if text.startswith("ProfilerStep#")]
    at = next(each for each in range(len(recording.annotations)) if recording.annotations.names[each] in marks)
    begin, end = (int(getattr(recording.annotations, which)[at]) for which in ("begins_ns", "ends_ns"))
    spans = recording.annotations
    rows = {each: getattr(spans, each).tolist() for each in spans.__dataclass_fields__}
    for column, value in zip(
        rows.values(), (begin + 1, end - 1, len(recording.names), rows["lanes"][at], -1, -1, -1, 0), strict=True
    ):
        column.insert(at + 1, value)
    arrays = {each: np.array(column, dtype=np.int64) for each, column in rows.items()}
    found = profile(replace(recording, names=(*recording.names, name), annotations=replace(spans, **arrays)))
    (step,) = (each for each in found.steps if each.step.name == found.steps[0].step.name)
    assert step.parts_ns[part] > 0.9 * step.nanoseconds
    assert before.steps[0].parts_ns[part] == 0
    assert sum(step.parts_ns.values()) == step.nanoseconds
