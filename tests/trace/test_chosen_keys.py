"""Attention to keys that an indexer chooses: closed form and trace agree as integers, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agree
from random_runs import LLAMA

from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.sparse import attend_to_chosen
from trainledger.engine.nn.transformer import Transformer
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.step import account
from trainledger.spec.layers import kind_of
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

SPEC: dict[str, object] = {
    **{name: value for name, value in LLAMA.items() if not name.startswith("attention")}, "vocab_size": 96,
    "d_model": 64, "n_layers": 3, "feed_forward.d_ff": 160, "max_seq_len": 32, "attention": "latent",
    "attention.n_heads": 4, "attention.kv_rank": 16, "attention.q_rank": 32, "attention.nope_head_dim": 16,
    "attention.rope_head_dim": 16, "attention.v_head_dim": 16, "attention.indexer.n_heads": 2,
    "attention.indexer.head_dim": 16, "attention.indexer.top_k": 4,
}  # fmt: skip
RECIPES: dict[str, dict[str, object]] = {
    "fp32": {},
    "bf16-mixed, full": {"precision": "bf16-mixed", "activation_checkpointing": "full"},
    "bf16, selective": {"precision": "bf16", "activation_checkpointing": "selective", "micro_batch": 2},
    "segments": {"activation_checkpointing": "segments", "dropout": 0.1},
    "fp8": {"precision": "fp8-rowwise"},
    "adapters": {"lora": {"rank": 2}},
}
EXPERTS = {"feed_forward": "experts", "feed_forward.n_experts": 4, "feed_forward.n_dense_layers": 1}


def run_with(changes: dict[str, object] | None = None, **recipe: object) -> Run:
    spec = from_fields(ModelSpec, SPEC | (changes or {}))
    return Run(model=spec, recipe=from_fields(Recipe, {"seq_len": 32, "global_batch": 4, "steps": 10, **recipe}))


@pytest.mark.agreement
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_closed_form_is_the_trace(recipe: str) -> None:
    assert_agree(run_with(**RECIPES[recipe]))


@pytest.mark.agreement
@pytest.mark.parametrize("recipe", ["fp32", "bf16-mixed, full", "segments"])
def test_layers_that_share_a_choice(recipe: str) -> None:
    """Of 9 layers 0, 1, 4 and 7 choose keys; the choice outlives the block that made it, recomputed or not."""
    shared = {"attention.indexer.every": 3, "attention.indexer.leading": 2, "n_layers": 9}
    run = run_with(shared, **RECIPES[recipe])
    assert [at for at in range(9) if kind_of(run.model, at).chooses] == [0, 1, 4, 7]
    assert_agree(run)


@pytest.mark.agreement
def test_and_with_experts_halves_and_a_module_of_prediction() -> None:
    own = {"attention.indexer.interleaved": True, "attention.indexer.top_k": 100, "n_mtp_layers": 1, **EXPERTS}
    assert_agree(run_with(own, precision="bf16-mixed"))


def test_the_indexer_is_counted_and_has_neither_gradient_nor_states() -> None:
    spec = run_with().model
    own = spec.n_layers * (32 * 2 * 16 + 64 * 16 + 2 * 16 + 64 * 2)
    without = with_fields(spec, {"attention.indexer": None})
    assert parameters(spec).total - parameters(without).total == own
    sparse, dense = account(run_with()), account(Run(model=without, recipe=run_with().recipe))
    assert sparse.parameters == dense.parameters
    assert dict(sparse.resident)["frozen weights"] == 4 * own
    assert dict(sparse.resident)["optimizer state"] == dict(dense.resident)["optimizer state"]


def test_few_chosen_keys_cost_less_than_all() -> None:
    """Attention of 4 keys of 32, and scores of the indexer over all of them."""
    few, all_keys = (account(run_with({"attention.indexer.top_k": keys})).by("kind")["attention"] for keys in (4, 32))
    assert few * 8 == all_keys


def test_chosen_keys_and_their_gradients_are_those_of_a_mask() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 9, 3, width, dtype=torch.float64).float().requires_grad_() for width in (6, 6, 5))
    chosen = torch.stack([torch.randperm(9)[:4] for _ in range(18)]).view(2, 9, 4)
    chosen[..., 0] = torch.arange(9)  # a query sees itself
    mask = torch.full((2, 9, 9), float("-inf")).scatter(-1, chosen, 0.0) + torch.full((9, 9), float("-inf")).triu(1)
    wanted = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask[:, None], scale=0.3)
    wanted = wanted.transpose(1, 2).flatten(-2)
    got = attend_to_chosen(q, k, v, chosen.int(), 0.3)
    torch.testing.assert_close(got, wanted)
    g = torch.randn_like(got)
    torch.testing.assert_close(
        torch.autograd.grad((got * g).sum(), (q, k, v)), torch.autograd.grad((wanted * g).sum(), (q, k, v))
    )


def test_a_model_learns_and_its_indexer_does_not_move() -> None:
    model = Transformer(from_fields(ModelSpec, SPEC))
    initialize(model, seed=3)
    before = {name: each.clone() for name, each in model.named_parameters() if ".indexer." in name}
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=3e-3)
    ids = torch.randint(0, 96, (4, 32), generator=torch.Generator().manual_seed(5))
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5
    assert all(torch.equal(before[name], each) for name, each in model.named_parameters() if name in before)


@pytest.mark.parametrize(
    ("changes", "recipe", "problem"),
    [
        ({}, {"attention": "math"}, "recipe.attention = 'math': is not accounted for with chosen keys"),
        ({}, {"compile": True}, "recipe.compile = true: is not accounted for with chosen keys"),
        ({}, {"attention_dropout": 0.1}, "recipe.attention_dropout = 0.1: is not accounted for with chosen keys"),
        ({}, {"documents": "masked"}, "masks scores, and chosen keys (model.attention.indexer) have no mask"),
        ({}, {"activation_checkpointing": "attention"}, "activation_checkpointing = 'attention': is not accounted for"),
        ({"attention.indexer.head_dim": 8}, {}, "head_dim = 8: must be at least rope_head_dim = 16"),
        ({"positions": "none"}, {}, "has rotary heads, so model.positions must be rope"),
    ],
)
def test_what_is_refused(changes: dict[str, object], recipe: dict[str, object], problem: str) -> None:
    assert any(problem in str(one) for one in run_problems(run_with(changes, **recipe)))
