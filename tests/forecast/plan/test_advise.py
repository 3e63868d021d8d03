"""What to change: each --set line gives exactly the promised figures, and nothing changes the result unsaid."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from planned_runs import ALONE, HERE, MESH, SHARDED, TOO_LARGE, Table, a_machine

import trainledger as tl
from drawn import Drawn, marks
from thinned import thinned
from trainledger.answers.advise import page
from trainledger.cli import main
from trainledger.forecast.plan.advise import Advice, Advised
from trainledger.forecast.plan.changes import EFFECTS, RESULT, SAME, Change, changes, made
from trainledger.report.chart import Band, Line
from trainledger.report.draw.chart import svg
from trainledger.report.table import commands
from trainledger.report.terminal import text
from trainledger.spec.calibration import write_calibration
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run_text import overrides, pasted_overrides

pytestmark = pytest.mark.sweep

# Fields that leave the mathematics of a run as it is.
_HARMLESS = {
    "recipe.activation_checkpointing", "recipe.activation_checkpointing.every",
    "recipe.activation_checkpointing.n_blocks", "recipe.micro_batch",
    "recipe.attention", "recipe.compile", "recipe.loss", "recipe.loss.chunks", "recipe.optimizer.implementation",
    "recipe.checkpoints.asynchronous", "recipe.checkpoints.every", "recipe.offload",
}  # fmt: skip
_SMALL_MESH: Table = {**MESH, "model": {"preset": "llama-3-8b", "n_layers": 8, "vocab_size": 128200}}
TABLES = {"alone": ALONE, "sharded": SHARDED, "too large": TOO_LARGE}


@pytest.fixture(scope="module", params=TABLES)
def case(request: pytest.FixtureRequest) -> tuple[Table, Advice]:
    table = TABLES[request.param]
    return table, tl.advise(tl.load(table))


@pytest.mark.long
def test_each_line_pasted_gives_the_promised_figures(case: tuple[Table, Advice]) -> None:
    table, advice = case
    assert advice.alone
    for each in advice.alone:
        _gives(table, each.sets, each)
    before = tl.load(table)
    for each in advice.together:
        _gives(table, overrides(advice.run, each.run), each)
        assert overrides(before, each.run) == each.sets
        before = each.run


def _gives(table: Table, sets: tuple[str, ...], promised: Advised) -> None:
    run = tl.load(table, list(sets))
    assert run == promised.run
    answer = tl.predict(run)
    assert answer.device_nbytes == promised.nbytes[1]
    assert answer.fits is promised.fits
    if promised.seconds[1] is not None:
        assert answer.total_seconds == promised.seconds[1]
    else:
        assert "not timed" in promised.cost


def test_what_changes_the_result_is_said(case: tuple[Table, Advice]) -> None:
    for each in (*case[1].alone, *case[1].together):
        fields = {one.partition("=")[0] for one in each.sets}
        harmless = all(one in _HARMLESS or one.startswith("layout.") for one in fields)
        assert harmless or each.effect == RESULT, each
        assert each.effect in EFFECTS


def test_the_best_comes_first(case: tuple[Table, Advice]) -> None:
    advice = case[1]
    if advice.goal == "time":
        assert all(each.fits is not False for each in advice.alone)
        gains = [each.faster for each in advice.alone]
        assert gains == sorted(gains, reverse=True)
        assert all(gain > 0 for gain in gains)
    else:
        fitting = [bool(each.fits) for each in advice.alone]
        assert fitting == sorted(fitting, reverse=True)
        assert all(each.smaller > 0 for each in advice.alone)


def test_together_every_step_starts_where_the_one_before_ended(case: tuple[Table, Advice]) -> None:
    advice = case[1]
    assert 1 <= len(advice.together) <= 3
    last = advice.forecast.device_nbytes
    for each in advice.together:
        assert each.nbytes[0] == last
        last = each.nbytes[1]
        assert each.effect != RESULT
    if advice.forecast.fits is False:
        assert advice.together[-1].fits


def test_what_does_not_fit_asks_for_memory_and_is_made_to_fit() -> None:
    advice = tl.advise(tl.load(TOO_LARGE))
    assert advice.forecast.fits is False
    assert advice.goal == "memory"
    assert advice.together[-1].fits
    assert not advice.together[0].fits or advice.alone[0].fits


def test_this_machine_is_asked_as_its_calibration_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.toml"
    write_calibration(a_machine(), path)
    monkeypatch.setenv("TRAINLEDGER_CALIBRATION", str(path))
    advice = tl.advise(tl.load(HERE))
    assert advice.goal == "time"
    assert advice.forecast.device == "a small machine"
    for each in advice.alone:
        _gives(HERE, each.sets, each)
    found = tl.breaks(tl.load(HERE), along=["sequence"])
    edge = next(each for each in found.along[0].breaks if each.limit == "device memory")
    assert edge.most == 2 * 10**9
    assert edge.before <= 2 * 10**9 < edge.after  # type: ignore[operator]
    compared = tl.compare(tl.load(HERE), tl.load(HERE, {"recipe.micro_batch": 8}))
    assert sum(each.difference for each in compared.times)


def test_without_a_known_machine_memory_alone_is_advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRAINLEDGER_CALIBRATION", raising=False)
    advice = tl.advise(tl.load(HERE))
    assert advice.goal == "memory"
    assert advice.alone[0].smaller > 0
    assert advice.alone[0].seconds == (None, None)


def test_a_goal_can_be_asked_for() -> None:
    advice = tl.advise(tl.load(ALONE), goal="memory", together=0)
    assert advice.goal == "memory"
    assert advice.together == ()
    saved = [each.smaller for each in advice.alone]
    assert saved == sorted(saved, reverse=True)
    with pytest.raises(InvalidInput) as caught:
        tl.advise(tl.load(ALONE), goal="tim")
    assert str(caught.value) == "goal = 'tim': must be one of time, memory; nearest that works: time"


def test_with_any_result_the_combination_is_at_least_as_fast() -> None:
    exact, free = (tl.advise(tl.load(ALONE), any_result=each) for each in (False, True))
    assert free.together[-1].seconds[1] < exact.together[-1].seconds[1]  # type: ignore[operator]
    assert any(each.effect == RESULT for each in free.together)


def test_a_micro_batch_that_changes_where_experts_drop_tokens_is_said() -> None:
    table: Table = {
        "model": {"preset": "mixtral-8x7b", "n_layers": 2},
        "recipe": {"seq_len": 1024, "global_batch": 8, "micro_batch": 2, "steps": 10, "expert_dispatch": "capacity"},
        "cluster": {"device": "h100-sxm"},
    }  # fmt: skip
    micro = [each for each in changes(tl.load(table)) if each.what.startswith("micro-batches")]
    assert micro
    assert {each.effect for each in micro} == {RESULT}


def test_a_mesh_is_moved_by_whole_factors_and_keeps_its_devices() -> None:
    run = tl.load(_SMALL_MESH)
    moves = [each for each in changes(run) if any(name.startswith("layout.") for name, _ in each.fields)]
    assert len(moves) > 20
    worked = 0
    for each in moves:
        try:
            other = tl.load(_SMALL_MESH, dict(each.fields))
        except InvalidInput:
            continue
        worked += 1
        assert other.layout.devices == run.layout.devices
    assert worked > 10


def test_a_run_without_a_layout_on_many_devices_is_offered_one() -> None:
    table = {**ALONE, "cluster": {"device": "h100-sxm", "count": 8}}
    whats = {each.what for each in changes(tl.load(table))}
    assert "a layout over all 8 devices" in whats


def test_a_vocabulary_is_padded_once() -> None:
    padded = [each for each in changes(tl.load(ALONE)) if each.what.startswith("vocabulary")]
    assert [each.fields for each in padded] == [(("model.vocab_multiple", 64),)]  # 50,304 is a multiple of 128 too
    assert padded[0].effect == RESULT
    assert padded[0].cost.startswith("47 more rows")


def test_the_text_fits_a_terminal_and_its_lines_can_be_pasted(case: tuple[Table, Advice]) -> None:
    table, advice = case
    answer = str(advice)
    assert max(len(line) for line in answer.splitlines()) <= 80
    together = answer.partition("Together (")[2].partition("    --set")[2].partition("\n\n")[0]
    sets = [each for each in shlex.split(together.replace("\\\n", " ")) if each != "--set"]
    assert tl.load(table, sets) == advice.together[-1].run


def test_who_has_several_devices_hears_of_the_search_for_layouts(case: tuple[Table, Advice]) -> None:
    table, advice = case
    several = table.get("cluster", {}).get("count", 1) > 1
    assert ("`trainledger layouts` searches all of them" in text(page(advice), full=True, width=200)) is several


def test_a_list_is_quoted_for_the_shell() -> None:
    assert shlex.split(commands(["layout.stage_layers=[2,2]"])) == ["--set", "layout.stage_layers=[2,2]"]


def test_the_chart_has_each_change_numbered_and_the_line_is_within(case: tuple[Table, Advice]) -> None:
    advice = case[1]
    (chart,) = page(advice).figures()
    points = {
        int(number): (said.split("\n")[0], x or 0.0)
        for each in marks(chart, Line)
        if each.name in EFFECTS.values()
        for number, said, x in zip(each.texts, each.said or (), each.xs, strict=True)
    }
    assert len(points) == sum(each.seconds[1] is not None for each in advice.alone)
    assert [points[number + 1][0] for number in range(len(points))] == list(chart.key)
    assert marks(chart, Line, "as planned")
    ((usable, *_),) = [(each.start,) for each in marks(chart, Band)]
    assert usable == pytest.approx((advice.forecast.usable_nbytes or 0) / 1e9)
    scale = Drawn(svg(chart)).scale("x")
    assert all(0 <= x <= scale.last * 1.2 for x in (usable, *(x for _, x in points.values())))
    assert ("does NOT fit" in " ".join(page(advice).about)) == (case[0] is TOO_LARGE)


def test_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "gpt2", "--set", "cluster.device=l4", "--together", "1", "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["goal"] == "time"
    first = answer["alone"][0]
    assert first["seconds"][1] < first["seconds"][0]
    assert first["set"]
    assert len(answer["together"]) <= 1


def test_nonsense_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "gpt2", "--set", "cluster.device=l4", "--together", "11"]) == 2
    assert capsys.readouterr().err == "--together = '11': must be between 0 and 10; nearest that works: 10\n"


def test_nothing_to_gain_is_said() -> None:
    run = tl.load(ALONE)
    advice = tl.advise(run)
    none = Advice(run, advice.forecast, "time", (), (), 3, 1)
    assert "None of 3 changes that were predicted gains in time." in str(none)
    assert SAME in EFFECTS


def test_adapters_on_a_small_device_hear_of_smaller_frozen_weights() -> None:
    """QLoRA (Dettmers et al. 2023): what an 8B needs on a device of 24 GB."""
    table = {
        "model": {"preset": "llama-3.1-8b"},
        "recipe": {"seq_len": 1024, "global_batch": 1, "steps": 10, "precision": "bf16-mixed", "lora.rank": 16},
        "cluster": {"device": "rtx-4090"},
    }
    advice = tl.advise(tl.load(table), any_result=True)
    assert advice.forecast.fits is False
    saving = {each.sets: each.smaller for each in advice.alone}
    assert saving[("recipe.lora.base_format=nf4",)] > saving[("recipe.lora.base_format=int8",)] > 0
    assert advice.together[-1].fits
    assert "(recipe.lora)" not in text(page(tl.advise(tl.load(table), together=0)), full=True)


@pytest.mark.agreement
def test_kernels_that_wait_and_whole_sends_are_advised_against() -> None:
    """CUDA_LAUNCH_BLOCKING=1 left set, and activations sent whole by each tensor rank, cost time for nothing."""
    layout = {"shard": 4, "tensor": 4, "pipeline": 4}
    table = {**MESH, "layout": layout, "recipe": {**MESH["recipe"], "launch_blocking": True, "global_batch": 16}}
    advice = tl.advise(tl.load(table), together=0)
    found = {each.sets: each for each in advice.alone}
    assert found[("recipe.launch_blocking=false",)].faster > 0
    assert found[("layout.split_sends=true",)].faster > 0
    split = {**table, "layout": {**layout, "split_sends": True}}
    for each in tl.advise(tl.load(split), together=0).alone:
        _gives(split, each.sets, each)


def test_what_may_overlap_compute_is_advised() -> None:
    """Of what a layout leaves waiting; not twice the same, and nothing that its ranks do not send."""

    def answer(layout: dict[str, Any]) -> dict[Any, Change]:
        run = tl.load({**_SMALL_MESH, "layout": layout, "cluster": {**MESH["cluster"], "count": 8}})
        return {value: each for each in changes(run) for field, value in each.fields if field == "layout.overlap"}

    plain, more = ("gradients",), ("gradients", "input-gradients")
    layout = {"shard": 2, "tensor": 4}
    assert set(answer(layout)) == {more}
    assert set(answer({**layout, "zero": 1})) == {more, ("gradients", "parameters")}
    assert set(answer({**layout, "sequence_parallel": True})) == {more, ("gradients", "tensor")}
    # With all matmuls in parts their sums are hidden so; moving ranks from tensor takes what is theirs with them.
    parts = {**layout, "sequence_parallel": True, "overlap": ["gradients", "tensor"]}
    assert not answer(parts)
    assert set(answer({"shard": 4, "tensor": 2, "overlap": [*more]})) == {plain}
    assert set(answer({"replicate": 8, "overlap": "none"})) == {plain}
    assert not answer({"shard": 8})
    table: Table = {**_SMALL_MESH, "layout": layout, "cluster": {**MESH["cluster"], "count": 8}}
    advice = tl.advise(tl.load(table), together=0)
    sums = next(each for each in advice.alone if "input-gradients" in each.sets[0])
    assert sums.faster > 0
    assert sums.smaller == pytest.approx(0)
    assert sums.effect == SAME
    assert "Megatron-LM" in sums.cost
    _gives(table, sums.sets, sums)


@pytest.mark.long
def test_what_was_not_tried_is_said_and_the_rest_is_as_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, short = tl.advise(tl.load(ALONE), limit_seconds=10**6), tl.advise(tl.load(ALONE), limit_seconds=0)
    assert whole.left == ()
    assert 0 < short.tried < whole.tried
    assert {change.sets for change in short.alone} < {change.sets for change in whole.alone}
    assert RESULT not in {change.effect for change in short.alone}  # which come last
    said = " ".join(str(short).split())
    assert f" of CPU time ({short.tried} changes were): {short.left[0]}; " in said.partition("Not tried within 0 ")[2]
    heard = list[str]()

    def stop(what: str, done: int, of: int) -> None:
        heard.append(what)
        if len(heard) == 12:
            raise KeyboardInterrupt

    cut = tl.advise(tl.load(ALONE), progress=stop)
    assert cut.interrupted
    assert short.tried <= cut.tried < whole.tried
    assert "Not tried before Ctrl-C" in str(cut)
    heard.clear()
    monkeypatch.setattr("trainledger.cli.asking.while_searching", lambda: stop)
    assert main(["advise", "gpt2", "--device", "h100-sxm"]) == 130
    assert "Not tried before Ctrl-C" in capsys.readouterr().out


def test_what_is_gathered_for_matmuls_may_be_gathered_again() -> None:
    """Megatron-LM's way takes less memory and next to no time; from there the other way is advised."""
    cluster, layout = {**MESH["cluster"], "count": 8}, {"shard": 2, "tensor": 4, "sequence_parallel": True}
    table: Table = {**_SMALL_MESH, "layout": layout, "cluster": cluster}
    advice = tl.advise(tl.load(table), goal="memory", together=0)
    again = next(each for each in advice.alone if each.sets == ("layout.sequence_gather=again",))
    assert again.smaller > 0.04
    assert again.faster == pytest.approx(0, abs=0.02)
    assert again.effect == SAME
    assert "Megatron-LM" in again.cost
    _gives(table, again.sets, again)
    table["layout"] = {**layout, "sequence_gather": "again"}
    back = [each for each in changes(tl.load(table)) if ("layout.sequence_gather", "kept") in each.fields]
    assert {each.what for each in back} >= {
        "keep gathered activations of tensor ranks for backward",
        "no sequence parallelism",
    }
    for each in back:
        assert not tl.load(table, dict(each.fields)).layout.gathers_again


