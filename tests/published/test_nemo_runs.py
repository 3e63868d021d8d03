"""NVIDIA's rows of NeMo: what was copied of them says the same twice, and the runs made of them can run."""

import pytest
from throughput_case import TimeCase
from throughput_nemo import blackwell_cases, fitted_nemo, nemo_cases, unseen_nemo

from trainledger.spec.rules.run import run_problems
from trainledger.spec.units import TERA

pytestmark = pytest.mark.published

# What NVIDIA divides by for the printed utilization, in 16 bits; twice that in 8.
PEAK = {"h100-sxm": 989.5 * TERA, "gb200": 2450 * TERA, "b200": 2250 * TERA}


def flops_per_token(case: TimeCase) -> float:
    """NVIDIA's FLOPs of a token (the notes of its recipes): 6 for each weight and 12 L h s, from 25.09 on half of it.

    Before 25.04 the recipes of Nemotron, and those of GPT-3, count keys and values as if all heads had their own.
    """
    model, length = case.run.model, case.run.recipe.seq_len
    L, h = model.n_layers, model.d_model
    row = case.row
    shared = row["source"] == "dgxc" and row["model"].startswith("Nemotron") and row["container"] < "25.04"
    pairs = 1 if shared else model.kv_heads / model.attention.n_heads
    seen = length / 2 if case.row["source"] == "bridge" else length
    vocab = 128256 if case.row["model"].startswith("LLAMA3") else model.vocab_size
    attention = 12 * L * h * h * (1 + pairs + seen / h)
    return float(attention + (18 if model.feed_forward.gated else 12) * L * model.feed_forward.d_ff * h + 6 * vocab * h)


def test_printed_rates_say_the_same_as_printed_times() -> None:
    for case in (*nemo_cases(), *blackwell_cases()):
        row = case.row
        tokens = case.run.recipe.tokens_per_step / case.seconds / case.run.layout.devices
        peak = PEAK[case.run.cluster.device] * (2 if row["precision"] == "fp8" else 1)
        printed = float(row["tflops"]) * TERA if row["tflops"] else float(row["mfu"]) / 100 * peak
        assert tokens * flops_per_token(case) == pytest.approx(printed, rel=0.012), row


def test_runs_are_what_the_row_says() -> None:
    cases = nemo_cases()
    assert len({each.name for each in cases}) == len(cases) == 169
    assert len({each.source for each in cases}) == 4
    blackwell = blackwell_cases()
    assert len({each.name for each in blackwell}) == len(blackwell) == 35
    assert len({each.source for each in blackwell}) == 4
    for case in (*cases, *blackwell):
        row, run = case.row, case.run
        assert run.layout.devices == int(row["gpus"]), row
        micro_batches = run.recipe.global_batch // (int(row["mbs"]) * run.layout.data_ranks)
        assert micro_batches == int(row["ga"]), row
        assert not list(run_problems(run)), row


def test_what_constants_are_fitted_on_is_apart_from_what_they_are_tried_on() -> None:
    fitted, unseen = fitted_nemo(), unseen_nemo()
    assert len(fitted) == 41
    assert {each.name for each in fitted} | {each.name for each in unseen} == {each.name for each in nemo_cases()}
    assert len(fitted) + len(unseen) == len(nemo_cases())
    assert all(each.row["container"] < "25" for each in fitted)
    for each in unseen:  # a later container, or a layout that is fitted on fewer devices
        alike = [other for other in fitted if (other.run.recipe.precision.kind, other.run.model) == (
            each.run.recipe.precision.kind, each.run.model)]  # fmt: skip
        assert each.row["container"] > "25" or any(
            other.run.layout.devices < each.run.layout.devices for other in alike
        ), each.name
