"""Two plans beside each other: what differs, and parts whose differences sum to the difference exactly."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_runs import ALONE, SHARDED

import trainledger as tl
from drawn import marks
from trainledger.answers.compare import about, figures, page
from trainledger.answers.sweep import Sweep
from trainledger.cli import main
from trainledger.forecast.plan.compare import compare, reasons
from trainledger.forecast.predict.forecast import Bar, Forecast, nanoseconds
from trainledger.report.chart import Band, Bars
from trainledger.report.document import signed
from trainledger.report.terminal import text
from trainledger.spec.run_text import as_override, differences, overrides

CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "recipe.activation_checkpointing": st.sampled_from(["none", "full", "selective"]),
        "recipe.micro_batch": st.sampled_from([1, 2, 4, 16]),
        "recipe.seq_len": st.sampled_from([256, 512, 1000]),
        "recipe.loss": st.sampled_from(["full", "chunked", "compiled"]),
        "recipe.precision": st.sampled_from(["bf16-mixed", "bf16"]),
        "recipe.tokens": st.sampled_from(["1B", "3B"]),
        "model.n_layers": st.integers(1, 20),
        "cluster.device": st.sampled_from(["h100-sxm", "a100-sxm-80gb", "l4"]),
    },
)


@settings(max_examples=20, deadline=None)
@given(CHANGES, CHANGES)
def test_parts_sum_to_the_difference_exactly(of_a: dict[str, Any], of_b: dict[str, Any]) -> None:
    a, b = (tl.load(ALONE, each) for each in (of_a, of_b))
    found = tl.compare(a, b)
    forecast_a, forecast_b = tl.predict(a), tl.predict(b)
    assert sum(each.a for each in found.times) == nanoseconds(forecast_a.total_seconds or 0)
    assert sum(each.b for each in found.times) == nanoseconds(forecast_b.total_seconds or 0)
    assert sum(each.difference for each in found.memory) == (forecast_b.device_nbytes or 0) - (
        forecast_a.device_nbytes or 0
    )
    assert tl.load(ALONE, {**of_a, **{each.field: each.b for each in found.fields}}) == b


def test_one_device_against_a_layout() -> None:
    found = tl.compare(tl.load(ALONE), tl.load(SHARDED))
    by_name = {each.name: each for each in found.rows}
    assert by_name["devices"].difference == 15
    assert sum(each.b for each in found.times) == nanoseconds(tl.predict(tl.load(SHARDED)).total_seconds or 0)
    assert "exposed communication" in {each.name for each in found.times}


def test_the_largest_causes_come_first() -> None:
    large = {"recipe.micro_batch": 32}  # kernels that take longer than their launches
    found = tl.compare(tl.load(ALONE, large), tl.load(ALONE, large | {"recipe.activation_checkpointing": "full"}))
    assert reasons(found.times)[0].name == "recomputation"
    assert reasons(found.memory)[0].name == "activations"
    answer = str(found)
    assert "The whole run: b takes" in answer
    assert "longer than a" in answer
    assert "recomputation +" in answer
    assert [each.field for each in found.fields] == ["recipe.activation_checkpointing"]


def test_what_only_rounding_tells_apart_is_no_difference() -> None:
    """Bars of an hour that end some nanoseconds apart, as sums of the same seconds in another order do."""
    run = tl.load(ALONE)
    answer = [
        Forecast(total_seconds=sum(bars.values()) / 10**9, step_seconds=1.0,
                 waterfall=tuple(Bar(cause, each) for cause, each in bars.items()))
        for bars in (
            {"ideal": 3600 * 10**9, "kernel efficiency": 700 * 10**9 + 1, "failures": 10**9},
            {"ideal": 3600 * 10**9 - 2, "kernel efficiency": 700 * 10**9, "failures": 21 * 10**9},
        )
    ]  # fmt: skip
    found = compare(run, answer[0], replace(run, recipe=replace(run.recipe, seed=1)), answer[1])
    assert [each.name for each in reasons(found.times)] == ["failures"]
    assert sum(each.difference for each in found.times) == 20 * 10**9 - 3
    assert "takes 20 s longer than a (+0.5 %): failures +20 s." in " ".join(str(found).split())
    none = replace(answer[0], waterfall=(*answer[0].waterfall[:2], Bar("failures", 10**9 + 1)))
    found = compare(run, answer[0], replace(run, recipe=replace(run.recipe, seed=1)), none)
    assert "The whole run: b takes as long as a." in " ".join(str(found).split())


def test_a_bound_is_no_match_for_a_calibrated_time() -> None:
    found = tl.compare(tl.load(ALONE), tl.load(ALONE, {"cluster.device": "l4"}))
    answer = " ".join(str(found).split())
    assert "B's time is only a lower bound, what its device allows at best, and a's is what programs reach" in answer
    both = tl.compare(tl.load(ALONE, {"cluster.device": "l4"}), tl.load(ALONE, {"cluster.device": "t4"}))
    assert "is only a lower bound" not in str(both)


def test_a_run_against_itself() -> None:
    found = tl.compare(tl.load(ALONE), tl.load(ALONE))
    assert found.fields == ()
    assert not any(each.difference for each in (*found.times, *found.memory))
    assert str(found).startswith("The two runs have the same value in every field.")


def test_without_a_known_machine_memory_is_compared_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRAINLEDGER_CALIBRATION", raising=False)
    table = {**ALONE, "cluster": {}}
    found = tl.compare(tl.load(table), tl.load(table, {"recipe.micro_batch": 4}))
    assert found.times == ()
    assert reasons(found.memory)
    assert "was not measured yet" in str(found).replace("\n", " ")


def test_an_override_is_written_so_that_it_reads_back() -> None:
    other = tl.load(
        SHARDED,
        {
            "recipe.micro_batch": "none", "recipe.activation_checkpointing.keep": ["attention"],
            "recipe.compile": False,
            "layout.reshard_after_forward": False, "recipe.learning_rate": 1e-5, "model.name": "x-1",
        },
    )  # fmt: skip
    run = tl.load(SHARDED)
    assert tl.load(SHARDED, overrides(run, other)) == other
    assert tl.load(SHARDED, overrides(other, run)) == run
    assert as_override("recipe.micro_batch", None) == "recipe.micro_batch=none"
    assert len(differences(run, other)) == 5  # compile is false in both


def test_the_text_fits_a_terminal() -> None:
    found = replace(tl.compare(tl.load(ALONE), tl.load(SHARDED)), names=("a-run.toml", "another.toml"))
    assert max(len(line) for line in text(page(found)).splitlines()) <= 80
    assert len(repr(found)) < 100


def test_a_difference_of_shares_is_in_points() -> None:
    """41 % less 38 % are three points; three percent of 38 % would be another number."""
    shown = str(tl.compare(tl.load(ALONE), tl.load(SHARDED)))
    for name in ("MFU", "HFU"):
        assert re.search(rf"^{name} .* % +[+-]\d+\.\d points$", shown, re.MULTILINE), shown


def test_a_difference_too_small_to_show_has_no_sign() -> None:
    assert signed(-0.0001, "share") == "0.0 %"
    assert signed(-0.001, "share") == "-0.1 %"
    assert signed(0.0, "seconds") == "0"


def test_the_figures_hold_both_sides() -> None:
    found = tl.compare(tl.load(ALONE), tl.load(SHARDED))
    time, memory = figures(replace(found, names=("one", "other")))
    assert [each.name for each in marks(time, Bars)] == ["a: one", "b: other"]
    *parts, whole = marks(memory, Bars)[0].ends
    assert sum(parts) == pytest.approx(sum(each.a for each in found.memory) / 1e9) == whole
    assert marks(memory, Band) == []  # both fit


def test_what_does_not_fit_is_drawn_and_said() -> None:
    small, large = ({**ALONE, "cluster": {"device": each}} for each in ("l4", "h200"))
    for table in (small, large):
        table["recipe"] = {**ALONE["recipe"], "micro_batch": 64, "global_batch": 64}
    found = tl.compare(tl.load(small), tl.load(large))
    assert (found.forecast_a.fits, found.forecast_b.fits) == (False, True)
    lines = marks(figures(found)[1], Band)
    given = [each.usable_nbytes for each in (found.forecast_a, found.forecast_b)]
    assert [each.start for each in lines] == [each / 1e9 for each in given if each]
    assert [each.text[:3] for each in lines] == ["a: ", "b: "]
    said = " ".join(about(replace(found, names=("one", "other"))))
    assert "a: one" in said
    assert "1 x l4" in said
    assert "a does NOT fit: " in said
    assert "b fits (chance " in said


def test_two_files_and_one_file_changed_give_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    a.write_text(tomli_w.dumps(ALONE))
    b.write_text(tomli_w.dumps({**ALONE, "recipe": {**ALONE["recipe"], "micro_batch": 4}}))
    assert main(["compare", str(a), str(b), "--json"]) == 0
    by_files = json.loads(capsys.readouterr().out)
    assert main(["compare", str(a), "--set-b", "recipe.micro_batch=4", "--json"]) == 0
    by_change = json.loads(capsys.readouterr().out)
    for name in ("fields", "rows", "nanoseconds", "memory_nbytes"):
        assert by_files[name] == by_change[name]
    parts = by_files["nanoseconds"]
    assert sum(each["difference"] for each in parts["parts"]) == parts["difference"]


def test_models_alone_are_compared_by_one_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "gpt2", "gpt2-medium", "--set", "cluster.device=l4", "--full"]) == 0
    out = capsys.readouterr().out
    assert "Time of one step" in out
    assert "whole run" not in out


def test_figures_go_to_a_file_and_json_stays_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "beside.html"
    words = ["compare", "gpt2", "gpt2-medium", "--set", "cluster.device=l4", "--json", "--plot", str(where)]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["time_of"] == "one step"
    assert f"Written to {where}\n" in err
    assert "Memory of the peak rank" in where.read_text()


def test_nothing_to_compare_with_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "gpt2"]) == 2
    sentence = "B: is missing: name a second plan, change this one with --set-b, or name a field with --over\n"
    assert capsys.readouterr() == ("", sentence)


def test_runs_that_wait_for_tokens_are_compared_with_the_wait() -> None:
    """A slow loader leaves a step as it is and halves what the run makes of it."""
    slow, quick = (tl.load(ALONE, {"cluster.loader_tokens_per_second": each}) for each in (1000, 2000))
    by_name = {each.name: each for each in tl.compare(slow, quick).rows}
    assert by_name["step"].difference == by_name["tokens/s"].difference == by_name["MFU"].difference == 0
    assert by_name["tokens/s with the wait"].difference == pytest.approx(1000)
    steps = by_name["step with the wait for tokens"]
    assert (steps.a or 0) / (steps.b or 1) == pytest.approx(2)
    shares = by_name["MFU with the wait"]
    assert (shares.b or 0) / (shares.a or 1) == pytest.approx(2)
    assert not [each for each in tl.compare(tl.load(ALONE), tl.load(SHARDED)).rows if "wait" in each.name]


def test_what_is_not_known_of_one_run_is_no_gain_of_it() -> None:
    found = tl.compare(tl.load(ALONE, {"cluster.device": "h100-sxm"}), tl.load(ALONE, {"cluster.device": "h200"}))
    answer = " ".join(str(found).split())
    assert (
        "B has no interruptions in it, as its device's rate of failures is not known (cluster.mtbf_device_hours"
        in answer
    )
    same = tl.compare(tl.load(ALONE, {"cluster.device": "h200"}), tl.load(ALONE, {"cluster.device": "h200"}))
    assert "interruptions" not in str(same)


def test_another_price_is_said_where_the_time_is_the_same() -> None:
    dear = tl.load(ALONE, {"cluster.price_per_device_hour": 3.0})
    cheap = tl.load(dear, {"cluster.price_per_device_hour": 1.5})
    assert re.search(r"b costs [\d.,]+ less than a \(-50\.0 %\)\.", " ".join(str(tl.compare(dear, cheap)).split()))
    assert "costs" not in str(tl.compare(dear, dear))


def test_every_value_of_a_field_in_one_table() -> None:
    field = "recipe.activation_checkpointing"
    given = {"recipe.global_batch": 8, "cluster.device": "a100-sxm-80gb"}
    found = tl.compare("gpt2-xl", overrides=given, over=field)
    assert isinstance(found, Sweep)
    rows = {each.value: each for each in found.rows}
    assert [*rows] == ["none", "full", "segments of 7", "from-start", "selective", "attention", "offload"]  # of 48
    assert rows["from-start"].memory_nbytes is None
    assert "low-precision" in rows["from-start"].why
    for row in rows.values():
        if row.memory_nbytes is not None:
            forecast = tl.predict("gpt2-xl", {**given, field: row.value.split()[0]})
            assert (row.memory_nbytes, row.step_seconds) == (forecast.device_nbytes, forecast.step_seconds)
            assert row.activation_nbytes == forecast.peak_by_category["activations"]
    forward = tl.account("gpt2-xl", {**given, "recipe.micro_batch": 8}).by("phase")["forward"]
    assert rows["none"].recomputed_flops == rows["offload"].recomputed_flops == 0
    assert 0.6 * forward < (rows["full"].recomputed_flops or 0) < forward  # all but the head, and what nobody needs
    assert rows["none"].relative == 1 < (rows["full"].relative or 0) < (rows["offload"].relative or 0)
    text = str(found)
    assert re.search(r"from-start .* cannot be", text)
    assert "none *" in text


def test_values_without_a_time_and_of_two_implementations() -> None:
    precisions = tl.compare("gpt2", overrides={"cluster.device": "a100-sxm-80gb"}, over="recipe.precision")
    rows = {each.value: each for each in precisions.rows}
    assert rows["fp8-block"].step_seconds is None
    assert rows["fp8-block"].memory_nbytes
    assert "no peak for e4m3" in str(precisions)
    assert rows["fp32"].relative == 1
    optimizers = tl.compare("gpt2", overrides={"cluster.device": "a100-sxm-80gb"}, over="recipe.optimizer")
    seconds = {each.value: each.step_seconds or 0 for each in optimizers.rows}
    assert seconds["adamw-8bit"] > 2 * seconds["adamw-8bit fused"]
    assert "unfused implementation" in str(optimizers)
    assert "unfused" not in str(precisions)


def test_values_that_were_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "gpt2", "--device", "l4", "--set", "recipe.global_batch=8", "--json", "--over"]
    assert main([*words, "recipe.micro_batch=1,3,8"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["value"] for row in data["rows"]] == ["1", "3", "8"]
    assert [row["memory_nbytes"] is None for row in data["rows"]] == [False, True, False]
    assert data["rows"][1]["why"] == "recipe.global_batch must be a multiple of micro_batch = 3"
    for over, rule in (("recipe.micro_batch", "recipe.micro_batch=1,2,4"), ("recipe.precison", "recipe.precision")):
        assert main([*words, over]) == 2
        assert rule in json.loads(capsys.readouterr().out)["error"][0]["sentence"]
    assert main(["compare", "gpt2", "gpt2-xl", "--over", "recipe.precision"]) == 2
    assert "leave out B" in capsys.readouterr().err
