"""What a compiler makes one kernel of, against blocks whose data flow is counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from models import sizes
from trainledger.answers.load import load
from trainledger.ledger.step import account

SIZES = {"seq_len": 128, "global_batch": 4, "steps": 1, "grad_clip": None}
ROWS, D, F = 512, 256, 768


def ledger(model=None, **recipe):
    table = {
        "model": {
            "vocab_size": 64,
            "d_model": D,
            "n_layers": 3,
            "attention.n_heads": 4,
            "feed_forward.d_ff": F,
            "max_seq_len": 128,
            **(model or {}),
        },
        "recipe": {**SIZES, "precision": "bf16", "compile": True, **recipe},
    }
    return account(load(table), backend="cuda")


MEMORY = {"fused": (), "kept": 0, "allocated": (), "freed": ()}


def test_nothing_changes_but_what_each_costs_compiled_and_what_is_live():
    plain, compiled = ledger(compile=False), ledger()
    assert all(not each.fused for each in plain)
    assert [replace(each, **MEMORY) for each in compiled] == [replace(each, **MEMORY) for each in plain]


def moved(entries):
    read, written, kernels = (sum(each.fused[place] for each in entries) for place in range(3))
    return read, written, kernels


def of(compiled, phase, *paths):
    return [each for each in compiled if each.fused and each.phase == phase and each.path in paths]


def test_a_gated_mlp_reads_its_two_matmuls_once():
    row = 2 * ROWS * F  # bytes of one array in bf16
    compiled = ledger()
    assert moved(of(compiled, "forward", "layers.*.mlp")) == (2 * row, 2 * row, 1)  # silu is kept for backward
    # Backward reads the gradient and what was kept (silu's input and result, up) and writes two gradients.
    assert moved(of(compiled, "backward", "layers.*.mlp")) == (4 * row, 2 * row, 1)


def test_rotation_reads_queries_and_keys_once_and_writes_them_turned():
    queries, angles = 2 * ROWS * D, 2 * 128 * 64
    read, written, kernels = moved(of(ledger(), "forward", "layers.*.self_attn"))
    assert (written, kernels) == (2 * queries, 1)
    assert 2 * queries <= read <= 2 * queries + 2 * angles


def test_a_norm_joins_the_sum_before_it():
    stream, weight = 2 * ROWS * D, 2 * D
    compiled = ledger()
    read, written, kernels = moved(of(compiled, "forward", "layers.*", "layers.*.post_attention_layernorm"))
    # Two sums, one of them with the norm; the last sum begins a kernel that the block's end closes.
    assert kernels == 2
    assert read == 4 * stream + weight
    assert written == 3 * stream + 4 * ROWS  # two sums, the normed rows and a deviation of each in fp32


def test_no_operation_costs_more_compiled_and_none_outside_of_blocks_is_compiled():
    for recipe in ({}, {"precision": "bf16-mixed"}, {"activation_checkpointing": "full"}, {"dropout": 0.1}):
        for entry in ledger({"attention.bias": True, "feed_forward.bias": True}, **recipe):
            if entry.fused:
                read, written, kernels = entry.fused
                assert 0 <= read <= entry.read
                assert 0 <= written <= entry.written
                assert kernels in (0, 1)
                assert entry.path.startswith("layers.")
            else:
                assert entry.kind in ("matmul", "attention", "reduction", "allocate") or "layers" not in entry.path


def test_matmuls_and_kernels_over_all_rows_end_a_kernel():
    compiled = [each for each in ledger({"feed_forward.bias": True}) if each.path.startswith("layers.")]
    assert all(not each.fused for each in compiled if each.kind in ("matmul", "attention"))
    assert all(not each.fused for each in compiled if each.kind == "reduction")


def test_sizes_may_be_arrays():
    batches = np.array([2, 4, 16])
    run = load(
        {"model": sizes(V=64, D=D, L=2, H=4, F=F, T=128), "recipe": {**SIZES, "compile": True, "precision": "bf16"}}
    )
    many = account(replace(run, recipe=replace(run.recipe, global_batch=batches)), backend="cuda")
    for place, batch in enumerate(batches):
        one = account(replace(run, recipe=replace(run.recipe, global_batch=int(batch))), backend="cuda")
        for mine, alone in zip(many, one, strict=True):
            mine_now = [each if np.ndim(each) == 0 else each[place] for each in mine.fused]
            assert mine_now == pytest.approx(alone.fused)


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_autograd_adds_gradients_of_micro_batches_outside_of_what_is_compiled(precision):
    one, two = ledger(precision=precision), ledger(precision=precision, micro_batch=2)
    nbytes = 2 if precision == "bf16" else 4
    weights = 3 * (4 * D * D + 3 * D * F + 2 * D)  # of all blocks
    added = [each for each in two if each.phase == "backward" and each.name == "add_" and "layers" in each.path]
    assert not any(each.fused for each in added)
    # Each but the first reads both and writes one; what the compiled backward makes of them is written as before.
    assert [sum(each.read * each.times for each in added), sum(each.written * each.times for each in added)] == [
        2 * nbytes * weights, nbytes * weights,
    ]  # fmt: skip
    casts = [each for each in two if each.phase == "backward" and each.fused and each.name == "_to_copy"]
    written = sum(each.fused[1] * each.times for each in casts if each.path.endswith("_proj"))
    alone = [each for each in one if each.phase == "backward" and each.fused and each.name == "_to_copy"]
    assert written == 2 * sum(each.fused[1] * each.times for each in alone if each.path.endswith("_proj"))
