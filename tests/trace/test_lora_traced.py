"""Adapters beside frozen weights: the closed form and the trace tell the same, and both what is saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import assert_agree, examples
from hypothesis import given
from hypothesis import strategies as st
from random_runs import pick, run_of
from saving_runs import same_ledgers, saving_runs

from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.ops.adapters import base_nbytes
from trainledger.ledger.step import account
from trainledger.spec.layers import segments
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

pytestmark = pytest.mark.agreement

torch.set_num_threads(1)


@examples(50)
@given(
    saving_runs(
        activation_checkpointing=pick("none", "none", "full", "selective", "attention", "offload"),
        loss=pick("full", "chunked", "fused"),
        **{
            "lora.rank": pick(1, 4),
            "lora.targets": pick(("linear",), ("q_proj", "v_proj"), ("down_proj",), ("k_proj", "up_proj")),
            "lora.dropout": pick(0.0, 0.1),
            "lora.dora": pick(False, True),
            "lora.base_format": pick(None, "bf16", "int8", "nf4"),
            "loss.chunks": 2,
        },
    )
)
def test_adapters(run: Run) -> None:
    predicted, _ = same_ledgers(run, in_order=run.recipe.activation_checkpointing.kind != "offload")
    assert dict(predicted.resident)["frozen weights"] > 0


EXPERTS = {
    "feed_forward": "experts", "feed_forward.d_ff": 12, "feed_forward.n_experts": 4, "feed_forward.per_token": 2,
}  # fmt: skip


@examples(40)
@given(st.data())
def test_adapters_of_mixtures(data: st.DataObject) -> None:
    """Of stacks by their weights or by rows, beside those of attention and of shared experts, or alone."""
    how = data.draw(pick(None, "weights", "rows"))
    model = {
        **EXPERTS, "n_layers": data.draw(pick(1, 2, 3, 6)), "feed_forward.n_shared": data.draw(pick(0, 1)),
        "feed_forward.n_dense_layers": data.draw(pick(0, 1, 2)), "feed_forward.expert_d_ff": data.draw(pick(7, 16)),
        "feed_forward.bias": data.draw(st.booleans()), "feed_forward.gated": data.draw(st.booleans()), "d_model": 24,
    }  # fmt: skip
    if model["feed_forward.n_shared"]:
        model["feed_forward.shared_gate"] = data.draw(st.booleans())
    if model["n_layers"] < 3:
        model["feed_forward.n_dense_layers"] = min(model["feed_forward.n_dense_layers"], model["n_layers"] - 1)
    again = data.draw(pick("none", "full", "selective", "attention", "offload"))
    recipe = {
        "lora.rank": data.draw(pick(1, 3)), "lora.experts": how or "rows",
        "lora.targets": data.draw(pick(("linear",), ("q_proj",), ("o_proj",))),
        "lora.dropout": 0.0 if how == "weights" else data.draw(pick(0.0, 0.1)),
        "lora.base_format": data.draw(pick(None, "bf16", "nf4")), "activation_checkpointing": again,
        "precision": data.draw(pick("fp32", "bf16-mixed", "bf16")), "load_balance_loss": data.draw(pick(0.0, 0.01)),
        "expert_dispatch": data.draw(pick("dropless", "capacity")), "objective": data.draw(pick("next-token", "dpo")),
    }  # fmt: skip
    if how is not None:
        recipe["lora.targets"] = (*recipe["lora.targets"], "experts")[data.draw(pick(0, 1)) :]
    if recipe["objective"] == "dpo":
        recipe["load_balance_loss"] = 0.0
    run = run_of(model=model, **recipe)
    predicted, _ = same_ledgers(run, in_order=again != "offload")
    alone = account(run_of(model=model, **{**recipe, "lora.targets": ("q_proj",)}))
    stacks = sum(segment.count * sum(kind.experts for kind in segment.kinds) for segment in segments(run.model))
    if how is not None and recipe["lora.targets"] == ("q_proj", "experts"):
        wide = model["feed_forward.expert_d_ff"] * (2 if model["feed_forward.gated"] else 1)
        of_layer = 4 * run.recipe.lora.rank * (24 + wide + 24 + model["feed_forward.expert_d_ff"])
        assert predicted.parameters - alone.parameters == stacks * of_layer


def test_frozen_weights_have_no_gradient_no_state_and_no_matmul_of_their_own() -> None:
    """FLOPs of linear layers: forward and the input's gradient instead of three matmuls; more with recomputation."""
    deep = {"n_layers": 6, "vocab_size": 8}
    run = run_of(model=deep, **{"lora.rank": 1})
    plain, adapted, again = (
        account(each)
        for each in (run_of(model=deep), run, run_of(model=deep, activation_checkpointing="full", **{"lora.rank": 1}))
    )
    tokens = run.recipe.tokens_per_step
    elements = parameters(run.model)
    linear = elements.by_component["attention"] + elements.by_component["mlp"]

    def of_blocks(ledger: object) -> int:
        entries = ledger.filter(lambda each: each.path.startswith("layers") and each.kind == "matmul")  # type: ignore
        return int(entries.flops)

    assert of_blocks(plain) == 6 * linear * tokens
    trained = adapted.parameters
    first = of_blocks(adapted) - 6 * trained * tokens
    assert first < 4 * linear * tokens < first + 2 * linear * tokens // 6  # the first block's input has no gradient
    assert of_blocks(again) > of_blocks(adapted)
    resident = dict(adapted.resident)
    assert resident["parameters"] == 4 * trained
    assert resident["frozen weights"] == 4 * elements.total
    assert resident["optimizer state"] < 9 * trained
    gradients = sum(nbytes for each in adapted for name, nbytes in each.allocated if name == "gradients")
    assert gradients <= 4 * trained


