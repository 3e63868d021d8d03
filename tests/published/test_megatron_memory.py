"""Megatron-LM's own peaks beside the account of their arguments: the bounds of the errors, and the page."""

from statistics import median

import pytest
from megatron_cases import LARGE, OF_EXPERTS, golden_values, read_cases
from megatron_page import page

pytestmark = pytest.mark.published


def test_peaks_of_dense_decoders_are_within_2_percent_in_the_median_and_5_in_nine_of_ten() -> None:
    predicted, _ = golden_values()
    errors = [abs(each.error) for each in predicted]
    dense = [abs(each.error) for each in predicted if not each.of_experts]
    assert len(dense) >= 200
    assert median(errors) <= 0.02
    assert median(dense) <= 0.01
    assert sum(each <= 0.05 for each in dense) >= 0.9 * len(dense)
    experts = [abs(each.error) for each in predicted if each.of_experts]
    assert len(experts) >= 65
    assert median(experts) <= 0.015


def test_peaks_above_8_gb_are_within_3_percent_in_the_median() -> None:
    large = [abs(each.error) for each in golden_values()[0] if each.measured > LARGE]
    assert len(large) >= 10
    assert median(large) <= 0.03


def test_most_decoders_are_predicted() -> None:
    known = {each.row["case"] for each in golden_values()[0]}
    every = {each["case"] for each in read_cases()}
    dense = {each for each in every if each.startswith("gpt/")}
    experts = {each for each in every if each.startswith(OF_EXPERTS)}
    assert len(known & dense) >= 0.85 * len(dense)
    assert len(known & experts) >= 0.95 * len(experts)


def test_what_is_exact_is_exact() -> None:
    """One stage, no other ranks of a model: nothing is left but small change, on three generations of devices."""
    alone = [
        each for each in golden_values()[0]
        if each.run.layout.tensor == each.run.layout.pipeline == each.run.layout.context == 1 and not each.of_experts
    ]  # fmt: skip
    assert {each.row["device"].partition("_")[0] for each in alone} == {"a100", "h100", "gb200"}
    for each in alone:
        assert abs(each.predicted - each.measured) < 7e6, each.row["case"]


def test_the_page_is_current() -> None:
    assert page().stale() == [], "run python tools/published/megatron_page.py"
