"""A served model as it is printed."""

from __future__ import annotations

import json

import pytest

from trainledger.cli import main


def test_many_tokens_a_second_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt2", "--phase", "prefill", "--device", "a100-sxm-80gb", "--context", "1024", "--batch", "4"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert main([*words, "--full"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    rates = [answer["bound_tokens_per_second"], answer["expected_tokens_per_second"]]
    rates += [each["bound_tokens_per_second"] for each in answer["batches"]]
    assert min(rates) > 1e5
    for rate in rates:
        assert f" {rate:,.0f} " in out
    assert "e+" not in out


def test_the_most_that_is_tried_is_not_called_the_largest_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "teach-1m", "--phase", "decode", "--device", "h100-sxm", "--context", "1", "--full"]) == 0
    assert "A batch of 1,048,576 fits; larger ones are not tried." in capsys.readouterr().out
