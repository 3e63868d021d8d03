import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainledger.forecast.predict.refit import ENOUGH_RATIOS, RunSample, factors_of, refit
from trainledger.spec.calibration import LEAST_FACTOR, MOST_FACTOR

KINDS = ("forward matmul", "backward matmul", "forward elementwise", "optimizer update")
# So near to each other that every kind takes more than the smallest share of a step.
seconds = st.floats(0.5, 2.0)
planted = st.fixed_dictionaries({kind: st.floats(0.3, 3.0) for kind in KINDS})
predictions = st.lists(st.fixed_dictionaries(dict.fromkeys(KINDS, seconds)), min_size=5, max_size=9)


def sample(name, predicted, factors, more=1.0):
    measured = {kind: more * each * factors[kind] for kind, each in predicted.items()}
    return RunSample(name=name, seconds=sum(measured.values()), measured=measured, predicted=predicted)


def samples_of(predicted, factors):
    return [sample(str(at), each, factors) for at, each in enumerate(predicted)]


@given(predictions, planted)
def test_planted_factors_are_found_again_and_left_out_runs_predicted(predicted, factors):
    runs = samples_of(predicted, factors)
    found = refit(runs, title="a machine", date="today")
    assert found.fit.factors == pytest.approx(factors)
    assert found.fit.error_after == pytest.approx(0, abs=1e-9)
    assert [each.after for each in found.rows] == pytest.approx([each.measured for each in found.rows])


@settings(max_examples=50)
@given(predictions, planted, st.floats(1e-3, 1e3))
def test_a_run_that_went_astray_does_not_move_the_factors(predicted, factors, astray):
    runs = samples_of(predicted, factors)
    moved = [sample("astray", predicted[0], factors, astray), *runs[1:]]
    for kind, factor in factors_of(moved).items():
        assert factor == pytest.approx(factors[kind], rel=1e-6)


def test_factors_stay_within_bounds():
    runs = [sample(str(at), {KINDS[0]: 1.0}, {KINDS[0]: 1000.0}) for at in range(3)]
    assert factors_of(runs) == {KINDS[0]: MOST_FACTOR}
    runs = [sample(str(at), {KINDS[0]: 1.0, KINDS[1]: 1.0}, {KINDS[0]: 0.01, KINDS[1]: 1.0}) for at in range(3)]
    assert factors_of(runs)[KINDS[0]] == LEAST_FACTOR


def test_what_was_seen_once_or_hardly_takes_time_has_no_factor():
    usual = {KINDS[0]: 1.0}
    runs = [sample(str(at), usual, {KINDS[0]: 1.5}) for at in range(ENOUGH_RATIOS)]
    once = sample("once", {**usual, KINDS[1]: 1.0}, {KINDS[0]: 1.5, KINDS[1]: 2.0})
    tiny = [
        sample(f"tiny {at}", {**usual, KINDS[2]: 1e-4}, {KINDS[0]: 1.5, KINDS[2]: 7.0}) for at in range(ENOUGH_RATIOS)
    ]
    assert factors_of([*runs, once, *tiny]) == {KINDS[0]: 1.5}


def test_each_row_is_predicted_by_the_others_alone():
    factors = [1.0, 1.0, 1.0, 5.0]
    runs = [sample(str(at), {KINDS[0]: 1.0}, {KINDS[0]: each}) for at, each in enumerate(factors)]
    found = refit(runs, title="a machine", date="today")
    assert [each.after for each in found.rows] == [1.0, 1.0, 1.0, 1.0]
    assert [each.before for each in found.rows] == [1.0] * 4
    assert found.fit.error_after == found.fit.error_before
    assert not found.better
