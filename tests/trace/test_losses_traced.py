"""Losses chunk by chunk: the closed form and the trace tell the same, and both what is saved."""

from __future__ import annotations

import pytest
import torch
from agreement import examples
from hypothesis import given
from random_runs import pick, run_of
from saving_runs import same_ledgers, saving_runs

from trainledger.ledger.ledger import Ledger
from trainledger.ledger.step import account
from trainledger.spec.run import Run

pytestmark = pytest.mark.agreement

torch.set_num_threads(1)


@examples(12)
@given(saving_runs(**{"loss.upcast": pick(True, False)}))
def test_all_logits_at_once(run: Run) -> None:
    same_ledgers(run)


@examples(40)
@given(
    saving_runs(
        loss=pick("chunked", "fused"), activation_checkpointing=pick("none", "none", "full", "segments", "offload"),
        **{"loss.chunks": pick(1, 2, "half", "all"), "loss.upcast": pick(True, False)},
    )
)  # fmt: skip
def test_chunk_by_chunk(run: Run) -> None:
    same_ledgers(run, in_order=run.recipe.activation_checkpointing.kind != "offload")


def head_heavy(**recipe: object) -> Ledger:
    return account(run_of(model={"vocab_size": 30_000, "n_layers": 2}, **recipe))


def test_chunks_save_logits_and_the_fused_loss_makes_nothing_again() -> None:
    full = head_heavy()
    logits_nbytes = 4 * 128 * 30_000
    for kind in ("chunked", "fused"):
        for chunks in (4, 16):
            saving = head_heavy(loss=kind, **{"loss.chunks": chunks})
            assert full.peak().nbytes - saving.peak().nbytes > 0.5 * logits_nbytes
            assert saving.model_flops == full.model_flops
            again = saving.matmul_flops - full.matmul_flops
            assert again == (2 * 128 * 64 * 30_000 if kind == "chunked" else 0)
            logits = saving.filter(lambda each: each.path == "lm_head" and each.phase == "forward")
            assert max(each.written for each in logits) == logits_nbytes // chunks
    assert full.peak().nbytes > head_heavy(precision="bf16", **{"loss.upcast": False}).peak().nbytes


def test_the_work_does_not_grow_with_chunks() -> None:
    for kind in ("chunked", "fused"):
        assert len(head_heavy(loss=kind, **{"loss.chunks": 8})) == len(head_heavy(loss=kind, **{"loss.chunks": 128}))


def test_batches_as_an_array() -> None:
    numpy = pytest.importorskip("numpy")
    batches = numpy.array([2, 4, 8])
    for kind in ("chunked", "fused"):
        recipe = {"loss": kind, "loss.chunks": 8, "precision": "bf16-mixed"}
        many = account(run_of(global_batch=batches, micro_batch=batches, **recipe))
        for at, each in enumerate(batches):
            one = account(run_of(global_batch=int(each), micro_batch=int(each), **recipe))
            assert many.total("flops")[at] == one.total("flops")
            assert many.kept_nbytes[at] == one.kept_nbytes
