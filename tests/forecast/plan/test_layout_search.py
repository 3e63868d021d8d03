"""The search for a layout: its grid against the rules, its bounds against the accounts, its best against all."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import trainledger as tl
from drawn import marks
from models import sizes
from trainledger.answers.layout import with_layout
from trainledger.answers.layouts import figures
from trainledger.answers.load import load
from trainledger.answers.machine import kernels_of, machine_of
from trainledger.cli import main
from trainledger.forecast.plan.layouts.accounts import pareto, rescore
from trainledger.forecast.plan.layouts.blocks import Blocks
from trainledger.forecast.plan.layouts.bounds import Bounds
from trainledger.forecast.plan.layouts.grid import Grid, Shape, grid_of, run_of, shared_layers, whole
from trainledger.forecast.plan.layouts.result import AS_QUICK
from trainledger.forecast.plan.layouts.search import BY_ACCOUNT, _costs
from trainledger.forecast.plan.layouts.stages import Pipelines, States
from trainledger.report.chart import Band, Line
from trainledger.report.table import pasted
from trainledger.spec.problem import InvalidInput
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

pytestmark = pytest.mark.agreement

SMALL = sizes(D=64, H=8, KV=2, F=96, V=96, T=64, L=4)
EXPERTS = {
    **SMALL,
    "feed_forward": "experts",
    "feed_forward.n_experts": 4,
    "feed_forward.per_token": 2,
    "feed_forward.expert_d_ff": 32,
}


def run_for(devices: int, model: dict[str, Any], **recipe: Any) -> Run:
    given = {"seq_len": 32, "global_batch": 4, "steps": 1, "precision": "bf16-sharded", **recipe}
    run = load({"model": model, "recipe": given, "cluster": {"device": "h100-sxm"}})
    return replace(run, cluster=replace(run.cluster, count=devices))


PATTERNS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"preset": "mixtral-8x7b", "n_layers": 8, "feed_forward.every": 3}, {"seq_len": 512}, 8),
    ({"preset": "mixtral-8x7b", "n_layers": 8, "feed_forward.every": 2}, {"seq_len": 512}, 4),
    ({"preset": "gpt2"}, {"seq_len": 512, "activation_checkpointing": "full", "activation_checkpointing.every": 2}, 12),
    ({"preset": "gemma-3-12b", "n_layers": 24}, {"seq_len": 2048}, 12),
]


@pytest.mark.parametrize(("model", "recipe", "stages"), PATTERNS, ids=str)
def test_stages_that_cut_a_pattern_of_layers_come_to_what_their_plan_says(
    model: dict[str, Any], recipe: dict[str, Any], stages: int
) -> None:
    run = run_for(stages, model, global_batch=16, micro_batch=1, **recipe)
    run = replace(run, layout=replace(run.layout, pipeline=stages))
    machine = machine_of(run)
    answer, found = tl.predict(run), rescore(run, machine, backend=kernels_of(run))
    assert (found.seconds, found.peak_nbytes) == (pytest.approx(answer.step_seconds), answer.peak_nbytes)


def everything(grid: Grid) -> Iterator[Run]:
    """All runs of a grid, allowed or not, without asking the search."""
    for tensor, context, pipeline in grid.blocks():
        ranks = grid.devices // (tensor * context * pipeline)
        for parallel in grid.parallels(tensor):
            for kind in grid.kinds(context):
                for expert in grid.experts():
                    for size in grid.micro_batches():
                        for again in grid.again():
                            shape = Shape(tensor, parallel, context, kind, expert, size, again)
                            for stages in grid.stages(pipeline):
                                for sharding in grid.shardings(ranks, context):
                                    yield run_of(grid.run, shape, stages, sharding)


def candidates(blocks: Blocks) -> Iterator[Run]:
    for some in blocks.blocks.values():
        for block in some:
            for way, variant, sharding in np.argwhere(blocks.allowed(block)):
                shape = blocks.shapes[block.variants[variant]]
                yield run_of(blocks.grid.run, shape, blocks.stages[block.pipeline][way], block.shardings[sharding])


@pytest.mark.parametrize(
    ("devices", "model", "recipe"),
    [
        (4, SMALL, {}), (4, EXPERTS, {}), (6, {**SMALL, "n_layers": 5}, {"global_batch": 6}),
        (4, SMALL, {"loss": "chunked", "loss.chunks": 64}), (4, SMALL, {"optimizer": "adafactor"}),
        (4, SMALL, {"loss": "compiled"}),
        (4, SMALL, {"attention": "math"}), (2, {**SMALL, "n_mtp_layers": 1}, {}),
        (4, SMALL, {"precision": "fp8-rowwise", "precision.weight_caching": True}),
        (4, SMALL, {"precision": "fp8-rowwise-sharded"}),
        (4, SMALL, {"lora.rank": 2, "lora.base_format": "nf4", "precision": "bf16-mixed"}),
        (4, SMALL, {"activation_checkpointing": "segments"}), (8, {**SMALL, "n_layers": 3}, {"global_batch": 2}),
    ],
)  # fmt: skip
def test_a_layout_is_a_candidate_exactly_where_the_rules_allow_it(
    devices: int, model: dict[str, Any], recipe: dict[str, Any]
) -> None:
    run = whole(run_for(devices, model, **recipe))
    grid = grid_of(run, devices, {})
    blocks = Blocks(grid)
    found = list(candidates(blocks))
    every = list(everything(grid))
    valid = {each for each in every if not list(run_problems(each))}
    assert len(found) == len(set(found))
    assert set(found) == valid
    assert blocks.searched == len(every) == len(found) + sum(blocks.rejected.values())
    assert all(each.layout.devices == devices for each in found)


def bounds_of(run: Run, blocks: Blocks, machine: tl.Device) -> Bounds:
    every = range(len(blocks.shapes))
    costs = _costs(run, machine, kernels_of(run))
    return Bounds(run, blocks.shapes, costs, wanted={False: every, True: every}, backend=kernels_of(run))


def bounded(run: Run, draws: int, seed: int, fixed: dict[str, Any]) -> Iterator[tuple[float, float, Run]]:
    """Some layouts of a run: the shares of their accounts in bytes and in seconds that their bounds are."""
    machine = machine_of(run)
    assert isinstance(machine, tl.Device)
    grid = grid_of(whole(run), run.cluster.count, fixed)
    run = grid.run
    blocks = Blocks(grid)
    states = States(run, list(blocks.ranks), backend=kernels_of(run))
    bounds = bounds_of(run, blocks, machine)
    ways = {pipeline: Pipelines(blocks.stages[pipeline], bounds.runs) for pipeline in blocks.blocks}
    pairs = [(pipeline, each) for pipeline, some in blocks.blocks.items() for each in some]
    draw = random.Random(seed)
    for _ in range(draws):
        pipeline, block = draw.choice(pairs)
        allowed = np.argwhere(blocks.allowed(block))
        if not len(allowed):
            continue
        at = tuple(allowed[draw.randrange(len(allowed))])
        static = states.of(ways[pipeline], block.zero_modes, np.array(block.columns))
        (rates,) = bounds.rates_of([block])
        least_nbytes, _, least_seconds = bounds.of(block, ways[pipeline], static, rates)
        shape, sharding = blocks.shapes[block.variants[at[1]]], block.shardings[at[2]]
        one = run_of(run, shape, blocks.stages[pipeline][at[0]], sharding)
        answer = rescore(one, machine, backend=kernels_of(run))
        assert answer.seconds is not None
        yield least_nbytes[at] / answer.peak_nbytes, least_seconds[at] / answer.seconds, one


KINDS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("llama-3-8b", 64, {"seq_len": 4096, "global_batch": 64}, {"context_kind": "ring"}),
    ("gpt2", 16, {"seq_len": 1024, "global_batch": 16, "precision": "bf16-mixed"}, {}),
    ("gpt2-medium", 8, {"seq_len": 1024, "global_batch": 8, "precision": "bf16", "precision.master_weights": True,
                        "precision.gradient_dtype": "fp32"}, {}),
    ("mixtral-8x7b", 16, {"seq_len": 1024, "global_batch": 16}, {"micro_batch": 1, "sequence_parallel": False}),
    ("deepseek-v2-lite", 8, {"seq_len": 1024, "global_batch": 8}, {"context": 1, "micro_batch": 2}),
    ("gemma-2-2b", 8, {"seq_len": 1024, "global_batch": 8, "attention": "flash"}, {"context": 1}),
    ("llama-3-8b", 16, {"seq_len": 1024, "global_batch": 32, "compile": True}, {"context": 1,
                                                                               "activation_checkpointing": "none"}),
    ("llama-3-8b", 16, {"seq_len": 1024, "global_batch": 64, "precision": "fp8-tensorwise",
                        "precision.weight_caching": True}, {"context": 1, "micro_batch": 1}),
    ("llama-3-8b", 8, {"seq_len": 1024, "global_batch": 64, "precision": "bf16", "lora.rank": 16,
                       "lora.base_format": "nf4"}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "devices", "recipe", "fixed"), KINDS)
def test_bounds_are_below_the_account_and_near_it(
    name: str, devices: int, recipe: dict[str, Any], fixed: dict[str, Any]
) -> None:
    """What fits is never rejected: bytes are never above; seconds rank layouts, so they must be close."""
    run = run_for(devices, {"preset": name}, **recipe)
    found = list(bounded(run, 16, 7, fixed))
    for nbytes, seconds, one in found:
        assert nbytes <= 1, (nbytes, one.layout, one.recipe)
        assert 0.2 < seconds < 1.1, (seconds, one.layout, one.recipe)
    assert np.median([nbytes for nbytes, _, _ in found]) > 0.85
    assert np.median([seconds for _, seconds, _ in found]) > 0.75


def test_split_sends_are_searched_as_they_are_accounted_for() -> None:
    run = run_for(64, {"preset": "llama-3-8b"}, seq_len=1024, global_batch=64)
    fixed = {"sequence_parallel": False, "context": 1, "pipeline": 4, "tensor": 4}
    ratios = []
    for splits in (False, True):
        asked = replace(run, layout=replace(run.layout, split_sends=splits))
        found = list(bounded(asked, 12, 7, fixed))
        assert any(one.layout.split_sends for _, _, one in found) is splits
        assert all(nbytes <= 1 for nbytes, _, _ in found)
        ratios.append([seconds for _, seconds, _ in found])
    assert ratios[1] == pytest.approx(ratios[0], rel=0.15)


def test_gathers_in_backward_are_searched_as_they_are_accounted_for() -> None:
    """Bounds stay below the account and as near to it, and the rules are asked with what the run says."""
    run = run_for(16, {"preset": "llama-3-8b"}, seq_len=1024, global_batch=64)
    fixed = {"sequence_parallel": True, "context": 1, "tensor": 4}
    answer = []
    for gather in ("kept", "again"):
        asked = replace(run, layout=replace(run.layout, sequence_gather=gather))
        found = list(bounded(asked, 12, 7, fixed))
        assert {one.layout.sequence_gather for _, _, one in found} == {gather}
        assert all(nbytes <= 1 and 0.2 < seconds < 1.1 for nbytes, seconds, _ in found)
        answer.append(np.array([(nbytes, seconds) for nbytes, seconds, _ in found]))
    assert answer[1] == pytest.approx(answer[0], rel=0.15)


@pytest.mark.parametrize("precision", ["bf16-sharded", "fp8-block"])
def test_gathers_in_backward_are_candidates_where_ranks_are_sequence_parallel(precision: str) -> None:
    run = run_for(4, {**SMALL, "feed_forward.d_ff": 128}, precision=precision)
    run = replace(run, layout=replace(run.layout, sequence_gather="again"))
    grid = grid_of(whole(run), 4, {"micro_batch": 1, "pipeline": 1})
    found = set(candidates(Blocks(grid)))
    assert found == {each for each in everything(grid) if not list(run_problems(each))}
    ways = {(each.layout.sequence_parallel, each.layout.sequence_gather) for each in found}
    assert ways == {(False, "kept"), *({(True, "again")} if precision == "bf16-sharded" else ())}


def test_sums_that_overlap_matmuls_are_searched_as_they_are_accounted_for() -> None:
    """Bounds stay below the account and as near to it; steps are too long to wait for launches, which are more."""
    run = run_for(16, {"preset": "llama-3-8b"}, seq_len=4096, global_batch=64)
    answer = []
    for more in ((), ("input-gradients",)):
        asked = replace(run, layout=replace(run.layout, overlap=("gradients", *more)))
        found = list(bounded(asked, 12, 7, {"context": 1, "tensor": 4}))
        assert {one.layout.overlap for _, _, one in found} == {("gradients", *more)}
        assert all(nbytes <= 1 and 0.2 < seconds < 1.1 for nbytes, seconds, _ in found)
        answer.append(np.array([(nbytes, seconds) for nbytes, seconds, _ in found]))
    assert answer[1] == pytest.approx(answer[0], rel=0.15)
    assert (answer[1][:, 1] <= answer[0][:, 1] * (1 + 1e-9)).all()  # what hides in the account hides in the bound


def test_sums_that_overlap_matmuls_are_said_of_layouts_with_tensor_ranks_alone() -> None:
    run = run_for(4, SMALL)
    run = replace(run, layout=replace(run.layout, overlap=("gradients", "input-gradients")))
    grid = grid_of(whole(run), 4, {"micro_batch": 1, "pipeline": 1})
    found = set(candidates(Blocks(grid)))
    assert found == {each for each in everything(grid) if not list(run_problems(each))}
    ways = {(each.layout.tensor > 1, "input-gradients" in (each.layout.overlap or ())) for each in found}
    assert ways == {(False, False), (True, True)}


def test_the_collectives_of_a_block_cost_the_same_alone_and_among_others() -> None:
    run = whole(run_for(8, {"preset": "mixtral-8x7b"}, seq_len=1024, global_batch=16))
    machine = machine_of(run)
    assert isinstance(machine, tl.Device)
    grid = grid_of(run, 8, {"micro_batch": 1})
    blocks = Blocks(grid)
    bounds = bounds_of(run, blocks, machine)
    every = [each for some in blocks.blocks.values() for each in some]
    assert len({each.expert for each in every}) > 1
    for block, among in zip(every, bounds.rates_of(every), strict=True):
        (alone,) = bounds.rates_of([block])
        for name, rate in vars(alone).items():
            np.testing.assert_allclose(rate, getattr(among, name), rtol=1e-12)


def test_the_best_is_the_best_of_all() -> None:
    run = run_for(4, {"preset": "gpt2"}, seq_len=1024, global_batch=16)
    fixed = {"micro_batch": 2, "activation_checkpointing": "none", "context_kind": "ring", "schedule": "1f1b"}
    found = tl.layouts(run, fixed=fixed, keep=5)
    assert found.certain
    machine = machine_of(run)
    assert isinstance(machine, tl.Device)
    grid = grid_of(whole(run), 4, fixed)
    every = [each for each in everything(grid) if not list(run_problems(each))]
    answer = sorted(rescore(each, machine, backend=kernels_of(run)).seconds or 0.0 for each in every)
    assert len(every) == found.allowed
    assert [each.seconds for each in found.ranked] == pytest.approx(answer[:5])


def test_what_is_said_of_a_layout_is_what_its_plan_says() -> None:
    run = run_for(8, {"preset": "gpt2-medium"}, seq_len=1024, global_batch=32)
    more = {"micro_batch": 1, "activation_checkpointing": "none"}
    found = tl.layouts(run, keep=3, fixed={**more, "schedule": "interleaved", "pipeline": 4})
    searched = (*found.ranked, *tl.layouts(run, keep=2, fixed=more).ranked)
    assert len(searched) == 5
    for each in searched:
        answer = tl.predict(each.run)
        assert answer.step_seconds == pytest.approx(each.seconds)
        assert answer.peak_nbytes == each.peak_nbytes
        assert answer.device_nbytes == each.device_nbytes
        assert answer.mfu == pytest.approx(each.mfu)
        assert answer.fits
    assert [each.seconds for each in found.ranked] == sorted(each.seconds for each in found.ranked)
    assert all(each.run.layout.schedule == "interleaved" for each in found.ranked)


def test_every_layout_that_was_searched_is_accounted_for() -> None:
    found = tl.layouts(run_for(8, {"preset": "gpt2"}, seq_len=1024, global_batch=8), keep=3)
    too_large = sum(each.count for each in found.rejected if each.reason == BY_ACCOUNT)
    assert sum(each.count for each in found.rejected) + found.accounted - too_large == found.searched


def test_nothing_on_the_front_is_beaten_by_what_is_on_it() -> None:
    found = tl.layouts(run_for(8, {"preset": "llama-3-8b"}, seq_len=4096, global_batch=16), keep=3)
    assert len(found.pareto) > 3
    seconds = [each.seconds for each in found.pareto]
    nbytes = [each.device_nbytes for each in found.pareto]
    assert seconds == sorted(seconds)
    assert nbytes == sorted(nbytes, reverse=True)
    assert found.best in found.pareto
    (chart,) = figures(found)
    (front,) = marks(chart, Line, "Pareto front")
    assert front.texts == [f"{at + 1}" for at in range(len(found.pareto))]
    assert list(chart.key) == [each.title for each in found.pareto]  # what the numbers name
    assert [each.text for each in marks(chart, Band)] == ["85.02 GB usable"]


def test_the_front_of_points_is_what_no_other_beats() -> None:
    draw = np.random.default_rng(0)
    seconds, nbytes = draw.integers(0, 30, 200).astype(float), draw.integers(0, 30, 200).astype(float)
    front = set(pareto(seconds, nbytes).tolist())
    points = list(zip(seconds, nbytes, strict=True))
    kept = {points[index] for index in front}
    for point in set(points):
        beaten = any(
            other[0] <= point[0] and other[1] <= point[1] and other != point for other in points
        )  # fmt: skip
        assert (point in kept) == (not beaten)


def test_layers_that_do_not_go_evenly_are_fewer_at_the_ends() -> None:
    """Grattafiori et al. 2024, section 3.3.2: of 126 layers the first and the last of 16 stages have one fewer."""
    assert shared_layers(126, 16) == (7, *[8] * 14, 7)
    assert shared_layers(126, 128) == (0, *[1] * 126, 0)
    assert shared_layers(61, 16) == (3, *[4] * 13, 3, 3)
    assert shared_layers(4, 8) is None
    for layers in range(1, 40):
        for chunks in range(1, 42):
            shared = shared_layers(layers, chunks)
            if shared:
                assert sum(shared) == layers
                assert max(shared) - min(shared) == 1


def test_the_published_layout_of_llama_3_405b_is_a_candidate_that_fits() -> None:
    """Grattafiori et al. 2024, table 4: tensor 8, pipeline 16, data 128 on 16,384 H100 at 8,192 tokens.

    FSDP keeps what it gathered from forward to backward (section 3.3.2), which an interleaved pipeline does.
    """
    run = run_for(16384, {"preset": "llama-3.1-405b"}, seq_len=8192, global_batch=2048)
    said = {"tensor": 8, "pipeline": 16, "context": 1, "sequence_parallel": True, "micro_batch": 1, "zero": 3}
    found = tl.layouts(run, fixed={**said, "schedule": "interleaved"}, keep=1, limit_seconds=2)
    assert found.best is not None
    assert found.best.run.layout.data_ranks == 128
    assert found.best.mfu is not None
    assert 0.3 < found.best.mfu < 0.55  # 0.41 is published


def test_an_interrupted_search_gives_what_it_has() -> None:
    seen = []

    def stop(what: str, done: int, of: int) -> None:
        seen.append(what)
        if what == "accounts" and done >= 2:
            raise KeyboardInterrupt

    run = run_for(4, {"preset": "gpt2"}, seq_len=1024, global_batch=8)
    found = tl.layouts(run, progress=stop)
    assert found.accounted == 2
    assert not found.certain
    assert any("interrupted" in each for each in found.notes)
    assert found.interrupted
    assert "groups of layouts estimated" in seen
    with pytest.raises(KeyboardInterrupt):  # a run with the best layout is not to be had then
        with_layout(replace(run, layout=replace(run.layout, auto=True)), progress=stop)


def test_a_search_says_when_it_is_done() -> None:
    heard: list[tuple[int, int]] = []
    tl.layouts(run_for(4, SMALL), limit_seconds=0, progress=lambda what, done, of: heard.append((done, of)))
    assert heard[-1][0] == heard[-1][1]


def test_where_nothing_fits_the_reasons_say_so() -> None:
    found = tl.layouts(run_for(1, {"preset": "llama-3-70b"}, seq_len=4096, global_batch=4))
    assert found.best is None
    assert "none fits" in repr(found)
    (reason,) = {each.reason for each in found.rejected if "fit" in each.reason}
    assert "optimizer state alone" in reason


def test_modules_that_predict_ahead_are_searched_in_pipelines_but_not_over_tensor_ranks() -> None:
    run = whole(run_for(4, {**EXPERTS, "n_mtp_layers": 1}))
    grid = grid_of(run, 4, {})
    blocks = Blocks(grid)
    found = list(candidates(blocks))
    assert {each.layout.tensor for each in found} == {1}
    assert {each.layout.pipeline for each in found} == {1, 2, 4}
    assert any("n_mtp_layers" in each for each in map(str, blocks.rejected))


def test_what_cannot_be_searched_is_refused_with_a_sentence() -> None:
    run = run_for(4, {"preset": "gpt2"}, seq_len=1024, global_batch=8)
    with pytest.raises(InvalidInput, match=r"tensr = 4: is not searched; .* nearest that works: tensor"):
        tl.layouts(run, fixed={"tensr": 4})
    with pytest.raises(InvalidInput, match="cannot be timed; name a device of the catalog"):
        tl.layouts(run, device="this-machine")
    with pytest.raises(InvalidInput, match="h100-sxm"):
        tl.layouts(run, device="h100-smx")


# layout = "auto"


AUTO = {
    "model": {"preset": "gpt2"}, "recipe": {"seq_len": 1024, "global_batch": 16, "steps": 1},
    "cluster": {"device": "h100-sxm", "count": 4},
}  # fmt: skip


def test_a_run_file_may_ask_for_the_best_layout() -> None:
    run = load({**AUTO, "layout": "auto"})
    assert not run.layout.auto
    assert run.layout.devices == 4
    assert run == load(AUTO, ["layout=auto"]) == load({**AUTO, "layout": {"auto": True}})
    asked = load(AUTO, ["layout=auto"], search=False)
    assert asked.layout.auto
    assert not asked.layout.alone
    best = tl.layouts(asked, keep=1).simplest
    assert best is not None
    assert best.run == run


@pytest.mark.parametrize(("device", "global_batch"), [("h100-sxm", 16), ("a100-sxm-80gb", 64)])
def test_the_simplest_has_the_fewest_kinds_of_ranks_of_those_about_as_quick(device: str, global_batch: int) -> None:
    changes = {"recipe.global_batch": global_batch, "cluster.device": device, "cluster.count": 8}
    found = tl.layouts(load(AUTO, changes), keep=500)
    best, simplest = found.best, found.simplest
    assert best is not None
    assert simplest is not None
    as_quick = [each for each in found.ranked if each.seconds <= best.seconds * AS_QUICK]
    assert len(as_quick) < len(found.ranked)
    fewest = min(as_quick, key=lambda each: (each.run.layout.kinds_of_ranks, each.seconds))
    assert simplest == fewest


def test_uneven_stages_are_not_chosen_for_a_tenth_of_a_percent(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layouts", "llama-3-8b", "--device", "h800-sxm", "--count", "8", "--fix", "context=4", "--keep", "3"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    best, simplest = answer["ranked"][0], answer["simplest"]
    assert best["layout"]["stage_layers"]
    assert "stage_layers" not in simplest["layout"]
    assert best["step_seconds"] < simplest["step_seconds"] < 1.01 * best["step_seconds"]
    assert main([*words, "--full"]) == 0
    said = capsys.readouterr().out
    assert "Within 3.0 % of the quickest, and simpler" in said
    assert '[layout]\npipeline = 2\nschedule = "interleaved"\nvirtual_stages = 8\ncontext = 4\n' in said
    run = load({"model": {"preset": "llama-3-8b"}, "recipe": {"seq_len": 8192, "global_batch": 512, "steps": 1,
                "precision": "bf16-sharded"}, "cluster": {"device": "h800-sxm", "count": 8}, "layout": {"auto": True,
                "context": 4}})  # fmt: skip
    assert run.layout.pipeline == 2
    assert run.layout.stage_layers is None


def test_what_is_said_with_auto_is_kept() -> None:
    run = load(AUTO, {"layout.auto": True, "layout.pipeline": 2, "recipe.micro_batch": 2})
    assert (run.layout.pipeline, run.recipe.micro_batch) == (2, 2)
    assert run.layout.devices == 4
    rule = "found no layout that fits 4 x h100-sxm: layout.tensor must divide the embedding's rows = 50257"
    with pytest.raises(InvalidInput, match=rule):
        load(AUTO, {"layout.auto": True, "layout.tensor": 2})


def test_where_rules_allow_a_layout_and_memory_none_it_is_memory_that_is_named() -> None:
    large = {**AUTO, "model": {"preset": "llama-3-70b"}, "cluster": {"device": "h100-sxm", "count": 2}}
    rule = "fits 2 x h100-sxm: too large: parameters, gradients and optimizer state alone"
    with pytest.raises(InvalidInput, match=rule):
        load(large, ["layout=auto"])
    one = {**AUTO, "cluster": {"device": "h100-sxm", "count": 1}}
    with pytest.raises(InvalidInput, match="fits 1 x h100-sxm with shard = 2"):
        load(one, ["layout=auto", "layout.shard=2"])


def test_on_one_device_the_micro_batch_and_the_recomputation_are_searched_for() -> None:
    """As `layouts` does: a step of 65,536 tokens is not one micro-batch that does not fit."""
    one = {**AUTO, "recipe": {**AUTO["recipe"], "global_batch": 64}, "cluster": {"device": "l4", "count": 1}}
    run = load(one, ["layout=auto"])
    assert run.layout.alone
    best = tl.layouts(load(one), keep=1).simplest
    assert best is not None
    assert run == best.run
    assert run.recipe.micro_batch is not None
    assert tl.predict(run).fits is True
    assert tl.predict(load(one)).fits is False


def test_on_this_machine_auto_is_one_device() -> None:
    run = load({**AUTO, "cluster": {"device": "this-machine"}}, ["layout=auto"])
    assert run.layout.alone
    assert run.recipe.micro_batch is None
    assert with_layout(run) == run


def test_a_found_layout_reads_back_as_it_was_found() -> None:
    import tomllib

    from trainledger.forecast.plan.layouts.result import as_toml

    run = load({**AUTO, "layout": "auto"})
    table = tomllib.loads(as_toml(run))
    again = load({**AUTO, "layout": table["layout"], "recipe": {**AUTO["recipe"], **table["recipe"]}})
    assert again == run
    best = tl.layouts(run, keep=1).simplest
    assert best is not None
    assert load(AUTO, best.settings) == run


def test_operators_that_a_layout_keeps_read_back() -> None:
    import tomllib

    from trainledger.forecast.plan.layouts.result import as_toml

    keeping = {"kind": "selective", "every": 1, "keep": ["matmuls", "attention"]}
    kept = {**AUTO["recipe"], "micro_batch": 1, "activation_checkpointing": keeping}
    run = load({**AUTO, "recipe": kept, "layout": {"shard": AUTO["cluster"]["count"]}})
    table = tomllib.loads(as_toml(run))
    assert load({**AUTO, "layout": table["layout"], "recipe": {**AUTO["recipe"], **table["recipe"]}}) == run


def test_the_command_fits_a_terminal_and_tells_programs_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layouts", "gpt2", "--device", "h100-sxm", "--count", "8", "--keep", "3"]
    words += ["--set", "recipe.global_batch=32"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert all(len(each) <= 80 for each in shown.splitlines())
    assert main([*words, "--full"]) == 0
    full = capsys.readouterr().out
    assert "[layout]" in full
    assert "why not" in full
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["ranked"]) == 3
    assert answer["searched"] >= answer["allowed"] >= answer["fitting"] >= answer["accounted"]
    assert main([*words, "--fix", "tensr=2"]) == 2
    assert "nearest that works: tensor" in capsys.readouterr().err
    assert main([*words, "--fix", "tensor=2", "--limit", "soon"]) == 2


def test_a_plan_prints_the_layout_that_it_found(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'layout = "auto"\n[model]\npreset = "gpt2"\n[recipe]\nseq_len = 1024\nglobal_batch = 16\nsteps = 10\n'
        '[cluster]\ndevice = "h100-sxm"\ncount = 4\n'
    )
    assert main(["plan", str(file), "--full"]) == 0
    shown = capsys.readouterr().out
    assert "The layout that was found, to paste into a run file\n[layout]" in shown
    assert kernels_of(load(file)) == "sm90"


def test_a_model_that_no_layout_takes_is_refused_with_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layouts", "deepseek-v3", "--device", "h100-sxm", "--count", "65536", "--set", "recipe.global_batch=512"]
    assert main(words) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "No layout over 65,536 x NVIDIA H100 SXM 80GB is allowed" in out
    assert "--set model.n_mtp_layers=0" in out
    assert "must divide the 1 to 128 key-value heads" in out


def test_lists_to_paste_fit_a_terminal_and_read_back() -> None:
    toml = "pipeline = 2\nstage_layers = [" + ", ".join(["11"] * 60) + "]"
    assert max(len(line) for line in pasted(toml).splitlines()) <= 80
    assert tomllib.loads(pasted(toml)) == tomllib.loads(toml)


def test_devices_whose_network_is_not_known_are_spread_within_a_node() -> None:
    found = tl.layouts(run_for(4, SMALL), device="l4", keep=1)
    assert found.best is not None
    assert found.best.seconds == pytest.approx(tl.predict(found.best.run).step_seconds)
    with pytest.raises(InvalidInput, match="16 devices are more than the 8 of a node; name a link"):
        tl.layouts(run_for(16, SMALL), device="l4")
    named = load_with_network(run_for(16, SMALL))
    assert tl.layouts(named, device="l4", keep=1).best is not None


def load_with_network(run: Run) -> Run:
    return replace(run, cluster=replace(run.cluster, network="ethernet-100"))


def test_a_format_without_a_rate_is_refused_with_a_sentence() -> None:
    with pytest.raises(InvalidInput, match="T4 has no peak for bf16 on record"):
        tl.layouts(run_for(4, SMALL, precision="bf16-sharded"), device="t4")
