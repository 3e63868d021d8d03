"""Scaling laws: the closed forms against a search, the published tables, and the errors against sampling."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp, isclose, log, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.forecast.plan.scaling_law import Between, LineLaw, LossLaw, RatioLaw, laws

LAWS = laws()
REFIT = LAWS["besiroglu"]
LOSSES = [each for each in LAWS.values() if isinstance(each, LossLaw)]
assert isinstance(REFIT, LossLaw)

# Hoffmann et al. 2022, table 3 (approach 1) and table A3 (approaches 2 and 3): parameters, FLOPs, tokens.
TABLES = {
    "chinchilla-1": (
        (400e6, 1.92e19, 8.0e9), (1e9, 1.21e20, 20.2e9), (10e9, 1.23e22, 205.1e9), (67e9, 5.76e23, 1.5e12),
        (175e9, 3.85e24, 3.7e12), (280e9, 9.90e24, 5.9e12), (520e9, 3.43e25, 11.0e12), (1e12, 1.27e26, 21.2e12),
        (10e12, 1.30e28, 216.2e12),
    ),
    "chinchilla-2": (
        (400e6, 1.84e19, 7.7e9), (1e9, 1.20e20, 20.0e9), (10e9, 1.32e22, 219.5e9), (67e9, 6.88e23, 1.7e12),
        (175e9, 4.54e24, 4.3e12), (280e9, 1.18e25, 7.1e12), (520e9, 4.19e25, 13.4e12), (1e12, 1.59e26, 26.5e12),
        (10e12, 1.75e28, 292.0e12),
    ),
    # The FLOPs of 175B are printed as 1.26e24, a tenth of 6 N D: a slip of the exponent.
    "chinchilla-3": (
        (400e6, 2.21e19, 9.2e9), (1e9, 1.62e20, 27.1e9), (10e9, 2.46e22, 410.1e9), (67e9, 1.71e24, 4.1e12),
        (175e9, 1.26e25, 12.0e12), (280e9, 3.52e25, 20.1e12), (520e9, 1.36e26, 43.5e12), (1e12, 5.65e26, 94.1e12),
        (10e12, 8.55e28, 1425.5e12),
    ),
}  # fmt: skip
WITHIN = {"chinchilla-1": 0.02, "chinchilla-2": 0.04, "chinchilla-3": 0.09}  # of N
ROWS = [(name, *row) for name, rows in TABLES.items() for row in rows]


@pytest.mark.parametrize(("name", "parameters", "flops", "tokens"), ROWS)
def test_the_published_table(name, parameters, flops, tokens):
    found = LAWS[name].parameters(flops).value
    assert abs(found / parameters - 1) < WITHIN[name]
    # Tokens are printed in two digits, and follow from N: they err by its error and their rounding.
    assert abs(LAWS[name].tokens(flops) / tokens - 1) < WITHIN[name] / (1 - WITHIN[name]) + 0.05


@pytest.mark.parametrize("name", ["chinchilla-1", "chinchilla-2"])
def test_the_exponent_of_a_table_is_the_published_one(name):
    law = LAWS[name]
    assert isinstance(law, LineLaw)
    assert round(law.exponent, 2) == {"chinchilla-1": 0.50, "chinchilla-2": 0.49}[name]
    assert law.exponents is not None
    assert law.exponents[0] < law.exponent < law.exponents[1]


def test_the_rounded_coefficients_of_the_paper_miss_its_own_table():
    law = LAWS["chinchilla-3"]
    assert isinstance(law, LossLaw)
    rounded = LossLaw(name="", title="", E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
    parameters, flops, _ = TABLES["chinchilla-3"][3]
    assert abs(law.parameters(flops).value / parameters - 1) < 0.09
    assert abs(rounded.parameters(flops).value / parameters - 1) > 0.15


def test_chinchilla_itself():
    """70B on 1.4T tokens, 5.76e23 FLOP; the refit says about 20 tokens per parameter, the published fit about 70."""
    refit, published = LAWS["besiroglu"], LAWS["chinchilla-3"]
    between = refit.parameters(5.76e23)
    assert between.low is not None
    assert between.high is not None
    assert between.low < 70e9 < between.high
    assert 15 < refit.tokens(5.76e23) / between.value < 25
    assert 50 < published.tokens(5.76e23) / published.parameters(5.76e23).value < 80
    # Besiroglu et al. find 4 to 40 tokens per parameter possible; D / N = C / 6 N^2.
    assert 4 < 5.76e23 / 6 / between.high**2 < 5.76e23 / 6 / between.low**2 < 45


@pytest.mark.parametrize("law", LOSSES, ids=lambda each: each.name)
@given(exponent=st.floats(18, 28))
def test_the_closed_form_is_the_minimum(law, exponent):
    flops = 10**exponent
    best = law.parameters(flops).value

    def loss(parameters):
        return law.loss(parameters, flops / (6 * parameters))

    low, high = log(best) - 3, log(best) + 3
    for _ in range(60):  # ternary search, which knows nothing of the formula
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if loss(exp(left)) < loss(exp(right)) else (left, high)
    # A minimum is flat: where the loss is lowest is known to the root of its precision.
    assert isclose(exp(low), best, rel_tol=1e-5)
    assert loss(best) <= min(loss(best * 1.01), loss(best / 1.01))
    assert isclose(law.flops_of_loss(loss(best)), flops, rel_tol=1e-8)
    assert isclose(law.tokens_at_loss(best, loss(best)), flops / (6 * best), rel_tol=1e-8)
    assert isclose(law.best_parameters_for(flops / (6 * best)), best, rel_tol=1e-8)


@given(parameters=st.floats(1e7, 1e13), tokens=st.floats(1e9, 1e15), more=st.floats(1.001, 1e3))
def test_more_of_either_is_never_worse(parameters, tokens, more):
    for law in LOSSES:
        here = law.loss(parameters, tokens)
        assert law.E < law.loss(parameters * more, tokens) < here
        assert law.E < law.loss(parameters, tokens * more) < here


def sampled(law, count):
    """Laws drawn from a law's covariance, by its Cholesky factor."""
    rows = law.covariance
    factor = [[0.0] * 5 for _ in rows]
    for i in range(5):
        for j in range(i + 1):
            rest = rows[i][j] - sum(factor[i][k] * factor[j][k] for k in range(j))
            factor[i][j] = sqrt(rest) if i == j else rest / factor[j][j]
    draw = random.Random(0)
    for _ in range(count):
        z = [draw.gauss(0, 1) for _ in rows]
        a, b, e, alpha, beta = (sum(each * other for each, other in zip(row, z, strict=True)) for row in factor)
        yield replace(
            law, E=law.E * exp(e), A=law.A * exp(a), B=law.B * exp(b), alpha=law.alpha + alpha, beta=law.beta + beta
        )


