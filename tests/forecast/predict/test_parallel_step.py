"""The step of a layout: its parts against the whole, links against none, and what must never get worse."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainledger as tl
from models import sizes
from trainledger import catalog
from trainledger.forecast.predict.parallel_step import layout_time, spans
from trainledger.forecast.predict.stage import stages_of
from trainledger.forecast.predict.step import CAUSES, StepTime, step_time
from trainledger.forecast.predict.stream_ops import compute_seconds
from trainledger.ledger.ranks import accounts
from trainledger.spec.cluster import Fabric, Link
from trainledger.spec.device import Device
from trainledger.spec.run import Run

pytestmark = pytest.mark.sweep

MODEL = sizes(V=4096, D=512, L=8, H=8, KV=4, F=1536, T=4096)
SHEET = catalog.device("h100-sxm")
# A tiny model is slower to launch than to run; what is launched has tests of its own.
assert SHEET.efficiency is not None
H100 = replace(SHEET, efficiency=replace(SHEET.efficiency, launch_seconds=0.0))


def run_of(layout: dict[str, Any], recipe: dict[str, Any] | None = None, **cluster: Any) -> Run:
    count = 1
    for axis in ("replicate", "shard", "context", "tensor", "pipeline"):
        count *= layout.get(axis, 1)
    usual = {"seq_len": 1024, "global_batch": 64, "micro_batch": 1, "steps": 1, "precision": "bf16-sharded"}
    model = (recipe or {}).pop("model", MODEL) if recipe else MODEL
    return tl.load(
        {
            "model": model, "recipe": usual | (recipe or {}), "layout": layout,
            "cluster": {"device": "h100-sxm", "count": count, **cluster},
        }
    )  # fmt: skip


def timed(run: Run, device: Device = H100) -> StepTime:
    machine = replace(device, fabric=catalog.fabric(device, run.cluster))
    step = layout_time(accounts(run, backend="cuda"), machine)
    assert step.seconds is not None, step.notes
    return step


def linked(near: float, far: float) -> Fabric:
    links = (Link(name=name, title=name, bytes_per_second=rate) for name, rate in (("near", near), ("far", far)))
    return Fabric(devices_per_node=8, node=next(links), network=next(links))


LAYOUTS: list[dict[str, Any]] = [
    {"replicate": 8},
    {"shard": 16},
    {"shard": 8, "replicate": 4},
    {"shard": 8, "zero": 1},
    {"shard": 8, "zero": 2},
    {"tensor": 4},
    {"tensor": 4, "sequence_parallel": True, "shard": 4},
    {"tensor": 4, "sequence_parallel": True, "sequence_gather": "again", "shard": 4},
    {"tensor": 4, "overlap": ["gradients", "input-gradients"]},
    {"tensor": 4, "sequence_parallel": True, "sequence_gather": "again", "shard": 4, "overlap": ["input-gradients"]},
    {"context": 4},
    {"context": 4, "context_kind": "all-to-all", "shard": 2},
    {"pipeline": 4},
    {"pipeline": 4, "schedule": "gpipe", "shard": 4, "zero": 1},
    {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2, "shard": 4},
    {"pipeline": 2, "shard": 8, "reshard_after_forward": True},
    {"pipeline": 4, "schedule": "zero-bubble", "tensor": 2},
    {"pipeline": 4, "stage_layers": [1, 3, 3, 1], "replicate": 2},
    {"pipeline": 2, "schedule": "zero-bubble", "context": 4},
    {"shard": 2, "context": 4, "zero": 1, "overlap": ["gradients", "parameters"]},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_causes_and_splits_sum_to_the_step(layout: dict[str, Any]) -> None:
    step = timed(run_of(dict(layout)))
    assert set(step.causes) == set(CAUSES)
    for split in (step.causes, step.by_phase, step.by_kind, step.by_bound):
        assert sum(split.values()) == pytest.approx(step.seconds)
    exposed, bubble = step.causes["exposed communication"], step.causes["pipeline bubble"]
    assert exposed >= 0
    assert (bubble > 0) if layout.get("pipeline", 1) > 1 else (bubble == 0)


@pytest.mark.parametrize("layout", [{"shard": 8, "expert": 4}, {"shard": 4, "context": 4, "expert": 8}], ids=str)
def test_experts_on_several_ranks_show_what_they_send(layout: dict[str, Any]) -> None:
    model = {
        **MODEL,
        "feed_forward": "experts",
        "feed_forward.n_experts": 8,
        "feed_forward.per_token": 2,
        "feed_forward.expert_d_ff": 512,
    }
    run = run_of(dict(layout), {"model": model})
    step, together = timed(run), timed(run_of({**layout, "expert": 1}, {"model": model}))
    assert sum(step.causes.values()) == pytest.approx(step.seconds)
    sent = [each for each in accounts(run, backend="cuda")[0].ledger if each.name == "all_to_all"]
    assert sent
    assert step.causes["exposed communication"] > 0
    assert together.causes["ideal"] == pytest.approx(step.causes["ideal"])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_parts_of_a_stage_are_all_of_its_step(layout: dict[str, Any]) -> None:
    """Before, every micro-batch of every chunk, after and at the end, against the ledger's own totals."""
    run = run_of(dict(layout), {"activation_checkpointing": "full"})
    fabric = H100.fabric
    assert fabric is not None
    for stage in stages_of(accounts(run, backend="cuda"), H100, fabric):
        whole = sum(each.seconds for each in stage.times)
        assert compute_seconds(stage.whole) == pytest.approx(whole)
        if run.layout.pipeline > 1:
            micro = sum(compute_seconds(each.forward) + compute_seconds(each.backward) for each in stage.chunks)
            around = sum(compute_seconds(each) for each in (stage.begin, stage.end, stage.close))
            # The first micro-batch has no gradients to add to.
            assert around + run.grad_accum * micro == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_operations_of_a_stage_have_all_of_its_flops_and_bytes(layout: dict[str, Any]) -> None:
    run = run_of(dict(layout))
    for stage in _stages(run, accounts(run, backend="cuda"), H100):
        for amount in ("flops", "read"):
            answer = sum(getattr(each.entry, amount) * each.entry.times for each in stage.times)
            own = stage.ledger.filter(lambda each: each.kind not in ("collective", "transfer"))
            assert answer == own.total(amount)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_links_without_end_leave_compute_and_bubble(layout: dict[str, Any]) -> None:
    run = run_of(dict(layout))
    ranks = accounts(run, backend="cuda")
    free = layout_time(ranks, replace(H100, fabric=linked(1e30, 1e30)))
    assert free.causes["exposed communication"] == pytest.approx(0, abs=1e-9)
    real = timed(run)
    for cause in ("ideal", "kernel efficiency", "memory-bound operations", "pipeline bubble"):
        assert free.causes[cause] == pytest.approx(real.causes[cause], abs=1e-9)


