"""The napkin: published examples, and that each unknown solved for satisfies the equation of the others."""

import csv
import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import trainledger as tl
from trainledger import catalog
from trainledger.cli import main
from trainledger.forecast.plan.napkin import UNKNOWNS, headline, largest_models, napkin
from trainledger.ledger import rules_of_thumb as rules
from trainledger.spec.problem import InvalidInput

with open(Path(__file__).parents[3] / "tools/published" / "worked_examples.csv", newline="", encoding="utf-8") as file:
    EXAMPLES = {row["id"]: row for row in csv.DictReader(file)}

WORKED = {"params": "70B", "tokens": "15T", "device": "h100-sxm", "count": 1024, "mfu": 0.5}


def test_the_worked_example_of_70b_on_15t_tokens():
    answer = napkin(**WORKED)
    low, high = EXAMPLES["days_70b"]["published_value"].split(" to ")
    assert float(low) <= answer.days <= float(high)
    assert f"{answer.days:.1f}" == "143.9"
    assert answer.flops == 63 * 10**23
    assert answer.static_nbytes["fp32-adamw"] == 1120 * 10**9
    assert answer.devices_for_static["fp32-adamw"] == 14
    assert answer.device_hours == pytest.approx(1024 * 143.93 * 24, rel=1e-4)
    assert headline(answer) == "70B parameters, 15T tokens, 1,024 x h100-sxm at 50.0 % MFU (6 N D): 143.9 days"


def test_the_same_run_in_88_days_needs_an_mfu_that_nobody_reached():
    answer = napkin(**{**WORKED, "mfu": None, "days": 88})
    assert answer.mfu == pytest.approx(0.82, abs=0.005)
    assert answer.remarks[0] == "Not plausible: 81.8 % MFU is more than the highest published, about 72.0 %."
    faster = napkin(**{**WORKED, "mfu": None, "days": 44})
    assert faster.remarks[0] == "Impossible: it needs 163.6 % of the peak."


def test_32_h100_for_two_weeks_at_20_tokens_per_parameter():
    answer = napkin(tokens="20x", device="h100-sxm", count=32, mfu=0.5, days="2w")
    assert answer.params == pytest.approx(float(EXAMPLES["fit_32h100_2w"]["our_value"].replace("e9", "e9")), rel=1e-3)
    assert answer.tokens == pytest.approx(252.7e9, rel=1e-3)
    assert answer.solved == "params"


def test_twenty_tokens_per_parameter_where_the_parameters_are_known():
    answer = napkin(params="1B", tokens="20x", device="h100-sxm", count=8, mfu=0.5)
    assert (answer.tokens, answer.solved) == (20 * 10**9, "days")


def test_8_h100_at_50_percent():
    answer = napkin(params="1.28B", tokens="300B", device="h100-sxm", count=8, mfu=0.5)
    assert answer.days == pytest.approx(float(EXAMPLES["days_1_28b"]["our_value"]), rel=2e-3)


def test_a_bill():
    answer = napkin(**WORKED, price=2)
    assert answer.money == pytest.approx(2 * answer.device_hours)
    assert napkin(**WORKED).money is None


QUANTITIES = {
    "params": st.integers(10**5, 10**13), "tokens": st.integers(10**6, 10**15), "count": st.integers(1, 10**6),
    "days": st.floats(0.01, 10**5), "mfu": st.floats(0.01, 1),
}  # fmt: skip


@given(st.sampled_from(UNKNOWNS), st.fixed_dictionaries(QUANTITIES), st.sampled_from(catalog.device_names()))
def test_each_unknown_solved_for_satisfies_the_equation(unknown, values, device):
    given_values = {name: value for name, value in values.items() if name != unknown}
    try:
        answer = napkin(device=device, **given_values)
    except InvalidInput as error:
        assume("less than one" not in str(error))
        raise
    done = answer.count_exact * answer.peak_flops_per_second * answer.mfu * answer.days * 86400
    rounding = 0.5 / answer.params + 0.5 / answer.tokens  # parameters and tokens are whole
    assert done == pytest.approx(6 * answer.params * answer.tokens, rel=1e-9 + rounding)
    assert answer.solved == unknown
    assert {name: getattr(answer, name) for name in given_values} == given_values
    assert answer.count >= answer.count_exact * (1 - 1e-9)
    assert answer.count < answer.count_exact + 1
    json.dumps(answer.document().data(), allow_nan=False)


@given(st.fixed_dictionaries(QUANTITIES), st.sampled_from(UNKNOWNS))
def test_solving_for_what_was_left_out_gives_it_back(values, unknown):
    """Days from the other four, then each of the four from days and the rest."""
    whole = napkin(device="h100-sxm", **{**values, "days": None})
    assume(unknown != "days" and 1e-6 <= whole.days <= 1e18)
    again = napkin(device="h100-sxm", **{**values, "days": whole.days, unknown: None})
    found = again.count_exact if unknown == "count" else getattr(again, unknown)
    assert found == pytest.approx(values[unknown], rel=1e-6)


