"""What a plan says of MFU and HFU where causal attention, which is counted dense, is much of a step."""

import json

import pytest

import trainledger as tl
from trainledger.cli import main
from trainledger.ledger.conventions import attended_share
from trainledger.plan.plan import by_causal
from trainledger.questions import plan

LONG = ["plan", "llama-3.1-8b", "--device", "a100-sxm-80gb", "--set", "recipe.seq_len=131072"]
AGAIN = ["--set", "recipe.activation_checkpointing=full"]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return " ".join(capsys.readouterr().out.partition("What it costs")[2].partition("Where the time")[0].split())


def percent(text: str, before: str) -> float:
    return float(text.partition(before)[2].partition(" %")[0])


def test_hfu_above_the_peak_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    costs = said(capsys, *LONG, *AGAIN)
    assert percent(costs, "HFU ") > 100
    assert "both count causal attention dense; by the convention causal MFU is " in costs
    assert percent(costs, "causal MFU is ") < percent(costs, "by kernels HFU is ") < 100
    assert "makes kernel efficiency negative below" in costs


def test_the_causal_figure_is_that_of_the_convention(capsys: pytest.CaptureFixture[str]) -> None:
    beside = percent(said(capsys, *LONG, *AGAIN), "causal MFU is ")
    costs = said(capsys, *LONG, *AGAIN, "--convention", "causal")
    assert percent(costs, "; MFU ") == beside
    assert "both count" not in costs
    assert "HFU counts causal attention dense; by the convention kernels it is " in costs


def test_short_sequences_say_nothing_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "dense" not in said(capsys, "plan", "llama-3-8b", "--device", "a100-sxm-80gb")


def test_programs_are_always_told_and_half_of_attention_goes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3-8b", "--device", "a100-sxm-80gb", "--set", "recipe.activation_checkpointing=full"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    told, causal = found["forecast"], found["causal"]
    # (T + 1) / 2T of all pairs are left; recomputed attention goes by the same share as the first.
    attention, products = told["flops"]["attention"], told["flops"]["attention"] + told["flops"]["matmul"]
    gone = (1 - (8192 + 1) / (2 * 8192)) * attention / products
    assert causal["hfu"] == pytest.approx(told["hfu"] * (1 - gone))
    assert causal["mfu"] < told["mfu"]


def test_kernels_that_run_masked_pairs_keep_their_hfu() -> None:
    table = {
        "model": {"preset": "gpt2"}, "recipe": {"seq_len": 1024, "global_batch": 1, "steps": 1,
                                               "precision": "bf16-mixed"},
        "cluster": {"device": "a100-sxm-80gb"},
    }  # fmt: skip
    for kernel in ("efficient", "math"):
        made = plan(tl.load(table, {"recipe.attention": kernel}))
        found = by_causal(made)
        assert found is not None
        assert found.hfu == made.forecast.hfu
        assert found.mfu < made.forecast.mfu
        assert attended_share(made.run) == 1025 / 2048


def test_a_convention_that_changes_nothing_is_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    costs = said(capsys, "plan", "mistral-7b", "--device", "a100-sxm-80gb")  # its kernels run what a window masks
    assert "by the convention causal MFU is " in costs
    assert "kernels" not in costs
