"""What stands side by side: ranges of formats, one matmul in two formats, optimizers by bytes per parameter."""

import re

import pytest

from trainledger.answers.pages.optimizer import optimizers_table
from trainledger.ledger.rules_of_thumb import STATES
from trainledger.web import answers
from trainledger.web.calculators import CALCULATORS
from trainledger.web.field import read_query
from trainledger.web.run import without_search


def drawing(name: str, query: dict[str, str], start: str) -> dict:
    return next(each for each in answers.view(name, query)["drawings"] if each["title"].startswith(start))


def rows_of(table: str) -> list[list[str]]:
    return [re.findall(r"<t[dh][^>]*>([^<]*)<", row) for row in table.split("<tr>")[2:]]


def test_five_formats_have_their_ranges_and_what_each_is_for() -> None:
    shown = drawing("formats", {"value": "0.1"}, "How far")
    rows = {row[0]: row for row in rows_of(shown["table"])}
    assert list(rows) == ["fp32", "bf16", "fp16", "e4m3", "e5m2"]
    assert rows["fp16"][3] == "65504"
    assert rows["e4m3"][3] == "448"
    assert "gradients need a scaled loss" in rows["fp16"][5]
    assert "gradients need a scaled loss" in shown["svg"]
    assert (
        list({row[0]: 0 for row in rows_of(drawing("formats", {"format": "e2m1"}, "How far")["table"])})[-1] == "e2m1"
    )


def test_a100_and_h100_stand_side_by_side_in_fp32_and_bf16() -> None:
    query = dict(CALCULATORS["matmul"].presets["A100 and H100 in fp32 and bf16"])
    rows = rows_of(drawing("matmul", query, "The same in")["table"])
    assert [(row[0], row[1]) for row in rows] == [
        (device, dtype) for device in ("NVIDIA A100 SXM 80GB", "NVIDIA H100 SXM 80GB") for dtype in ("fp32", "bf16")
    ]
    assert [row[4] for row in rows] == ["19.5 TFLOP/s", "312 TFLOP/s", "67 TFLOP/s", "989.5 TFLOP/s"]  # data sheets
    at_least = [float(row[2].split(" ")[0]) for row in rows]
    assert at_least[0] == pytest.approx(2 * 4096**3 / 19.5e12 * 1e3, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("adamw", "fp32-adamw"), ("momentum", "fp32-momentum"), ("lion", "fp32-lion"), ("sgd", "fp32-sgd")],
)
def test_bytes_per_parameter_of_optimizers_are_those_of_the_rules(kind: str, rule: str) -> None:
    calculator = CALCULATORS["memory"]
    run = without_search(read_query(calculator.fields, {"recipe.global_batch": "1"}, any_of_run=True))
    rows = {row[0]: row for row in optimizers_table(run.model, run.recipe).rows}
    assert rows[kind][-2] == pytest.approx(sum(STATES[rule].terms.values()), abs=0.01)
    assert rows["adamw"][-1] == pytest.approx(16 * 8_030_261_248, rel=1e-6)


def test_optimizers_of_another_precision_have_a_master_copy() -> None:
    def rows(precision: str) -> dict[str, list[str]]:
        sections = answers.view("memory", {"recipe.precision": precision})["sections"]
        section = next(each for each in sections if each["title"].startswith("Optimizers"))
        return {row[0]: row for row in rows_of(section["html"])}

    assert rows("bf16-mixed")["adamw"][1:6] == ["4", "4", "0", "8", "16"]
    assert float(rows("bf16-mixed")["adamw-8bit"][5]) < 11
    assert rows("bf16")["adamw"][1:6] == ["2", "2", "0", "4", "8"]


@pytest.mark.parametrize(
    ("title", "days"),
    [("70B on 15T tokens, 1,024 H100", 143.9), ("What can 8 devices train in 2 weeks?", 14),
     ("What can 32 devices train in 2 weeks?", 14)],
)  # fmt: skip
def test_the_napkin_questions_are_presets(title: str, days: float) -> None:
    data = answers.answer("time", dict(CALCULATORS["time"].presets[title]))["data"]
    assert round(data["days"], 1) == days
    rate = {"70B": 1024 * 989.5e12 * 0.5, "Wha": 0.4 * 989.5e12 * data["count"]}[title[:3]]
    assert 6 * data["params"] * data["tokens"] / rate / 86400 == pytest.approx(days, rel=1e-3)
