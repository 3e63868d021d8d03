"""The account of a rank: what papers say of it, arrays of layouts, and what it must not grow with."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from thinned import thinned
from trainledger.answers.load import load, model
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.parallel.rank_plan import chunks_of, rank_plan
from trainledger.ledger.parallel.schedule import in_flight, in_flight_by_chunk
from trainledger.ledger.ranks import account_of_stage, accounts
from trainledger.ledger.step import account, follow
from trainledger.spec.layout import Layout
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

pytestmark = pytest.mark.sweep

SPEC = model("llama-3-8b", n_layers=8)


def run_of(layout: Layout, *, n_layers: Any = 8, **recipe: Any) -> Run:
    given = {"seq_len": 2048, "micro_batch": 1, "global_batch": 16, "steps": 1, "precision": "bf16-mixed", **recipe}
    return Run(model=replace(SPEC, n_layers=n_layers), recipe=from_fields(Recipe, given), layout=layout)


def ledger_of(layout: Layout, **more: Any) -> Ledger:
    return account(run_of(layout, **more), backend="cuda")


def collectives(ledger: Ledger, **wanted: Any) -> list[Entry]:
    found = [each for each in ledger if each.kind == "collective"]
    return [each for each in found if all(getattr(each, name) == value for name, value in wanted.items())]


def payload(entries: list[Entry]) -> int:
    return sum(each.payload * each.times for each in entries)


# What the papers say


def test_tensor_parallelism_sums_the_stream_twice_a_layer_each_way() -> None:
    """Shoeybi et al. 2019, figure 4: two all-reduces forward and two backward, each of B T D."""
    ledger = ledger_of(Layout(tensor=4), global_batch=1, precision="fp32")
    in_blocks = [each for each in collectives(ledger, group="tensor") if each.path.startswith("layers")]
    assert {each.name for each in in_blocks} == {"all_reduce"}
    stream = 4 * 2048 * SPEC.d_model
    for phase in ("forward", "backward"):
        assert sum(each.times for each in in_blocks if each.phase == phase) == 2 * 8
    assert payload(in_blocks) == 4 * 8 * stream
    assert {each.ranks for each in in_blocks} == {4}
    assert {each.overlap for each in in_blocks} == {""}


def test_sequence_parallelism_sends_as_much_in_halves() -> None:
    """Korthikanti et al. 2022, section 4.2.2: an all-reduce is a reduce-scatter and an all-gather."""
    ledger = ledger_of(Layout(tensor=4, sequence_parallel=True), global_batch=1, precision="fp32")
    in_blocks = [each for each in collectives(ledger, group="tensor") if each.path.startswith("layers")]
    stream = 4 * 2048 * SPEC.d_model
    for name in ("all_gather", "reduce_scatter"):
        assert payload([each for each in in_blocks if each.name == name]) == 4 * 8 * stream
    kept = [ledger_of(Layout(tensor=4, sequence_parallel=each), global_batch=1).kept_nbytes for each in (False, True)]
    assert kept[1] < kept[0]


def test_zero_1_sends_twice_the_parameters() -> None:
    """Rajbhandari et al. 2020, section 7.2.1: one reduce-scatter, and one all-gather of what was updated."""
    for zero in (1, 2):
        run = run_of(Layout(shard=8, zero=zero), global_batch=8, precision="fp32")
        ledger = account(run, backend="cuda")
        whole = 4 * parameters(SPEC).total
        for name in ("reduce_scatter", "all_gather"):
            sent = payload(collectives(ledger, name=name))
            assert whole <= sent < 1.001 * whole  # pieces are filled up


def test_zero_3_sends_three_times_the_parameters() -> None:
    """Rajbhandari et al. 2020, section 7.2.2: all-gathers forward and backward, and one reduce-scatter."""
    run = run_of(Layout(shard=8), global_batch=8, precision="fp32", grad_clip=None)
    ledger = account(run, backend="cuda")
    blocks = 4 * sum(each.elements for each in block_leaves(run)) * 8
    outside = 4 * (2 * SPEC.padded_vocab * SPEC.d_model + SPEC.d_model)
    assert payload(collectives(ledger, name="all_gather", phase="forward")) == blocks + outside
    assert payload(collectives(ledger, name="all_gather", phase="backward")) == blocks  # the rest was kept
    assert payload(collectives(ledger, name="reduce_scatter")) == blocks + outside
    kept = account(run_of(Layout(shard=8, reshard_after_forward=False), global_batch=8), backend="cuda")
    assert not collectives(kept, name="all_gather", phase="backward")


def block_leaves(run: Run) -> list[Any]:
    from trainledger.ledger.model.parameters import leaves_of

    return list(leaves_of(run.model).segments[0].blocks[0].all())


@pytest.mark.parametrize(("zero", "parts"), [(1, (1, 1, 8)), (2, (1, 8, 8)), (3, (8, 8, 8))])
def test_zero_shards_one_state_after_the_other(zero: int, parts: tuple[int, int, int]) -> None:
    """Rajbhandari et al. 2020, figure 1, with AdamW's 8 bytes of moments beside fp32 weights and gradients."""
    ledger = ledger_of(Layout(shard=8, zero=zero), grad_clip=None)
    whole = account(run_of(Layout()), backend="cuda").parameters
    live = dict(ledger.resident)
    assert live["parameters"] == pytest.approx(4 * whole / parts[0], rel=1e-3)
    gradients = live.get("gradients", 0)
    for each in ledger:
        gradients += each.times * (dict(each.allocated).get("gradients", 0) - dict(each.freed).get("gradients", 0))
    assert gradients == pytest.approx(4 * whole / parts[1], rel=1e-3)
    assert live["optimizer state"] == pytest.approx(8 * whole / parts[2], rel=1e-3)


