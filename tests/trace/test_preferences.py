"""Preference training: closed form, trace and the arithmetic of two forwards tell the same of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from agreement import assert_agree, examples
from hypothesis import assume, given
from hypothesis import strategies as st
from random_runs import LLAMA, models, pick, run_of

from trainledger.ledger.model.parameters import forward_flops
from trainledger.ledger.ranks import accounts
from trainledger.ledger.step import account
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

pytestmark = pytest.mark.agreement

torch.set_num_threads(1)

ADAPTERS: tuple[dict[str, Any], ...] = (
    {},
    {"lora.rank": 3},
    {"lora.rank": 2, "lora.dropout": 0.1, "lora.targets": ["q_proj", "v_proj"]},
    {"lora.rank": 2, "lora.base_format": "nf4"},
)


@st.composite
def preferences(draw: st.DrawFn) -> Run:
    """A small run on pairs: adapters or not, each kind of reference, of precision and of recomputation."""
    pairs, grad_accum, seq_len = draw(pick(1, 2, 3)), draw(pick(1, 2)), draw(pick(2, 8, 17))
    adapters = draw(st.sampled_from(ADAPTERS))
    precisions = ("fp32", "bf16", "bf16-mixed") if adapters else ("fp32", "bf16", "bf16-mixed", "bf16-sharded")
    objective = draw(pick("dpo", "orpo", "kto", "reward"))
    fields = {
        "seq_len": seq_len,
        "global_batch": 2 * pairs * grad_accum,
        "micro_batch": 2 * pairs,
        "steps": 3,
        "objective": objective,
        **({} if objective in ("orpo", "reward") else {"objective.reference": draw(pick("device", "precomputed"))}),
        "precision": draw(pick(*precisions)),
        "attention": draw(pick("sdpa", "math")),
        "activation_checkpointing": draw(pick("none", "full", "segments", "selective", "attention", "offload")),
        "loss.upcast": draw(st.booleans()),
        **(
            {}
            if seq_len == 17 or objective == "reward"
            else draw(pick({}, {"loss": "chunked", "loss.chunks": 2}, {"loss": "chunked", "loss.chunks": 4}))
        ),
        "optimizer": draw(pick("adamw", "sgd")),
        "grad_clip": draw(pick(None, 1.0)),
        **adapters,
    }
    assume(fields["precision"] != "bf16-sharded" or fields.get("loss") != "chunked")  # which the engine has not
    model = draw(models(seq_len))
    if objective == "reward":
        model = replace(model, scores=True, tie_embeddings=False)
        fields |= {"lora.whole": ["lm_head"]} if adapters else {}
    return Run(model=model, recipe=from_fields(Recipe, fields))


@examples(80)
@given(preferences())
def test_account_and_trace_agree(run: Run) -> None:
    # What is offloaded is saved in another order within an operation.
    assert_agree(run, in_order=run.recipe.activation_checkpointing.kind != "offload")


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "experts": (
        {"feed_forward": "experts", "feed_forward.n_experts": 4, "feed_forward.router.correction": True},
        {},
    ),
    "latent attention": (
        {
            "attention": "latent", "attention.kv_rank": 16, "attention.nope_head_dim": 4,
            "attention.rope_head_dim": 8, "attention.v_head_dim": 6,
        },
        {"precision": "bf16-mixed"},
    ),
    "windows": ({"attention.window": 5, "attention.global_every": 2, "n_layers": 3}, {}),
    "ALiBi": ({"positions": "alibi"}, {"attention": "math"}),
    "a scaled loss": ({}, {"precision": "fp16-mixed", "global_batch": 8, "micro_batch": 2}),
    "chunks": ({}, {"loss": "chunked", "loss.chunks": 8, "precision": "bf16-mixed"}),
    "a loop of chunks": ({}, {"loss": "chunked", "loss.chunks": 16, "lora.rank": 2}),
    "master weights": ({}, {"precision": "bf16", "precision.master_weights": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_other_models_and_formats(case: str) -> None:
    model, fields = OTHERS[case]
    family = {"attention.n_kv_heads": 2} if "attention" not in model else {}
    sizes = {"vocab_size": 100, "d_model": 32, "n_layers": 2, "attention.n_heads": 4, "feed_forward.d_ff": 48}
    batch = {"seq_len": 32, "global_batch": 4, "steps": 3, "objective": "dpo"}
    spec = from_fields(ModelSpec, {**sizes, "max_seq_len": 32, **LLAMA, **family, **model})
    assert_agree(Run(model=spec, recipe=from_fields(Recipe, {**batch, **fields})))


OTHER_PHASES = ("recompute", "backward", "clip", "optimizer")


def test_a_reference_is_one_forward_more_and_its_weights_and_keeps_nothing() -> None:
    """Against the step on next tokens, and the matmuls of a forward by their shapes."""
    for fields in ({}, {"precision": "bf16-mixed"}, {"lora.rank": 3}, {"activation_checkpointing": "full"}):
        plain, paired = account(run_of(**fields)), account(run_of(objective="dpo", **fields))
        known = account(run_of(objective="dpo", **{"objective.reference": "precomputed"}, **fields))
        once = run_of().recipe.global_batch * sum(forward_flops(run_of().model, run_of().recipe.seq_len).values())
        assert paired.model_flops - known.model_flops == once
        assert known.model_flops == plain.model_flops
        assert paired.kept_nbytes == known.kept_nbytes
        added = {name: nbytes - dict(known.resident).get(name, 0) for name, nbytes in paired.resident}
        weights = 0 if "lora.rank" in fields else 4 * plain.parameters
        assert added["frozen weights"] == weights
        assert added["batch"] == -4 * run_of().recipe.global_batch
        for phase in OTHER_PHASES:
            assert paired.by("phase").get(phase) == known.by("phase").get(phase)


def test_forwards_of_each_objective_are_counted() -> None:
    """An odds ratio needs none beside the model's; mismatched answers one more of the model and one of a reference."""
    once = run_of().recipe.global_batch * sum(forward_flops(run_of().model, run_of().recipe.seq_len).values())
    plain = account(run_of())
    for objective, forwards in (("orpo", 0), ("dpo", 1), ("kto", 3)):
        told = account(run_of(objective=objective))
        assert told.model_flops - plain.model_flops == forwards * once
        weights = 4 * plain.parameters if forwards else 0
        assert dict(told.resident).get("frozen weights", 0) == weights
    known = account(run_of(objective="kto", **{"objective.reference": "precomputed"}))
    assert known.model_flops - plain.model_flops == once


