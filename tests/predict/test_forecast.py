import pytest

from trainledger.ledger.entry import Entry, Ledger
from trainledger.predict.forecast import Forecast, forecast
from trainledger.predict.run_time import checkpoints, evaluations, run_time
from trainledger.spec.cluster import Cluster, Device
from trainledger.spec.model import ModelSpec
from trainledger.spec.plain import read_json, write_json
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

SHEET = Device("d", "a device", {"fp32": 1e12}, memory_bytes_per_second=1e12)
MODEL = ModelSpec(vocab_size=16, d_model=8, n_layers=1, n_heads=2, d_ff=16, max_seq_len=8)


def run(price=None, count=1, **recipe):
    fields = {"seq_len": 8, "global_batch": 4, "steps": 10, "eval_sequences": 8, **recipe}
    return Run(model=MODEL, recipe=Recipe(**fields), cluster=Cluster(price_per_device_hour=price, count=count))


def ledger(**fields):
    entries = (
        Entry("mm", "", "forward", "matmul", flops=10**12, model_flops=10**12, kept=100, dtype="fp32",
              allocated=(("activations", 100),)),
        Entry("mm", "", "backward", "matmul", flops=3 * 10**12, model_flops=2 * 10**12, dtype="fp32",
              freed=(("activations", 100),)),
    )  # fmt: skip
    resident = (("parameters", 40), ("optimizer state", 80))
    return Ledger(entries, resident=resident, parameters=10, tokens=32, **fields)


def test_a_run_is_its_steps_its_evaluations_and_its_checkpoints():
    whole = run_time(
        run(price=2.0, count=2, eval_every=4, checkpoint_every=5), 3.0, by_phase={"forward": 1.0, "backward": 2.0},
        checkpoint_nbytes=100, storage_bytes_per_second=50.0,
    )  # fmt: skip
    # Evaluations after steps 4, 8 and 10, each of 8 sequences where a step's forward has 4; checkpoints after 5 and 10.
    # Two devices share all but the saving.
    assert whole.by_phase == {"forward": 5.0, "backward": 10.0, "evaluation": 3.0, "checkpoint": 4.0}
    assert whole.total_seconds == 22.0
    assert whole.tokens_per_second == 2 * 32 / 3
    assert whole.device_hours == pytest.approx(44 / 3600)
    assert whole.money == pytest.approx(88 / 3600)
    assert whole.notes == (
        "2 devices are taken to share the work without loss: the run file has no [layout]",
        "micro_batch is not given, so each device is taken to hold all 4 sequences at once; "
        "--set recipe.micro_batch=1 splits them",
    )


def test_many_devices_are_billed_for_the_work_and_not_for_their_number():
    one, many = (run_time(run(price=2.0, count=count), 3600.0) for count in (1, 1024))
    assert one.total_seconds == 36000.0 == 1024 * many.total_seconds
    assert (one.device_hours, one.money) == (many.device_hours, many.money) == (10.0, 20.0)
    mfus = [forecast(run(count=count), ledger(), SHEET).mfu for count in (1, 1024)]
    assert mfus[0] == mfus[1]


def test_fewer_tokens_than_a_step_has_are_named():
    seen = forecast(run(steps=None, tokens=10), ledger(), SHEET)
    assert seen.tokens_per_step == 32
    assert "recipe.tokens = 10 is less than the 32 tokens of one step, which is the least that is trained" in seen.notes
    assert not [each for each in forecast(run(steps=None, tokens=33), ledger(), SHEET).notes if "less than" in each]


@pytest.mark.parametrize(("every", "times"), [(None, 1), (4, 3), (5, 2), (10, 1), (20, 1)])
def test_the_end_of_a_run_counts_once(every, times):
    assert evaluations(run(eval_every=every)) == checkpoints(run(checkpoint_every=every)) == times


def test_what_a_run_time_leaves_out_is_named():
    assert run_time(run(), 1.0).notes == (
        "evaluation is not in it: the step is not split by phase",
        "checkpoints are not in it: the storage was not measured",
    )
    assert run_time(run(), 1.0).money is None


def test_a_forecast_has_the_ledgers_figures_and_their_bases():
    seen = forecast(run(), ledger(), SHEET)
    assert (seen.parameters, seen.tokens_per_step, seen.kept_nbytes, seen.peak_nbytes) == (10, 32, 100, 220)
    assert seen.peak_by_category == {"parameters": 40, "optimizer state": 80, "activations": 100}
    assert seen.flops == {"matmul": 4 * 10**12}
    assert seen.step_seconds == pytest.approx(4.0)
    assert (seen.mfu, seen.hfu) == (pytest.approx(0.75), pytest.approx(1.0))
    assert seen.basis["flops"] == "exact"
    assert seen.basis["step_seconds"] == "bound"


def test_without_a_machine_there_are_sizes_and_a_sentence_but_no_times():
    seen = forecast(run(), ledger(), None)
    assert seen.step_seconds is seen.mfu is seen.total_seconds is None
    assert seen.peak_nbytes == 220
    assert "trainledger measure machine" in seen.notes[0]


def test_uncounted_operations_take_the_exactness_away():
    seen = forecast(run(), ledger(uncounted=(("odd.op", 1),)), None)
    assert seen.basis["flops"] == "assumed"
    assert "odd.op" in seen.notes[0]


def test_a_forecast_survives_its_file(tmp_path):
    for machine in (SHEET, None):
        seen = forecast(run(price=1.0), ledger(), machine)
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
