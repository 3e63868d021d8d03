"""What a budget is best spent on: budgets, choices off the optimum, serving, repeated data, and their sentences."""

from __future__ import annotations

from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainledger as tl
from trainledger.answers.pages.optimal import page
from trainledger.forecast.plan.optimal import off_optimum, optimal, repeat, serve
from trainledger.forecast.plan.quantity import read_budget
from trainledger.forecast.plan.scaling_law import LossLaw, laws

LAWS = laws()
REFIT, PUBLISHED, REPEATED = LAWS["besiroglu"], LAWS["chinchilla-3"], LAWS["muennighoff"]
assert isinstance(REFIT, LossLaw)
assert isinstance(PUBLISHED, LossLaw)
assert isinstance(REPEATED, LossLaw)


def test_32_devices_for_two_weeks():
    """Row fit_32h100_2w of the worked examples: 12.63e9 parameters on 252.7e9 tokens."""
    for given_as in ({"count": 32, "days": "2w"}, {"device_hours": 32 * 14 * 24}, {"money": 26880, "price": 2.5}):
        best = tl.optimal(device="h100-sxm", family=None, **given_as)
        assert isclose(best.parameters, 12.63e9, rel_tol=1e-3)
        assert isclose(best.tokens, 252.7e9, rel_tol=1e-3)
        assert best.affordable is None


def test_money_and_hours_are_written_as_on_a_bill():
    budget = read_budget(device="h100-sxm", money=1_000_000, price=2)
    assert budget.formula.startswith("C = 1,000,000 / 2 = 500,000 device-hours x 989.5 TFLOP/s")
    assert "C = 30,840,000 device-hours" in read_budget(device="h100-sxm", device_hours=30.84e6).formula
    assert "C = 30,840,000 device-hours" in read_budget(device="h100-sxm", device_hours="30.84M").formula
    assert "C = 0.5 device-hours" in read_budget(device="h100-sxm", device_hours=0.5).formula


@given(st.floats(1e18, 1e28))
def test_flops_are_flops_however_they_are_said(flops):
    budget = read_budget(flops=flops, device="a100-sxm-80gb", mfu=0.4)
    assert budget.device_hours is not None
    again = read_budget(device_hours=budget.device_hours, device="a100-sxm-80gb", mfu=0.4)
    assert isclose(again.flops, flops, rel_tol=1e-12)


@given(exponent=st.floats(19, 26), ratio=st.floats(1, 5000))
def test_off_the_optimum_costs_more(exponent, ratio):
    flops = 10**exponent
    found = off_optimum(REFIT, flops, (flops / (6 * ratio)) ** 0.5)
    assert found.penalty >= 0
    assert 0 < found.same_loss_flops <= flops
    assert isclose(found.overhead, flops / found.same_loss_flops - 1)
    best = REFIT.parameters(found.same_loss_flops).value
    assert isclose(REFIT.loss(best, found.same_loss_flops / (6 * best)), found.loss, rel_tol=1e-7)


def budget_whose_best_is(law, parameters):
    low, high = 1e15, 1e32
    for _ in range(200):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if law.parameters(middle).value < parameters else (low, middle)
    return low


@pytest.mark.parametrize(
    ("reference", "served", "parameters", "saved"),
    # Sardana et al. 2023 (arXiv 2401.00448): figure 1 and the text, by the coefficients of approach 3.
    [(13e9, 2e12, 7e9, 0.17), (30e9, 1e13, 13.6e9, 0.28)],
)
def test_the_examples_of_the_paper_on_serving(reference, served, parameters, saved):
    found = serve(PUBLISHED, reference, served, budget_whose_best_is(PUBLISHED, reference))
    assert isclose(found.parameters, parameters, rel_tol=0.06)
    assert abs(found.saved - saved) < 0.02


@given(exponent=st.floats(20, 26), served=st.floats(1e9, 1e15))
def test_serving_makes_models_smaller_and_never_dearer(exponent, served):
    flops = 10**exponent
    best = REFIT.parameters(flops).value
    found = serve(REFIT, best, served, flops)
    assert found.parameters <= best * 1.0001
    assert found.training_flops >= flops * 0.9999
    assert found.saved >= -1e-9
    assert isclose(REFIT.loss(found.parameters, found.tokens), REFIT.loss(best, flops / (6 * best)), rel_tol=1e-9)
    for other in (0.97, 1.03):  # a neighbour with the same loss costs no less
        tokens = REFIT.tokens_at_loss(found.parameters * other, REFIT.loss(best, flops / (6 * best)))
        assert 6 * found.parameters * other * tokens + 2 * found.parameters * other * served >= found.total_flops * (
            1 - 1e-9
        )


