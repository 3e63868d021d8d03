"""The budget's options by the names that a run file has for them."""

import json

import pytest

from trainledger.cli import main

pytestmark = pytest.mark.sweep

MONEY = ["optimal", "--money", "100k", "--family", "none", "--json"]


def answer_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(list(words)) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_field_of_a_run_file_is_the_option_that_it_stands_for(capsys: pytest.CaptureFixture[str]) -> None:
    by_option = answer_of(capsys, *MONEY, "--device", "a100-sxm-80gb", "--count", "64", "--price", "2.5")
    fields = ("cluster.device=a100-sxm-80gb", "cluster.count = 64", "cluster.price_per_device_hour=2.5")
    assert answer_of(capsys, *MONEY, *(word for each in fields for word in ("--set", each))) == by_option
    assert by_option["budget"]["device_hours"] == 40_000  # type: ignore[index]
    last = ("--price", "9", "--set", "cluster.price_per_device_hour=", "--device", "a100-sxm-80gb", "--count", "64")
    assert main([*MONEY, *last]) == 2
    assert "price: is missing" in capsys.readouterr().err


def test_a_length_of_sequences_is_taken_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["optimal", "--device", "a100-sxm-80gb", "--count", "1", "--days", "1", "--family", "gpt2", "--json"]
    found = answer_of(capsys, *words, "--set", "recipe.seq_len=2048")
    assert found["affordable"]["recipe"]["seq_len"] == 2048  # type: ignore[index]
    assert found == answer_of(capsys, *words, "--seq-len", "2048")


@pytest.mark.parametrize(
    ("given", "near"),
    [("cluster.price=3", "cluster.price_per_device_hour"), ("price_per_device_hour=3", "cluster.price_per_device_hour"),
     ("recipe.precision=fp8-block", None), ("nonsense", None)],
)  # fmt: skip
def test_other_fields_are_refused_with_those_that_there_are(capsys, given, near):
    assert main([*MONEY[:-1], "--device", "a100-sxm-80gb", "--set", given]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"--set = '{given}': is no field of a budget, which has cluster.device, cluster.count, ")
    assert err.endswith(f"; nearest that works: {near}\n" if near else "; layout and recipe are found here\n")
