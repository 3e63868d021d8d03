"""Runs of our own models whose layers are multiplied, beside all of them traced."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agreement import examples
from blocks_compared import same_ledger
from hypothesis import given
from hypothesis import strategies as st
from random_runs import run_of, runs

from trainledger.answers.load import load
from trainledger.observe.measure.step import rehearse
from trainledger.spec.run import Run

pytestmark = pytest.mark.agreement


@given(run=runs(), n_layers=st.integers(8, 9))
@examples(5)
def test_of_any_run_the_layers_multiply(run: Run, n_layers: int) -> None:
    deep = replace(run, model=replace(run.model, n_layers=n_layers))
    same_ledger(rehearse(deep), rehearse(deep, blocks="all"))


SAVINGS = {
    "every-other": {"activation_checkpointing": "full", "activation_checkpointing.every": 2},
    "segments": {"activation_checkpointing": "segments", "activation_checkpointing.n_blocks": 2},
    "selective": {"activation_checkpointing": "selective", "activation_checkpointing.keep": ("matmuls",)},
    "attention": {"activation_checkpointing": "attention", "attention": "math"},
    "offload": {"activation_checkpointing": "offload"},
    "lora": {"lora.rank": 4},
    "chunked-loss": {"loss": "chunked"},
    "fp16": {"precision": "fp16-mixed"},
    "muon": {"optimizer": "muon"},
    "adafactor": {"optimizer": "adafactor"},
    "adamw-8bit": {"optimizer": "adamw-8bit"},
}


@pytest.mark.parametrize("saving", SAVINGS)
def test_what_saves_memory_multiplies(saving: str) -> None:
    layers = {"every-other": 17, "segments": 17}.get(saving, 10)
    run = run_of(model={"n_layers": layers}, **SAVINGS[saving])
    same_ledger(rehearse(run), rehearse(run, blocks="all"))


KINDS = {
    "windows": {"attention.window": 8, "attention.global_every": 3},
    "dense-then-experts": {
        "feed_forward": "experts",
        "feed_forward.n_experts": 4,
        "feed_forward.per_token": 2,
        "feed_forward.expert_d_ff": 32,
        "feed_forward.n_dense_layers": 3,
    },
    "every-other-expert": {
        "feed_forward": "experts",
        "feed_forward.n_experts": 4,
        "feed_forward.per_token": 2,
        "feed_forward.expert_d_ff": 32,
        "feed_forward.every": 2,
    },
    "parallel": {"block": "parallel"},
    "sandwich": {"norm_place": "sandwich"},
    "tied": {"tie_embeddings": True},
    "ahead": {"n_mtp_layers": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_block_multiplies(kind: str) -> None:
    layers = {"windows": 25, "dense-then-experts": 11, "every-other-expert": 17}.get(kind, 9)
    run = run_of(model={"n_layers": layers, **KINDS[kind]})
    once = rehearse(run)
    same_ledger(once, rehearse(run, blocks="all"))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("preset", ["llama-3-8b", "llama-3-70b", "mixtral-8x7b", "deepseek-v2-lite", "qwen3-30b-a3b"])
def test_models_as_they_are(preset: str, checkpointing: str) -> None:
    recipe = {"seq_len": 4096, "global_batch": 2, "micro_batch": 1, "steps": 1}
    run = load({"model": {"preset": preset}, "recipe": {**recipe, "activation_checkpointing": checkpointing}})
    same_ledger(rehearse(run), rehearse(run, blocks="all"))


def test_micro_batches_multiply_with_the_layers_in_them() -> None:
    run = run_of(model={"n_layers": 9}, global_batch=16, micro_batch=2)
    once = rehearse(run)
    same_ledger(once, rehearse(run, blocks="all"))
    assert {len(each.loop) for each in once} == {0, 1, 2}
    assert once.notes == (
        "9 layers are alike: traced once and multiplied by 9",
        "8 micro-batches are alike: 4 were traced and one of them multiplied",
    )


def test_micro_batches_of_a_shallow_model_multiply() -> None:
    run = run_of(global_batch=16, micro_batch=2, dropout=0.1, precision="bf16-mixed")
    same_ledger(rehearse(run), rehearse(run, blocks="all"))


@pytest.mark.parametrize(
    "run",
    [
        run_of(model={"n_layers": 7}),
        run_of(model={"n_layers": 8}, activation_checkpointing="from-start"),
        run_of(model={"n_layers": 9}, activation_checkpointing="segments"),
    ],
    ids=["too few", "each made from the first", "only three segments"],
)
def test_what_does_not_multiply_is_traced_whole(run: Run) -> None:
    ledger, whole = rehearse(run), rehearse(run, blocks="all")
    assert not any(each.loop for each in ledger)
    assert ledger == whole