BESIDE: tuple[dict[str, Any], ...] = (
    {"lora.whole": ["embed_tokens", "lm_head"]},
    {"lora.whole": ["lm_head"], "loss": "fused", "loss.chunks": 2},
    {"lora.whole": ["embed_tokens"], "lora.targets": ["down_proj"]},
    {"lora.whole": ["embed_tokens", "lm_head"], "lora.base_format": "nf4", "precision": "bf16-mixed"},
    {
        "lora.whole": ["embed_tokens", "lm_head"],
        "activation_checkpointing": "full",
        "loss": "chunked",
        "loss.chunks": 4,
    },
    {"lora.whole": ["embed_tokens", "lm_head"], "objective": "orpo"},
)


@pytest.mark.parametrize("fields", BESIDE, ids=lambda fields: " ".join(map(str, fields.values())))
def test_matrices_trained_whole_beside_adapters(fields: dict[str, Any]) -> None:
    run = run_of(**{"lora.rank": 3, **fields})
    whole, _ = assert_agree(run)
    alone = account(run_of(**{"lora.rank": 3, **fields, "lora.whole": []}))
    elements = run.model.vocab_size * run.model.d_model * len(fields["lora.whole"])
    assert whole.parameters - alone.parameters == elements
    moved = dict(alone.resident)["frozen weights"] - dict(whole.resident)["frozen weights"]
    assert moved == 4 * elements == dict(whole.resident)["parameters"] - dict(alone.resident)["parameters"]


GATED_DELTA = {
    "mixer": "gated-delta", "mixer.n_heads": 4, "mixer.n_key_heads": 2, "mixer.key_dim": 6, "mixer.value_dim": 8,
}  # fmt: skip
BESIDE_MIXERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gated delta": ({**GATED_DELTA, "layers": "RRA"}, {"precision": "bf16-mixed"}),
    "attention alone": ({**GATED_DELTA, "layers": "RA"}, {"lora.targets": ["q_proj", "v_proj"], "lora.dropout": 0.1}),
    "mamba-2": (
        {"mixer": "mamba-2", "mixer.n_heads": 4, "mixer.head_dim": 8, "mixer.state": 6, "layers": "M*-"},
        {"activation_checkpointing": "full"},
    ),
    "experts too": (
        {**GATED_DELTA, "layers": "ME*-RB", "n_layers": 6, "feed_forward": "experts", "feed_forward.n_experts": 4},
        {"precision": "bf16", "lora.dora": True},
    ),
}