def test_every_state_is_counted_and_rounded_up_to_whole_devices():
    answer = napkin(**WORKED)
    memory = catalog.device("h100-sxm").memory_nbytes
    assert set(answer.static_nbytes) == set(rules.STATES)
    for name, nbytes in answer.static_nbytes.items():
        devices = answer.devices_for_static[name]
        assert (devices - 1) * memory < nbytes <= devices * memory


def test_a_device_without_bf16_counts_at_fp16_and_says_so():
    answer = napkin(params="1B", tokens="20x", device="v100-sxm-16gb", count=8, mfu=0.4)
    assert (answer.dtype, answer.peak_flops_per_second) == ("fp16", 125e12)
    assert any("no bf16 matrix units" in each for each in answer.remarks)


def test_static_state_that_does_not_fit_is_said():
    answer = napkin(params="70B", tokens="1T", device="h100-sxm", count=8, mfu=0.4)
    assert "At 16 bytes per parameter the static state alone needs 14 of these devices, not 8." in answer.remarks


ONE = "napkin: needs all of params, tokens, count, days, mfu but one, which is solved for; "


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({"mfu": None}, [ONE + "left out: days, mfu"]),
        ({"mfu": None, "params": None}, [ONE + "left out: params, days, mfu"]),
        ({"days": 5}, [ONE + "all five are given"]),
        ({"mfu": 50}, ["mfu = 50: is a share of the peak, above 0 and at most 1; nearest that works: 0.5"]),
        ({"mfu": "120%"}, ["mfu = '120%': is a share of the peak, above 0 and at most 1; nearest that works: 1"]),
        ({"mfu": 0}, ["mfu = 0: must be between 1e-06 and 1; nearest that works: 1e-06"]),
        ({"mfu": "-1"}, ["mfu = '-1': must be between 1e-06 and 1; nearest that works: 1e-06"]),
        ({"mfu": 200}, ["mfu = 200: is a share of the peak, above 0 and at most 1; nearest that works: 1"]),
        ({"mfu": "0,5"}, ["mfu = '0,5': is not a number; write it like 0.5, \"3e-4\" or \"50%\"; "
                          "a comma only parts thousands, as in 4,096; nearest that works: 0.5"]),
        ({"mfu": float("nan")}, ["mfu = nan: must be a finite number"]),
        ({"params": "70Q"}, ["params = '70Q': is not a count; write it like 4096, \"1e9\" or \"15T\""]),
        ({"params": -5}, ["params = -5: must be at least 1; nearest that works: 1"]),
        ({"count": 1.5}, ["count = 1.5: must be a whole number; nearest that works: 2"]),
        ({"count": True}, ["count = true: must be a finite number"]),
        ({"tokens": "0x"}, ["tokens = '0x': tokens per parameter are written like \"20x\"; nearest that works: 20x"]),
        ({"price": -1}, ["price = -1: must be at least 0; nearest that works: 0"]),
        ({"dtype": "fp64"}, ["dtype = 'fp64': h100-sxm has no known peak for it; known: fp32, tf32, fp16, bf16, fp8"]),
        ({"device": "h10-sxm"}, ["device = 'h10-sxm': is not in the catalog; nearest that works: h100-sxm"]),
        ({"params": "x", "count": 0}, ["params = 'x': is not a count; write it like 4096, \"1e9\" or \"15T\"",
                                      "count = 0: must be at least 1; nearest that works: 1"]),
    ],
)  # fmt: skip
def test_wrong_input_is_sentences(changes, sentences):
    with pytest.raises(InvalidInput) as caught:
        napkin(**{**WORKED, **changes})
    assert [str(each) for each in caught.value.problems] == sentences


@given(st.integers(1, 10**13), st.integers(1, 10**6), st.floats(0.01, 1e4))
def test_the_largest_model_fits_and_one_parameter_more_does_not(memory, count, each):
    for answer in (
        largest_models(memory=memory, count=count),
        largest_models(memory=memory, count=count, bytes_per_param=each),
    ):
        for name, params in answer.params.items():
            exact = Fraction(answer.bytes_per_parameter[name])
            assert params * exact <= count * memory < (params + 1) * exact
            assert answer.params_of_one[name] * exact <= memory < (answer.params_of_one[name] + 1) * exact