@pytest.mark.long
def test_sharded_parameters_are_multiplied_in_8_bits_as_they_are_gathered() -> None:
    table: Table = {
        "model": {"preset": "llama-3-8b"},
        "recipe": {"steps": 10, "global_batch": 8, "seq_len": 8192, "precision": "bf16-sharded", "compile": True},
        "layout": {"shard": 8}, "cluster": {"device": "h100-sxm", "count": 8},
    }  # fmt: skip
    advice = tl.advise(tl.load(table)).alone
    (ours,) = (each for each in advice if each.sets == ("recipe.precision=fp8-tensorwise-sharded",))
    assert ours.faster > 0.01
    assert not any(each.sets == ("recipe.precision=fp8-tensorwise",) for each in advice)
    _gives(table, ours.sets, ours)


@pytest.mark.agreement
def test_weights_are_cast_once_a_step_where_that_saves_time_or_not_where_it_saves_memory() -> None:
    recipe = {"precision": "fp8-tensorwise", "precision.master_weights": True, "micro_batch": 1, "seq_len": 2048}
    table: Table = {
        "model": {"preset": "llama-3-8b"}, "recipe": {"steps": 10, "global_batch": 128, **recipe},
        "layout": {"shard": 8, "zero": 1}, "cluster": {"device": "h200", "count": 8},
    }  # fmt: skip
    once = next(
        each for each in tl.advise(tl.load(table)).alone if each.sets == ("recipe.precision.weight_caching=true",)
    )
    assert once.faster > 0.05
    assert once.smaller < 0
    assert once.effect == SAME
    assert "Transformer Engine" in once.cost
    _gives(table, once.sets, once)
    kept = tl.load(table, list(once.sets))
    back = next(each for each in changes(kept) if each.fields == (("recipe.precision.weight_caching", False),))
    assert back.effect == SAME
    in_fp32 = tl.load(table, [*once.sets, "recipe.precision.master_weights=false"])
    (wide,) = (each for each in changes(in_fp32) if dict(each.fields).get("recipe.precision") == "bf16-mixed")
    assert not made(in_fp32, wide).recipe.precision.weight_caching


