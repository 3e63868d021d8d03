"""Why no layout is found: what is named as nearest, against all layouts of every size in between."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from test_layout_search import EXPERTS, SMALL, everything, run_for

import trainledger as tl
from thinned import thinned
from trainledger.answers.layout import why_no_layout
from trainledger.cli import main
from trainledger.forecast.plan.layouts.diagnostics import diagnose
from trainledger.forecast.plan.layouts.grid import divisors, grid_of, whole
from trainledger.forecast.plan.layouts.search import NOT_ACCOUNTED, SLOWER
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

pytestmark = pytest.mark.sweep


def allowed(run: Run, devices: int, fixed: dict[str, Any]) -> bool:
    """Whether any layout of the grid breaks no rule, each asked by itself."""
    run = replace(whole(run), cluster=replace(run.cluster, count=devices))
    return any(not list(run_problems(each)) for each in everything(grid_of(run, devices, fixed)))


@pytest.mark.long
def test_a_search_without_time_ranks_one_and_does_not_say_that_others_are_slower() -> None:
    found = tl.layouts(run_for(8, SMALL), limit_seconds=0)
    assert found.best is not None
    assert not found.certain
    assert {each.reason for each in found.rejected} & {SLOWER, NOT_ACCOUNTED} == {NOT_ACCOUNTED}
    none = replace(found, ranked=(), simplest=None, pareto=())
    assert f"No layout that fits was found before the time limit; {found.accounted} account" in str(none)
    problem = why_no_layout(none, {})
    assert "a longer time limit looks at more" in problem.rule
    assert problem.nearest is None


def with_batch(run: Run, batch: int) -> Run:
    return replace(run, recipe=replace(run.recipe, global_batch=batch))


def why(run: Run, fixed: dict[str, Any]) -> Problem:
    found = tl.layouts(run, fixed=fixed)
    assert found.best is None
    return why_no_layout(found, fixed)


@pytest.mark.agreement
@pytest.mark.parametrize(
    ("devices", "model", "fixed"),
    [
        (7, SMALL, {}), (11, SMALL, {}), (14, {**SMALL, "n_layers": 3}, {}), (13, EXPERTS, {}),
        (14, SMALL, {"tensor": 2}), (7, SMALL, {"micro_batch": 2}), (11, SMALL, {"shard": 2}),
        (7, {**SMALL, "n_mtp_layers": 1}, {}), (14, SMALL, {"sequence_parallel": True}),
        (11, SMALL, {"shard": 2, "replicate": 1}), (13, SMALL, {"context": 2, "context_kind": "all-to-all"}),
    ],
)  # fmt: skip
def test_the_nearest_batch_and_devices_are_those_of_all_sizes_between(
    devices: int, model: dict[str, Any], fixed: dict[str, Any]
) -> None:
    run = run_for(devices, model)
    batch = run.recipe.global_batch
    assert not allowed(run, devices, fixed)
    batches = sorted(range(1, 3 * devices), key=lambda each: (abs(each - batch), each))
    nearest = [f"recipe.global_batch={each}" for each in batches if allowed(with_batch(run, each), devices, fixed)][:1]
    fewer = (each for each in range(devices - 1, 0, -1) if allowed(run, each, fixed))
    more = (each for each in range(devices + 1, 3 * devices) if allowed(run, each, fixed))
    nearest += [f"cluster.count={each}" for some in (fewer, more) for each in [next(some, None)] if each is not None]
    answer = str(why(run, fixed).nearest)
    assert answer.replace(" or ", ", ").split(", ")[: len(nearest)] == nearest


@pytest.mark.parametrize(
    ("devices", "fixed", "name"),
    [
        (8, {"tensor": 3}, "tensor"), (4, {"pipeline": 3, "tensor": 1}, "pipeline"),
        (4, {"micro_batch": 3}, "micro_batch"), (6, {"shard": 4}, "shard"),
        (8, {"tensor": 8, "sequence_parallel": True, "context": 1, "pipeline": 1}, "context"),
    ],
)  # fmt: skip
def test_a_fixed_value_that_is_in_the_way_is_named_with_the_nearest_to_it(
    devices: int, fixed: dict[str, Any], name: str
) -> None:
    run = run_for(
        devices, {**SMALL, "n_layers": 5, "attention.n_kv_heads": 8}, seq_len=6, global_batch=12 if devices == 6 else 4
    )
    sizes = divisors(run.recipe.global_batch if name == "micro_batch" else devices)
    near = sorted(sizes, key=lambda each: (abs(each - fixed[name]), each))
    others = [each for each in near if allowed(run, devices, {**fixed, name: each})]
    section = "recipe" if name == "micro_batch" else "layout"
    found = why(run, fixed)
    assert f"{section}.{name}={others[0]}" in str(found.nearest) if others else name not in str(found.nearest)


def test_data_ranks_that_the_batch_is_no_multiple_of_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama-3-8b", "--device", "h100-sxm", "--count", "1000", "--set", "recipe.global_batch=512"]
    rule = (
        "found no layout that fits 1,000 x h100-sxm: recipe.global_batch = 512 must be a multiple of the data ranks, "
        "which are 5, 10, 20 ... given the tensor, context and pipeline ranks that the model allows"
    )
    nearest = "; nearest that works: recipe.global_batch=510, cluster.count=992 or cluster.count=1024"
    assert main(["plan", *words, "--set", "layout=auto"]) == 2
    assert (
        f"layout = 'auto': {rule} (trainledger layouts --full shows the search){nearest}\n" in capsys.readouterr().err
    )
    assert main(["layouts", *words]) == 2
    out, err = capsys.readouterr()
    assert "why not" in out
    assert err.endswith(f"layout: {rule}{nearest}\n")
    assert main(["layouts", *words, "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert (answer["allowed"], answer["error"][0]["field"]) == (0, "layout")
    assert answer["error"][0]["sentence"] == f"layout: {rule}{nearest}"


@pytest.mark.slow
def test_memory_that_is_too_small_names_devices_that_have_enough() -> None:
    model = {"preset": "llama-3-70b"}
    run = run_for(2, model, seq_len=1024, global_batch=32)
    found = why(run, {"context": 1})
    assert found.nearest == "cluster.count=16"
    for count, fits in ((4, False), (8, False), (16, True)):
        there = tl.layouts(run, devices=count, fixed={"context": 1}, keep=1, limit_seconds=3)
        assert (there.best is not None) is fits


def test_what_keeps_the_layouts_out_that_come_nearest_is_said() -> None:
    """Where states fit and activations do not, more of the layouts may fail by their states."""
    run = run_for(8, {"preset": "llama-3-8b"}, seq_len=8192, global_batch=64)
    fixed = {"micro_batch": 8, "tensor": 1, "context": 1, "pipeline": 1, "activation_checkpointing": "none"}
    found = why(run, fixed)
    assert "too large: activations and gathered parameters, on top of the states" in found.rule


def test_nothing_fixed_is_said_as_it_is_written() -> None:
    run = run_for(8, SMALL)
    with pytest.raises(InvalidInput, match=r"fits 8 x h100-sxm with tensor = 3; nearest that works: layout\.tensor=2$"):
        raise InvalidInput([why(run, {"tensor": 3})])


def test_an_allowed_layout_leaves_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layouts", "gpt2", "--device", "h100-sxm", "--count", "4", "--keep", "1"]
    assert main([*words, "--fix", "tensor=1"]) == 0
    capsys.readouterr()
    assert main([*words, "--fix", "tensor=3"]) == 2
    out, err = capsys.readouterr()
    assert "No layout over 4 x NVIDIA H100 SXM 80GB is allowed." in out
    assert "the reasons are below" not in out  # there are none: the grid has no such layout
    assert err.endswith("layout: found no layout that fits 4 x h100-sxm with tensor = 3; "
                        "nearest that works: layout.tensor=1\n")  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "least", "enough", "named"),
    thinned([(14, 15, 15, "16"), (64, 70, 90, "96"), (80, 0, 97, "128"), (1, 0, 2, "2"), (5, 0, 10**9, None)], every=3),
)
@pytest.mark.long
def test_the_nearest_count_is_the_first_power_of_two_or_three_times_one_that_suffices(
    devices: int, least: int, enough: int, named: str | None
) -> None:
    found = replace(tl.layouts(run_for(8, SMALL), limit_seconds=0), devices=devices, allowed=1)
    asked: list[int] = []

    def fits(count: int) -> bool:
        asked.append(count)
        return count >= enough

    nearest = diagnose(found, {}, fits, least).nearest
    assert nearest == (() if named is None else (f"cluster.count={named}",))
    assert all(each > devices and each >= least for each in asked)
    assert len(asked) == len(set(asked)) <= 8


@pytest.mark.agreement
def test_more_devices_get_the_batch_that_is_assumed_for_them() -> None:
    with pytest.raises(InvalidInput) as caught:
        tl.load("llama-3-70b", {"cluster.device": "h100-sxm", "cluster.count": 14})
    nearest = caught.value.problems[0].nearest
    assert nearest == "cluster.count=16"
    assert tl.plan("llama-3-70b", {"cluster.device": "h100-sxm", "cluster.count": 16}).forecast.fits


@pytest.mark.long
def test_layouts_that_are_not_accounted_for_are_no_layouts_that_do_not_fit() -> None:
    problem = tl.layouts("deepseek-v3", device="t4", devices=8).problem
    assert problem is not None
    assert "102,600 of 120,690 layouts are not accounted for with multi-token prediction" in problem.rule
    found = tl.layouts("deepseek-v3", {"model.n_mtp_layers": 0}, device="t4", devices=8).problem
    assert found is not None
    assert "multi-token" not in found.rule
