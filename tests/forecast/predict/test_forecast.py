from dataclasses import replace

import pytest

from trainledger.answers.cost import predict
from trainledger.forecast.predict.forecast import BEYOND, IDEAL, NAPKIN, Forecast, nanoseconds
from trainledger.forecast.predict.predict import forecast
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.ranks import RunAccount
from trainledger.spec.cluster import Cluster
from trainledger.spec.device import Device
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.plain import from_plain, read_json, to_plain, write_json
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

SHEET = Device("d", "a device", {"fp32": 1e12}, memory_bytes_per_second=1e12)
MODEL = from_fields(
    ModelSpec,
    {"vocab_size": 16, "d_model": 8, "n_layers": 1, "attention.n_heads": 2, "feed_forward.d_ff": 16, "max_seq_len": 8},
)


def run(price=None, count=1, **recipe):
    fields = {"seq_len": 8, "global_batch": 4, "steps": 10, "evaluation.sequences": 8, **recipe}
    return Run(
        model=MODEL, recipe=from_fields(Recipe, fields), cluster=Cluster(price_per_device_hour=price, count=count)
    )


def ledger(**fields):
    entries = (
        Entry("mm", "", "forward", "matmul", flops=10**12, model_flops=10**12, kept=100, dtype="fp32",
              allocated=(("activations", 100),)),
        Entry("mm", "", "backward", "matmul", flops=3 * 10**12, model_flops=2 * 10**12, dtype="fp32",
              freed=(("activations", 100),)),
    )  # fmt: skip
    resident = (("parameters", 40), ("optimizer state", 80))
    return Ledger(entries, resident=resident, parameters=10, tokens=32, **fields)


def test_many_devices_are_billed_for_the_work_and_not_for_their_number():
    one, many = (forecast(RunAccount(run(price=2.0, count=count), ledger()), SHEET) for count in (1, 4))
    assert one.total_seconds == pytest.approx(4 * many.total_seconds)
    assert one.total_seconds == pytest.approx(10 * 4.0 + 2.0)  # and two batches' forward for 8 sequences
    assert one.device_hours == pytest.approx(42 / 3600)
    assert (one.device_hours, one.money) == pytest.approx((many.device_hours, many.money))
    assert one.money == pytest.approx(2 * one.device_hours)
    assert one.mfu == many.mfu


def test_energy_is_of_the_rated_power_and_what_the_cluster_says():
    sheet = replace(SHEET, power_watts=500.0)
    hours = forecast(RunAccount(run(), ledger()), sheet).device_hours
    assert forecast(RunAccount(run(), ledger()), SHEET).kwh is None
    assert forecast(RunAccount(run(), ledger()), sheet).kwh == pytest.approx(0.5 * hours)
    cluster = Cluster(power_share=0.8, power_usage_effectiveness=1.1, grid_kg_co2_per_kwh=0.4)
    answer = forecast(RunAccount(replace(run(), cluster=cluster), ledger()), sheet)
    assert answer.kwh == pytest.approx(0.5 * 0.8 * 1.1 * hours)
    assert answer.co2_kg == pytest.approx(0.4 * answer.kwh)
    assert forecast(RunAccount(run(), ledger()), sheet).co2_kg is None


def test_what_does_not_fit_is_the_bottleneck():
    small = forecast(RunAccount(run(), ledger()), replace(SHEET, memory_nbytes=200))
    assert (small.fits, small.device_nbytes, small.usable_nbytes) == (False, 220, 200)
    assert small.bottleneck.name == "device memory"
    assert small.bottleneck.sentence == "a device needs 220 B and has 200 B; most of it is activations: 100 B"
    assert forecast(RunAccount(run(), ledger()), replace(SHEET, memory_nbytes=220)).fits is True
    assert forecast(RunAccount(run(), ledger()), SHEET).fits is None


def test_a_waterfall_leads_from_the_napkin_to_the_whole_run():
    answer = forecast(RunAccount(run(), ledger()), SHEET)
    assert sum(each.nanoseconds for each in answer.waterfall) == nanoseconds(answer.total_seconds)
    bars = {each.cause: each.seconds for each in answer.waterfall if each.nanoseconds}
    napkin = 6 * parameters(MODEL).active * 32 * 10 / 1e12
    assert bars[NAPKIN] == pytest.approx(napkin, abs=1e-9)
    assert bars[NAPKIN] + bars[BEYOND] == pytest.approx(30.0)
    assert bars["evaluation"] == pytest.approx(2.0)
    assert answer.bottleneck.name == "compute"


