"""A step that somebody measured beside the forecast: the MFU and the seconds are one measurement, and parts sum."""

import json
import math

import pytest

import trainledger as tl
from trainledger.answers.advise import page
from trainledger.report.terminal import text

RUN = {"model": {"preset": "gpt2"}, "cluster": {"device": "h100-sxm"}, "recipe": {
    "seq_len": 1024, "global_batch": 32, "micro_batch": 32, "steps": 100, "precision": "bf16-mixed"}}  # fmt: skip


@pytest.fixture(scope="module")
def forecast():
    return tl.plan(RUN).forecast


@pytest.mark.parametrize(
    ("end", "factor", "place"), [("low", 0.9, "below"), ("low", 1.1, "within"), ("high", 2, "above")]
)
def test_causes_and_the_rest_are_the_measured_step(forecast, end, factor, place):
    times = factor * getattr(forecast.intervals["step_seconds"], end) / forecast.step_seconds
    advice = tl.advise(RUN, mfu=forecast.mfu / times, together=0)
    assert advice.measured_seconds == pytest.approx(forecast.step_seconds * times)
    said = json.loads(json.dumps(page(advice).data()))["measured"]
    assert said["mfu"] == pytest.approx(forecast.mfu / times)
    assert sum(said["causes"].values()) + said["unexplained_seconds"] == pytest.approx(said["step_seconds"])
    assert (said["place"], said["ratio"]) == (place, pytest.approx(times))
    short = text(page(advice))
    assert len(short.splitlines()) <= 35
    assert f"{times:.3g} times the forecast, {place} the interval" in " ".join(short.split())
    assert ("; unexplained: " in short) is (times > 1)
    assert ("reconcile --trace" in " ".join(short.split())) is (place == "above")


def test_seconds_and_mfu_are_the_same_measurement(forecast):
    by_share, by_time = tl.advise(RUN, mfu="20%", together=0), tl.advise(RUN, step_seconds=0.5, together=0)
    assert by_share.measured_seconds == pytest.approx(forecast.step_seconds * forecast.mfu / 0.2)
    assert page(by_time).data()["measured"]["mfu"] == pytest.approx(forecast.mfu * forecast.step_seconds / 0.5)
    assert by_share.alone == tl.advise(RUN, together=0).alone
    assert "measured" not in page(tl.advise(RUN, together=0)).data()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"mfu": "0%"}, "mfu = 0.0: must be larger than 0"),
        ({"mfu": "22"}, "mfu = '22': must be between 0 and 1; nearest that works: 22%"),
        ({"mfu": "22%", "step_seconds": "1s"}, "is given beside mfu"),
        ({"step_seconds": "1us"}, "would be an MFU of"),
        ({"step_seconds": "0s"}, "must be larger than 0"),
    ],
)
def test_what_cannot_be_a_measurement_is_refused(given, why):
    with pytest.raises(tl.InvalidInput, match=why):
        tl.advise(RUN, together=0, **given)


def test_a_peak_that_is_not_known_takes_the_time_of_a_step():
    unknown = {**RUN, "cluster": {"device": "this-machine"}}
    with pytest.raises(tl.InvalidInput, match="no predicted step"):
        tl.advise(unknown, mfu="20%", together=0)


def test_what_may_have_been_otherwise_is_predicted_and_reproduced_by_its_override():
    cluster = {"device": "a100-sxm-80gb", "count": 16}
    run = {**RUN, "cluster": cluster, "layout": {"shard": 16}, "recipe": {**RUN["recipe"], "global_batch": 512}}
    planned = tl.plan(run).forecast
    assert planned.mfu is not None
    advice = tl.advise(run, mfu=planned.mfu / 3, together=0)
    alone = [one for one in advice.hypotheses if not one.solved]
    assert {"recipe.precision=tf32", "recipe.micro_batch=1"} <= {one.override for one in alone}
    off = [abs(math.log(one.seconds / advice.measured_seconds)) for one in alone]
    assert off == sorted(off)
    for one in advice.hypotheses:
        changed = tl.plan(tl.load(run, [one.override])).forecast
        assert (changed.run_step_seconds if one.solved else changed.step_seconds) == pytest.approx(
            one.seconds, rel=0.01
        )
        assert not one.solved or one.seconds == pytest.approx(advice.measured_seconds, rel=0.1)
    assert len([one for one in advice.hypotheses if one.solved]) == 2  # network and loaders
    short = text(page(advice))
    assert len(short.splitlines()) <= 35
    assert "--set cluster.loader_tokens_per_second=" in short
    assert not tl.advise(run, mfu=planned.mfu, together=0).hypotheses