def test_a_layout_that_shards_in_bf16_gathers_half_the_bytes() -> None:
    wide, narrow = (ledger_of(Layout(shard=8), precision=each) for each in ("fp32", "bf16-sharded"))
    gathered = [payload(collectives(each, name="all_gather", phase="forward")) for each in (wide, narrow)]
    assert gathered[0] == 2 * gathered[1]
    reduced = [payload(collectives(each, name="reduce_scatter")) for each in (wide, narrow)]
    assert reduced[0] == reduced[1]  # in fp32 either way


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "block"])
@pytest.mark.parametrize("layout", [Layout(shard=8), Layout(replicate=2, shard=4), Layout(shard=4, tensor=2)])
def test_matmuls_in_8_bits_read_what_is_gathered_in_bf16(layout: Layout, scaling: str) -> None:
    """torchtitan's recipe: what is sent and held is that of bf16-sharded, whose matmuls alone change their format."""
    narrow, wide = f"fp8-{scaling}-sharded", f"fp8-{scaling}"
    ours, bf16, mixed = (ledger_of(layout, precision=each) for each in (narrow, "bf16-sharded", wide))
    sent = [[(each.name, each.phase, each.payload, each.times) for each in collectives(one)] for one in (ours, bf16)]
    assert sent[0] == sent[1]
    gathers = [payload(collectives(each, name="all_gather", group="shard")) for each in (ours, mixed)]
    assert gathers[1] == 2 * gathers[0]
    assert dict(ours.resident) == dict(bf16.resident)
    assert ours.matmul_flops == bf16.matmul_flops
    eights = {each.name for each in ours if each.kind == "matmul" and each.dtype in ("e4m3", "e5m2")}
    assert eights == {"_scaled_mm"}
    assert ours.peak().nbytes < mixed.peak().nbytes