def test_a_sharded_reference_has_pieces_and_is_gathered_once_more_for_its_forward() -> None:
    fields: dict[str, Any] = {"objective": "dpo", "global_batch": 8, "precision": "bf16-sharded"}
    device, known = (
        replace(run_of(**fields, **{"objective.reference": kind}), layout=Layout(shard=2))
        for kind in ("device", "precomputed")
    )
    (ours,), (others,) = accounts(device), accounts(known)
    gathers = [
        [entry.payload * entry.times for entry in rank.ledger.entries if entry.name == "all_gather"]
        for rank in (ours, others)
    ]
    blocks = (
        2
        * sum(  # in bf16, without what lies outside the blocks
            count * sum(leaf.elements for leaf in pattern)
            for pattern, count in list(others.plan.chunks[0].leaves.in_order())[1:-1]
        )
    )
    outside = 2 * sum(leaf.elements for leaf in others.plan.chunks[0].leaves.outside)
    assert sum(gathers[0]) - sum(gathers[1]) == blocks + outside
    assert dict(ours.ledger.resident)["frozen weights"] == dict(ours.ledger.resident)["parameters"]
    assert ours.ledger.kept_nbytes == others.ledger.kept_nbytes
    reduced = [
        sum(entry.payload for entry in rank.ledger.entries if entry.name == "reduce_scatter") for rank in (ours, others)
    ]
    assert reduced[0] == reduced[1] > 0


def test_what_is_refused_names_what_works() -> None:
    found = {
        str(problem)
        for fields in ({"global_batch": 3}, {"loss": "fused", "loss.chunks": 2}, {"dropout": 0.1}, {"compile": True})
        for problem in run_problems(run_of(objective="dpo", **fields))
    }
    yet = "is not accounted for with preferences (recipe.objective)"
    assert found == {
        "recipe.global_batch = 3: a micro-batch of 3 is not of pairs, a chosen and a rejected sequence each "
        "(recipe.objective); nearest that works: 4",
        f"recipe.loss = 'fused': {yet}; nearest that works: chunked",
        f"recipe.dropout = 0.1: {yet}; nearest that works: 0",
        f"recipe.compile = true: {yet}; nearest that works: false",
    }
