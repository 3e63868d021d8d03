"""What a budget pays for at the speed that is predicted: with speeds that are known, so that the answer is too."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import trainledger as tl
from trainledger.answers.plan import plan
from trainledger.forecast.plan.affordable import _fewer_than_devices, affordable
from trainledger.forecast.plan.family import family_of
from trainledger.forecast.plan.limits import critical_batch
from trainledger.forecast.plan.memory_model import memory_model
from trainledger.forecast.plan.optimal import optimal
from trainledger.forecast.plan.quantity import read_budget
from trainledger.forecast.plan.scaling_law import FixedSize, RatioLaw, default_tokens_per_step, laws
from trainledger.forecast.predict.forecast import Forecast
from trainledger.ledger.model.parameters import parameters
from trainledger.report.terminal import text
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.units import parse_count

pytestmark = pytest.mark.sweep

LAWS = laws()
DEVICE = tl.device("h100-sxm")
BASE = tl.model("gpt2")
PEAK = DEVICE.peak_flops_per_second["bf16"]


def steady(share, beside=0.0):
    """A prediction of the same share of the peak for every run, and so much of its time beside its steps."""

    def predict(run):
        rate = share * PEAK * run.cluster.count / (6 * parameters(run.model).total)
        tokens = run.recipe.total_steps * run.recipe.tokens_per_step
        return Forecast(tokens_per_second=rate, step_seconds=run.recipe.tokens_per_step / rate,
                        total_seconds=tokens / rate * (1 + beside))  # fmt: skip

    return predict


def paid(predict, law=LAWS["rule-20"], **given):
    budget = read_budget(**{"device": DEVICE, "count": 8, "days": 1} | given)
    return budget, affordable(budget, law, BASE, DEVICE, predict)


@pytest.mark.parametrize("share", [0.1, 0.35, 0.6])
def test_a_steady_speed_gives_what_the_rule_says_of_it(share):
    budget, found = paid(steady(share))
    flops = budget.flops * share / budget.mfu
    wanted = LAWS["rule-20"].parameters(flops).value
    assert found.iterations[0].wanted == pytest.approx(LAWS["rule-20"].parameters(budget.flops).value)
    assert found.parameters == pytest.approx(wanted, rel=0.04)  # members of the family are not nearer to each other
    assert found.mfu == pytest.approx(share)
    assert 6 * found.parameters * found.tokens == pytest.approx(flops, rel=0.002)
    assert found.note == ""


def test_what_is_not_a_step_has_its_time():
    _, without = paid(steady(0.4))
    _, found = paid(steady(0.4, beside=0.25))
    assert found.parameters == without.parameters
    assert found.tokens == pytest.approx(without.tokens / 1.25, rel=0.003)
    assert found.forecast.total_seconds == pytest.approx(86400, rel=0.003)


def test_the_run_that_is_paid_for_obeys_the_rules_and_fits():
    for count in (1, 7, 8, 24):
        _, found = paid(steady(0.4), count=count)
        assert list(run_problems(found.run)) == []
        assert found.run.cluster.count == count == found.run.layout.devices
        held = plan(found.run).device_memory
        assert held is not None
        assert held.fits
        assert held.nbytes == found.memory.nbytes


def test_more_than_memory_allows():
    budget = read_budget(device=tl.device("t4"), count=1, days=3000)
    found = affordable(budget, LAWS["rule-20"], BASE, tl.device("t4"), steady(0.4))
    assert found.note.startswith("memory allows no more on these devices; the rule asks for")
    assert found.memory.fits
    assert found.parameters < found.iterations[-1].wanted


def test_what_fits_is_about_the_largest_that_does():
    """Of the members of the family those beyond it, by more than 3 %, hold more than there is."""
    device = tl.device("t4")
    found = affordable(read_budget(device=device, count=1, days=3000), LAWS["rule-20"], BASE, device, steady(0.4))
    family, scale = family_of(BASE), memory_model(device, backend="sm70", chance=0.8)
    larger = family[family.nearest(1.06 * found.parameters)]
    assert 1.03 < parameters(larger).total / found.parameters < 1.1
    for saving in ("none", "selective", "full"):
        recipe = with_fields(found.run.recipe, {"micro_batch": 1, "activation_checkpointing": saving})
        assert not scale.fits(replace(found.run, model=replace(larger, max_seq_len=4096), recipe=recipe))


@pytest.mark.agreement
def test_the_size_that_is_asked_for_is_the_one_that_is_paid_for():
    for share in (0.2, 0.4):
        _, asked = paid(steady(share), law=FixedSize(name="asked", title="as asked", size=3e9))
        assert len(asked.iterations) == 1
        assert asked.parameters == pytest.approx(3e9, rel=0.03)
        assert asked.note == ""
        assert 6 * asked.parameters * asked.tokens == pytest.approx(8 * PEAK * share * 86400, rel=0.002)
    _, large = paid(steady(0.4), law=FixedSize(name="asked", title="as asked", size=70e9), count=1)
    assert large.note == "memory allows no more on these devices; you ask for 70B parameters"
    _, untimed = paid(lambda run: Forecast(), law=FixedSize(name="asked", title="as asked", size=70e9), count=1)
    assert untimed.note == f"no time is predicted for it, so 50 % of the peak stays assumed; {large.note}"
    _, dense = paid(steady(0.4), law=RatioLaw(name="asked", title="as asked", tokens_per_parameter=100))
    assert dense.ratio == pytest.approx(100, rel=0.05)


def test_the_whole_question_is_about_the_size_that_is_asked_for():
    found = tl.optimal(device="a100-sxm-80gb", count=8, days=3, params="2B", family="gpt2")
    assert found.affordable.parameters == pytest.approx(2e9, rel=0.03)
    assert tl.optimal(
        device="a100-sxm-80gb", count=8, days=3, ratio=80, family="gpt2"
    ).affordable.ratio == pytest.approx(80, rel=0.06)
    shown = " ".join(text(found.document(), full=True).split())
    assert "What fits of the requested model, and what its predicted speed affords" in shown


@pytest.mark.parametrize("asked", [{}, {"params": "2B"}, {"ratio": 60}, {"mfu": 0.3}])
def test_the_headline_is_no_dearer_than_the_budget_at_the_predicted_speed(asked):
    answer = tl.optimal(device="a100-sxm-80gb", count=8, days=3, family="gpt2", **asked)
    verdict, found = answer.document().verdict, answer.affordable
    size, tokens = (parse_count(each) for each in re.findall(r"([\d.]+[MBT]) ", verdict))
    assert "the predicted speed: " in verdict
    assert verdict.startswith("As asked") == bool(asked.keys() & {"params", "ratio"})
    assert (size, tokens) == pytest.approx((found.parameters, found.tokens), rel=0.01)
    assert tokens / found.forecast.tokens_per_second <= 1.01 * answer.budget.seconds


def test_all_that_the_speed_needs_and_all_that_belongs_to_the_run_is_said():
    """Planned from the settings of the text and the defaults of a run file, the run takes as long as is predicted."""
    answer = tl.optimal(device="h100-sxm", count=8, days=1, params="2B")
    shown = " ".join(text(answer.document(), full=True).split())
    found, recipe = answer.affordable, answer.affordable.run.recipe
    kept = ("seq_len", "global_batch", "micro_batch", "precision", "activation_checkpointing", "tokens")
    result = {name: getattr(recipe, name) for name in kept}
    named = dict(
        each.split("=") for each in re.findall(r"recipe\.(\w+=[^,.\s]+)[,.] ", shown.partition("A device needs")[0])
    )
    assert named == {"compile": "true"}
    again = replace(found.run, recipe=from_fields(Recipe, {**result, "compile": named["compile"] == "true"}))
    assert tl.predict(again).total_seconds == found.forecast.total_seconds
    assert tl.predict(replace(again, recipe=from_fields(Recipe, result))).total_seconds > found.forecast.total_seconds
    for note in found.forecast.notes:
        assert note[1:] in shown
    assert any("an interruption every" in each for each in found.forecast.notes)


def test_devices_whose_network_nobody_knows_are_not_searched(recwarn):
    """No time can be predicted then, and memory alone says what fits."""
    found = tl.optimal(device="l4", count=128, days=3, params="400M", family="gpt2").affordable
    assert found.note == "no time is predicted for it, so 50 % of the peak stays assumed"
    assert found.memory.fits
    assert not [each for each in recwarn if each.category is RuntimeWarning]


def test_without_a_predicted_time_the_supposed_share_stays():
    _, found = paid(lambda run: Forecast())
    assert found.note == "no time is predicted for it, so 50 % of the peak stays assumed"
    assert (found.tokens, found.mfu, found.ratio) == (None, None, None)
    assert len(found.iterations) == 1


def test_what_cannot_be_paid_for_is_a_sentence():
    with pytest.raises(tl.InvalidInput, match="budget: needs a device, how many of them, and for how long"):
        affordable(read_budget(flops=1e22), LAWS["rule-20"], BASE, DEVICE, steady(0.4))
    with pytest.raises(tl.InvalidInput, match="family = 'mixtral-8x7b': has experts"):
        tl.optimal(device="h100-sxm", count=8, days=1, family="mixtral-8x7b")
    tiny = replace(tl.device("t4"), memory_nbytes=10**9, usable_nbytes=10**9)
    with pytest.raises(tl.InvalidInput, match="holds no model of the family, however it is spread"):
        affordable(
            read_budget(device=tiny, count=1, days=1), LAWS["rule-20"], tl.model("llama-3-8b"), tiny, steady(0.4)
        )


def test_the_tokens_of_a_step():
    assert default_tokens_per_step(1e23) == 4 * 10**6
    assert default_tokens_per_step(4e25) == 16 * 10**6
    assert default_tokens_per_step(1e18) == pytest.approx(225_000, rel=0.01)
    assert default_tokens_per_step(1e18, 96 * 4096) == 96 * 4096
    assert default_tokens_per_step(1e18, 2000 * 4096) == 2000 * 4096
    assert default_tokens_per_step(1e18, 10_000 * 4096) == 16 * 10**6
    assert default_tokens_per_step(7e21) == 4 * 10**6


def test_a_small_budget_is_not_spent_beyond_the_critical_batch():
    """What `breaks` warns of is not what is proposed here."""
    found = tl.optimal(device="l4", count=1, days=1).affordable
    assert found is not None
    assert found.run.recipe.tokens_per_step < critical_batch(found.run)
    assert found.run.recipe.total_steps > 2000
    assert all(each.limit != "critical batch" for each in tl.breaks(found.run).already)


@pytest.mark.long
def test_the_time_that_is_given_is_never_passed():
    for beside in (0.0, 0.1, 0.7):
        _, found = paid(steady(0.4, beside=beside))
        assert 0.995 * 86400 < found.forecast.total_seconds <= 86400


def test_rounds_that_do_not_settle_end_with_the_best_of_them():
    """Every second round is slower than the others: N goes up and down, and the last round is not the best."""
    law, sizes = LAWS["besiroglu"], []

    def uneven(run):
        size = parameters(run.model).total
        if size not in sizes:
            sizes.append(size)
        return steady(0.5 if sizes.index(size) % 2 else 0.1)(run)

    budget = read_budget(device=DEVICE, count=1, days=1)
    steadily = affordable(budget, law, BASE, DEVICE, steady(0.5), loss=law.loss)
    assert steadily.best == len(steadily.iterations) - 1
    found = affordable(budget, law, BASE, DEVICE, uneven, loss=law.loss)
    losses = [law.loss(each.parameters, each.tokens) for each in found.iterations]
    assert losses[found.best] <= min(losses) + 0.001 < losses[-1]
    assert found.parameters == found.iterations[found.best].parameters
    assert found.forecast.total_seconds == pytest.approx(86400, rel=0.003)
    answer = replace(optimal(budget, law="besiroglu"), affordable=found)
    said = " ".join(text(answer.document(), full=True).split())
    assert f"The answer is iteration {found.best + 1}, whose loss is the lowest" in said
    assert "The answer is iteration" not in text(replace(answer, affordable=steadily).document(), full=True)


@pytest.mark.parametrize(("count", "batch"), [(4096, 4096), (16384, 4096), (24576, 3072), (100_000, 3125)])
def test_a_step_for_more_devices_than_sequences(count, batch):
    """Near 16M tokens of 4,096 each, with the odd factors of the devices, which tensor ranks and stages do not take."""
    assert _fewer_than_devices(16e6 / 4096, count) == batch


def test_devices_that_no_step_can_be_shared_out_over_are_a_sentence():
    sentence = r"count = 1000000: is 15,625 times a power of two.*3,906 sequences.*nearest that works: 999936"
    with pytest.raises(tl.InvalidInput, match=sentence):
        tl.optimal(device="h100-sxm", count=1_000_000, days=30)


def test_a_step_has_a_sequence_however_few_tokens_it_is_asked_to_have():
    assert tl.optimal(device="h100-sxm", count=1, days=1, tokens_per_step=1).affordable.run.recipe.global_batch == 1
    with pytest.raises(tl.InvalidInput, match=r"is 7 times a power of two, too many for a step of 1 sequence \("):
        tl.optimal(device="h100-sxm", count=7, days=1, tokens_per_step=1)
    with pytest.raises(tl.InvalidInput, match="with sequences of 10,000,000 tokens"):
        tl.optimal(device="h100-sxm", count=2, days=1, seq_len=10_000_000)
