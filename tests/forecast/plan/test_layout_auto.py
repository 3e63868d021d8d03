"""A layout that is to be found: what somebody wrote beside it is kept, and a default batch can be sharded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

import pytest
from test_layout_search import EXPERTS as EXPERTS_OF_4

import trainledger as tl
from trainledger.answers.layouts import page
from trainledger.answers.load import load
from trainledger.cli import main
from trainledger.forecast.plan.layouts.grid import divisors, fixed_by
from trainledger.forecast.plan.layouts.result import Layouts
from trainledger.spec import runfile
from trainledger.spec.parts import kinds_of
from trainledger.spec.problem import InvalidInput
from trainledger.spec.rules.run import run_problems
from trainledger.spec.setting import quantity_of

pytestmark = pytest.mark.sweep

GPT2: dict[str, Any] = {
    "model": {"preset": "gpt2"}, "recipe": {"seq_len": 1024, "global_batch": 16, "steps": 1},
    "cluster": {"device": "h100-sxm", "count": 4}, "layout": {"auto": True},
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "model": {"preset": "deepseek-v2-lite"},
    "recipe": {
        "seq_len": 4096,
        "global_batch": 64,
        "steps": 1,
        "precision": "bf16-sharded",
        "micro_batch": 1,
        "attention": "efficient",
    },  # slow enough to hide its sends behind
    "cluster": {"device": "h100-sxm", "count": 16},
    "layout": {"auto": True, "pipeline": 1, "context": 1, "tensor": 1, "expert": 16},
}


@pytest.mark.parametrize(
    ("table", "name", "usual"),
    [
        (GPT2, "shard", 1), (GPT2, "zero", 3), (EXPERTS, "overlap", ("gradients",)),
        (EXPERTS, "expert_send", "copies"),
    ],
)  # fmt: skip
@pytest.mark.long
def test_what_is_written_with_auto_is_kept_where_it_is_the_default_too(
    table: dict[str, Any], name: str, usual: Any, tmp_path: Path
) -> None:
    assert getattr(load(table).layout, name) != usual
    layout = {**table["layout"], name: usual}
    run = load({**table, "layout": layout})
    assert getattr(run.layout, name) == usual
    path = tmp_path / "run.toml"
    path.write_text(
        "".join(
            f"[{section}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in fields.items())
            for section, fields in {**table, "layout": layout}.items()
        )
    )
    assert load(path) == run == load(table, {f"layout.{name}": usual})
    assert load(table, iter([f"layout.{name}={_toml(usual)}"])) == run


def _toml(value: object) -> str:
    return (
        str(list(value) if isinstance(value, tuple) else value).lower() if not isinstance(value, str) else repr(value)
    )


def test_the_command_line_keeps_what_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt2", "--device", "h100-sxm", "--count", "4", "--set", "layout=auto"]
    words += ["--set", "recipe.global_batch=16", "--full"]
    assert main(words) == 0
    assert "[layout]\nshard = 4\n" in capsys.readouterr().out
    assert main([*words, "--set", "layout.shard=1"]) == 0
    found = capsys.readouterr().out.partition("[layout]")[2].partition("[recipe]")[0]
    assert "replicate = " in found
    assert "\nshard" not in found


def test_recomputation_that_is_written_is_kept_and_named_where_nothing_fits() -> None:
    table = {**GPT2, "model": {"preset": "llama-3-8b"}, "recipe": {**GPT2["recipe"], "seq_len": 8192,
             "precision": "bf16-sharded"}, "cluster": {"device": "a100-sxm-40gb", "count": 16}}  # fmt: skip
    given = {"layout.context": 1, "layout.tensor": 1, "layout.pipeline": 1}
    assert load(table, given).recipe.activation_checkpointing.kind != "none"
    with pytest.raises(InvalidInput, match="activation_checkpointing = 'none': too large: activations"):
        load(table, {**given, "recipe.activation_checkpointing": "none"})


def test_a_complete_run_says_no_more_than_what_is_not_as_by_default() -> None:
    run = load(GPT2, search=False)
    assert fixed_by(run, runfile.written(vars(run))) == {}
    alone = load({**GPT2, "cluster": {"device": "h100-sxm"}, "layout": {}})
    assert fixed_by(run, runfile.written(runfile.resolved(alone), ["layout=auto"])) == {}
    assert fixed_by(run, runfile.written(runfile.resolved(alone), ["layout=auto", "layout.tensor=1"])) == {"tensor": 1}
    assert load(replace(run), {"layout.shard": 1}).layout.replicate == 4


def test_none_is_no_choice_and_an_empty_value_takes_it_out() -> None:
    run = load(GPT2, search=False)
    written = runfile.written(GPT2, ["recipe.micro_batch=none", "layout.shard=1", "layout.shard="])
    assert "recipe.micro_batch" in written
    assert fixed_by(run, written) == {}


def test_what_the_search_cannot_keep_is_refused() -> None:
    for given in ({"layout.stage_layers": [6, 6]}, {"layout.gather": "tensor"}):
        (name,) = given
        with pytest.raises(InvalidInput, match=f"{name} = .* cannot be combined with auto: leave it out"):
            load(GPT2, given)


@pytest.mark.parametrize("count", [24, 50, 97, 100, 257, 511])
def test_a_batch_that_nobody_gave_can_be_spread_over_the_devices(count: int) -> None:
    run = load("llama-3-8b", {"cluster.device": "h100-sxm", "cluster.count": count, "layout": "auto"}, search=False)
    round_sizes = [each << power for each in (1, 2, 3, 4, 5, 6, 7) for power in range(8)]
    assert run.recipe.global_batch == count * min(round_sizes, key=lambda each: abs(each - 512 / count))
    given = {"cluster.device": "h100-sxm", "cluster.count": count, "layout": "auto", "recipe.micro_batch": 3}
    by_three = load("llama-3-8b", given, search=False).recipe.global_batch
    assert by_three % 3 == 0
    assert by_three // 3 in (each * count for each in round_sizes)


def test_powers_of_two_keep_the_batch_of_a_power_of_two() -> None:
    for power in range(15):
        given = {"cluster.device": "h100-sxm", "cluster.count": 2**power, "layout": "auto"}
        of_8b, of_gpt2 = (load(name, given, search=False).recipe.global_batch for name in ("llama-3-8b", "gpt2"))
        assert of_8b == min(2048, max(512, 2**power))  # 4M tokens, then one sequence for each device up to 16M
        assert of_gpt2 == min(2**14, max(256, 2**power))


@pytest.mark.parametrize("count", [2500, 3000, 5000, 9728])
def test_more_devices_than_sequences_share_them_in_powers_of_two(count: int) -> None:
    given = {"cluster.device": "h100-sxm", "cluster.count": count, "layout": "auto"}
    batch = load("llama-3-8b", given, search=False).recipe.global_batch
    assert 2048 / 2**0.5 <= batch <= 2048 * 2**0.5
    ranks = max(each for each in divisors(count) if batch % each == 0)
    assert (count // ranks).bit_count() == 1  # what is left for tensor ranks and stages


def test_a_count_that_is_no_power_of_two_costs_about_as_much_for_each_device(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rate(count: int) -> float:
        with_layout = {"cluster.device": "h100-sxm", "cluster.count": count, "layout": "auto"}
        found = tl.layouts(
            load("gpt2", with_layout, search=False), fixed={"tensor": 1, "context": 1, "pipeline": 1}, keep=1
        )
        assert found.best is not None
        return found.best.run.recipe.tokens_per_step / found.best.seconds / count

    assert rate(6) == pytest.approx(rate(8), rel=0.05)
    words = ["layouts", "gpt2", "--device", "h100-sxm", "--count", "6", "--keep", "1", "--fix", "pipeline=1"]
    assert main([*words, "--fix", "tensor=1", "--fix", "context=1"]) == 0
    assert "recipe.global_batch=240 (245.8K tokens in a step)" in " ".join(capsys.readouterr().err.split())


@pytest.mark.agreement
def test_the_count_that_is_proposed_is_not_just_a_double() -> None:
    table = {"model": {"preset": "llama-13b"}, "cluster": {"device": "h100-sxm", "count": 2}, "layout": {"auto": True},
             "recipe": {"seq_len": 2048, "global_batch": 1536, "steps": 10, "precision": "bf16-sharded"}}  # fmt: skip
    with pytest.raises(InvalidInput, match=r"nearest that works: cluster\.count=3$"):
        load(table)
    assert load(table, {"cluster.count": 3}).layout.devices == 3


@pytest.fixture(scope="module")
def found() -> Layouts:
    return tl.layouts({**GPT2, "recipe": {**GPT2["recipe"], "global_batch": 4, "seq_len": 64}}, keep=1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["layout.shard=4", "layout.reshard_after_forward=false"], ["layout.shard=4"]),
        (["layout.shard=4", "recipe.micro_batch=2"], ["layout.shard=4", "recipe.micro_batch=4"]),
        (["layout.shard=4", "recipe.activation_checkpointing=full"], ["layout.shard=4"]),
        (["layout.context=4", "layout.context_kind=all-to-all"], ["layout.context=4"]),
        (["layout.shard=4"], ["layout.replicate=4"]),
    ],
)
def test_no_two_layouts_of_a_verdict_have_one_name(found: Layouts, first: list[str], second: list[str]) -> None:
    assert found.best is not None
    best, simplest = (
        replace(found.best, seconds=1.0 + at, run=load({**GPT2, "layout": {}}, ["recipe.micro_batch=1", *words]))
        for at, words in enumerate((first, second))
    )
    verdict = page(replace(found, ranked=(best,), simplest=simplest)).verdict
    names = re.fullmatch(r"Quickest: (.+), 1 s a step\. About as quick and simpler: (.+), 2 s\.", verdict)
    assert names is not None
    assert names[1] != names[2]
    assert ("(" in verdict) == (first[0] == second[0])


SPREAD: dict[str, Any] = {
    "model": EXPERTS_OF_4,
    "recipe": {"seq_len": 32, "global_batch": 4, "steps": 1, "precision": "bf16-sharded", "attention": "flash"},
    "cluster": {"device": "h100-sxm", "count": 4},
}
FIELDS = {f"{section}.{field.name}": field for section, part in runfile.SECTIONS.items()
          for field in fields(part) if section in ("layout", "recipe") and field.name != "auto"}  # fmt: skip
BRIEF: dict[str, Any] = {"micro_batch": 1, "activation_checkpointing": "none"}
ALONE = {**BRIEF, "context": 1, "pipeline": 1, "tensor": 1}
VALUES: dict[str, list[Any]] = {
    "flag": [True, False], "count": [1, 2], "counts": [[2, 2]], "number": [0.5, 2.0], "text": ["x"],
    "texts": [["experts"], ["gradients", "parameters"], "none"],
}  # fmt: skip


def settings(path: str, field: Field[Any]) -> Iterator[tuple[str, Any]]:
    """A field with each of its choices or some values; of a part of one kind the fields in it."""
    kinds = kinds_of(field) or {}
    if list(kinds) == [""]:
        for inner in fields(kinds[""]):
            yield from settings(f"{path}.{inner.name}", inner)
    else:
        for value in field.metadata["choices"] or VALUES.get(quantity_of(field), ["2048", 2, 0.5]):
            yield path, value


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_that_is_set_is_one_of_every_layout_or_refused(path: str) -> None:
    section, _, name = path.partition(".")
    for where, value in settings(path, FIELDS[path]):
        try:
            asked = load(SPREAD, {where: value, "layout.auto": True}, search=False)
            few = ALONE if section == "recipe" else BRIEF
            few = {axis: size for axis, size in few.items() if axis != name}
            found = tl.layouts(SPREAD, {where: value}, fixed=few, keep=2, limit_seconds=0.2)
        except InvalidInput:
            continue
        chosen = getattr(getattr(asked, section), name)
        assert found.ranked or found.problem
        for run in (layout.run for layout in found.ranked):
            changed = replace(run, **{section: replace(getattr(run, section), **{name: chosen})})
            same = run == changed or (run.layout.reshards, name) == (chosen, "reshard_after_forward")
            assert same or list(run_problems(changed)), (where, value, run.layout)


def test_what_sends_to_experts_is_fixed_by_set_as_by_fix() -> None:
    for value in ("copies", "nodes"):
        found = tl.layouts(SPREAD, {"layout.expert_send": value}, keep=4, limit_seconds=0.5)
        sends = {(layout.run.layout.expert_send, layout.run.layout.expert > 1) for layout in found.ranked}
        assert sends == {("nodes", True)} if value == "nodes" else "nodes" not in dict(sends)
    for field, value in (("expert_tensor", 1), ("gather", "tensor"), ("stage_layers", [2, 2])):
        with pytest.raises(InvalidInput, match=f"layout.{field} = .* is not searched for"):
            tl.layouts(SPREAD, {f"layout.{field}": value})
    no_megatron = tl.layouts(SPREAD, {"layout.expert_send": "all"})
    assert "megatron-core" in str(no_megatron.problem)


OF_A_NODE = {"qwen2.5-7b": {"method": "full", "recipe.seq_len": 1024}, "llama-3.1-8b": {}, "gpt2": {"method": "lora"}}


@pytest.mark.parametrize("model", OF_A_NODE)
@pytest.mark.long
def test_the_devices_of_one_node_share_data_and_states_unless_somebody_asks(model: str) -> None:
    sets = OF_A_NODE[model]
    run = load(model, sets, device="h100-sxm", count=8)
    assert (run.layout.tensor, run.layout.pipeline, run.layout.context) == (1, 1, 1)
    forecast, asked = tl.predict(run), tl.predict(load(model, {**sets, "layout": "auto"}, device="h100-sxm", count=8))
    assert forecast.fits
    assert forecast.as_likely_as(0.8)
    assert forecast.step_seconds is not None
    assert asked.step_seconds is not None
    assert asked.step_seconds <= 1.03 * forecast.step_seconds
    assert "recipe.micro_batch" not in run.origin.assumed
    for changes in ({"recipe.micro_batch": 2 * run.device_batch}, {"recipe.activation_checkpointing": "none"}):
        other = (
            tl.predict(load(run, changes)) if run.grad_accum > 1 or "recipe.micro_batch" not in changes else forecast
        )
        quicker = (other.step_seconds or 0) < forecast.step_seconds / 1.03
        assert not (quicker and other.fits and other.as_likely_as(0.8)), changes


def test_stages_are_for_what_does_not_fit_without() -> None:
    run = load("llama-3.1-8b", {"recipe.global_batch": 4}, device="h100-sxm", count=8)
    assert run.layout.tensor * run.layout.pipeline * run.layout.context > 1
    assert load("llama-3.1-8b", {"layout.tensor": 2}, device="h100-sxm", count=8).layout.tensor == 2
