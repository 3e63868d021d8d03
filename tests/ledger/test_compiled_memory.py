"""The memory of compiled blocks in the closed form: what each keeps, counted by hand, and what holds of every model."""

from dataclasses import replace
from typing import Any

import pytest

from models import GPT2 as GPT2_FIELDS
from models import sizes, spec_of
from trainledger.forecast.predict.predict import predict
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import timeline
from trainledger.ledger.ranks import accounts
from trainledger.ledger.step import account
from trainledger.spec.layout import Layout
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

pytestmark = pytest.mark.agreement

LLAMA: dict[str, Any] = {}
GPT2: dict[str, Any] = {**GPT2_FIELDS, "tie_embeddings": False}
B, T, D, F, H = 4, 128, 256, 768, 4
ROWS = B * T


def run_of(model: dict[str, Any], **recipe: Any) -> Run:
    spec = spec_of(**{**sizes(V=64, D=D, L=3, H=H, F=F, T=T), **model})
    fields = {"seq_len": T, "global_batch": B, "steps": 1, "grad_clip": None, "compile": True, "precision": "fp32"}
    return Run(model=spec, recipe=from_fields(Recipe, {**fields, **recipe}))


def eager(run: Run) -> Run:
    return replace(run, recipe=replace(run.recipe, compile=False))


def kept_by_block(ledger: Ledger) -> int:
    """Bytes that the blocks' operations leave for the backward, in all blocks together."""
    kept: int = sum(each.kept * each.times for each in ledger if each.path.startswith("layers."))
    return kept


STREAM, WIDE, LOGSUMEXP, ROW = ROWS * D, ROWS * F, 4 * ROWS * H, 4 * ROWS


def test_a_llama_block_keeps_what_products_and_attention_read() -> None:
    # Both norms' results, queries, keys, values, the mixture and its projection; gate, up and their product; the
    # block's own result. Beside them a root of each row's mean for each norm, and the logsumexp of attention.
    block = 4 * (8 * STREAM + 3 * WIDE) + LOGSUMEXP + 2 * ROW
    assert kept_by_block(account(run_of(LLAMA))) == 3 * block


def test_in_low_precision_the_sum_is_made_again_of_what_it_adds() -> None:
    # In 16 bits: the results of both norms, q, k, v, mixture and projection, the MLP's; the copies of all matrices.
    weights = 4 * D * D + 3 * D * F
    block = 2 * (7 * STREAM + 3 * WIDE + weights) + 4 * STREAM + LOGSUMEXP + 2 * ROW
    assert kept_by_block(account(run_of(LLAMA, precision="bf16-mixed"))) == 3 * block


def test_a_gpt2_block_keeps_what_it_keeps_eagerly() -> None:
    run = run_of(GPT2)
    assert account(run).kept_nbytes == account(eager(run)).kept_nbytes


def test_of_relu_the_sign_is_kept_beside_the_result() -> None:
    run = run_of({**GPT2, "feed_forward.activation": "relu"})
    assert account(run).kept_nbytes == account(eager(run)).kept_nbytes + 3 * WIDE


def test_of_dropout_a_mask_is_kept() -> None:
    with_dropout, without = (kept_by_block(account(run_of(GPT2, dropout=each))) for each in (0.1, 0.0))
    assert with_dropout - without == 3 * 2 * STREAM  # a byte for each element of both branches


def test_checkpointed_blocks_keep_their_inputs_alone() -> None:
    run = run_of(LLAMA, activation_checkpointing="full")
    assert account(run).kept_nbytes == account(eager(run)).kept_nbytes
    assert account(run).peak().nbytes < 0.93 * account(eager(run)).peak().nbytes


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_in_8_bits_what_products_read_is_cast_again(scaling: str) -> None:
    # Nothing in 8 bits, no norm's result, not the product of gate and up: queries, keys, values, mixture and its
    # projection, gate and up, all as products make them, and the block's own result. Eagerly products hold all inputs.
    block = 2 * (5 * STREAM + 2 * WIDE) + 4 * STREAM + LOGSUMEXP + 2 * ROW
    run = run_of(LLAMA, precision=f"fp8-{scaling}")
    assert kept_by_block(account(run)) == 3 * block
    assert kept_by_block(account(eager(run))) > 1.5 * 3 * block


SELECTIVE: dict[str, Any] = {"activation_checkpointing": "selective"}


def test_a_policy_keeps_as_much_of_products_in_8_bits() -> None:
    block = 2 * (3 * STREAM + WIDE) + 4 * STREAM + LOGSUMEXP
    assert kept_by_block(account(run_of(LLAMA, precision="fp8-tensorwise", **SELECTIVE))) == 3 * block