def test_a_pipeline_keeps_as_many_micro_batches_as_are_in_flight() -> None:
    stages = accounts(run_of(Layout(pipeline=4), global_batch=8), backend="cuda")
    kept = [each.ledger.peak().by_category["activations"] for each in stages]
    assert kept[0] > kept[1] > kept[2] > kept[3]
    assert kept[1] / kept[2] == pytest.approx(3 / 2, rel=0.05)
    for each in stages:
        sends = sum(entry.times for entry in collectives(each.ledger, name="send"))
        receives = sum(entry.times for entry in collectives(each.ledger, name="recv"))
        assert sends == receives == (8 if each.plan.first or each.plan.last else 16)
    assert [bool(collectives(each.ledger, phase="backward", name="all_reduce")) for each in stages] == [False] * 4


@pytest.mark.parametrize("schedule", [{}, {"schedule": "interleaved", "virtual_stages": 2}, {"schedule": "gpipe"}])
def test_split_sends_take_a_part_between_stages_and_gather_it_among_tensor_ranks(schedule: dict[str, Any]) -> None:
    """Narayanan et al. 2021, section 4.1: each rank of a stage sends 1/t of an activation, and the next gathers it."""
    layout = Layout(tensor=4, pipeline=2, **schedule)
    stream = 2048 * SPEC.d_model * 2
    whole = accounts(run_of(layout, precision="bf16"), backend="cuda")
    split = accounts(run_of(replace(layout, split_sends=True), precision="bf16"), backend="cuda")
    for one, other in zip(whole, split, strict=True):
        for name in ("send", "recv"):
            before, after = collectives(one.ledger, name=name), collectives(other.ledger, name=name)
            assert {each.payload for each in before} == {stream}
            assert {each.payload for each in after} == {stream // 4}
            assert sum(each.times for each in before) == sum(each.times for each in after)
        gathered = collectives(other.ledger, name="all_gather", group="tensor")
        received = sum(each.times for each in collectives(other.ledger, name="recv"))
        assert payload(gathered) == stream * received
        assert not collectives(one.ledger, name="all_gather", group="tensor")
        assert one.ledger.flops == other.ledger.flops
        more = peak_nbytes(other.ledger) - peak_nbytes(one.ledger)
        assert 0 <= more <= stream // 4  # the part beside the whole that is gathered from it


def test_a_tied_embedding_on_both_ends_is_summed() -> None:
    tied = replace(run_of(Layout(pipeline=4), global_batch=8), model=replace(SPEC, tie_embeddings=True))
    sent = [payload(collectives(each.ledger, name="all_reduce", phase="backward")) for each in accounts(tied)]
    assert sent == [4 * SPEC.padded_vocab * SPEC.d_model, 0, 0, 4 * SPEC.padded_vocab * SPEC.d_model]


def test_interleaving_has_more_in_flight_and_smaller_chunks() -> None:
    """Narayanan et al. 2021, section 2.2: the first stage keeps 1 + (P - 1) / (P V) times as many activations."""
    layout = Layout(pipeline=4, virtual_stages=2, schedule="interleaved")
    assert [each.first for each in chunks_of(layout, 16, 1)] == [2, 10]
    chunks = in_flight(layout, 0, 16)
    assert chunks / 2 == 4 * (1 + 3 / 8)
    assert sum(in_flight_by_chunk(layout, 0, 16)) == chunks


def test_experts_go_to_two_exchanges_each_way() -> None:
    experts = with_fields(
        SPEC,
        {
            "feed_forward": "experts",
            "feed_forward.n_experts": 8,
            "feed_forward.per_token": 2,
            "feed_forward.expert_d_ff": 1024,
        },
    )
    run = replace(run_of(Layout(shard=8, expert=8), global_batch=8), model=experts)
    exchanges = collectives(account(run, backend="cuda"), name="all_to_all")
    numbers = [each for each in exchanges if each.basis == "exact"]
    assert {(each.phase, each.payload) for each in numbers} == {("forward", 8 * 8)}
    assert sum(each.times for each in numbers) == 8
    found = [each for each in exchanges if each.basis != "exact"]
    assert sum(each.times for each in found if each.phase == "forward") == 2 * 8
    assert sum(each.times for each in found if each.phase == "backward") == 2 * 8
    assert {each.payload for each in found} == {2 * 2048 * 2 * SPEC.d_model}  # K routes of T tokens in bf16
    assert {each.basis for each in found} == {"assumed"}


@pytest.mark.parametrize("kind", ["ring", "all-to-all"])
def test_context_ranks_share_the_tokens_and_the_work(kind: str) -> None:
    alone = ledger_of(Layout(), global_batch=1)
    rank = ledger_of(Layout(context=4, context_kind=kind), global_batch=1)
    assert 4 * rank.model_flops == alone.model_flops
    assert 4 * rank.tokens == alone.tokens
    in_attention = [each for each in collectives(rank) if each.group == "context"]
    keys = 2 * 2 * (2048 // 4) * SPEC.kv_heads * SPEC.head_size
    queries = 2 * (2048 // 4) * SPEC.attention.n_heads * SPEC.head_size
    forward = payload([each for each in in_attention if each.phase == "forward" and each.name != "recv"])
    assert forward == 8 * (3 * keys if kind == "ring" else keys + 2 * queries)


# Arrays of layouts, and what an account must not grow with


LAYOUTS = {"replicate": [1, 2, 4, 1], "shard": [2, 4, 2, 8], "tensor": [2, 4, 8, 2], "context": [2, 2, 4, 8]}


@pytest.mark.parametrize(
    ("pipeline", "stage", "more"),
    [
        (1, 0, {}), (4, 0, {}), (4, 1, {"schedule": "gpipe"}), (4, 3, {"sequence_parallel": True}), (2, 1, {"zero": 1}),
        (1, 0, {"zero": 2}), (1, 0, {"reshard_after_forward": False}), (1, 0, {"context_kind": "all-to-all"}),
        (2, 0, {"schedule": "interleaved", "virtual_stages": 2}),
    ],
)  # fmt: skip
def test_an_array_of_layouts_gives_what_each_gives_alone(pipeline: int, stage: int, more: dict[str, Any]) -> None:
    if more.get("context_kind"):
        sizes = {**LAYOUTS, "tensor": [2, 2, 2, 2], "context": [2, 4, 2, 2]}
    else:
        sizes = LAYOUTS
    arrays = {name: np.array(each) for name, each in sizes.items()}
    together = figures(Layout(pipeline=pipeline, **arrays, **more), stage)
    for index in range(4):
        alone = figures(Layout(pipeline=pipeline, **{name: each[index] for name, each in sizes.items()}, **more), stage)
        assert [int(np.broadcast_to(each, 4)[index]) for each in together] == alone


def figures(layout: Layout, stage: int) -> list[Any]:
    ledger = account_of_stage(run_of(layout, global_batch=256), stage, backend="cuda")
    amounts = [ledger.total(each) for each in ("flops", "model_flops", "payload", "kept")]
    return [*amounts, ledger.parameters, ledger.tokens, peak_nbytes(ledger)]


def test_a_group_of_one_sends_nothing() -> None:
    together = ledger_of(Layout(replicate=np.array([1, 4]), shard=np.array([2, 2])), global_batch=64)
    over_replicas = collectives(together, group="replicate")
    assert over_replicas
    assert all(each.payload[0] == 0 < each.payload[1] for each in over_replicas)


def test_an_account_does_not_grow_with_the_layers_or_the_ranks() -> None:
    for layout in (Layout(shard=8, tensor=2), Layout(pipeline=4, tensor=2), Layout(shard=4, zero=1)):
        few, many = (account_of_stage(run_of(layout, n_layers=each, global_batch=512), 0) for each in (16, 1600))
        assert len(few) == len(many)
        wide = replace(layout, shard=64)
        if layout.shard > 1:
            assert len(account_of_stage(run_of(wide, n_layers=16, global_batch=512), 0)) == len(few)


def test_of_a_run_on_one_device_there_is_one_rank() -> None:
    run = run_of(Layout())
    (rank,) = accounts(run, backend="cuda")
    assert (rank.title, rank.count, rank.in_flight) == ("every rank", 1, 1)
    assert rank.ledger == account(run, backend="cuda")
    assert not collectives(rank.ledger)


def test_a_plan_tells_the_ranks_apart(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from trainledger.cli import main

    words = ["plan", "gpt2", "--set", "layout.pipeline=3", "--set", "cluster.count=3", "--set", "recipe.global_batch=6"]
    words += ["--set", "recipe.micro_batch=1"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [each["title"] for each in answer["ranks"]] == ["first stage", "stage 2", "last stage"]
    assert max(each["peak_nbytes"] for each in answer["ranks"]) == answer["forecast"]["peak_nbytes"]
    assert main([*words, "--full"]) == 0
    shown = capsys.readouterr().out
    assert "Memory of the distinct ranks" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_the_same_from_a_run_file() -> None:
    table = {"model": {"preset": "gpt2"}, "recipe": {"seq_len": 128, "global_batch": 4, "steps": 1}}
    run = load({**table, "layout": {"shard": 4}, "cluster": {"count": 4}})
    assert sum(each.count for each in accounts(run)) == 4


@pytest.mark.parametrize("schedule", [{}, {"schedule": "gpipe"}, {"schedule": "zero-bubble"},
                                      {"schedule": "interleaved", "virtual_stages": 2}])  # fmt: skip
@pytest.mark.parametrize("more", [{}, {"shard": 3}, {"shard": 4, "zero": 2}, {"shard": 4, "zero": 1, "tensor": 2}])
@pytest.mark.parametrize("count", thinned([8, 4, 20]))
@pytest.mark.long
def test_stages_that_are_alike_have_the_accounts_that_they_would_have_on_their_own(schedule, more, count):
    layout = Layout(pipeline=4, **schedule, **more)
    if schedule.get("schedule") == "interleaved" and layout.zero == 2:
        layout = replace(layout, zero=3)
    run = run_of(layout, n_layers=16, global_batch=count * layout.data_ranks, activation_checkpointing="full")
    found = accounts(run, backend="cuda")
    # With no more micro-batches than stages some loops of an interleaved pipeline are empty, of each stage others.
    assert count == 4 or any(each.alike != each.stage for each in found)
    for each in found:
        assert each.ledger == follow(rank_plan(run, each.stage, each.plan.place), backend="cuda")
    assert sum(each.count for each in found) == layout.devices


@pytest.mark.parametrize("precision", ["bf16-sharded", "bf16-mixed", "fp16-mixed", "fp16"])
@pytest.mark.parametrize("more", [
    {}, {"optimizer": "muon"}, {"grad_clip": None}, {"compile": True}, {"pipeline": 2},
    {"activation_checkpointing": "full"},
])  # fmt: skip
def test_ranks_with_uneven_pieces_have_the_accounts_that_they_would_have_on_their_own(precision, more):
    """Micro-batches are followed once for all places of a stage; of three pieces of 14,336 rows one is smaller."""
    recipe = {name: value for name, value in more.items() if name != "pipeline"}
    layout = Layout(shard=3, pipeline=more.get("pipeline", 1))
    run = run_of(layout, global_batch=3 * 4, precision=precision, **recipe)
    found = accounts(run, backend="cuda")
    assert len({each.plan.place for each in found}) > 1
    for each in found:
        assert each.ledger == follow(rank_plan(run, each.stage, each.plan.place), backend="cuda")
    one, other = (next(each.ledger for each in found if (each.plan.place > 0) is later) for later in (False, True))
    assert one != other
    assert [each for each in one if each.phase == "backward"] == [each for each in other if each.phase == "backward"]
