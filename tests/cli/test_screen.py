"""Each answer fits a terminal: at most 35 lines of 80 columns, then what more there is."""

from __future__ import annotations

import pytest

from trainledger.cli import main

pytestmark = pytest.mark.sweep

MOST_LINES, COLUMNS = 35, 80
LAID_OUT = ["--device", "h100-sxm", "--count", "16", "--set", "layout.shard=16", "--set", "recipe.global_batch=64"]
ANSWERS = {
    "plan": ["plan", "llama-3-8b", *LAID_OUT, "--set", "recipe.tokens=1T", "--set", "cluster.price_per_device_hour=2"],
    "plan of one device": ["plan", "gpt2", "--device", "l4"],
    "plan without a device": ["plan", "gpt2"],
    "plan that does not fit": ["plan", "llama-3-70b", "--device", "l4"],
    "prefill": ["plan", "llama-3-8b", "--device", "h100-sxm", "--phase", "prefill"],
    "fit": ["fit", "llama-3-8b", "--device", "a100-sxm-40gb"],
    "breaks": ["breaks", "llama-3-8b", *LAID_OUT],
    "advise": ["advise", "llama-3-8b", *LAID_OUT],
    "layouts": ["layouts", "gpt2-xl", "--device", "h100-sxm", "--count", "8"],
    "loop": ["loop", "gpt2", "--set", "recipe.tokens=10B"],
    "compare": ["compare", "gpt2", "gpt2-xl", "--device", "h100-sxm"],
    "optimal": ["optimal", "--flops", "1e22"],
    "napkin": ["napkin", "--params", "70B", "--tokens", "15T", "--device", "h100-sxm", "--count", "64", "--mfu", "0.5"],
    "napkin of memory": ["napkin", "--device", "h100-sxm", "--count", "8"],
    "rules": ["rules", "llama-3-8b"],
    "explain memory": ["explain", "memory", "llama-3-8b", *LAID_OUT],
    "explain time": ["explain", "time", "llama-3-8b", *LAID_OUT],
    "explain flops": ["explain", "flops", "gpt2"],
    "explain parameters": ["explain", "parameters", "mixtral-8x7b"],
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_fits_a_screen_and_names_what_more_there_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(ANSWERS[name])
    short = capsys.readouterr().out.splitlines()
    assert len(short) <= MOST_LINES
    assert max(map(len, short)) <= COLUMNS
    assert any(line.startswith("More: --full (") for line in short[-3:])
    main([*ANSWERS[name], "--full"])
    full = capsys.readouterr().out.splitlines()
    assert len(full) > len(short)
    assert not any(line.startswith("More: --full") for line in full)
