"""Recomputation and offloading: the closed form and the trace tell the same, and both what is saved."""

from __future__ import annotations

import pytest
import torch
from agreement import examples
from hypothesis import given
from random_runs import pick, run_of
from saving_runs import same_ledgers, saving_runs

from trainledger.ledger.entry import HOST
from trainledger.ledger.step import account
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run

pytestmark = pytest.mark.agreement

torch.set_num_threads(1)


@examples(24)
@given(saving_runs(activation_checkpointing="full", **{"activation_checkpointing.every": pick(1, 2, 3)}))
def test_blocks(run: Run) -> None:
    same_ledgers(run)


@examples(16)
@given(
    saving_runs(activation_checkpointing="segments", **{"activation_checkpointing.n_blocks": pick(None, 2, 3, 4, 9)})
)
def test_segments(run: Run) -> None:
    same_ledgers(run)


@examples(24)
@given(
    saving_runs(
        activation_checkpointing="selective",
        **{"activation_checkpointing.keep": pick(
            ("matmuls",), ("attention",), ("mm", "addmm"), ("bmm", "_softmax"), ("silu", "gelu", "native_layer_norm"),
            ("native_dropout", "matmuls"),
        ), "activation_checkpointing.every": pick(1, 1, 2)},
    )
)  # fmt: skip
def test_selected_operations(run: Run) -> None:
    same_ledgers(run)


@examples(16)
@given(saving_runs(activation_checkpointing="attention", attention_dropout=pick(0.0, 0.1)))
def test_the_core_of_attention(run: Run) -> None:
    same_ledgers(run)


@pytest.mark.parametrize("gpt2", [False, True])
def test_gathered_copies_of_parameters_stay_on_the_device(gpt2: bool) -> None:
    run = run_of(gpt2=gpt2, activation_checkpointing="offload", precision="bf16-sharded")
    predicted, _ = same_ledgers(run, in_order=False)
    weights = 2 * run.model.d_model * run.model.feed_forward.d_ff
    assert not any(each.name == "to_host" and each.written == weights for each in predicted)
    assert account(run, backend="cuda").flops > 0


@examples(16)
@given(saving_runs(activation_checkpointing="offload"))
def test_offloading(run: Run) -> None:
    predicted, _ = same_ledgers(run, in_order=False)
    moved = [each for each in predicted if each.kind == "transfer" and each.name.startswith("to_")]
    there = sum(each.written * each.times for each in moved if each.name == "to_host")
    back = sum(each.read * each.times for each in moved if each.name == "to_device")
    assert 0 < back <= there
    assert HOST not in predicted.peak().by_category


@examples(16)
@given(saving_runs(activation_checkpointing="from-start"))
def test_from_start(run: Run) -> None:
    predicted, _ = same_ledgers(run, in_order=False)
    n_layers = run.model.n_layers
    down = [each for each in predicted.filter(lambda each: each.path.endswith("down_proj")) if each.kind == "matmul"]
    forward, again = (sum(each.times for each in down if each.phase == phase) for phase in ("forward", "recompute"))
    assert forward == n_layers * run.grad_accum
    # The last matmul of a block is not made again for its own backward, unless a norm stands behind it.
    whole = n_layers * (n_layers - 1) // 2 * run.grad_accum
    assert again in (whole, whole + forward)


def test_each_way_saves_what_it_says() -> None:
    """Of twelve equal blocks: bytes kept by the forward fall, operations rise, the model's own do not change."""
    deep = {"n_layers": 12}
    plain = account(run_of(model=deep))
    block = account(run_of(model=deep, activation_checkpointing="full"))
    root = account(run_of(model=deep, activation_checkpointing="segments"))
    start = account(run_of(model=deep, activation_checkpointing="from-start"))
    second = account(run_of(model=deep, activation_checkpointing="full", **{"activation_checkpointing.every": 2}))
    matmuls = account(run_of(model=deep, activation_checkpointing="selective"))
    every = (start, root, block, matmuls, plain)
    assert [each.kept_nbytes for each in every] == sorted(each.kept_nbytes for each in every)
    assert len({each.kept_nbytes for each in every}) == 5
    assert {each.model_flops for each in (*every, second)} == {plain.model_flops}
    assert 2 * (second.kept_nbytes - block.kept_nbytes) == plain.kept_nbytes - block.kept_nbytes
    assert 2 * (second.matmul_flops - plain.matmul_flops) == block.matmul_flops - plain.matmul_flops
    assert start.matmul_flops > root.matmul_flops >= block.matmul_flops > matmuls.matmul_flops > plain.matmul_flops
    # With blocks that keep many times their input, a segment's activations outweigh the inputs that it saves.
    assert start.peak().nbytes <= block.peak().nbytes < root.peak().nbytes < plain.peak().nbytes


def test_the_work_does_not_grow_with_layers() -> None:
    for variant in ("full", "selective", "attention", "offload", "from-start"):
        few, many = (account(run_of(model={"n_layers": each}, activation_checkpointing=variant)) for each in (9, 900))
        assert len(few) == len(many), variant


def test_layers_as_an_array() -> None:
    numpy = pytest.importorskip("numpy")
    for variant in ("full", "selective", "attention", "offload", "from-start"):
        layers = numpy.array([4, 5, 9])
        many = account(run_of(model={"n_layers": layers}, activation_checkpointing=variant))
        for at, each in enumerate(layers):
            one = account(run_of(model={"n_layers": int(each)}, activation_checkpointing=variant))
            assert many.total("flops")[at] == one.total("flops")
            assert many.kept_nbytes[at] == one.kept_nbytes
    with pytest.raises(InvalidInput, match="n_layers must be one number"):
        account(run_of(model={"n_layers": layers}, activation_checkpointing="segments"))
