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

from trainledger.ledger.model.parameters import forward_flops, parameters
from trainledger.ledger.ranks import accounts
from trainledger.ledger.step import account
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
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
    objective = draw(pick("dpo", "orpo", "kto", "reward", "distillation"))
    compared = {}
    if objective in ("dpo", "kto"):
        compared = {"objective.reference": draw(pick("device", "precomputed"))}
    elif objective == "distillation":
        ratio, temperature = draw(pick(1.0, 0.5)), draw(pick(1.0, 2.0))
        compared = {"objective.kd_ratio": ratio, "objective.temperature": temperature}
    fields = {
        "seq_len": seq_len,
        "global_batch": 2 * pairs * grad_accum,
        "micro_batch": 2 * pairs,
        "steps": 3,
        "objective": objective,
        **compared,
        "precision": draw(pick(*precisions)),
        "attention": draw(pick("sdpa", "math")),
        "activation_checkpointing": draw(pick("none", "full", "segments", "selective", "attention", "offload")),
        "loss.upcast": draw(st.booleans()),
        **(
            {}
            if seq_len == 17 or objective in ("reward", "distillation")
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
    teacher = replace(draw(models(seq_len)), vocab_size=model.vocab_size) if objective == "distillation" else None
    return Run(model=model, recipe=from_fields(Recipe, fields), teacher=teacher)


@examples(120)
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


def test_a_teacher_is_a_forward_and_weights_of_another_model_and_probabilities_of_all_tokens() -> None:
    """Against the step on next tokens, whose log-probabilities the student keeps as well."""
    for fields in ({}, {"precision": "bf16-mixed"}, {"lora.rank": 3}, {"activation_checkpointing": "full"}):
        plain = run_of(**fields)
        run = distilled(**fields)
        assert run.teacher is not None
        before, after = account(plain), account(run)
        rows, batch = plain.recipe.tokens_per_step, plain.recipe.global_batch
        assert after.parameters == before.parameters
        once = batch * sum(forward_flops(run.teacher, plain.recipe.seq_len).values())
        assert after.model_flops - before.model_flops == once
        of_teacher = (2 if "precision" in fields else 4) * parameters(run.teacher).total
        frozen = dict(after.resident)["frozen weights"] - dict(before.resident).get("frozen weights", 0)
        assert frozen == of_teacher
        without_count = -4  # of the tokens, which the loss of the next token keeps
        assert after.kept_nbytes - before.kept_nbytes == 4 * rows * run.model.padded_vocab + without_count
        for phase in OTHER_PHASES[2:]:
            assert after.by("phase").get(phase) == before.by("phase").get(phase)


def distilled(**fields: Any) -> Run:
    plain = run_of(objective="distillation", **fields)
    teacher = with_fields(plain.model, {"d_model": 96, "n_layers": 5, "feed_forward.d_ff": 111, "name": "teacher"})
    return replace(plain, teacher=teacher)


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


def test_a_teacher_must_be_a_model_of_its_own_with_the_vocabulary_of_the_student() -> None:
    run = distilled()
    assert run.teacher is not None

    def refused(**fields: Any) -> list[str]:
        return [str(problem) for problem in run_problems(replace(run, teacher=with_fields(run.teacher, fields)))]

    assert refused() == []
    missing = "is missing: the frozen model whose logits are learned, by a name of the catalog or its fields"
    assert [str(problem) for problem in run_problems(replace(run, teacher=None))] == [
        f"teacher: {missing}; nearest that works: teacher.preset=NAME"
    ]
    rule = "must be that of the student, with whose 1,000 logits of a token its own are compared; nearest that works:"
    assert refused(vocab_size=1001) == [f"teacher.vocab_size = 1001: {rule} model.vocab_size = 1001"]
    assert refused(vocab_size=2000) == [f"teacher.vocab_size = 2000: {rule} a teacher with the student's tokenizer"]
    assert refused(**{"attention.n_heads": 7, "attention.n_kv_heads": 1}) == [
        "teacher.attention.n_heads = 7: must divide d_model = 96 where head_dim is not given; nearest that works: 8"
    ]
    assert refused(max_seq_len=5)[0].startswith("recipe.seq_len = 32: is longer than teacher.max_seq_len = 5")
    asked = replace(run, recipe=with_fields(run.recipe, {"objective": "dpo"}))
    assert [str(problem) for problem in run_problems(asked)] == [
        "recipe.objective = 'dpo': has no teacher, and [teacher] names one; nearest that works: distillation"
    ]


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