def test_compiling_says_where_memory_is_counted_as_before() -> None:
    for model, saving, answer in (("llama-3-8b", "offload", True), ("llama-3-8b", "none", False),
                                ("mixtral-8x7b", "none", False)):  # fmt: skip
        recipe = {**ALONE["recipe"], "activation_checkpointing": saving}
        run = tl.load({**ALONE, "model": {"preset": model}, "recipe": recipe})
        (each,) = (each for each in changes(run) if each.what == "compile each block")
        assert ("counted as that of eager blocks" in each.cost) == answer


@pytest.mark.parametrize("named", thinned([["gpt2", "h100-sxm", 8], ["llama-3-8b", "h100-sxm", 16]]))
def test_of_a_layout_that_was_searched_for_all_of_it_is_one_command(named: tuple[str, str, int]) -> None:
    model, device, count = named
    cluster = [f"cluster.device={device}", f"cluster.count={count}"]
    advice = tl.advise(model, cluster)
    assert advice.run.origin.searched
    printed = text(page(advice), width=10**6)
    pasted = printed.partition("Together (")[2].partition("\n")[2].partition("\n\n")[0].replace("\\\n", " ")
    sets = [each for each in shlex.split(pasted) if each != "--set"]
    run = tl.load(model, [*cluster, *sets])
    assert not run.origin.searched
    assert run == advice.together[-1].run
    assert tl.predict(run).step_seconds == advice.together[-1].forecast.step_seconds
    alone = next(each for each in advice.alone if each.sets[0].startswith("recipe."))
    found = printed.partition("The layout that the search selected:\n")[2].partition("\n\n")[0].replace("\\\n", " ")
    layout = [each for each in shlex.split(found) if each != "--set"]
    assert tl.load(model, [*cluster, *layout, *alone.sets]) == alone.run


