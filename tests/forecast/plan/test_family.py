"""Families of models: the published one is a member, sizes are in order, and every member obeys the rules."""

from __future__ import annotations

import pytest

from trainledger import catalog
from trainledger.answers.load import model
from trainledger.forecast.plan.family import DEPTH_BAND, family_of
from trainledger.ledger.model.parameters import parameters
from trainledger.spec.rules.model import model_problems

NAMES = ("llama-3-8b", "llama-2-7b", "gpt2", "falcon-40b", "gemma-2-9b", "qwen3-8b", "mixtral-8x7b", "deepseek-v3",
         "gpt-oss-20b", "teach-10m")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_family(name):
    base = model(name)
    family = family_of(base)
    at = family.nearest(parameters(base).total)
    assert family[at] == base
    places = range(0, len(family), max(1, len(family) // 40))
    sizes = []
    for place in places:
        spec = family[place]
        assert list(model_problems(spec)) == []
        assert spec.head_size == base.head_size
        assert spec.vocab_size == base.vocab_size
        assert spec.attention.n_heads % spec.kv_heads == 0
        share = (spec.n_layers / base.n_layers) / (spec.d_model / base.d_model)
        # The shallowest models cannot follow: a whole number of layers, and one behind the leading dense ones.
        shallow = 4 if base.experts is None else max(4, base.experts.n_dense_layers + 1)
        assert spec.n_layers <= shallow or DEPTH_BAND[0] <= share <= DEPTH_BAND[1]
        sizes.append(parameters(spec).total)
        assert family.nearest(sizes[-1]) in range(place - 8, place + 9)
    assert sizes == sorted(sizes)


def test_published_shapes_are_members_or_near():
    """Llama 3 70B and 405B from 8B: the widths are there, and the depths within the band."""
    family = family_of(model("llama-3-8b"))
    shapes = {(each.d_model, each.n_layers, each.attention.n_heads, each.attention.n_kv_heads) for each in family}
    assert (8192, 80, 64, 8) in shapes
    assert (16384, 126, 128, 8) in shapes


def test_the_ratios_of_published_models_that_the_rule_rests_on():
    dense = [each for each in map(model, catalog.model_names()) if each.experts is None]
    ratios = sorted(each.d_model / each.n_layers for each in dense)
    within = [each for each in ratios if 40 <= each <= 140]
    assert len(within) / len(ratios) >= 0.75
