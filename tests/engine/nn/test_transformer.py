"""The model itself: what must hold of a causal Transformer whatever its sizes."""

import csv
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainledger.engine.nn.attention import Scores, scaled_dot_product, written_out
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.loss import next_token_loss
from trainledger.engine.nn.positions import Rotary, frequencies, rotate
from trainledger.engine.nn.transformer import Transformer
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.recipe import Recipe

FEW = settings(max_examples=30, deadline=None)
LLAMA = from_fields(
    ModelSpec,
    {
        "vocab_size": 50,
        "d_model": 24,
        "n_layers": 3,
        "attention.n_heads": 4,
        "attention.n_kv_heads": 2,
        "attention.head_dim": 8,
        "feed_forward.d_ff": 40,
        "max_seq_len": 32,
    },
)
GPT2 = from_fields(
    ModelSpec,
    {
        "vocab_size": 50,
        "d_model": 24,
        "n_layers": 3,
        "attention.n_heads": 4,
        "feed_forward.d_ff": 40,
        "max_seq_len": 32,
        "norm": "layernorm",
        "norm.bias": True,
        "feed_forward.gated": False,
        "feed_forward.activation": "gelu_tanh",
        "positions": "learned",
        "attention.bias": True,
        "feed_forward.bias": True,
        "tie_embeddings": True,
    },
)
FAMILIES = pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
ATTENTIONS = pytest.mark.parametrize("attention", ["sdpa", "math"])


def made(spec, **options):
    model = Transformer(spec, **options)
    initialize(model, seed=0)
    return model


def ids_for(spec, batch=2, seed=0):
    return torch.randint(spec.vocab_size, (batch, spec.max_seq_len), generator=torch.Generator().manual_seed(seed))


@given(
    batch=st.integers(1, 3), kv_heads=st.integers(1, 3), ratio=st.integers(1, 4), n_tokens=st.integers(1, 40),
    width=st.integers(1, 33), seed=st.integers(0, 99),
)  # fmt: skip
@FEW
def test_both_attentions_are_equal(batch, kv_heads, ratio, n_tokens, width, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, n_tokens, kv_heads * ratio, width, generator=generator, requires_grad=True)
    k = torch.randn(batch, n_tokens, kv_heads, width, generator=generator, requires_grad=True)
    v = torch.randn(batch, n_tokens, kv_heads, width, generator=generator, requires_grad=True)
    towards = torch.randn(batch, n_tokens, kv_heads * ratio * width, generator=generator)
    later = torch.full((n_tokens, n_tokens), -math.inf).triu(1)
    scores = Scores("sdpa", 1 / math.sqrt(width))
    both = []
    for y in (scaled_dot_product(q, k, v, None, scores), written_out(q, k, v, later, scores)):
        both.append((y, *torch.autograd.grad((y * towards).sum(), (q, k, v))))
    for fused, plain in zip(*both, strict=True):
        torch.testing.assert_close(fused, plain, atol=2e-5, rtol=1e-4)


def test_attention_is_the_mean_of_values_where_scores_are_equal():
    v = torch.randn(1, 6, 2, 4)
    later = torch.full((6, 6), -math.inf).triu(1)
    y = written_out(torch.zeros(1, 6, 4, 4), torch.randn(1, 6, 2, 4), v, later, Scores("math", 0.5))
    means = v.cumsum(1) / torch.arange(1, 7)[:, None, None]
    # Heads 0 and 1 share the first key-value head.
    torch.testing.assert_close(y.unflatten(-1, (4, 4)), means.repeat_interleave(2, dim=2))


@FAMILIES
@ATTENTIONS
@torch.no_grad()
def test_no_token_sees_a_later_one(spec, attention):
    model = made(spec, attention=attention).eval()
    ids = ids_for(spec)
    before = model(ids)
    for at in (1, 7, 31):
        changed = ids.clone()
        changed[:, at] = (changed[:, at] + 1) % spec.vocab_size
        after = model(changed)
        assert torch.equal(before[:, :at], after[:, :at])
        assert not torch.allclose(before[:, at], after[:, at])
        if at < 31:
            assert not torch.equal(before[:, -1], after[:, -1]), "and every later one sees it"


@FAMILIES
@torch.no_grad()
def test_a_prefix_has_the_same_logits_alone(spec):
    model = made(spec).eval()
    ids = ids_for(spec)
    torch.testing.assert_close(model(ids[:, :9]), model(ids)[:, :9], atol=2e-6, rtol=0)


def test_a_score_depends_on_the_distance_of_two_positions_only():
    rotary = Rotary(with_fields(LLAMA, {"max_seq_len": 64, "attention.head_dim": 16}))
    cosines, sines = rotary(64, torch.float32)
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    turned_q, turned_k = (rotate(each.expand(1, 64, 1, 16), (cosines, sines))[0, :, 0] for each in (q, k))
    scores = turned_q @ turned_k.T
    for distance in range(-40, 41):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=2e-5, rtol=0)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(64))  # turning keeps lengths
    assert torch.equal(turned_q[0], q)  # position 0 is not turned
    assert (scores.diagonal(3).mean() - scores.diagonal(7).mean()).abs() > 1e-3