def test_the_largest_model_is_what_the_static_state_of_the_napkin_fills():
    found = tl.napkin(device="h100-sxm", count=8)
    assert (found.params["fp32-adamw"], found.params["bf16-fp32-moments-adamw"]) == (40 * 10**9, 53_333_333_333)
    assert found.params_of_one["fp32-adamw"] == 5 * 10**9
    assert set(found.params) == set(rules.STATES)
    for name, params in found.params.items():
        answer = napkin(params=params, tokens="20x", device="h100-sxm", count=8, mfu=0.5)
        assert answer.devices_for_static[name] == 8
        more = napkin(params=params + 8, tokens="20x", device="h100-sxm", count=8, mfu=0.5)
        assert more.devices_for_static[name] == 9
    by_text = tl.napkin(memory="80GB", count=8)
    assert (by_text.params, by_text.device) == (found.params, None)
    assert tl.napkin(memory="24GB", count=4, bytes_per_param="16").params == {"given": 6 * 10**9}


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        ({"memory": "80GB", "tokens": "1T", "days": 3},
         ["tokens = '1T': has no part in the largest model that memory holds, which leaves time out",
          "days = 3: has no part in the largest model that memory holds, which leaves time out"]),
        ({"memory": "80 apples"},
         ["memory = '80 apples': is not a number of bytes; write it like \"80GB\" or \"1GiB\""]),
        ({"bytes_per_param": 4}, ["memory: is missing, and no device is given that has one; nearest that works: 80GB"]),
        ({"memory": "1GB", "bytes_per_param": 0, "count": 0},
         ["count = 0: must be at least 1; nearest that works: 1",
          "bytes_per_param = 0: must be between 0.01 and 1,000,000; nearest that works: 0.01"]),
        ({"device": "h10-sxm", "count": 2},
         ["device = 'h10-sxm': is not in the catalog; nearest that works: h100-sxm"]),
        ({}, ["device: is missing; only with memory there need be none; nearest that works: h100-sxm"]),
    ],
)  # fmt: skip
def test_wrong_input_about_the_largest_model_is_sentences(words, sentences):
    with pytest.raises(InvalidInput) as caught:
        tl.napkin(**words)
    assert [str(each) for each in caught.value.problems] == sentences


def test_the_largest_model_on_the_command_line(capsys):
    assert main(["napkin", "--memory", "80GB", "--count", "8", "--bytes-per-param", "12"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("8 devices of 80 GB hold at most 53.33B parameters at 12 bytes each\n")
    assert "= 8 x 80 GB / 12 B = 5.333e10" in printed
    assert main(["napkin", "--device", "h100-sxm", "--count", "8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["params"]["fp32-adamw"], answer["memory_nbytes"]) == (40 * 10**9, 80 * 10**9)


def test_a_budget_too_small_for_one_parameter():
    with pytest.raises(InvalidInput, match="afford less than one of params"):
        napkin(tokens=10**18, device="t4", count=1, days=1e-6, mfu=0.01)


def test_a_bad_calibration_is_named(tmp_path, monkeypatch):
    path = tmp_path / "machine.toml"
    path.write_text('format = 2\ntitle = "x"\n')
    monkeypatch.setenv("TRAINLEDGER_CALIBRATION", str(path))
    with pytest.raises(InvalidInput) as caught:
        napkin(**{**WORKED, "device": "this-machine"})
    assert f"{path}: kernels: is missing" in str(caught.value).splitlines()


def test_the_headline_speaks_of_one_day_and_of_long_times():
    day = napkin(device="t4", params=65 * 10**12 // 6 + 1, tokens=86400, count=1, mfu=1)
    assert headline(day).endswith("at 100.0 % MFU (6 N D): 1 day")
    assert headline(napkin(params="1e18", tokens="1e18", device="t4", count=1, mfu=1)).startswith("1e18 parameters, ")


def test_this_machine_must_have_been_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRAINLEDGER_CALIBRATION", raising=False)
    with pytest.raises(InvalidInput, match="was not measured yet; `trainledger measure machine` does it"):
        napkin(**{**WORKED, "device": "this-machine"})


def test_a_napkin_is_one_line_and_prints_as_its_document():
    answer = napkin(params="70B", tokens="15T", device="h100-sxm", count=1024, mfu="50%")
    line = "Napkin(70B parameters, 15T tokens, 1,024 x h100-sxm at 50.0 % MFU (6 N D): 143.9 days)"
    assert repr(answer) == line
    assert str(answer).startswith(f"{line.removeprefix('Napkin(').removesuffix(')')}\n\n")
    assert len(answer.records("static state")) == len(answer.static_nbytes)


@pytest.mark.parametrize(
    "words",
    [
        ["napkin", "--params", "70B", "--tokens", "15T", "--device", "h100-sxm", "--count", "1024"],
        ["plan", "gpt2", "--device", "h100-sxm"],
        ["optimal", "--device", "h100-sxm", "--money", "100000", "--price", "2"],
    ],
)
def test_a_share_takes_percent(words, capsys):
    assert main([*words, "--mfu", "50%", "--json"]) == 0
    percent = capsys.readouterr().out
    assert main([*words, "--mfu", "0.5", "--json"]) == 0
    assert capsys.readouterr().out == percent
    assert main([*words, "--mfu", "50"]) == 2
    assert "is a share of the peak, above 0 and at most 1; nearest that works: 0.5" in capsys.readouterr().err
