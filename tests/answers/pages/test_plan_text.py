"""What a plan says of MFU and HFU where causal attention, which is counted dense, is much of a step."""

import json
from itertools import product

import pytest

import trainledger as tl
from trainledger.answers.plan import page, plan
from trainledger.cli import main
from trainledger.forecast.plan.plan import by_causal
from trainledger.ledger.rules_of_thumb import CONVENTIONS, attended_share
from trainledger.spec.optimizers import IMPLEMENTATIONS, OPTIMIZERS

LONG = ["plan", "llama-3.1-8b", "--device", "a100-sxm-80gb", "--set", "recipe.seq_len=131072"]
AGAIN = ["--set", "recipe.activation_checkpointing=full"]


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """What it costs; most plans here do not fit on their one device, which is code 2."""
    assert main(list(words)) == code
    return " ".join(capsys.readouterr().out.partition("Where the time")[0].split())


def percent(text: str, before: str) -> float:
    return float(text.partition(before)[2].partition(" %")[0])


def test_hfu_above_the_peak_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    costs = said(capsys, *LONG, *AGAIN)
    assert percent(costs, "HFU ") > 100
    assert "attention counted dense; " in costs
    assert percent(costs, "counted dense; ") < percent(costs, "of what the kernels run it is ") < 100
    assert "make kernel efficiency negative below" in costs


def test_the_causal_figure_is_that_of_the_convention(capsys: pytest.CaptureFixture[str]) -> None:
    beside = percent(said(capsys, *LONG, *AGAIN), "counted dense; ")
    costs = said(capsys, *LONG, *AGAIN, "--convention", "causal")
    assert percent(costs, "; MFU ") == beside
    assert "counted dense" not in costs
    assert "HFU counts attention dense too; of what the kernels run it is " in costs


def test_short_sequences_say_nothing_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    costs = said(capsys, "plan", "llama-3-8b", "--device", "a100-sxm-80gb", "--set", "recipe.seq_len=1024")
    assert "dense" not in costs


def test_programs_are_always_reported_and_half_of_attention_goes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3-8b", "--device", "a100-sxm-80gb", "--set", "recipe.activation_checkpointing=full"]
    assert main([*words, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    shown, causal = found["forecast"], found["causal"]
    # (T + 1) / 2T of all pairs are left; recomputed attention goes by the same share as the first.
    attention, matmuls = shown["flops"]["attention"], shown["flops"]["attention"] + shown["flops"]["matmul"]
    gone = (1 - (8192 + 1) / (2 * 8192)) * attention / matmuls
    assert causal["hfu"] == pytest.approx(shown["hfu"] * (1 - gone))
    assert causal["mfu"] < shown["mfu"]


def test_of_layers_with_and_without_a_mask_only_these_leave_pairs_out() -> None:
    table = {
        "model": {"preset": "gemma-3-12b"}, "recipe": {"seq_len": 4096, "global_batch": 1, "steps": 1,
                                                      "precision": "bf16-mixed"},
        "cluster": {"device": "h100-sxm"},
    }  # fmt: skip
    run = tl.load(table)
    ledger = tl.account(run)
    whole = [each for each in ledger if each.kind == "attention" and each.shape[-1]]
    assert {each.name.removesuffix("_backward") for each in whole} == {"_scaled_dot_product_cudnn_attention"}
    left_out = sum(each.flops * each.times for each in whole) * (1 - 4097 / 8192)
    assert CONVENTIONS["kernels"].flops(run, ledger) == pytest.approx(ledger.matmul_flops - left_out)


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


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "h100-sxm"])
def test_a_convention_that_changes_nothing_is_not_named(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    costs = said(capsys, "plan", "mistral-7b", "--device", device)  # its kernels run what a window masks
    assert "attention counted dense; " in costs
    assert "what the kernels run" not in costs


WAITING = {
    "model": {"preset": "gpt2"},
    "recipe": {"seq_len": 1024, "global_batch": 64, "micro_batch": 8, "tokens": "1B", "precision": "bf16-mixed"},
    "cluster": {"device": "h100-sxm", "loader_tokens_per_second": 10_000},
}


def test_a_run_that_waits_for_tokens_says_its_own_speed_too(capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(tl.load(WAITING))
    forecast, free = made.forecast, tl.predict(tl.load(WAITING, {"cluster.loader_tokens_per_second": 10**9}))
    assert (forecast.tokens_per_second, forecast.step_seconds, forecast.mfu) == (
        free.tokens_per_second, free.step_seconds, free.mfu
    )  # fmt: skip
    assert (free.run_tokens_per_second, free.run_step_seconds) == (free.tokens_per_second, free.step_seconds)
    assert forecast.run_tokens_per_second == pytest.approx(10_000)
    assert forecast.run_step_seconds == pytest.approx(64 * 1024 / 10_000)
    assert forecast.run_step_seconds * made.run.recipe.total_steps == pytest.approx(
        forecast.seconds_by_phase["data"] + made.run.recipe.total_steps * forecast.step_seconds
    )
    said = " ".join(str(made).split())
    assert f" {forecast.tokens_per_second:,.0f} tokens/s; MFU " in said
    assert " with the wait for tokens 10,000 tokens/s; MFU " in said
    assert ", 6.554 s with the wait for tokens; goodput " in said
    assert "with the wait" not in str(plan(tl.load(WAITING, {"cluster.loader_tokens_per_second": 10**9})))


def test_of_one_step_the_wait_is_said_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt2", "--device", "h100-sxm", "--set", "cluster.loader_tokens_per_second=1000"]
    costs = said(capsys, *words, code=0)
    assert ", 1.024 s with the wait for tokens" in costs
    assert main([*words, "--json"]) == 0
    forecast = json.loads(capsys.readouterr().out)["forecast"]
    assert (forecast["run_step_seconds"], forecast["run_tokens_per_second"]) == (1.024, 1000.0)


@pytest.mark.parametrize("name", ["gpt2-xl", "deepseek-v3"])
def test_the_middle_stage_of_a_plan_is_the_one_of_highest_peak(name):
    layout = {"layout.pipeline": "6", "layout.schedule": "1f1b"} if name == "gpt2-xl" else {"layout.pipeline": "61"}
    found = plan(name, {**layout, "cluster.count": layout["layout.pipeline"], "recipe.global_batch": "32"})
    *_, shown = [
        part for each in found.document().sections for part in each.parts if getattr(part, "name", "") == "memory"
    ]
    peaks = [each.ledger.peak().nbytes for each in found.ranks]
    assert [row[-1] for row in shown.rows] == [peaks[0], max(peaks[1:-1]), peaks[-1]]


@pytest.mark.parametrize(("kind", "implementation"), [*product(OPTIMIZERS, ("loop", "fused"))])
def test_the_update_of_an_unfused_implementation_is_not_passed_off_as_that_of_the_method(kind, implementation):
    if implementation not in IMPLEMENTATIONS[kind]:
        return
    optimizer = {"recipe.optimizer": kind, "recipe.optimizer.implementation": implementation}
    found = tl.plan("gpt2", {"recipe.seq_len": 128, **optimizer}, device="h100-sxm")
    said = "of an unfused" in str(page(found).sections)
    assert said == (kind.endswith("-8bit") and implementation == "loop")
    if said:
        fused = tl.plan(found.run, {"recipe.optimizer.implementation": "fused"})
        assert fused.forecast.step_seconds_by_phase["optimizer"] < found.forecast.step_seconds_by_phase["optimizer"]
