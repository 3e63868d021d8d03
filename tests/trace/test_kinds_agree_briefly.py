"""A few cases of `test_kinds_agree`, whose tables take minutes, and those that once found an error: in every build."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from agreement import assert_agree
from pairwise import Case
from random_runs import GPT2, LLAMA, run_of
from test_kinds_agree import blocks, combined, experts, precisions, run_from

from trainledger.observe.measure.step import rehearse

pytestmark = pytest.mark.torch
torch.set_num_threads(1)

GATED: Case = {**LLAMA, "feed_forward.activation": "clamped_swish"}
FULL: Case = {"recipe.seq_len": 8, "recipe.micro_batch": 2, "recipe.activation_checkpointing": "full"}
SIZES: Case = {"d_model": 12, "attention.n_heads": 2, "attention.head_dim": 4, "feed_forward.d_ff": 7}
# A block's last activations: who keeps one alive too long, and who lets it go too soon.
FOUND: dict[str, Case] = {
    "a gated MLP, recomputed": {**GATED, **SIZES, **FULL, "vocab_size": 5, "n_layers": 5},
    "a gated MLP with tokens ahead": {**GATED, **SIZES, **FULL, "vocab_size": 17, "n_layers": 2, "n_mtp_layers": 1},
    "shares of experts in their loss": {
        **GPT2, **SIZES, **FULL, "vocab_size": 5, "n_layers": 2, "feed_forward": "experts", "feed_forward.n_experts": 8,
        "feed_forward.per_token": 2, "feed_forward.n_dense_layers": 1, "recipe.load_balance_loss": 0.01,
    },
}  # fmt: skip
DRAWN = 4


@pytest.mark.parametrize("name", FOUND)
def test_what_was_once_wrong_agrees(name: str) -> None:
    assert_agree(run_from(FOUND[name]))


@pytest.mark.parametrize("draw", [blocks, combined, experts, precisions])
def test_some_of_each_table_agree(draw: Callable[[Random], Case]) -> None:
    for seed in range(DRAWN):
        assert_agree(run_from(draw(Random(seed))))


def test_micro_batches_are_alike() -> None:
    """As long as they are, a trace of four of them stands for all."""
    run = run_of(global_batch=16, micro_batch=2, precision="bf16-mixed")
    assert any(each.loop for each in rehearse(run))