def test_of_what_a_policy_keeps_is_kept_what_backward_reads() -> None:
    # Queries, values and the MLP's gate are every second product, the mixture is attention's; the last product is one
    # too, but only the block's own result is made of it.
    block = 4 * (4 * STREAM + WIDE) + LOGSUMEXP
    run = run_of(LLAMA, **SELECTIVE)
    assert kept_by_block(account(run)) == 3 * block
    assert kept_by_block(account(eager(run))) == 3 * (block + 4 * STREAM)


def test_a_compiled_policy_makes_copies_in_low_precision_again() -> None:
    block = 2 * (3 * STREAM + WIDE) + 4 * STREAM + LOGSUMEXP
    assert kept_by_block(account(run_of(LLAMA, precision="bf16-mixed", **SELECTIVE))) == 3 * block


def test_attention_that_runs_again_on_a_cpu_keeps_the_state_of_its_generator() -> None:
    run = run_of(LLAMA, **SELECTIVE, **{"activation_checkpointing.keep": ()})
    assert kept_by_block(account(run)) == 3 * (4 * STREAM + 5056)
    assert kept_by_block(account(run, backend="cuda")) == 3 * 4 * STREAM


def test_of_dropout_that_runs_again_a_seed_is_kept() -> None:
    with_dropout, without = (kept_by_block(account(run_of(GPT2, dropout=each, **SELECTIVE))) for each in (0.1, 0.0))
    assert with_dropout - without == 3 * 2 * 8


def test_what_is_made_again_runs_when_it_is_needed() -> None:
    ledger = account(run_of(LLAMA, **SELECTIVE))
    again = [each.path for each in ledger if each.phase == "recompute" and each.name == "mm"]
    assert again == [f"layers.*.{each}_proj" for each in ("self_attn.o", "mlp.up", "self_attn.k")]
    order = [each.path.removeprefix("layers.*.") for each in ledger if each.phase in ("recompute", "backward")]
    assert order.index("self_attn.k_proj") > order.index("mlp.gate_proj")
    plain = account(eager(run_of(LLAMA, **SELECTIVE)))
    assert (ledger.flops, len(ledger.entries)) == (plain.flops, len(plain.entries))


def test_a_kernel_over_the_gate_makes_all_three_of_its_results_at_once() -> None:
    # Sums of a row aside, at the peak: the products of the MLP that backward reads, the gradient of their product and
    # the three results of the kernel. Eagerly each result is gone when the next one comes.
    live, plain = (account(each).peak() for each in (run_of(LLAMA, **SELECTIVE), eager(run_of(LLAMA, **SELECTIVE))))
    assert live.entry.path == "layers.*.mlp"
    assert live.by_category["scratch"] >= 4 * 5 * WIDE
    assert live.nbytes < plain.nbytes


