"""The prediction of drawn runs, on one device and on many: what must balance, and what must never get worse."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainledger as tl
from models import spec_of
from trainledger import catalog
from trainledger.answers.load import load
from trainledger.forecast.predict.forecast import BEYOND, IDEAL, NAPKIN, RUN_CAUSES, nanoseconds
from trainledger.forecast.predict.predict import predict
from trainledger.forecast.predict.step import CAUSES
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.ranks import whole_run
from trainledger.ledger.rules_of_thumb import CONVENTIONS
from trainledger.ledger.step import account
from trainledger.spec.cluster import Cluster
from trainledger.spec.device import Device
from trainledger.spec.layout import Layout
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.plain import from_plain, to_plain
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run
from trainledger.spec.runfile import validated

pytestmark = pytest.mark.sweep

SOME = settings(max_examples=15)
DEVICES = {name: catalog.device(name) for name in ("h100-sxm", "a100-sxm-80gb", "l4", "b300")}


def pick(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pipeline = draw(pick(1, 1, 2, 4))
    schedule = draw(pick("1f1b", "gpipe", "interleaved", "zero-bubble")) if pipeline > 1 else "1f1b"
    tensor = draw(pick(1, 1, 2, 4))
    sequence_parallel = tensor > 1 and draw(st.booleans())
    return Layout(
        split_sends=tensor > 1 and pipeline > 1 and not sequence_parallel and draw(st.booleans()),
        replicate=draw(pick(1, 1, 2)), shard=draw(pick(1, 2, 8, 16)), zero=draw(pick(1, 2, 3)), tensor=tensor,
        sequence_parallel=sequence_parallel, pipeline=pipeline, schedule=schedule,
        sequence_gather=draw(pick("kept", "again")) if sequence_parallel else "kept",
        virtual_stages=2 if schedule == "interleaved" else 1, context=draw(pick(1, 1, 2)),
    )  # fmt: skip


@st.composite
def runs(draw: st.DrawFn, *, alone: bool = False) -> Run:
    spread = Layout() if alone else draw(layouts())
    heads = draw(pick(8, 16))
    model = spec_of(
        V=draw(pick(1024, 32000)),
        D=64 * heads,
        L=8,
        H=heads,
        F=256 * heads,
        T=2048,
        KV=draw(pick(None, 4)),
        norm="rmsnorm",
        positions="rope",
        **{
            "norm.bias": False,
            "feed_forward.activation": "silu",
            "feed_forward.gated": draw(st.booleans()),
            "attention.bias": False,
            "feed_forward.bias": False,
        },
    )
    batch = draw(pick(1, 2))
    rounds = draw(pick(1, 2)) * max(4, spread.pipeline)
    recipe = from_fields(Recipe, {
        "seq_len": draw(pick(512, 2048)), "micro_batch": batch, "global_batch": batch * rounds * spread.data_ranks,
        "steps": draw(st.integers(1, 10**6)), "precision": draw(pick("bf16-mixed", "bf16", "bf16-sharded", "fp32")),
        "activation_checkpointing": draw(pick("none", "full", "selective")), "compile": draw(st.booleans()),
        "evaluation.every": draw(pick(None, 100)), "checkpoints.every": draw(pick(None, 1, 500)),
        "checkpoints.asynchronous": draw(st.booleans()), "optimizer": draw(pick("adamw", "sgd")),
        "launch_blocking": draw(st.booleans()),
    })  # fmt: skip
    cluster = Cluster(
        device=draw(st.sampled_from(sorted(DEVICES))), count=spread.devices,
        price_per_device_hour=draw(pick(None, 2.0)), mtbf_device_hours=draw(pick(None, 50.0, 1e5)),
        restart_seconds=draw(pick(None, 0.0, 600.0)), storage_bytes_per_second=draw(pick(None, 10**8, 10**12)),
        loader_tokens_per_second=draw(pick(None, 10**4, 10**9)),
    )  # fmt: skip
    run = Run(model=model, recipe=recipe, layout=spread, cluster=cluster)
    try:
        return validated(run)
    except InvalidInput:
        return validated(replace(run, recipe=with_fields(recipe, {"precision": "bf16-mixed", "compile": False})))


def forecast_of(run: Run, **changes: Any) -> Any:
    machine = replace(DEVICES[run.cluster.device], **changes)
    return predict(run, machine, backend="cuda")


@SOME
@given(runs() | runs(alone=True))
def test_the_bars_of_a_waterfall_sum_to_the_prediction_exactly(run: Run) -> None:
    answer = forecast_of(run)
    if answer.step_seconds is None:
        assert any("network" in each for each in answer.notes)  # not known for the device, and the layout needs one
        return
    assert sum(answer.step_causes.values()) == pytest.approx(answer.step_seconds, rel=1e-9)
    assert set(answer.step_causes) <= set(CAUSES)
    # However many devices there are, a step takes as long as their peaks need for the model's own FLOPs; where a
    # device is not calibrated, for those that no causal kernel can leave out.
    own = answer.model_flops
    if DEVICES[run.cluster.device].efficiency is None:
        own = CONVENTIONS["causal"].flops(run, account(whole_run(run), backend="cuda"))
    least = own / (answer.peak_flops_per_second * run.layout.devices)
    assert least <= answer.step_causes["ideal"] * (1 + 1e-9)
    assert answer.step_seconds >= least * (1 - 1e-9)
    if answer.total_seconds is None:
        assert any("interrupted before it could save" in each for each in answer.notes)
        assert answer.bottleneck.name in ("failures", "device memory")
        return
    assert sum(each.nanoseconds for each in answer.waterfall) == nanoseconds(answer.total_seconds)
    begin = [IDEAL] if answer.waterfall[0].cause == IDEAL else [NAPKIN, BEYOND]
    assert [each.cause for each in answer.waterfall] == [*begin, *CAUSES[1:], *RUN_CAUSES]
    steps = run.recipe.total_steps
    off = 1e-9 * answer.total_seconds + 1e-8
    # At the data sheet's rates kernels take what is left without masked pairs, which the ideal counts.
    spared = steps * (answer.model_flops - own) / (answer.peak_flops_per_second * run.layout.devices)
    for bar in answer.waterfall:
        least_of = -spared if bar.cause == "kernel efficiency" else 0.0
        assert bar.seconds >= least_of - off, bar
        if bar.cause in answer.step_causes:
            assert abs(bar.seconds - steps * answer.step_causes[bar.cause]) <= off
    work = 6 * parameters(run.model).active * steps * run.recipe.tokens_per_step
    napkin = work / (answer.peak_flops_per_second * run.layout.devices)
    ideal = steps * answer.step_causes["ideal"]
    assert answer.waterfall[0].seconds == pytest.approx(min(napkin, ideal), abs=off)
    assert sum(answer.seconds_by_phase.values()) == pytest.approx(answer.total_seconds)
    # The same total once more, from the step and what stands beside it.
    beside = sum(each.seconds for each in answer.waterfall if each.cause in RUN_CAUSES)
    assert answer.total_seconds == pytest.approx(steps * answer.step_seconds + beside)
    assert answer.goodput == pytest.approx(steps * answer.step_seconds / answer.total_seconds)
    assert answer.device_hours == pytest.approx(answer.total_seconds * run.layout.devices / 3600)
    assert from_plain(type(answer), to_plain(answer)) == answer


@SOME
@given(runs())
@pytest.mark.long
def test_faster_links_and_memory_never_slow_a_run(run: Run) -> None:
    device = DEVICES[run.cluster.device]
    answer = forecast_of(run)
    better: dict[str, Any] = {"memory_bytes_per_second": 2 * (device.memory_bytes_per_second or 0)}
    if answer.step_seconds is None:
        return
    yield_of = [forecast_of(run, **better)]
    if device.fabric is not None:
        node = replace(device.fabric.node, bytes_per_second=2 * device.fabric.node.bytes_per_second)
        network = device.fabric.network
        if network is not None:
            network = replace(network, bytes_per_second=2 * network.bytes_per_second)
        yield_of.append(forecast_of(run, fabric=replace(device.fabric, node=node, network=network)))
    for seen in yield_of:
        assert seen.step_seconds <= answer.step_seconds * (1 + 1e-9)
        assert seen.mfu >= answer.mfu * (1 - 1e-9)


@SOME
@given(runs(), pick("shard", "tensor"))
@pytest.mark.long
def test_memory_falls_with_sharding(run: Run, axis: str) -> None:
    layout = run.layout
    more = replace(layout, **{axis: 2 * getattr(layout, axis)})
    recipe = replace(run.recipe, global_batch=run.recipe.global_batch * more.data_ranks // layout.data_ranks)
    wider = Run(
        model=run.model, recipe=recipe, layout=more, cluster=replace(run.cluster, count=more.devices), data=run.data
    )
    try:
        wider = validated(wider)
    except InvalidInput:
        return
    if axis == "shard" and layout.shard_ranks == 1:
        return  # the first ranks that share bring buffers to gather into, which a small model is smaller than
    before, after = forecast_of(run), forecast_of(wider)
    assert after.peak_nbytes <= before.peak_nbytes


@SOME
@given(runs())
def test_money_and_energy_follow_the_device_hours(run: Run) -> None:
    answer = forecast_of(run)
    if answer.device_hours is None:
        return
    price = run.cluster.price_per_device_hour
    assert answer.money == (None if price is None else price * answer.device_hours)
    watts = DEVICES[run.cluster.device].power_watts
    assert answer.kwh == pytest.approx(watts * answer.device_hours / 1000)
    assert answer.co2_kg is None
    assert answer.days == pytest.approx(answer.device_hours / 24 / run.layout.devices)


def test_a_layout_and_one_device_tell_the_same_model() -> None:
    fields = {"model": {"preset": "llama-3.2-1b"}, "cluster": {"device": "h100-sxm"}}
    recipe = {"seq_len": 2048, "global_batch": 16, "micro_batch": 1, "tokens": "1B", "precision": "bf16-mixed"}
    alone = load({**fields, "recipe": recipe})
    spread = load({**fields, "recipe": recipe, "layout": {"shard": 8}}, {"cluster.count": 8})
    one, many = forecast_of(alone), forecast_of(spread)
    assert (one.parameters, one.model_flops, one.tokens_per_step) == (
        many.parameters, many.model_flops, many.tokens_per_step,
    )  # fmt: skip
    assert many.peak_nbytes < one.peak_nbytes
    assert one.device_hours < many.device_hours < 1.5 * one.device_hours  # what eight devices wait for each other
    assert many.mfu < one.mfu < 1


def test_a_bottleneck_has_the_name_of_what_takes_most() -> None:
    def named(**changes: Any) -> str:
        table: dict[str, Any] = {"model": {"preset": "gpt2"}, "cluster": {"device": "h100-sxm"}}
        recipe = {"seq_len": 1024, "global_batch": 64, "micro_batch": 8, "tokens": "1B", "precision": "bf16-mixed"}
        answer = forecast_of(load({**table, "recipe": recipe}, changes))
        assert answer.bottleneck is not None
        shares = {"compute": 0.0}
        for each in answer.waterfall:
            name = "compute" if each.cause in (NAPKIN, BEYOND, "kernel efficiency") else each.cause
            shares[name] = shares.get(name, 0.0) + each.seconds
        assert answer.bottleneck.name == max(shares, key=lambda name: shares[name])
        return answer.bottleneck.name

    assert named() == "compute"
    assert named(**{"cluster.device": "l4"}) == "memory-bound operations"
    assert named(**{"cluster.loader_tokens_per_second": 1000}) == "data"
    assert named(**{"recipe.checkpoints.every": 1, "cluster.storage_bytes_per_second": "100MB"}) == "checkpoints"
    assert named(**{"recipe.evaluation.every": 1, "recipe.evaluation.sequences": 10_000}) == "evaluation"
    assert named(**{"cluster.mtbf_device_hours": 0.01, "recipe.checkpoints.every": 100}) == "failures"


def test_llama_3_405b_keeps_more_than_nine_tenths_of_its_time() -> None:
    """16,384 H100: more than 90 % effective training time (arXiv 2407.21783, section 3.3.4)."""
    run = load(
        {
            "model": {"preset": "llama-3.1-405b"},
            "recipe": {"seq_len": 8192, "global_batch": 2048, "micro_batch": 1, "tokens": "15.6T",
                       "precision": "bf16-sharded"},
            "layout": {"tensor": 8, "pipeline": 18, "shard": 128, "sequence_parallel": True},
            "cluster": {"device": "h100-sxm", "count": 18432},
        }
    )  # fmt: skip
    answer = forecast_of(run)
    assert answer.goodput is not None
    assert 0.90 < answer.goodput < 0.95
    assert answer.interruptions == pytest.approx(answer.total_seconds / 86400 / 54 * 419 * 18432 / 16384, rel=1e-3)


def test_a_device_without_a_published_rate_says_so() -> None:
    sheet = Device("d", "a device", {"fp32": 1e12}, memory_bytes_per_second=1e12, power_watts=100.0)
    model = spec_of(V=64, D=16, L=1, H=2, F=32, T=8)
    run = Run(model=model, recipe=Recipe(seq_len=8, global_batch=4, steps=10), cluster=Cluster(count=2))
    answer = predict(run, sheet, backend="cuda")
    assert answer.interruptions is None
    said = "interruptions are not included: no rate is published for this device (cluster.mtbf_device_hours sets it)"
    assert said in answer.notes


@pytest.mark.parametrize(
    ("model", "device", "attention", "other"),
    [
        ("llama-3-8b", "h100-sxm", "sdpa", "flash"), ("llama-3-8b", "gb200", "sdpa", "flash"),
        ("deepseek-v2-lite", "h200", "sdpa", "efficient"), ("mpt-7b", "h100-sxm", "sdpa", "efficient"),
        ("gemma-3-12b", "b200", "sdpa", None), ("gemma-3-12b", "h100-sxm", "sdpa", "flash"),
        ("llama-3-8b", "a100-sxm-80gb", "sdpa", None),
        ("llama-3-8b", "h100-sxm", "flash", None), ("llama-3-8b", "rtx-5090", "sdpa", None),
    ],
)  # fmt: skip
def test_plans_say_where_attention_is_cudnns(model: str, device: str, attention: str, other: str | None) -> None:
    run = tl.load(
        {"model": {"preset": model}, "recipe": {"seq_len": 1024, "global_batch": 1, "steps": 1, "attention": attention,
         "precision": "bf16-mixed"}, "cluster": {"device": device}}
    )  # fmt: skip
    (*notes,) = (each for each in tl.predict(run).notes if "selects cuDNN's attention" in each)
    assert [each.split('"')[1] for each in notes] == ([] if other is None else [other])
    if other is not None:
        assert not list(run_problems(replace(run, recipe=replace(run.recipe, attention=other))))
