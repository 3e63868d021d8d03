"""Sampling: a function of its arguments, from the distribution that the model says."""

import pytest
import torch

from models import sizes
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.sample import generate
from trainledger.engine.nn.transformer import Transformer
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.problem import InvalidInput

SPEC = from_fields(ModelSpec, sizes(V=11, D=16, L=2, H=2, F=24, T=12))


@pytest.fixture(scope="module")
def model():
    model = Transformer(SPEC, dropout=0.5)
    initialize(model, seed=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    return model


def test_the_prompt_and_as_many_tokens_as_asked_for(model):
    written = generate(model, [1, 2, 3], 5)
    assert written[:3] == [1, 2, 3]
    assert len(written) == 8
    assert all(0 <= each < 11 for each in written)
    assert generate(model, torch.tensor([1, 2, 3]), 0) == [1, 2, 3]


def test_the_same_seed_writes_the_same_and_no_other_generator_matters(model):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = generate(model, [1], 30, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert generate(model, [1], 30, seed=7) == first
    assert generate(model, [1], 30, seed=8) != first


def test_sampling_is_in_eval_mode_and_puts_the_mode_back(model):
    model.train()
    first = generate(model, [1], 20, temperature=0)
    assert model.training
    assert generate(model.eval(), [1], 20, temperature=0) == first
    assert not model.training


@torch.no_grad()
def test_temperature_zero_takes_the_likeliest(model):
    written = generate(model, [4], 6, temperature=0)
    model.eval()
    for at in range(1, len(written)):
        assert written[at] == int(model(torch.tensor([written[:at]]))[0, -1].argmax())
    assert generate(model, [4], 6, temperature=1e-30) == written
    assert generate(model, [4], 6, top_k=1) == written


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_follow_the_softmax(model, temperature):
    model.eval()
    wanted = (model(torch.tensor([[5]]))[0, -1] / temperature).softmax(0)
    n = 2000
    drawn = torch.tensor([generate(model, [5], 1, temperature=temperature, seed=seed)[1] for seed in range(n)])
    shares = torch.bincount(drawn, minlength=11) / n
    assert (shares - wanted).abs().max() < 0.04


def test_top_k_and_known_ids_leave_out_the_rest(model):
    with torch.no_grad():
        likeliest = model.eval()(torch.tensor([[5]]))[0, -1].topk(3).indices.tolist()
    assert {generate(model, [5], 1, temperature=5, top_k=3, seed=seed)[1] for seed in range(100)} == set(likeliest)
    assert {generate(model, [5], 1, temperature=5, n_known=2, seed=seed)[1] for seed in range(100)} == {0, 1}


def test_past_the_longest_sequence_the_last_tokens_count(model):
    written = generate(model, [1], 40, temperature=0)
    assert written[:40] == generate(model, written[:39], 1, temperature=0)
    assert (
        generate(model, [9, 9, 9, *written[:12]], 5, temperature=0)[-5:]
        == generate(model, written[:12], 5, temperature=0)[-5:]
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"ids": []}, "prompt: must have at least one token"),
        ({"ids": [3, 11]}, "prompt = 11: is a token outside the vocabulary of 11"),
        ({"ids": [-1]}, "prompt = -1: is a token outside the vocabulary of 11"),
        ({"n_tokens": -1}, "tokens = -1: must be at least 0"),
        ({"temperature": -0.1}, "temperature = -0.1: must be a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature = nan: must be a finite number of at least 0"),
        ({"top_k": 0}, "top_k = 0: must be at least 1"),
        ({"seed": -1}, "seed = -1: must be from 0"),
        ({"seed": 2**70}, "must be from 0 to 2**63 - 1"),
    ],
)
def test_what_cannot_be_sampled_is_said(model, change, sentence):
    with pytest.raises(InvalidInput) as caught:
        generate(model, **{"ids": [1], "n_tokens": 1} | change)
    assert sentence in str(caught.value)
