"""What is assumed of a model that is named alone, beside what is given."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import trainledger as tl
from trainledger.answers.breaks import breaks
from trainledger.answers.defaults import (
    FEWEST_STEPS,
    FIT,
    METHODS,
    PLAN,
    SERVE,
    TUNED_TOKENS,
    default_batch,
    how_else,
    reservations,
    run_of_model,
    with_length,
)
from trainledger.answers.load import load, resolve
from trainledger.answers.pages.padded_rows import lines_of
from trainledger.spec.problem import InvalidInput

H100 = {"cluster.device": "h100-sxm"}


@pytest.mark.parametrize(
    ("layout", "searched"),
    [
        ({}, True), ({"layout.tensor": 8}, True), ({"layout.tensor": 2, "layout.pipeline": 4}, True),
        ({"layout.overlap": ["gradients"]}, True), ({"layout.shard": 64}, False),
        ({"layout.tensor": 8, "layout.shard": 8}, False), ({"layout.tensor": 4, "layout.auto": False}, False),
        ({"layout.tensor": 4, "layout.auto": True, "layout.shard": 16}, True),
    ],
)  # fmt: skip
def test_what_is_left_of_the_devices_is_searched_for(layout: dict[str, Any], searched: bool) -> None:
    given = {**H100, "cluster.count": 64, **layout}
    if not searched and "layout.auto" in layout:
        with pytest.raises(InvalidInput, match="the layout \\(tensor 4\\) takes 4; layout=auto finds the other axes"):
            run_of_model("llama-3-70b", given)
        return
    run = run_of_model("llama-3-70b", given)
    assert run.layout.auto is searched
    assert (run.recipe.seq_len, run.recipe.global_batch, run.recipe.precision.kind) == (8192, 512, "bf16-sharded")


def test_a_layout_that_is_given_gets_the_recipe_of_one_that_is_searched_for() -> None:
    given = {**H100, "cluster.count": 16}
    found = load("gpt2", given)
    axes = {f"layout.{name}": getattr(found.layout, name) for name in ("replicate", "shard", "reshard_after_forward")}
    again = load("gpt2", {**given, **axes, "recipe.micro_batch": found.recipe.micro_batch})
    assert again.recipe == found.recipe
    assert again.layout == found.layout


@pytest.mark.parametrize(
    ("count", "layout"),
    [(768, {"layout.shard": 768}), (3000, {"layout.shard": 750, "layout.pipeline": 4}), (2048, {"layout.shard": 2048})],
)
def test_every_data_rank_and_every_stage_has_a_sequence(count: int, layout: dict[str, int]) -> None:
    run = run_of_model("llama-3-8b", {**H100, "cluster.count": count, **layout})
    assert run.recipe.global_batch % (run.layout.data_ranks * run.layout.pipeline) == 0
    assert default_batch(run) == run.recipe.global_batch


@pytest.mark.parametrize(
    ("device", "count", "more", "kind"),
    [
        ("h100-sxm", 1, {}, "bf16-mixed"), ("h100-sxm", 8, {}, "bf16-sharded"),
        ("h100-sxm", 1, {"recipe.lora.rank": 8}, "bf16"), ("v100-sxm-32gb", 1, {}, "fp16-mixed"),
        ("v100-sxm-32gb", 8, {}, "fp16-mixed"), ("t4", 1, {"recipe.lora.rank": 8}, "fp16-mixed"),
        ("h100-sxm", 8, {"recipe.framework": "megatron-core"}, "bf16"),
    ],
)  # fmt: skip
def test_the_precision_is_one_that_the_device_has(device: str, count: int, more: dict[str, Any], kind: str) -> None:
    given = {"cluster.device": device, "cluster.count": count, **more}
    for purpose in ("plan", FIT):
        precision = run_of_model("llama-3.2-1b", given, purpose).recipe.precision
        assert precision.kind == kind
        assert precision.master_weights is ("recipe.framework" in more)  # Megatron-LM's, where nothing is stated
        assert (precision.gradient_dtype == "fp32") is precision.master_weights
    precision = run_of_model("llama-3.2-1b", {**given, "recipe.precision": "fp32"}).recipe.precision
    assert (precision.kind, precision.master_weights) == ("fp32", False)
    assert run_of_model("llama-3.2-1b", {"cluster.device": device}, SERVE).layout.alone


def test_a_method_is_a_recipe_that_is_said_and_that_overrides_change() -> None:
    for given in (["method=qlora", "recipe.lora.rank=8"], {"method": "qlora", "recipe.lora.rank": 8}):
        run = run_of_model("llama-3.2-1b", given)
        assert (run.recipe.lora.rank, run.recipe.lora.base_format, run.recipe.steps) == (8, "nf4", 1)
        assert {"recipe.lora.base_format", "recipe.seq_len", "recipe.global_batch"} <= set(run.origin.assumed)
        assert "recipe.lora.rank" not in run.origin.assumed
    spread = run_of_model("gpt2", {"method": "full", "cluster.count": 6, **H100})
    assert (spread.recipe.seq_len, spread.recipe.global_batch, spread.recipe.lora) == (1024, 18, None)
    by_eight = run_of_model("gpt2", {"method": "full", "cluster.count": 6, "recipe.micro_batch": 8, **H100})
    assert by_eight.recipe.global_batch == 48
    with pytest.raises(InvalidInput, match=r"must be one of full, lora, qlora, dpo.*; nearest that works: lora"):
        load("gpt2", method="loar")
    with pytest.raises(InvalidInput, match=r"'full': trains all weights, and recipe.lora.dora is .* works: lora"):
        load("gpt2", {"recipe.lora.dora": True}, method="full")
    without = run_of_model("gpt2", ["method=lora", "recipe.lora=none"])
    assert without.recipe.lora is None
    assert not any("lora" in field for field in without.origin.assumed)
    with pytest.raises(InvalidInput, match="is of a model that is named alone"):
        load(run, method="lora")


@pytest.mark.parametrize("adapters", [{}, {"recipe.lora.rank": 16, "recipe.lora.base_format": "nf4"}])
@pytest.mark.parametrize("purpose", [PLAN, SERVE])
def test_the_batch_of_one_device_holds_the_micro_batch_that_is_given(adapters: dict[str, Any], purpose: str) -> None:
    run = run_of_model("llama-2-70b", {"recipe.micro_batch": 4, **H100, **adapters}, purpose)
    assert (run.recipe.micro_batch, run.recipe.global_batch) == (4, 4)


@pytest.mark.parametrize("method", METHODS)
def test_fine_tuning_is_not_trained_on_twenty_tokens_for_each_parameter(method: str) -> None:
    run = with_length(run_of_model("qwen2.5-7b", {**H100, **tuned_by(method)}))
    assert (run.recipe.steps, run.recipe.tokens) == (1, None)
    assert breaks("qwen2.5-7b", {**H100, **tuned_by(method)}, along="dataset").run.recipe.tokens is None
    given = with_length(run_of_model("qwen2.5-7b", {**H100, **tuned_by(method), "recipe.tokens": "100M"}))
    assert given.recipe.tokens == 10**8


def tuned_by(method: str) -> dict[str, Any]:
    """The method as an override, with a teacher where it learns from one; nothing without a method."""
    teacher = {"teacher.preset": "qwen2.5-14b"} if method == "distillation" else {}
    return {"method": method, **teacher} if method else {}


@pytest.mark.parametrize("method", ["", *METHODS])
@pytest.mark.parametrize("count", [1, 8])
def test_what_a_method_assumes_and_what_is_assumed_without_one_name_each_other(method: str, count: int) -> None:
    given = {**H100, "cluster.count": count, "layout.auto": False, "layout.shard": count}
    said = how_else(run_of_model("qwen2.5-7b", given | tuned_by(method)))
    assert f"--method {method}" in said
    assert ("without it" in said) == bool(method)
    assert not how_else(run_of_model("qwen2.5-7b", {**given, "recipe.steps": 10, "recipe.global_batch": 16}))


def test_adapters_are_not_trained_on_twenty_tokens_for_each_parameter() -> None:
    assert with_length(run_of_model("gpt2", H100)).recipe.tokens == 20 * 124_439_808
    assert with_length(run_of_model("gpt2", {**H100, "recipe.lora.rank": 8})).recipe.steps == 1


@pytest.mark.parametrize("tokens", ["300K", "6M", "100M", "500M", "2B", "15T"])
@pytest.mark.parametrize("count", [1, 8, 24, 64])
def test_a_small_budget_of_tokens_is_no_single_step(tokens: str, count: int) -> None:
    run = run_of_model("llama-3.1-8b", [f"recipe.tokens={tokens}", "cluster.device=h100-sxm", f"cluster.count={count}"])
    recipe = run.recipe
    least = count * recipe.seq_len  # tokens of a step in which each device has a sequence
    assert recipe.tokens_per_step == least or recipe.total_steps >= FEWEST_STEPS / 2
    assert count == 1 or recipe.tokens_per_step >= least
    assert recipe.tokens_per_step <= 1.2 * 2**22
    priced = recipe.total_steps * recipe.tokens_per_step
    assert priced + recipe.tokens_beyond_steps == pytest.approx(recipe.tokens, rel=1e-3)


def test_adapters_on_several_devices_have_a_step_as_people_tune() -> None:
    run = resolve("gpt2", ["cluster.device=h100-sxm", "cluster.count=4", "recipe.lora.rank=8"])
    assert run.recipe.tokens_per_step == TUNED_TOKENS


@pytest.mark.parametrize("device", ["l4", "rtx-4090", "a100-pcie-40gb", "l40s"])
def test_what_joins_devices_of_an_unknown_network_is_proposed(device: str) -> None:
    given = [f"cluster.device={device}", "cluster.count=16", "recipe.seq_len=64", "recipe.global_batch=16"]
    given += ["recipe.micro_batch=1", "layout.context=1", "layout.pipeline=1", "layout.tensor=1"]
    with pytest.raises(InvalidInput) as refused:
        load("gpt2", given)
    (problem,) = refused.value.problems
    (of_a_node,) = re.findall(r"cluster.devices_per_node = \d+", problem.rule)
    for proposal in (f"{problem.field}={problem.nearest}", of_a_node.replace(" ", "")):
        assert resolve("gpt2", [*given, proposal]).layout.devices == 16


@pytest.mark.parametrize("ask", [tl.layouts, tl.fit, tl.breaks, tl.loop])
@pytest.mark.long
def test_questions_about_full_rows_say_so(ask: Callable[..., Any]) -> None:
    settings = {**H100, "cluster.count": 2, "method": "lora", "recipe.micro_batch": 2, "recipe.seq_len": 1024}
    lengths = {"data.lengths": [[128, 400], [900, 20], [5000, 3]]}
    more = {tl.breaks: {"along": ("sequence",)}, tl.fit: {"of": ("memory",)}}.get(ask, {})
    answer, full = (ask("qwen2.5-0.5b", {**settings, **given}, **more) for given in (lengths, {}))
    assert "rows are counted full" in reservations(answer.run)
    assert answer.run.data.lengths is None
    if ask is tl.loop:
        assert (answer.tokens_per_step, answer.step_seconds) == (full.tokens_per_step, full.step_seconds)
    (rows,) = (text for name, text in lines_of(tl.plan("qwen2.5-0.5b", {**settings, **lengths})) if name == "rows")
    assert rows.startswith("423 rows (3 cut at 1,024) of 171 tokens")
