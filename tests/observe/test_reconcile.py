from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.answers.pages.reconciliation import page, table_of
from trainledger.forecast.predict.forecast import Forecast
from trainledger.ledger.entry import CATEGORIES, Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.measured import EagerBytes, Measured, Spread
from trainledger.observe.reconcile import Part, Reconciliation, Row, reconcile

nbytes = st.integers(0, 2**50)
seconds = st.floats(1e-6, 1e6)
by_category = st.dictionaries(st.sampled_from(CATEGORIES), nbytes)
phases = st.dictionaries(st.sampled_from(["data", "forward", "backward", "recompute", "optimizer", "other"]), seconds)


@st.composite
def forecasts(draw):
    return Forecast(
        parameters=draw(nbytes),
        tokens_per_step=draw(st.integers(1, 10**7)),
        flops=draw(st.dictionaries(st.sampled_from(["matmul", "attention", "norm"]), nbytes)),
        model_flops=draw(nbytes),
        kept_nbytes=draw(nbytes),
        kept_by_kind=draw(st.dictionaries(st.sampled_from(["matmul", "norm"]), nbytes)),
        peak_nbytes=draw(nbytes),
        peak_by_category=draw(by_category),
        step_seconds=draw(seconds),
        step_seconds_by_phase=draw(phases),
        tokens_per_second=draw(seconds),
        total_seconds=draw(st.none() | seconds),
        seconds_by_phase=draw(phases),
        mfu=draw(st.floats(0.0, 1.0)),
        peak_flops_per_second=draw(st.none() | st.floats(1e9, 1e15)),
        devices=draw(st.integers(1, 10**5)),
    )


@st.composite
def measurements(draw):
    median = draw(seconds)
    return Measured(
        parameters=draw(nbytes),
        flops=draw(st.dictionaries(st.sampled_from(["matmul", "attention", "norm"]), nbytes)),
        model_flops=draw(nbytes),
        kept_nbytes=draw(nbytes),
        kept_by_kind=draw(st.dictionaries(st.sampled_from(["matmul", "norm"]), nbytes)),
        peak_nbytes=draw(nbytes),
        peak_by_category=draw(by_category),
        allocator_peak_nbytes=draw(st.none() | nbytes),
        step_seconds=Spread(median=median, low=median, high=median, count=1),
        step_seconds_by_phase=draw(phases),
        tokens_per_second=draw(st.none() | seconds),
        total_seconds=draw(st.none() | seconds),
        seconds_by_phase=draw(phases),
    )


@given(forecasts(), measurements())
def test_parts_and_the_unexplained_rest_sum_to_the_difference_exactly(predicted, measured):
    for row in reconcile(predicted, measured).rows:
        if row.measured is None or row.predicted is None:
            assert row.unexplained is None
            continue
        listed = sum((Fraction(each.measured) - Fraction(each.predicted) for each in row.parts), Fraction())
        assert listed + row.unexplained == Fraction(row.measured) - Fraction(row.predicted)


def test_a_part_of_which_next_to_nothing_was_predicted_has_a_ratio():
    row = Row("step_seconds", "step time", "seconds", 1.0, 2.0, parts=(Part("other", 5e-324, 1.0),))
    assert table_of(Reconciliation((row,))).rows[1][3] == "over 1,000"


def test_the_measured_mfu_is_of_all_devices_of_the_forecast():
    predicted = Forecast(model_flops=800, step_seconds=1.0, mfu=0.5, peak_flops_per_second=200.0, devices=8)
    measured = Measured(step_seconds=Spread(median=2.0, low=2.0, high=2.0, count=1))
    assert reconcile(predicted, measured)["mfu"].measured == 0.25
    assert [each.field for each in Forecast(devices=0).problems()] == ["devices"]


@given(forecasts(), measurements())
def test_the_json_form_of_whole_quantities_balances_in_integers(predicted, measured):
    for row in page(reconcile(predicted, measured)).data()["rows"]:
        if row["unit"] in ("nbytes", "flops", "count") and row["difference"] is not None:
            assert all(type(each["difference"]) is int for each in row["parts"])
            assert sum(each["difference"] for each in row["parts"]) + row["unexplained"] == row["difference"]


def test_a_difference_that_no_category_holds_is_unexplained():
    predicted = Forecast(peak_nbytes=100, peak_by_category={"parameters": 60, "activations": 40})
    measured = Measured(peak_nbytes=130, peak_by_category={"parameters": 60, "activations": 45})
    row = reconcile(predicted, measured)["peak_nbytes"]
    assert (row.difference, row.unexplained, row.where) == (30, 25, ("unexplained", 25))
    assert row.ratio == pytest.approx(1.3)


def test_the_part_with_the_largest_difference_is_named():
    predicted = Forecast(step_seconds=1.0, step_seconds_by_phase={"forward": 0.25, "backward": 0.5, "recompute": 0.25})
    spread = Spread(median=1.5, low=1.4, high=1.6, count=9)
    measured = Measured(step_seconds=spread, step_seconds_by_phase={"forward": 0.25, "backward": 1.0, "data": 0.125})
    row = reconcile(predicted, measured)["step_seconds"]
    assert [each.name for each in row.parts] == ["forward", "backward", "data"]  # recomputation is part of backward
    assert row.where == ("backward", Fraction(1, 4))
    assert row.unexplained == Fraction(1, 8)