def test_repeated_data_make_models_smaller():
    """Muennighoff et al. 2023, section 5: 27 % fewer parameters at 9.3e21 FLOP and 25B unique tokens."""
    found = repeat(REPEATED, 9.3e21, 25e9)
    assert 0.65 < found.parameters / found.unconstrained_parameters < 0.85
    assert found.epochs > 4
    assert found.loss <= found.loss_of_it
    enough = repeat(REPEATED, 1e21, 1e13)
    assert isclose(enough.parameters, enough.unconstrained_parameters, rel_tol=1e-4)
    assert enough.epochs < 1


@pytest.mark.parametrize(
    ("given_as", "sentence"),
    [
        ({}, "budget: is given in exactly one way: flops, device_hours, days (with count), or money (with price)"),
        ({"flops": 1e20, "days": 3, "count": 2, "device": "l4"}, "given: flops, days"),
        ({"days": 3, "device": "l4"}, "count: is missing: days are a budget together with how many devices"),
        ({"money": 100, "device": "l4"}, "price: is missing"),
        ({"device_hours": 5}, "device: is missing: hours and money buy FLOPs on a device"),
        ({"device_hours": 5, "device": "h101"}, "device = 'h101': is not in the catalog"),
        ({"flops": -1}, "flops = -1: must be between 1 and 1e29; nearest that works: 1"),
        ({"flops": "many"}, "flops = 'many': is not a count"),
        ({"flops": "1e300"}, "flops = '1e300': must be between 1 and 1e29; nearest that works: 1e29"),
        ({"flops": "1e400"}, "flops = '1e400': is too large for any quantity"),
        ({"flops": float("nan")}, "flops = nan: must be a finite number"),
        ({"flops": 1e22, "mfu": 40}, "mfu = 40: is a share of the peak, above 0 and at most 1; nearest"),
        ({"flops": 1e22, "inference": -2}, "inference = -2: must be at least 1; nearest that works: 1"),
        ({"flops": 1e22, "unique": 0.5}, "unique = 0.5: must be a whole number"),
        ({"flops": 1e22, "law": "chinchila-3"}, "law = 'chinchila-3': must be one of rule-20, chinchilla-1"),
        ({"flops": 1e22, "loss_law": "kaplan"}, "loss_law = 'kaplan': must be a law that predicts a loss"),
        ({"flops": 1e22, "params": "8B", "ratio": 20}, "give one of them"),
        ({"flops": 1e22, "family": "lama-3-8b"}, "family = 'lama-3-8b': is not in the catalog; nearest that"),
        ({"flops": 1e22, "device": "v100-pcie", "dtype": "bf16"}, "dtype = 'bf16': v100-pcie has no known peak for it"),
        ({"flops": 1e22, "seq_len": "long"}, "seq_len = 'long': is not a length"),
    ],
)  # fmt: skip
def test_nonsense_is_a_sentence(given_as, sentence):
    with pytest.raises(tl.InvalidInput) as raised:
        tl.optimal(**given_as)
    assert sentence in str(raised.value)


def test_every_choice_spends_the_budget_and_names_its_source():
    answer = optimal(read_budget(flops="6e23"), unique_tokens=1e12, inference_tokens=1e12, parameters=8e9)
    forecast = page(answer).data()
    for choice in forecast["choices"]:
        assert isclose(6 * choice["parameters"]["value"] * choice["tokens"], 6e23, rel_tol=1e-9)
        assert choice["source"]
        assert choice["date"]
    assert forecast["asked"]["parameters"] == 8e9
    assert forecast["repeated"]["law"] == "muennighoff"
    assert set(forecast) >= {"budget", "choices", "off_optimum", "served", "repeated", "affordable"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"flops": "1e30"}, "flops = '1e30': must be between 1 and 1e29; nearest that works: 1e29"),
        ({"days": "1e12", "count": 1}, "days = '1e12': must be between 1e-06 and 3,650; nearest that works: 3650"),
        ({"device_hours": "1e15"}, "device_hours = '1e15': buys more than 1e29 FLOP"),
        ({"money": 1e17, "price": 2}, "money = 1e+17: buys more than 1e29 FLOP"),
        ({"days": 3650, "count": 10**7}, "days = 3650: buys more than 1e29 FLOP"),
        ({"flops": 1e28, "count": 8}, "flops = 1e+28: takes more than 3,650 days on 8 devices"),
        ({"device_hours": 1e9, "count": 8}, "device_hours = 1000000000.0: takes more than 3,650 days on 8 devices"),
    ],
)
def test_a_budget_that_nobody_can_spend_is_refused_at_once(given, sentence):
    """Refused where it is read, before any search of sizes; the nearest value that is named is then read."""
    device = None if given == {"flops": "1e30"} else "h100-sxm"
    with pytest.raises(tl.InvalidInput) as refused:
        tl.optimal(device=device, **given)
    assert str(refused.value).startswith(sentence)
    problem = refused.value.problems[0]
    assert read_budget(device=device, **given | {problem.field: problem.nearest}).flops <= 1e29 * (1 + 1e-9)
