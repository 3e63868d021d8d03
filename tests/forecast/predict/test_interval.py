"""Intervals and chances: Student's t against its printed table, what widens an interval, and what a forecast has."""

from dataclasses import replace
from math import log

import pytest

import trainledger as tl
from trainledger import catalog
from trainledger.forecast.plan.plan import by_causal
from trainledger.forecast.predict.interval import (
    AT_THE_PEAK,
    OF_STEPS,
    SURE,
    Interval,
    chance_of_fitting,
    kept_free,
    kinds_of,
    margin,
    of_memory,
    of_ratio,
    of_step,
    peaks_like,
    steps_like,
    student_quantile,
    student_share,
    unlike,
)
from trainledger.report.terminal import text
from trainledger.spec.device import ErrorModel
from trainledger.spec.run import Run

ERRORS = catalog.errors("h100-sxm")


def run_on(device: str, count: int = 8, model: str = "llama-3-8b", **recipe: object) -> Run:
    fields = {"seq_len": 4096, "global_batch": 64, "micro_batch": 1, "precision": "bf16-sharded", "tokens": 10**9}
    return tl.load(
        {
            "model": {"preset": model},
            "recipe": fields | recipe,
            "layout": {"shard": count},
            "cluster": {"device": device, "count": count, "price_per_device_hour": 2.0},
        }
    )


# Abramowitz and Stegun 1964, table 26.10, and any table of Student's t.
@pytest.mark.parametrize(
    ("degrees", "of_90", "of_95", "of_99"),
    [(1, 3.078, 6.314, 31.821), (2, 1.886, 2.920, 6.965), (5, 1.476, 2.015, 3.365), (30, 1.310, 1.697, 2.457)],
)
def test_students_t_is_that_of_the_tables(degrees: int, of_90: float, of_95: float, of_99: float) -> None:
    for share, printed in ((0.9, of_90), (0.95, of_95), (0.99, of_99)):
        assert student_quantile(share, degrees) == pytest.approx(printed, abs=6e-4)
        assert student_quantile(1 - share, degrees) == pytest.approx(-printed, abs=6e-4)
        assert student_share(student_quantile(share, degrees), degrees) == pytest.approx(share, abs=1e-9)


def test_with_the_margin_free_the_chance_of_fitting_is_95_percent() -> None:
    run, needed = run_on("h100-sxm"), 40e9
    assert chance_of_fitting(run, ERRORS, needed, needed + margin(run, ERRORS, needed)) == pytest.approx(SURE, abs=1e-6)
    chances = [chance_of_fitting(run, ERRORS, needed, usable * 1e9) for usable in (10, 30, 40, 60, 200)]
    assert chances == sorted(chances)
    assert chances[0] < 0.01
    assert chances[-1] > 0.99


def of_long_step(run: Run, errors: ErrorModel) -> Interval:
    return of_step(run, errors, 10.0)


def test_a_run_unlike_all_published_ones_has_wider_intervals() -> None:
    seen, dense, slow = ERRORS.steps_seen, run_on("h100-sxm"), run_on("h100-sxm", precision="fp32")
    assert unlike(dense, seen) == ()
    assert unlike(slow, seen) == ("fp32 matmuls",)
    assert kinds_of(run_on("h100-sxm", model="mixtral-8x7b")) == ("experts", "sharded parameters")
    many = run_on("h100-sxm", 2 * seen.most_devices, global_batch=2 * seen.most_devices)
    assert unlike(many, seen) == (f"{2 * seen.most_devices:,} devices",)
    for of in (of_long_step, of_memory):
        usual, wider = of(dense, ERRORS), of(slow, ERRORS)
        assert log(wider.high / wider.low) == pytest.approx(ERRORS.widening * log(usual.high / usual.low))
        assert wider.low < usual.low < usual.high < wider.high


def test_what_is_known_of_a_device_sets_the_interval_of_its_steps() -> None:
    own, other, bound = (catalog.errors(name).step for name in ("a100-sxm-80gb", "mi300x", "l4"))
    assert [each.basis for each in (own, other, bound)] == ["own", "other", "bound"]
    for mine, others, sheets in zip(own.classes, other.classes, bound.classes, strict=True):
        assert mine.high / mine.low < others.high / others.low
        if not (mine.short or mine.experts):
            assert sheets.low > 1  # no run is faster than its data sheet


def test_intervals_follow_the_length_of_a_step_and_its_experts() -> None:
    dense, experts = run_on("h100-sxm"), run_on("h100-sxm", model="mixtral-8x7b")
    widths = [
        log(found.high / found.low)
        for found in (of_step(dense, ERRORS, 1.0), of_step(dense, ERRORS, 0.99), of_step(experts, ERRORS, 1.0))
    ]
    assert widths[0] < min(widths[1:])
    for run in (dense, experts, run_on("h100-sxm", 1), run_on("h100-sxm", 2048, global_batch=2048)):
        steps, peaks = steps_like(run, ERRORS, 2.0), peaks_like(run, ERRORS)
        assert steps.devices >= run.layout.devices <= peaks.devices
        assert (steps.short, steps.experts, peaks.adapters) == (False, run is experts, False)


def test_a_forecast_has_an_interval_with_each_quantity_that_has_one() -> None:
    forecast = tl.plan(run_on("h100-sxm")).forecast
    step = of_step(run_on("h100-sxm"), ERRORS, forecast.step_seconds or 0)
    for name in OF_STEPS:
        value, found = getattr(forecast, name), forecast.intervals[name]
        assert (found.low, found.high) == pytest.approx((step.low * value, step.high * value))
    memory = of_memory(run_on("h100-sxm"), ERRORS)
    assert forecast.intervals["device_nbytes"].low == pytest.approx(memory.low * (forecast.device_nbytes or 0))
    assert forecast.chance_of_fitting is not None
    assert 0 < forecast.chance_of_fitting < 1