@settings(max_examples=25)
@given(st.sampled_from(LAYOUTS), st.floats(1e8, 1e12), st.floats(1e8, 1e12), st.booleans(), st.booleans())
def test_twice_the_bandwidth_is_never_slower(layout, near, far, node, device):
    run = run_of(dict(layout))
    ranks = accounts(run, backend="cuda")
    machine = replace(H100, fabric=linked(near, far))
    before = layout_time(ranks, machine).seconds
    rate = H100.memory_bytes_per_second
    assert rate is not None
    after = [layout_time(ranks, replace(H100, fabric=linked(near * (1 + node), far * (2 - node)))).seconds]
    if device:
        after.append(layout_time(ranks, replace(machine, memory_bytes_per_second=2 * rate)).seconds)
        peaks = {dtype: 2 * peak for dtype, peak in H100.peak_flops_per_second.items()}
        after.append(layout_time(ranks, replace(machine, peak_flops_per_second=peaks)).seconds)
    assert before is not None
    assert all(each is not None and each <= before * (1 + 1e-9) for each in after)


WIDE = {"model": {**MODEL, "d_model": 2048, "feed_forward.d_ff": 8192}, "seq_len": 4096}


@pytest.mark.parametrize(
    ("layout", "batch"),
    [
        ({"pipeline": 2, "schedule": "zero-bubble", "replicate": 4}, 4),
        ({"shard": 2, "context": 4, "zero": 1, "overlap": ["gradients", "parameters"]}, 2),
    ],
    ids=str,
)
def test_quicker_matmuls_are_never_slower_where_links_are_slow(layout: dict[str, Any], batch: int) -> None:
    """What hides beside matmuls, or waits until after them, was once taken off more than there was."""
    run = run_of(dict(layout), {**WIDE, "global_batch": batch})
    ranks, seconds = accounts(run, backend="cuda"), []
    for faster in (1, 2, 4):
        peaks = {dtype: faster * peak for dtype, peak in H100.peak_flops_per_second.items()}
        machine = replace(H100, fabric=linked(1e9, 1e9), peak_flops_per_second=peaks)
        seconds.append(layout_time(ranks, machine).seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_faster_links_of_a_program_that_launches_slowly_are_never_slower() -> None:
    """What is summed beside a backward has as long as its launches take, however short its other messages are."""
    assert H100.efficiency is not None
    slow = replace(H100, efficiency=replace(H100.efficiency, launch_seconds=1e-4))
    run = run_of({"pipeline": 2, "tensor": 8, "replicate": 2}, {**WIDE, "seq_len": 1024, "global_batch": 8})
    ranks = accounts(run, backend="cuda")
    seconds = [layout_time(ranks, replace(slow, fabric=linked(near, 1e9))).seconds for near in (1e10, 4e10, 2e11)]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_even_stages_take_what_the_closed_form_says(schedule: str, chunks: int) -> None:
    """Equal layers, next to nothing before and behind them: the simulated bubble against (P - 1) (F + B)."""
    layout = {"pipeline": 4, "schedule": schedule, "virtual_stages": chunks}
    model = {**MODEL, "n_layers": 64, "vocab_size": 8}
    run = run_of(layout, {"model": model, "precision": "bf16", "global_batch": 4})
    ranks, fabric = accounts(run, backend="cuda"), linked(1e30, 1e30)
    step = layout_time(ranks, replace(H100, fabric=fabric))
    middle = stages_of(ranks, H100, fabric)[1].chunks
    forward, backward = (sum(compute_seconds(getattr(each, way)) for each in middle) for way in ("forward", "backward"))
    expected = (4 - 1) * (forward + backward) / chunks
    assert step.causes["pipeline bubble"] == pytest.approx(expected, rel=0.05)


def test_what_a_layout_overlaps_shows_less() -> None:
    """Gradients, updated parameters and tensor collectives: each beside compute is faster than none of them."""
    wide = {"model": {**MODEL, "d_model": 2048, "feed_forward.d_ff": 8192}, "global_batch": 64, "seq_len": 4096}
    ways: list[tuple[dict[str, Any], list[Any]]] = [
        ({"replicate": 32}, ["none", ["gradients"]]),
        ({"shard": 32, "zero": 1}, ["none", ["gradients"], ["gradients", "parameters"]]),
        ({"shard": 4, "zero": 1, "pipeline": 4}, ["none", ["gradients"], ["gradients", "parameters"]]),
        ({"tensor": 4, "sequence_parallel": True}, [["gradients"], ["tensor"]]),
    ]
    for layout, overlaps in ways:
        steps = [timed(run_of({**layout, "overlap": each}, dict(wide))) for each in overlaps]
        shown = [each.causes["exposed communication"] for each in steps]
        assert shown == sorted(shown, reverse=True)
        assert shown[-1] < 0.9 * shown[0], layout
        for each in steps:
            assert each.causes["ideal"] == pytest.approx(steps[0].causes["ideal"])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rate", [4e12, 2e10])
def test_what_is_gathered_again_overlaps_the_gradient_of_the_input(rate: float, batch: int) -> None:
    """A step is longer by what each gather takes beyond half the matmuls that wait for it, or by all of it."""
    wide = {"model": {**MODEL, "d_model": 2048, "feed_forward.d_ff": 8192}, "seq_len": 4096, "micro_batch": batch}
    machine = replace(H100, fabric=linked(rate, rate), efficiency=None)

    def step(gather: str, **layout: Any) -> StepTime:
        run = run_of({"tensor": 4, "sequence_parallel": True, "sequence_gather": gather, **layout}, dict(wide))
        return layout_time(accounts(run, backend="cuda"), machine)

    def of(answer: StepTime, kind: str, *modules: str) -> float:
        found = (each for each in answer.entries if (each.entry.phase, each.entry.kind) == ("backward", kind))
        return sum(each.seconds for each in found if each.entry.path.rpartition(".")[2] in modules)

    matmuls = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj"), "lm_head": ("lm_head",)}
    kept, again, bare = step("kept"), step("again"), step("again", overlap="none")
    shown = gathers = 0.0
    for module, names in matmuls.items():
        sent = sum(
            each.seconds for each in again.messages
            if (each.entry.name, each.entry.overlap) == ("all_gather", "compute") and each.entry.path.endswith(module)
        )  # fmt: skip
        assert sent > 0
        gathers += sent
        shown += max(0.0, sent - of(again, "matmul", *names) / 2)
    assert (shown > 0) is (rate < 1e11)
    copies = of(again, "copy", *matmuls) - of(kept, "copy", *matmuls)  # sequences are brought together once more
    assert (copies > 0) is (batch > 1)
    seconds = [each.seconds for each in (kept, again, bare)]
    assert seconds == pytest.approx([seconds[0], seconds[0] + copies + shown, seconds[0] + copies + gathers])


def test_sharded_blocks_wait_where_nothing_overlaps_and_gathers_of_tensors_wait_for_each() -> None:
    shared = {"shard": 64}
    beside, after = timed(run_of(shared)), timed(run_of({**shared, "overlap": "none"}))
    one_by_one = timed(run_of({**shared, "overlap": "none", "gather": "tensor"}))
    shown = [each.causes["exposed communication"] for each in (beside, after, one_by_one)]
    assert shown[0] < shown[1] < shown[2]
    # A block has 7 matrices and 2 norms: what the links' latency adds is 8 rings more for each gather of a block.
    assert one_by_one.by_kind["matmul"] == after.by_kind["matmul"]


def test_split_sends_show_less_where_the_network_is_slow() -> None:
    layout, wide = {"tensor": 8, "pipeline": 4}, {"seq_len": 4096}
    whole, split = (
        timed(run_of({**layout, "split_sends": each}, dict(wide), network_reached_bytes_per_second="1GB"))
        for each in (False, True)
    )
    assert split.seconds < whole.seconds
    assert split.causes["ideal"] == pytest.approx(whole.causes["ideal"])
    fast = timed(run_of({**layout, "split_sends": True}, dict(wide)))
    assert fast.seconds < split.seconds


@pytest.mark.parametrize("layout", [{}, {"replicate": 16}, {"shard": 16}, {"tensor": 4, "pipeline": 2}], ids=str)
def test_blocking_launches_add_each_launch_and_hide_nothing(layout: dict[str, Any]) -> None:
    """CUDA_LAUNCH_BLOCKING=1: a step of one device is all kernels and all launches, one after the other."""
    slow = replace(SHEET, efficiency=replace(H100.efficiency, launch_seconds=4e-5, straggler_share=0.0))
    plain, blocking = (timed(run_of(layout, {"launch_blocking": each}), slow) for each in (False, True))
    assert blocking.seconds > plain.seconds
    assert sum(blocking.causes.values()) == pytest.approx(blocking.seconds)
    assert blocking.causes["launch overhead"] > plain.causes["launch overhead"]
    assert blocking.causes["exposed communication"] >= plain.causes["exposed communication"] * (1 - 1e-9)
    if not layout:
        kernels = timed(run_of({}), replace(slow, efficiency=replace(slow.efficiency, launch_seconds=0.0)))
        launches = sum(each.launch_seconds for each in plain.entries)
        assert blocking.seconds == pytest.approx(kernels.seconds + launches)


def test_notes_name_the_network_that_was_timed_and_launches_that_are_waited_for() -> None:
    spread = {"replicate": 16}
    usual, sheet, measured = (
        " ".join(timed(run_of(spread, **said)).notes)
        for said in (
            {}, {"network_bytes_per_second": "200Gbit/s"},
            {"network_bytes_per_second": "200Gbit/s", "network_reached_bytes_per_second": "20GB/s"},
        )
    )  # fmt: skip
    assert "nodes over InfiniBand NDR" in usual
    assert "nodes over a network of 25 GB/s for each device (cluster.network_bytes_per_second) with the lat" in sheet
    assert "that was measured to reach 20 GB/s of 25 GB/s for each device (cluster.network_reached_bytes" in measured
    for layout in ({}, spread):
        waits = "the program waits for each kernel (recipe.launch_blocking)"
        assert waits in " ".join(timed(run_of(layout, {"launch_blocking": True})).notes)
        assert waits not in " ".join(timed(run_of(layout)).notes)


def test_an_overlap_that_there_is_not_is_refused() -> None:
    with pytest.raises(tl.InvalidInput, match=r"layout.overlap = 'gradient'.*gradients, parameters, tensor"):
        run_of({"shard": 8, "overlap": ["gradient"]})
    with pytest.raises(tl.InvalidInput, match="sequence-parallel ranks"):
        run_of({"tensor": 4, "overlap": ["tensor"]})
    only = r"input-gradients: only tensor ranks have gradients of inputs to add up; set layout.tensor; nearest that wo"
    for said, nearest in ((["gradients", "input-gradients"], r"\['gradients'\]"), (["input-gradients"], "none")):
        with pytest.raises(tl.InvalidInput, match=only + f"rks: {nearest}$"):
            run_of({"shard": 8, "overlap": said})
    tensor = run_of({"tensor": 8, "overlap": ["input-gradients"]})
    assert tensor.layout.overlap == ("input-gradients",)


def test_one_device_is_the_step_of_one_device() -> None:
    run = run_of({})
    (rank,) = accounts(run, backend="cuda")
    assert layout_time((rank,), H100) == step_time(rank.ledger, H100)


def test_more_replicas_with_more_work_take_no_less_than_one_and_the_bound_stays_below() -> None:
    sheet = replace(H100, efficiency=None)
    one = layout_time(accounts(run_of({}, {"global_batch": 4}), backend="cuda"), H100)
    assert one.seconds is not None
    for replicas in (2, 8, 64):
        run = run_of({"replicate": replicas}, {"global_batch": 4 * replicas})
        step, bound = timed(run), timed(run, sheet)
        assert step.seconds is not None
        assert bound.seconds is not None
        assert one.seconds <= step.seconds * (1 + 1e-9)
        assert bound.seconds <= step.seconds
        assert bound.basis == "bound"


def test_replicas_at_equal_work_each_take_the_same_but_for_what_shows_of_the_sum() -> None:
    """Device time per step at equal work per device: the bound does not grow beyond the last bucket."""
    fast = replace(H100, efficiency=None, fabric=linked(1e30, 1e30))
    times = []
    for replicas in (2, 4, 1024):
        run = run_of({"replicate": replicas}, {"global_batch": 4 * replicas})
        times.append(layout_time(accounts(run, backend="cuda"), fast).seconds)
    assert times == [pytest.approx(times[0])] * 3


def test_stragglers_and_contention_cost_their_shares() -> None:
    assert H100.efficiency is not None
    run = run_of({"shard": 32})
    usual = replace(H100, efficiency=replace(H100.efficiency, straggler_share=0.0, contention_share=0.0))
    slow = replace(usual, efficiency=replace(H100.efficiency, straggler_share=0.01, contention_share=0.0))
    busy = replace(usual, efficiency=replace(H100.efficiency, straggler_share=0.0, contention_share=0.2))
    before = timed(run, usual).seconds
    assert before is not None
    assert timed(run, slow).seconds == pytest.approx(before * 1.02)  # four nodes: two doublings
    assert timed(run, slow).causes["stragglers"] == pytest.approx(before * 0.02)
    after = timed(run, busy)
    assert after.seconds is not None
    assert after.seconds > before


@pytest.mark.parametrize(("count", "slower"), [(8, False), (32, True)])
def test_what_the_network_carries_in_a_step_shows_between_nodes(count: int, slower: bool) -> None:
    assert H100.efficiency is not None
    run = run_of({"shard": count})
    whole, half = (
        timed(run, replace(H100, efficiency=replace(H100.efficiency, network_share=share))) for share in (1.0, 0.5)
    )
    assert whole.seconds is not None
    assert half.seconds is not None
    assert (half.seconds > whole.seconds) == slower
    shown = half.causes["exposed communication"] - whole.causes["exposed communication"]
    assert (shown > 0) == slower
    answer = "of which collectives reach 50.0 % in a step (network_share of the calibration)"
    assert any(answer in each for each in half.notes) == slower
    assert not any("network_share" in each for each in whole.notes)
    # Without a calibration times are bounds, of the network too.
    assert H100.fabric is not None
    assert replace(H100, efficiency=None).step_fabric == H100.fabric.bound


def test_what_is_not_known_is_said() -> None:
    run = run_of({"shard": 16})
    ranks = accounts(run, backend="cuda")
    unknown = layout_time(ranks, replace(H100, fabric=None))
    assert unknown.seconds is None
    assert "no link between devices" in unknown.notes[0]
    assert H100.fabric is not None
    apart = layout_time(ranks, replace(H100, fabric=replace(H100.fabric, network=None)))
    assert apart.seconds is None
    assert "16 ranks is on 2 nodes of 8 devices" in apart.notes[0]
    within = layout_time(ranks, replace(H100, fabric=replace(H100.fabric, network=None, devices_per_node=16)))
    assert within.seconds is not None


def test_the_cluster_says_what_joins_its_devices() -> None:
    clusters: list[dict[str, Any]] = [
        {"devices_per_node": 16}, {}, {"network": "ndr", "network_bytes_per_second": "1.25GB"},
        {"network": "ethernet-10"},
    ]  # fmt: skip
    times = [timed(run_of({"shard": 16}, **each)).seconds or 0.0 for each in clusters]
    assert 0 < times[0] < times[1] < times[2] < times[3]
    with pytest.raises(tl.InvalidInput, match=r"cluster.network = 'nrd'.*nearest that works: ndr"):
        run_of({"shard": 16}, network="nrd")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_spans_end_with_the_step(layout: dict[str, Any]) -> None:
    run = run_of(dict(layout), {"model": {**MODEL, "d_model": 2048, "feed_forward.d_ff": 6144}})
    ranks = accounts(run, backend="cuda")
    drawn = spans(ranks, H100)
    step = layout_time(ranks, H100)
    assert step.seconds is not None
    assert max(each.end for each in drawn) == pytest.approx(step.seconds - step.causes["stragglers"])
    assert all(0 <= each.start < each.end for each in drawn)
    if run.layout.pipeline > 1:
        assert {each.stream for each in drawn} == {f"stage {each + 1}" for each in range(run.layout.pipeline)}


def test_a_program_that_launches_slowly_sets_the_pace() -> None:
    """At most one launch after another on one stage; in a pipeline with what fills and drains it."""
    assert H100.efficiency is not None
    slow = replace(H100, efficiency=replace(H100.efficiency, launch_seconds=1e-3))
    for layout, more in (({"shard": 8}, 1.0), ({"pipeline": 4}, 1 + 3 / 64)):
        run = run_of(dict(layout))
        ranks = accounts(run, backend="cuda")
        launches = max(sum(each.launch_seconds for each in stage.times) for stage in _stages(run, ranks, slow))
        step = layout_time(ranks, slow)
        assert step.seconds == pytest.approx(launches * more, rel=0.02)
        assert sum(step.causes.values()) == pytest.approx(step.seconds)


def _stages(run: Run, ranks: Any, device: Device) -> Any:
    assert device.fabric is not None
    return stages_of(ranks, device, device.fabric)


@pytest.mark.parametrize(
    ("layout", "rel"),
    [
        ({"pipeline": 4}, 1e-12),
        ({"pipeline": 4, "shard": 2, "zero": 1}, 1e-12),
        ({"pipeline": 4, "schedule": "interleaved", "virtual_stages": 2}, 1e-12),
        ({"pipeline": 4, "schedule": "zero-bubble", "shard": 2, "zero": 2}, 1e-12),
        # Parameters outside of the layers are gathered again for each micro-batch in flight.
        ({"pipeline": 4, "shard": 2, "reshard_after_forward": True}, 1e-3),
    ],
)
def test_stages_that_are_alike_take_the_time_that_each_takes_on_its_own(layout: dict[str, Any], rel: float) -> None:
    run = run_of(layout)
    ranks = accounts(run, backend="cuda")
    together = layout_time(ranks, H100)
    apart = layout_time([replace(each, alike=None) for each in ranks], H100)
    assert together.seconds == pytest.approx(apart.seconds, rel=1e-12)
    for split in ("causes", "by_phase", "by_kind", "by_bound"):
        assert getattr(together, split) == pytest.approx(getattr(apart, split), rel=rel, abs=1e-9), split


@pytest.mark.parametrize(
    "layout",
    [
        {"zero": 1}, {"zero": 2}, {}, {"schedule": "zero-bubble"}, {"schedule": "gpipe", "zero": 2},
        {"reshard_after_forward": True},
    ],
)  # fmt: skip
def test_one_micro_batch_takes_no_longer_than_two(layout: dict[str, Any]) -> None:
    """What is gathered and summed once a step is so beside the other stages' work, with one micro-batch too."""
    spread = {"pipeline": 2, "shard": 16, **layout}
    slow = {"network_bytes_per_second": 5 * 10**9}
    one, two = (timed(run_of(spread, {"global_batch": 16 * number}, **slow)) for number in (1, 2))
    assert one.seconds is not None
    assert two.seconds is not None
    assert one.seconds < two.seconds