def test_errors_carried_through_are_those_of_sampled_laws():
    drawn = list(sampled(REFIT, 4000))
    for parameters, tokens in ((8e9, 160e9), (70e9, 1.4e12), (8e9, 15e12)):
        found = sorted(each.loss(parameters, tokens) for each in drawn)
        between = REFIT.loss_between(parameters, tokens)
        assert between.low is not None
        assert between.high is not None
        spread = (found[3899] - found[99]) / 2  # 95 %
        assert isclose((between.high - between.low) / 2, spread, rel_tol=0.08)
    found = sorted(log(each.parameters(1e24).value) for each in drawn)
    between = REFIT.parameters(1e24)
    assert between.low is not None
    assert between.high is not None
    assert isclose(log(between.high / between.low), found[3899] - found[99], rel_tol=0.08)


def test_the_covariance_has_the_published_standard_errors():
    """Computed from the same data by the same procedure: so near as rounding and bootstraps let them be."""
    from trainledger.catalog import scaling_laws

    published = scaling_laws()["besiroglu"]["standard_errors"]
    assert REFIT.covariance is not None
    root = [sqrt(REFIT.covariance[at][at]) for at in range(5)]
    assert isclose(root[0] * REFIT.A, published["A"], rel_tol=0.06)
    assert isclose(root[1] * REFIT.B, published["B"], rel_tol=0.35)  # lognormal, so that its own error is large
    assert round(root[2] * REFIT.E, 2) == published["E"]
    assert abs(root[3] - published["alpha"]) < 0.0055  # printed in one digit
    assert abs(root[4] - published["beta"]) < 0.005
    assert all(isclose(REFIT.covariance[i][j], REFIT.covariance[j][i]) for i in range(5) for j in range(5))


def test_a_law_without_published_errors_says_none():
    for name in ("chinchilla-3", "muennighoff", "kaplan", "rule-20"):
        assert LAWS[name].parameters(1e22).low is None
    law = LAWS["chinchilla-3"]
    assert isinstance(law, LossLaw)
    assert law.loss_between(1e9, 1e10) == Between(law.loss(1e9, 1e10))


def test_the_interval_of_an_exponent_turns_in_the_middle_of_what_was_fitted():
    law = LAWS["chinchilla-2"]
    middle = law.parameters(sqrt(6e18 * 3e21))
    assert middle.low == middle.high == middle.value
    far = law.parameters(1e25)
    assert far.low is not None
    assert far.high is not None
    assert far.low < far.value < far.high


def test_kaplan_in_a_petaflop_day():
    assert isclose(LAWS["kaplan"].parameters(8.64e19).value, 1.3e9)
    assert isclose(LAWS["kaplan"].parameters(8.64e22).value / 1.3e9, 1000**0.73)


def test_twenty_tokens_per_parameter():
    law = LAWS["rule-20"]
    assert isinstance(law, RatioLaw)
    flops = 32 * 989.5e12 * 0.5 * 14 * 86400
    assert round(law.parameters(flops).value / 1e9, 1) == 12.6
    assert round(law.tokens(flops) / 1e9) == 253


def test_repeated_tokens_are_worth_less_and_less():
    """Muennighoff et al. 2023: up to four epochs nearly as good as new, nothing after about forty."""
    law = LAWS["muennighoff"]
    assert isinstance(law, LossLaw)
    unique, parameters = 1e11, 1e9
    losses = [law.constrained_loss(parameters, epochs * unique, unique) for epochs in (1, 2, 4, 8, 16, 40, 80)]
    assert losses == sorted(losses, reverse=True)
    assert isclose(law.constrained_loss(parameters, 0.5 * unique, unique), law.loss(parameters, 0.5 * unique))
    assert law.constrained_loss(parameters, 4 * unique, unique) - law.loss(parameters, 4 * unique) < 0.01
    assert losses[-2] - losses[-1] < 0.005
    with pytest.raises(ValueError, match="has no constants for repeated data"):
        REFIT.constrained_loss(1e9, 1e10, 1e9)


def test_the_four_epochs_of_the_paper():
    """8.7B on 178B tokens: four epochs of 44B end 0.5 % above one of 178B (section 6 of the paper)."""
    law = LAWS["muennighoff"]
    assert isinstance(law, LossLaw)
    new, four = law.constrained_loss(8.7e9, 178e9, 178e9), law.constrained_loss(8.7e9, 178e9, 44e9)
    assert 0.003 < four / new - 1 < 0.01