def test_a_bound_on_memory_has_no_interval_and_no_chance() -> None:
    forecast = tl.plan(run_on("mi300x")).forecast
    assert "device_nbytes" not in forecast.intervals
    assert forecast.chance_of_fitting is None
    assert forecast.intervals["step_seconds"].high > (forecast.step_seconds or 0)


@pytest.mark.parametrize(
    ("device", "model", "more"),
    [
        ("rtx-4090", "llama-3.1-8b", ["recipe.lora.rank=16", "recipe.lora.base_format=nf4"]),
        ("rtx-3090", "llama-3-8b", ["recipe.lora.rank=16", "recipe.tokens=10M"]),
        ("h100-sxm", "mixtral-8x7b", ["recipe.seq_len=4096"]),
        ("l40s", "mixtral-8x7b", []),
        ("a100-sxm-80gb", "llama-3-8b", []),
        ("l4", "llama-3-8b", []),
    ],
)
def test_no_interval_begins_below_what_the_data_sheet_allows(device: str, model: str, more: list[str]) -> None:
    plan = tl.plan(model, [f"cluster.device={device}", *more])
    forecast, causal = plan.forecast, by_causal(plan)
    assert forecast.step_seconds is not None
    assert causal is not None
    found = forecast.intervals["step_seconds"]
    at_the_peak = causal.hfu * forecast.step_seconds
    if forecast.basis["step_seconds"] != "bound":
        assert found.low <= forecast.step_seconds < found.high
    assert found.low >= at_the_peak
    for name in OF_STEPS:
        if value := getattr(forecast, name):
            assert forecast.intervals[name].low == pytest.approx(found.low * value / forecast.step_seconds)
    clipped = AT_THE_PEAK in forecast.notes
    usual = of_step(plan.run, catalog.errors(device), forecast.step_seconds)
    assert clipped == (usual.low * forecast.step_seconds < 0.9999 * found.low)
    assert clipped == (device not in ("a100-sxm-80gb", "l4"))


@pytest.mark.parametrize("batch", [1, 512])
def test_no_step_is_quicker_than_by_the_data_sheet_alone(batch: int) -> None:
    forecast = tl.plan("gpt2", ["cluster.device=rtx-5090", f"recipe.global_batch={batch}"]).forecast
    assert forecast.basis["step_seconds"] == "bound"
    assert (forecast.step_seconds < 1) == (AT_THE_PEAK in forecast.notes) == (batch == 1)
    assert forecast.intervals["step_seconds"].low >= forecast.step_seconds


def test_one_step_has_no_interval_of_a_run() -> None:
    forecast = tl.plan(
        "llama-3-8b", ["cluster.device=h100-sxm", "cluster.count=8", "layout.shard=8", "recipe.global_batch=8"]
    ).forecast
    assert forecast.total_seconds is None
    assert set(forecast.intervals) == {"step_seconds", "device_nbytes"}


def test_two_runs_on_one_device_are_distinguished_better_than_by_their_own_intervals() -> None:
    steps = steps_like(run_on("h100-sxm"), ERRORS, 0.5)
    assert ERRORS.one_device.ratio**2 < steps.high / steps.low
    assert ERRORS.one_device.ratio < ERRORS.two_devices.ratio
    quick, slow = run_on("h100-sxm"), run_on("h100-sxm", activation_checkpointing="full")
    found = tl.compare(quick, slow).ratio
    assert found is not None
    assert found.one_device
    assert found.interval == of_ratio(ERRORS.one_device, found.predicted)
    far = tl.compare(quick, replace(quick, recipe=replace(quick.recipe, global_batch=640))).ratio
    assert far is None or far.pairs == ERRORS.one_device
    assert tl.compare(run_on("h100-sxm"), run_on("l4")).ratio is None  # a bound
    other = tl.compare(run_on("h100-sxm"), run_on("a100-sxm-80gb")).ratio
    assert other is not None
    assert other.pairs == ERRORS.two_devices
    assert other.decided


def test_what_fits_beside_the_even_margin_fits_as_likely_as_not() -> None:
    run, device = run_on("h100-sxm"), catalog.device("h100-sxm")
    assert device.capacity_nbytes == device.usable_nbytes is not None
    kept = kept_free(run, device)
    left = device.keeping_free(kept)
    assert left.capacity_nbytes == device.usable_nbytes - kept
    assert chance_of_fitting(run, ERRORS, left.capacity_nbytes, device.usable_nbytes) == pytest.approx(0.5, abs=1e-6)
    assert kept_free(run, replace(device, errors=None)) == 0
    assert kept_free(run, replace(device, memory_nbytes=None, usable_nbytes=None)) == 0
    other = replace(device, compute_capability=None)  # of which nothing outside the tensors is known
    assert kept_free(run, other) - kept == pytest.approx(0.05 * (device.usable_nbytes - kept), abs=2)


def test_an_interval_above_its_prediction_is_explained() -> None:
    above = "above its prediction: half of the published peaks with adapters are at least 1.18 times the predicted"
    tuned = tl.plan("gpt2", {"cluster.device": "h100-sxm", "recipe.lora.rank": 8})
    interval, counted = tuned.forecast.intervals["device_nbytes"], tuned.forecast.device_nbytes or 0
    assert interval.low * interval.high > counted**2
    assert above in " ".join(text(tuned.document(), full=True).split())
    plain = tl.plan("gpt2", {"cluster.device": "h100-sxm"})
    assert "above its prediction" not in text(plain.document(), full=True)
