"""What goes to the ranks of experts and back, in which format, and who shares the states of what they hold."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import spec_of
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.parallel.rank_plan import rank_plan
from trainledger.ledger.ranks import accounts
from trainledger.ledger.step import account, follow
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

pytestmark = pytest.mark.sweep

D, T, K = 256, 512, 2
SPEC = spec_of(
    V=512,
    D=D,
    L=2,
    H=4,
    F=512,
    T=T,
    norm="rmsnorm",
    positions="rope",
    feed_forward="experts",
    **{
        "feed_forward.gated": True,
        "feed_forward.activation": "silu",
        "feed_forward.n_experts": 8,
        "feed_forward.per_token": K,
        "feed_forward.expert_d_ff": 128,
    },
)


def run_of(layout: Layout, model: ModelSpec = SPEC, **recipe: Any) -> Run:
    given = {"seq_len": T, "micro_batch": 1, "global_batch": layout.data_ranks, "steps": 1, "precision": "bf16"}
    cluster = Cluster(count=layout.devices)
    run = Run(model=model, recipe=from_fields(Recipe, {**given, **recipe}), layout=layout, cluster=cluster)
    assert not list(run_problems(run))
    return run


def ledger_of(layout: Layout, model: ModelSpec = SPEC, **recipe: Any) -> Ledger:
    return follow(rank_plan(run_of(layout, model, **recipe)), backend="cuda")


def sent(ledger: Ledger) -> list[Entry]:
    """Tokens on their way; without places their numbers go first."""
    return [each for each in ledger if each.name == "all_to_all" and each.basis == "assumed"]


def test_to_nodes_goes_as_much_in_16_bits_but_no_copies_are_made_for_it() -> None:
    copies, nodes = (ledger_of(Layout(shard=8, expert=8, expert_send=each)) for each in ("copies", "nodes"))
    assert [each.payload for each in sent(nodes)] == [each.payload for each in sent(copies)] == 8 * [2 * K * T * D]
    assert (nodes.flops > 0, nodes.matmul_flops) == (True, copies.matmul_flops)
    assert nodes.total("written") < copies.total("written")
    assert nodes.kept_nbytes <= copies.kept_nbytes
    assert nodes.peak().nbytes <= copies.peak().nbytes


def test_with_matmuls_in_8_bits_by_block_tokens_go_out_in_8_bits_and_come_back_in_16() -> None:
    """DeepSeek-V3, section 3.3.3: so do the gradients of what the experts made, in backward."""
    ledger = ledger_of(
        Layout(shard=8, expert=8, expert_send="nodes"), precision="fp8-block", **{"precision.master_weights": True}
    )
    out, back = K * T * (D + 4 * D // 128), 2 * K * T * D  # a scale in fp32 for each 128
    assert [(each.phase, each.payload) for each in sent(ledger)] == [
        *[("forward", out), ("forward", back)] * 2, *[("backward", out), ("backward", back)] * 2,
    ]  # fmt: skip
    whole = ledger_of(Layout(shard=8, expert=8), precision="fp8-block", **{"precision.master_weights": True})
    assert {each.payload for each in sent(whole)} == {back}


def test_matmuls_of_experts_are_in_8_bits_by_block_alone() -> None:
    """torchao's Float8Linear, which the other two are, takes no experts."""
    formats = {}
    for precision in ("bf16-mixed", "fp8-rowwise", "fp8-block"):
        matmuls = [each for each in account(run_of(Layout(), precision=precision)) if "experts" in each.path]
        matmuls = [each for each in matmuls if each.kind == "matmul"]
        formats[precision] = {each.dtype for each in matmuls}
        assert sum(each.model_flops * each.times for each in matmuls) == 2 * 3 * 2 * K * T * 3 * D * 128
    assert formats == {"bf16-mixed": {"bf16"}, "fp8-rowwise": {"bf16"}, "fp8-block": {"e4m3"}}
    ahead = account(run_of(Layout(), with_fields(SPEC, {"n_mtp_layers": 1}), precision="fp8-block"))
    of_module = [entry for entry in ahead if entry.path.startswith("mtp") and "experts" in entry.path]
    assert {entry.dtype for entry in of_module if entry.kind == "matmul"} == {"e4m3"}