KINDS: dict[str, dict[str, Any]] = {
    "grouped": {"attention.n_kv_heads": 2, "attention.qk_norm": "head"},
    "sandwich": {"norm_place": "sandwich", "norm.plus_one": True},
    "parallel": {**GPT2, "block": "parallel"},
    "after-add": {**GPT2, "norm_place": "after-add"},
    "clamped": {"feed_forward.activation": "clamped_swish", "feed_forward.bias": True},
    "windowed": {"attention.window": 32, "attention.global_every": 2, "n_layers": 6},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "segments", "selective"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed", "fp8-rowwise"])
def test_whatever_is_allocated_is_freed_as_in_eager_blocks(kind, backend, checkpointing, precision):
    run = run_of(KINDS[kind], precision=precision, activation_checkpointing=checkpointing, micro_batch=2)
    compiled, plain = account(run, backend=backend), account(eager(run), backend=backend)

    assert left(compiled) == left(plain)
    assert compiled.flops == plain.flops
    assert compiled.kept_nbytes <= 1.01 * plain.kept_nbytes
    assert compiled.peak().nbytes <= 1.01 * plain.peak().nbytes
    assert all(min(each.live.values()) >= 0 for each in timeline(compiled))


SPREAD: dict[str, dict[str, Any]] = {
    "replicas": {"replicate": 2},
    "sharded states": {"shard": 2, "zero": 1},
    "sharded gradients": {"shard": 2, "zero": 2},
    "sharded parameters": {"shard": 2},
    "two ahead": {"shard": 2, "prefetch": 2},
    "gathered once": {"shard": 2, "reshard_after_forward": False},
    "tensor": {"tensor": 2},
    "tensor and sequence": {"tensor": 2, "sequence_parallel": True},
    "one forward, one backward": {"pipeline": 3},
    "all forwards first": {"pipeline": 3, "schedule": "gpipe", "stage_layers": (3, 2, 1)},
    "interleaved": {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 3},
    "all of it": {"pipeline": 3, "tensor": 2, "sequence_parallel": True, "shard": 2},
    "tensor and sequence, gathered again": {"tensor": 2, "sequence_parallel": True, "sequence_gather": "again"},
    "context, a ring": {"context": 2},
    "context, all to all": {"context": 2, "context_kind": "all-to-all"},
    "context, stages and tensor": {"context": 2, "pipeline": 3, "tensor": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp8-tensorwise"])
def test_on_every_rank_too(spread: str, checkpointing: str, precision: str) -> None:
    recipe = {"precision": precision, "activation_checkpointing": checkpointing, "micro_batch": 1, "global_batch": 8}
    run = replace(run_of({"n_layers": 6, "attention.n_kv_heads": 2}, **recipe), layout=Layout(**SPREAD[spread]))
    for mine, plain in zip(accounts(run), accounts(eager(run)), strict=True):
        compiled, same = mine.ledger, plain.ledger
        assert left(compiled) == left(same)
        assert compiled.flops == same.flops
        assert all("compared with no compiled program" in each or "counted as eager" in each for each in compiled.notes)
        near = 1.06 if checkpointing == "selective" else 1.01  # what ranks send counts as needed for longer
        assert compiled.peak().nbytes <= near * same.peak().nbytes
        assert all(min(each.live.values()) >= 0 for each in timeline(compiled))


@pytest.mark.parametrize("spread", ["replicas", "sharded states", "sharded gradients", "sharded parameters"])
def test_a_block_keeps_the_same_whoever_has_its_parameters(spread: str) -> None:
    alone = run_of(LLAMA, micro_batch=B)
    layout = Layout(**SPREAD[spread])
    spread_out = replace(alone, recipe=replace(alone.recipe, global_batch=2 * B), layout=layout)
    assert kept_by_block(account(spread_out)) == kept_by_block(account(alone))


def test_a_tensor_rank_keeps_what_it_gathers_and_its_part_of_the_products() -> None:
    # Both norms' results, which the ranks hold whole; queries, keys, values and the mixture over the ranks; the
    # attention's sum, added up over them, and the block's own result; gate, up and their product over the ranks.
    block = 4 * (4 * STREAM + 4 * STREAM // 2 + 3 * WIDE // 2) + LOGSUMEXP // 2 + 2 * ROW
    assert kept_by_block(account(replace(run_of(LLAMA), layout=Layout(tensor=2)))) == 3 * block


def test_what_sequence_parallel_ranks_gather_is_kept_whole() -> None:
    # As above, but each rank has its own tokens of the attention's sum and of the result, and of the roots.
    block = 4 * (2 * STREAM + 2 * STREAM // 2 + 4 * STREAM // 2 + 3 * WIDE // 2) + LOGSUMEXP // 2 + 2 * ROW // 2
    run = replace(run_of(LLAMA), layout=Layout(tensor=2, sequence_parallel=True))
    assert kept_by_block(account(run)) == 3 * block


AGAIN: dict[str, Any] = {"tensor": 2, "sequence_parallel": True, "sequence_gather": "again"}


def test_what_ranks_gather_again_is_kept_in_parts() -> None:
    # Of both norms' results this rank's own tokens, else as above.
    block = 4 * (2 * STREAM // 2 + 2 * STREAM // 2 + 4 * STREAM // 2 + 3 * WIDE // 2) + LOGSUMEXP // 2 + 2 * ROW // 2
    assert kept_by_block(account(replace(run_of(LLAMA), layout=Layout(**AGAIN)))) == 3 * block


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["ring", "all-to-all"])
def test_a_context_rank_keeps_as_much_of_its_own_tokens(kind: str, ranks: int) -> None:
    # As alone; where heads and tokens are exchanged, the mixture twice: as attention made it and as products read it.
    streams = 8 if kind == "ring" else 9
    block = (4 * (streams * STREAM + 3 * WIDE) + LOGSUMEXP + 2 * ROW) // ranks
    generator = 2 * 8
    layout = Layout(context=ranks, context_kind=kind)
    run = replace(run_of(LLAMA, attention="efficient", precision="fp32"), layout=layout)
    assert kept_by_block(account(run, backend="cuda")) == 3 * (block + generator)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_weights_that_are_cast_once_change_nothing_that_a_block_keeps(scaling: str) -> None:
    run = run_of(LLAMA, precision=f"fp8-{scaling}")
    once = replace(run, recipe=with_fields(run.recipe, {"precision.weight_caching": True}))
    assert kept_by_block(account(once)) == kept_by_block(account(run))


EXPERTS: dict[str, Any] = {"feed_forward": "experts", "feed_forward.n_experts": 4, "feed_forward.per_token": 2}
LATENT: dict[str, Any] = {
    "attention": "latent",
    "attention.kv_rank": 12,
    "attention.nope_head_dim": 8,
    "attention.rope_head_dim": 4,
    "attention.v_head_dim": 8,
}
UNWITNESSED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("precision fp8-rowwise over tensor ranks", LLAMA, {"precision": "fp8-rowwise", "precision.weight_caching": True},
     {"tensor": 2, "sequence_parallel": True}),
    ("context ranks", LLAMA, {}, {"context": 2}),
    ('sequence_gather = "again"', LLAMA, {}, AGAIN),
    ('sequence_gather = "again" and context ranks', LLAMA, {}, {**AGAIN, "context": 2}),
    ("latent attention over tensor ranks", LATENT, {}, {"tensor": 2}),
    ("experts over tensor ranks", EXPERTS, {}, {"tensor": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("what", "model", "recipe", "layout"), UNWITNESSED, ids=[each[0] for each in UNWITNESSED])
def test_where_no_compiled_program_shows_the_rules_a_note_says_so(what, model, recipe, layout):
    run = replace(run_of(model, **recipe), layout=Layout(**layout))
    compiled, plain = (accounts(each, backend="cuda")[0].ledger for each in (run, eager(run)))
    assert compiled.notes == (
        f"compiled memory follows the compiler's rules, which were compared with no compiled program for {what}",
    )
    assert compiled.kept_nbytes < plain.kept_nbytes
    assert compiled.flops == plain.flops


def test_what_ranks_add_up_at_the_end_of_a_block_stays_where_a_policy_keeps_it() -> None:
    # Queries, values and the gate over the ranks, as the mixture; the block's result and the last product, whole.
    block = 4 * (3 * STREAM // 2 + WIDE // 2 + 2 * STREAM) + LOGSUMEXP // 2
    assert kept_by_block(account(replace(run_of(LLAMA, **SELECTIVE), layout=Layout(tensor=2)))) == 3 * block


def left(ledger: Ledger) -> dict[str, int]:
    """Bytes by category that a step leaves behind."""
    split: dict[str, int] = {}
    for each in ledger:
        for sign, amounts in ((1, each.allocated), (-1, each.freed)):
            for category, nbytes in amounts:
                split[category] = split.get(category, 0) + sign * nbytes * each.times
    return {category: nbytes for category, nbytes in split.items() if nbytes}


UNCOVERED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("expert ranks", EXPERTS, {}, {"shard": 2, "expert": 2}),
    ('activation_checkpointing = "attention"', {}, {"activation_checkpointing": "attention"}, {}),
    (
        'activation_checkpointing.keep = "gelu"',
        {},
        {**SELECTIVE, "activation_checkpointing.keep": ("matmuls", "gelu")},
        {},
    ),
    ('activation_checkpointing = "offload"', {}, {"activation_checkpointing": "offload"}, {}),
    ('activation_checkpointing = "segments"', {}, {"activation_checkpointing": "segments"}, {"shard": 2}),
    ("precision bf16-sharded of parameters that are not sharded", {}, {"precision": "bf16-sharded"}, {"replicate": 2}),
    ("precision fp8-block", {}, {"precision": "fp8-block"}, {"shard": 2}),
    (
        "precision fp8-rowwise-sharded over tensor ranks",
        {},
        {"precision": "fp8-rowwise-sharded"},
        {"shard": 2, "tensor": 2, "sequence_parallel": True},
    ),
]


@pytest.mark.parametrize(("why", "model", "recipe", "layout"), UNCOVERED, ids=[each[0] for each in UNCOVERED])
def test_what_is_not_followed_is_counted_as_eager_with_a_note(why, model, recipe, layout):
    run = replace(run_of(model, **recipe), layout=Layout(**layout))
    compiled, plain = (accounts(each, backend="cuda")[0].ledger for each in (run, eager(run)))
    assert compiled.kept_nbytes == plain.kept_nbytes
    assert compiled.peak() == replace(plain.peak(), entry=compiled.peak().entry)
    (note,) = compiled.notes
    assert note.startswith("compiled memory is counted as eager: ")
    assert why in note
    assert plain.notes == ()


def test_the_note_stands_in_the_forecast() -> None:
    forecast = predict(run_of(LLAMA, activation_checkpointing="offload"), None, backend="cuda")
    assert any(each.startswith("compiled memory is counted as eager: ") for each in forecast.notes)
    assert not any("counted as eager" in each for each in predict(run_of(LLAMA), None, backend="cuda").notes)