def test_casts_that_cost_more_than_they_save_alone_are_tried_with_compiled_blocks() -> None:
    run = tl.load("llama-3-8b", {"cluster.device": "h100-sxm", "recipe.micro_batch": 1, "recipe.compile": False,
                                 "recipe.seq_len": 2048, "recipe.activation_checkpointing": "full",
                                 "model.n_layers": 8})  # fmt: skip
    advice = tl.advise(run, any_result=True)
    assert any(each.startswith("recipe.precision=") for step in advice.together for each in step.sets)


@pytest.mark.long
def test_faster_runs_that_are_too_large_do_not_crowd_out_a_change_that_fits() -> None:
    run = tl.load("llama-3.1-70b", {"cluster.device": "h100-sxm", "cluster.count": 64, "layout.shard": 64,
                                    "recipe.micro_batch": 1, "recipe.activation_checkpointing": "full"})  # fmt: skip
    advice = tl.advise(run)
    best = [advised.sets for advised in advice.alone if advised.effect != "result"][:2]
    assert {*best} <= {advised.sets for advised in advice.together}


def test_overrides_after_a_search_give_the_same_run_from_before_and_after_it() -> None:
    named = ["cluster.device=h100-sxm", "cluster.count=16", "recipe.tokens=1B"]
    found = tl.load("gpt2", named)
    assert found.origin.searched
    assert found.layout.shard > 1
    other = tl.load(found, {"layout.shard": 1, "layout.replicate": 16, "layout.reshard_after_forward": None})
    sets = pasted_overrides(found, other)
    assert tl.load("gpt2", [*named, *sets]) == other == tl.load(found, list(sets))