@pytest.mark.parametrize("name", BESIDE_MIXERS)
def test_adapters_beside_mixers_that_stay_as_they_are(name: str) -> None:
    model, recipe = BESIDE_MIXERS[name]
    run = run_of(model=model, **{"lora.rank": 3, **recipe})
    assert not [*run_problems(run)]
    adapted, _ = assert_agree(run)
    gradients = sum(nbytes for each in adapted for name, nbytes in each.allocated if name == "gradients")
    assert gradients <= 4 * adapted.parameters < parameters(run.model).total


IN_FP16: tuple[dict[str, Any], ...] = (
    {"lora.base_format": "nf4", "lora.dropout": 0.1},
    {"activation_checkpointing": "full", "global_batch": 8, "micro_batch": 2},
    {"lora.dora": True, "loss": "chunked", "loss.chunks": 2},
)


@pytest.mark.parametrize("recipe", IN_FP16, ids=lambda fields: " ".join(map(str, fields.values())))
def test_adapters_under_a_scaled_loss(recipe: dict[str, Any]) -> None:
    """As on devices without bf16: V100, T4."""
    run = run_of(**{"lora.rank": 3, "precision": "fp16-mixed", **recipe})
    assert not [*run_problems(run)]
    assert_agree(run)


def test_what_is_trained_whole_is_refused_where_it_would_be_another_run() -> None:
    whole = {"lora.rank": 3, "lora.whole": ["lm_head"]}
    for fields, sentence in (
        (
            {"lora.whole": ["lm_hed"]},
            "recipe.lora.whole = 'lm_hed': must be of embed_tokens, lm_head; nearest that works: lm_head",
        ),
        ({"objective": "dpo"}, "would change the reference, which is the model with adapters off (recipe.objective)"),
        ({"model": {"tie_embeddings": True}}, "names one of two tied matrices, which PEFT would train apart"),
    ):
        assert sentence in " ".join(map(str, run_problems(run_of(**{**whole, **fields}))))


def test_bytes_of_a_large_frozen_weight() -> None:
    """4.127 bits per weight in nf4 with 8-bit scales (Dettmers et al. 2023, section 3: 0.127 bits for the scales)."""
    n = 4096 * 4096
    assert base_nbytes(n, "bf16") == 2 * n
    assert base_nbytes(n, "int8") == n + 4 * n // 2048
    assert base_nbytes(n, "nf4") == n // 2 + n // 64 + 4 * n // (64 * 256)


def test_sizes_as_arrays_and_the_work_does_not_grow_with_layers() -> None:
    numpy = pytest.importorskip("numpy")
    few, many = (
        account(run_of(model={"n_layers": each}, **{"lora.rank": 2, "lora.base_format": "nf4"})) for each in (9, 900)
    )
    assert len(few) == len(many)
    widths = numpy.array([64, 128])
    both = account(run_of(model={"feed_forward.d_ff": widths}, **{"lora.rank": 2, "lora.base_format": "nf4"}))
    for at, each in enumerate(widths):
        one = account(run_of(model={"feed_forward.d_ff": int(each)}, **{"lora.rank": 2, "lora.base_format": "nf4"}))
        assert both.total("flops")[at] == one.total("flops")
        assert dict(both.resident)["frozen weights"][at] == dict(one.resident)["frozen weights"]


@pytest.mark.parametrize("recipe", [{"activation_checkpointing": "full"}, {"loss": "fused", "loss.chunks": 4}])
def test_symbols(recipe: dict[str, object]) -> None:
    sympy = pytest.importorskip("sympy")
    batch = sympy.Symbol("B", integer=True, positive=True)
    formula = account(run_of(global_batch=batch, micro_batch=batch, **recipe, **{"lora.rank": 2}))
    for size in (4, 8):
        one = account(run_of(global_batch=size, micro_batch=size, **recipe, **{"lora.rank": 2}))
        assert formula.total("flops").subs(batch, size) == one.total("flops")