@pytest.mark.parametrize(
    ("model", "changes", "first", "counted"),
    [
        ("llama-3.2-1b", {"recipe.lora.rank": 16, "recipe.seq_len": 2048}, IDEAL, "gradients of frozen weights"),
        ("pythia-70m", {"recipe.seq_len": 128}, IDEAL, "the input embedding"),
        ("llama-3.2-1b", {"recipe.seq_len": 8192}, NAPKIN, None),
    ],
)
def test_a_waterfall_begins_with_what_the_step_computes_and_adds_attention(model, changes, first, counted):
    answer = predict(model, changes, device="h100-sxm")
    bars = {each.cause: each.nanoseconds for each in answer.waterfall}
    assert next(iter(bars)) == first
    assert sum(bars.values()) == nanoseconds(answer.step_seconds)
    assert bars.get(BEYOND, 0) >= 0
    ideal = answer.model_flops / answer.peak_flops_per_second
    assert bars[first] + bars.get(BEYOND, 0) == pytest.approx(ideal * 1e9, abs=1)
    said = [note for note in answer.notes if note.startswith("6 N D counts")]
    assert [counted in note for note in said] == [True] * (counted is not None)


def test_a_forecast_without_the_newer_fields_is_still_read():
    answer = forecast(RunAccount(run(), ledger()), SHEET)
    newer = ("days", "kwh", "co2_kg", "goodput", "interruptions", "checkpoint_every", "step_causes", "waterfall",
             "bottleneck", "device_nbytes", "usable_nbytes", "fits")  # fmt: skip
    old = {name: each for name, each in to_plain(answer).items() if name not in newer}
    assert from_plain(Forecast, old).total_seconds == answer.total_seconds
    assert from_plain(Forecast, to_plain(answer)) == answer


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (10, "is priced as 1 step of 32 tokens: 22 more"),
        (33, "is priced as 1 step of 32 tokens: 1 fewer"),
        (160_032, None),
        (320_000_031, None),  # less than a thousandth
    ],
)
def test_tokens_that_whole_steps_leave_out_are_named(tokens: int, said: str | None) -> None:
    seen = forecast(RunAccount(run(steps=None, tokens=tokens), ledger()), SHEET)
    assert seen.tokens_per_step == 32
    assert [said in note for note in seen.notes if "is priced as" in note] == [True] * (said is not None)


def test_a_forecast_has_the_ledgers_figures_and_their_bases():
    seen = forecast(RunAccount(run(), ledger()), SHEET)
    assert (seen.parameters, seen.tokens_per_step, seen.kept_nbytes, seen.peak_nbytes) == (10, 32, 100, 220)
    assert seen.peak_by_category == {"parameters": 40, "optimizer state": 80, "activations": 100}
    assert seen.flops == {"matmul": 4 * 10**12}
    assert seen.step_seconds == pytest.approx(4.0)
    assert (seen.mfu, seen.hfu) == (pytest.approx(0.75), pytest.approx(1.0))
    assert seen.basis["flops"] == "exact"
    assert seen.basis["step_seconds"] == "bound"


def test_without_a_machine_there_are_sizes_and_a_sentence_but_no_times():
    seen = forecast(RunAccount(run(), ledger()), None)
    assert seen.step_seconds is seen.mfu is seen.total_seconds is None
    assert seen.peak_nbytes == 220
    assert "trainledger measure machine" in seen.notes[0]


def test_uncounted_operations_take_the_exactness_away():
    seen = forecast(RunAccount(run(), ledger(uncounted=(("odd.op", 1),))), None)
    assert seen.basis["flops"] == "assumed"
    assert "odd.op" in seen.notes[0]


def test_a_forecast_survives_its_file(tmp_path):
    for machine in (SHEET, None):
        seen = forecast(RunAccount(run(price=1.0), ledger()), machine)
        write_json(seen, tmp_path / "forecast.json")
        assert read_json(Forecast, tmp_path / "forecast.json") == seen


def test_a_damaged_forecast_is_sentences(tmp_path):
    path = tmp_path / "forecast.json"
    for content, sentence in [
        ('{"parameters": 3, "peak_by', "is not whole JSON"),
        ('{"parameters": "many"}', "parameters = 'many': must be a whole number"),
        ('{"peak_by_category": {"activations": 1.5}}', "peak_by_category.activations = 1.5: must be a whole number"),
        ('{"step_seconds": NaN}', "step_seconds = nan: must be a finite number"),
        ('{"basis": {"mfu": "guessed"}}', "basis.mfu = 'guessed': must be one of exact, bound, assumed, measured"),
        ("[]", "must be a table of fields, not list"),
    ]:
        path.write_text(content)
        with pytest.raises(InvalidInput, match=r".") as caught:
            read_json(Forecast, path)
        assert sentence in str(caught.value)


def test_a_forecast_goes_to_a_table_of_its_known_numbers() -> None:
    made = predict("gpt2", device="a100-sxm-80gb")
    rows = {row["quantity"]: row for row in made.records()}
    assert rows["step_seconds"] == {"quantity": "step_seconds", "value": made.step_seconds, "basis": "assumed"}
    assert rows["parameters"]["basis"] == "exact"
    assert "money" not in rows
    assert "step_seconds" in made._repr_html_()