def test_rotary_frequencies_by_hand():
    spec = with_fields(LLAMA, {"attention.head_dim": 8, "positions.theta": 10000.0})
    torch.testing.assert_close(frequencies(spec), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    # Into 200 positions the waves fit 31.8, 3.18, 0.318 and 0.0318 times: kept, blended, slowed, slowed.
    scaled = frequencies(
        with_fields(spec, {"positions.scaling.factor": 8.0, "positions.scaling.original_seq_len": 200})
    )
    blend = (200 * 0.1 / (2 * math.pi) - 1) / 3
    wanted = [1.0, blend * 0.1 + (1 - blend) * 0.1 / 8, 0.01 / 8, 0.001 / 8]
    torch.testing.assert_close(scaled, torch.tensor(wanted))


@FAMILIES
@ATTENTIONS
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpointing_changes_no_gradient(spec, attention, dropout):
    gradients, losses = [], []
    for checkpointing in ("none", "full"):
        recipe = from_fields(
            Recipe,
            {
                "seq_len": 31,
                "global_batch": 2,
                "steps": 1,
                "activation_checkpointing": checkpointing,
                "dropout": dropout,
            },
        )
        model = made(spec, attention=attention, dropout=dropout, checkpointing=recipe).train()
        torch.manual_seed(0)
        ids = ids_for(spec)
        loss = next_token_loss(model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        losses.append(loss)
        gradients.append({name: each.grad for name, each in model.named_parameters()})
    assert torch.equal(*losses)
    assert all(torch.equal(each, gradients[1][name]) for name, each in gradients[0].items())
    assert all(each.abs().sum() > 0 for name, each in gradients[0].items() if not name.endswith("k_proj.bias"))


@FAMILIES
def test_dropout_acts_in_training_only(spec):
    model, ids = made(spec, dropout=0.3), ids_for(spec)
    with torch.no_grad():
        assert not torch.equal(model.train()(ids), model(ids))
        assert torch.equal(model.eval()(ids), model(ids))
        assert torch.equal(model(ids), made(spec).eval()(ids))


def test_the_loss_is_the_mean_of_minus_log_probability():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    by_hand = -sum(logits.softmax(-1)[b, t, targets[b, t]].log() for b in range(2) for t in range(3)) / 6
    torch.testing.assert_close(next_token_loss(logits, targets), by_hand)
    assert next_token_loss(logits.bfloat16(), targets).dtype == torch.float32


@FAMILIES
def test_rotary_buffers_and_masks_are_not_weights(spec):
    assert set(Transformer(spec).state_dict()) == {
        *(name for name, _ in Transformer(spec).named_parameters()), "lm_head.weight",
    }  # fmt: skip


def published():
    """The rows of the published sizes that are GPT-2s or Llamas as built here."""
    path = Path(__file__).parents[3] / "tools/published" / "param_counts.csv"
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            llama = row["norm"] == "rmsnorm" and row["positional"] == "rope" and row["gated"] == "1"
            llama = llama and row["biases"] == "none" and not row["n_experts"]
            llama = llama and not any(each in row["notes"] for each in ("qk-norm", "pre+post"))
            gpt2 = row["norm"] == "layernorm" and row["positional"] == "learned" and row["biases"] == "all"
            if (llama or gpt2) and row["exact_params"].isdigit():
                yield pytest.param(row, gpt2, id=row["model"])


@pytest.mark.parametrize(("row", "gpt2"), list(published()))
def test_parameters_are_those_published(row, gpt2):
    sizes = {
        field: int(row[column])
        for field, column in {
            "vocab_size": "vocab",
            "d_model": "d_model",
            "n_layers": "n_layers",
            "attention.n_heads": "n_heads",
            "attention.n_kv_heads": "n_kv_heads",
            "attention.head_dim": "head_dim",
            "feed_forward.d_ff": "d_ff",
        }.items()
    }
    family = (
        {
            "norm": "layernorm",
            "norm.bias": True,
            "feed_forward.gated": False,
            "feed_forward.activation": "gelu_tanh",
            "positions": "learned",
            "attention.bias": True,
            "feed_forward.bias": True,
        }
        if gpt2
        else {}
    )
    longest = int(row["max_learned_pos"] or 0) or 2048
    spec = from_fields(ModelSpec, {**sizes, **family, "max_seq_len": longest, "tie_embeddings": row["tied"] == "1"})
    with torch.device("meta"):
        model = Transformer(spec)
    assert sum(each.numel() for each in model.parameters()) == int(row["exact_params"])


def test_there_are_published_sizes_of_both_families():
    names = {each.id for each in published()}
    assert {"gpt2-xl", "Llama-2-7b-hf", "Llama-3-70B", "Llama-3.2-1B"} <= names