def test_biases_of_experts_in_8_bits_have_their_gradients() -> None:
    model = with_fields(SPEC, {"feed_forward.bias": True})
    with_bias, without = (account(run_of(Layout(), each, precision="fp8-block")) for each in (model, SPEC))
    sums = [each for each in with_bias if each.name == "group_sums"]
    assert len(sums) == 2
    assert with_bias.parameters - without.parameters == 2 * 8 * (2 * 128 + D)
    assert not [each for each in without if each.name == "group_sums"]


# States of experts, whole on their ranks


@pytest.mark.parametrize("zero", [1, 2])
def test_states_of_experts_are_shared_by_those_that_hold_the_same(zero: int) -> None:
    layout = Layout(shard=8, expert=4, zero=zero)
    ledger = ledger_of(layout, **{"precision.master_weights": True})
    experts = parameters(SPEC).by_component["experts"]
    others = parameters(SPEC).total - experts
    assert ledger.parameters == others + experts // 4
    held = others // 8 + experts // 8  # each once among the eight ranks
    assert dict(ledger.resident)["optimizer state"] == pytest.approx(12 * held, rel=1e-3)
    gathered = {each.group: each.payload for each in ledger if each.name == "all_gather"}
    assert gathered == {"shard": 2 * others, "shard / expert": 2 * experts // 4}
    reduced: dict[str, int] = {}
    for each in ledger:
        if each.name == "reduce_scatter":
            reduced[each.group] = reduced.get(each.group, 0) + each.payload * each.times
    assert reduced == gathered
    assert {each.ranks for each in ledger if each.group == "shard / expert"} == {2}


def test_experts_on_one_rank_alone_share_nothing() -> None:
    ledger = ledger_of(Layout(shard=8, expert=8, zero=1), **{"precision.master_weights": True})
    assert {each.group for each in ledger if each.name in ("all_gather", "reduce_scatter")} == {"shard"}
    replicas = ledger_of(Layout(replicate=2, shard=8, expert=8, zero=1), **{"precision.master_weights": True})
    summed = [each.payload for each in replicas if each.group == "replicate"]
    experts = parameters(SPEC).by_component["experts"]
    assert summed == [2 * (parameters(SPEC).total - experts) // 8, 2 * experts // 8]


# Modules that predict ahead, on the last stage


@settings(max_examples=20)
@given(st.sampled_from((2, 3)), st.sampled_from((1, 2, 3)), st.booleans(), st.sampled_from(("1f1b", "zero-bubble")))
@pytest.mark.long
def test_modules_that_predict_ahead_stand_on_the_last_stage(stages: int, zero: int, tied: bool, schedule: str) -> None:
    model = with_fields(SPEC, {"n_layers": 6, "n_mtp_layers": 1, "tie_embeddings": tied})
    run = run_of(Layout(pipeline=stages, shard=2, zero=zero, schedule=schedule), model, global_batch=2 * stages)
    found = accounts(run)
    alone = account(replace(run, layout=Layout(), cluster=Cluster()))
    assert sum(each.count * each.ledger.model_flops for each in found) == alone.model_flops
    table = 512 * D  # of the last stage's own: the head's where it is tied
    copies = 1 if zero == 3 else 2
    assert sum(each.count * each.ledger.parameters for each in found) == copies * (alone.parameters + table)
    *others, last = found
    assert [bool([e for e in each.ledger if e.path.startswith("mtp")]) for each in found] == [
        *[False] * len(others), True,
    ]  # fmt: skip
    both = [each.group for each in last.ledger if each.group == "first and last stage"]
    assert both == ["first and last stage"]
