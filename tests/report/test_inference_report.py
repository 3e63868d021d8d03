"""A served model as it is printed."""

from __future__ import annotations

import json

import pytest

from trainledger.cli import main


def test_many_tokens_a_second_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt2", "--phase", "prefill", "--device", "a100-sxm-80gb", "--context", "1024", "--batch", "4"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    rates = [told["bound_tokens_per_second"], told["expected_tokens_per_second"]]
    rates += [each["bound_tokens_per_second"] for each in told["batches"]]
    assert min(rates) > 1e5
    for rate in rates:
        assert f" {rate:,.0f} " in out
    assert "e+" not in out