@pytest.mark.parametrize("of", ["named model", "epochs.yml", "arguments.json"])
def test_a_run_of_unknown_length_is_ranked_by_its_step(of: str, tmp_path: Path) -> None:
    (tmp_path / "epochs.yml").write_text("base_model: gpt2\nsequence_len: 1024\nnum_epochs: 3\nbf16: true\n")
    (tmp_path / "arguments.json").write_text('{"output_dir": "out", "per_device_train_batch_size": 4, "bf16": true}')
    given = ["model.preset=gpt2"] if of == "arguments.json" else []
    source = "gpt2" if of == "named model" else str(tmp_path / of)
    advice = tl.advise(source, given, device="a100-sxm-40gb")
    planned = tl.plan(source, given, device="a100-sxm-40gb").forecast
    assert (advice.forecast.total_seconds, planned.total_seconds) == (None, None)
    assert advice.forecast.step_seconds == planned.step_seconds
    assert advice.alone[0].seconds == (planned.step_seconds, advice.alone[0].forecast.step_seconds)
    shown = text(page(advice))
    assert f"{planned.tokens_per_second:,.0f} tokens/s" in shown
    assert "in all" not in shown
    together = shown[shown.index("Together (") :].partition("):")[0]
    above = shown[: shown.index("Together (")]
    named, _, others = " ".join(together.removeprefix("Together (").split()).partition("not listed above: ")
    assert all(f" {what}: " in " ".join(above.split()) for what in named.split("; ") if what)
    assert not any(f" {what}: " in " ".join(above.split()) for what in others.split("; ") if what)