def test_scratch_of_the_library_is_the_allocators_unexplained_rest():
    measured = Measured(peak_nbytes=110, allocator_peak_nbytes=117)
    row = reconcile(Forecast(peak_nbytes=100), measured)["allocator_peak_nbytes"]
    assert (row.predicted, row.measured, row.unexplained) == (100, 117, 7)


def test_sums_inside_of_matmuls_are_a_part_of_the_allocators_peak():
    measured = Measured(peak_nbytes=110, allocator_peak_nbytes=117, matmul_sums_nbytes=5)
    row = reconcile(Forecast(peak_nbytes=100), measured)["allocator_peak_nbytes"]
    assert [(each.name, each.difference) for each in row.parts] == [
        ("dispatched", 10),
        ("sums inside of bf16 matmuls", 5),
    ]
    assert row.unexplained == 2


def test_a_step_metered_without_compile_is_set_beside_the_account_of_eager_operations():
    eager = EagerBytes(
        kept_nbytes=50, kept_by_kind={"norm": 50}, peak_nbytes=110, peak_by_category={"activations": 110}
    )
    measured = Measured(
        kept_nbytes=50, kept_by_kind={"norm": 50}, peak_nbytes=111, peak_by_category={"activations": 111},
        allocator_peak_nbytes=103, eager=eager,
    )  # fmt: skip
    found = reconcile(Forecast(kept_nbytes=40, peak_nbytes=100), measured)
    kept, peak, allocator = (found[each] for each in ("kept_nbytes", "peak_nbytes", "allocator_peak_nbytes"))
    assert (kept.predicted, kept.measured, kept.where) == (50, 50, None)
    assert (peak.predicted, peak.measured, peak.where) == (110, 111, ("activations", 1))
    # The other steps are compiled: their peak is that of the forecast, but for what the metered one differs by.
    assert (allocator.predicted, allocator.measured) == (100, 103)
    assert (allocator.parts[0].difference, allocator.unexplained) == (1, 2)


def test_lower_mfu_is_the_step_time_and_the_flops():
    predicted = Forecast(model_flops=800, step_seconds=1.0, mfu=0.5, peak_flops_per_second=1600.0)
    measured = Measured(model_flops=1000, step_seconds=Spread(median=2.0, low=2.0, high=2.0, count=1))
    row = reconcile(predicted, measured)["mfu"]
    assert row.measured == 1000 / (2 * 1600)
    assert {each.name: float(each.difference) for each in row.parts} == {"step time": -0.25, "model FLOPs": 0.0625}


def test_without_a_peak_there_is_no_mfu():
    measured = Measured(model_flops=10, step_seconds=Spread(median=2.0, low=2.0, high=2.0, count=1))
    assert reconcile(Forecast(model_flops=10), measured)["mfu"].measured is None


@pytest.mark.parametrize(
    ("peak", "notes", "said"),
    [(None, (), 1), (None, ("not measured yet; run `trainledger measure machine` once",), 1), (1600.0, (), 0)],
)
def test_an_unknown_mfu_names_the_command_that_makes_it_known_once(peak, notes, said):
    measured = Measured(model_flops=10, step_seconds=Spread(median=2.0, low=2.0, high=2.0, count=1))
    found = page(reconcile(Forecast(model_flops=10, peak_flops_per_second=peak, notes=notes), measured))
    assert str(found.sections).count("trainledger measure machine") == said


def test_nothing_measured_gives_rows_without_a_verdict():
    rows = reconcile(Forecast(parameters=3, step_seconds=1.0), Measured()).rows
    assert all(isinstance(each, Row) and each.measured is None and each.ratio is None for each in rows)


def test_ledgers_reconcile_in_what_they_hold():
    entry = Entry(
        "mm", "block.0", "forward", "matmul", flops=100, model_flops=100, kept=8, allocated=(("activations", 8),)
    )
    one = Ledger((entry,), resident=(("parameters", 40),), parameters=10, tokens=4)
    other = Ledger((entry, entry), resident=(("parameters", 40),), parameters=10, tokens=4)
    result = reconcile(one, other)
    assert (result["parameters"].difference, result["flops"].difference) == (0, 100)
    assert result["flops"].where == ("matmul", 100)
    assert result["peak_nbytes"].parts[-1].difference == 8


def test_a_machine_that_was_measured_since_the_run_is_said_to_be(tmp_path, monkeypatch):
    forecast = Forecast(notes=("no step time: this machine was not measured yet; run `trainledger measure machine`",))
    monkeypatch.setenv("TRAINLEDGER_CALIBRATION", str(tmp_path / "machine.toml"))
    assert "was measured since" not in str(page(reconcile(forecast, Measured())).sections)
    (tmp_path / "machine.toml").touch()
    assert "This machine was measured since then" in str(page(reconcile(forecast, Measured())).sections)
