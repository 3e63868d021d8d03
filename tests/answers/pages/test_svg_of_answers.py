"""Every chart that an answer has is drawn: whole, small, within its edges, for a screen and for a telephone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from make_run import make_run

import trainledger as tl
from drawn import Drawn, marks
from trainledger.answers.pages.memory import memory_chart
from trainledger.answers.pages.reconciliation import figures as figures_of_a_run
from trainledger.answers.pages.record import read_run
from trainledger.report.chart import Area, Band, Bars, Chart, Line
from trainledger.report.draw.chart import standalone, svg
from trainledger.report.draw.elements import STYLE, width_of
from trainledger.web.calculator import Calculator
from trainledger.web.calculators import CALCULATORS
from trainledger.web.field import read_query

pytestmark = pytest.mark.sweep

LLAMA: dict[str, Any] = {
    "model": {"preset": "llama-3-8b"}, "cluster": {"device": "h100-sxm"},
    "recipe": {"seq_len": 8192, "global_batch": 1, "steps": 1, "precision": "bf16-mixed"},
}  # fmt: skip
SHARDED: dict[str, Any] = LLAMA | {
    "cluster": {"device": "h100-sxm", "count": 32},
    "layout": {"shard": 2, "tensor": 4, "pipeline": 4},
    "recipe": LLAMA["recipe"] | {"global_batch": 32, "seq_len": 2048},
}
SMALL: dict[str, Any] = LLAMA | {
    "model": {"preset": "gpt2"},
    "recipe": {"seq_len": 512, "global_batch": 32, "steps": 1, "precision": "bf16-mixed"},
}
ONE_PLACE = {"pipeline": 1, "context": 1, "tensor": 1}
GIVEN = {"flops": "1e22", "family": None, "params": "8B", "inference": "1T", "unique": "50B"}

# What has charts, and how they are asked for.
ANSWERS: list[tuple[str, Callable[[Path], Sequence[Chart]]]] = [
    ("plan", lambda _: tl.plan(LLAMA).document().figures()),
    ("plan", lambda _: tl.plan(SHARDED).document().figures()),
    ("memory", lambda _: [memory_chart(tl.account(tl.load(LLAMA)))]),
    ("compare", lambda _: tl.compare(LLAMA, SHARDED).document().figures()),
    ("fit", lambda _: tl.fit(LLAMA).document().figures()),
    ("serving", lambda _: tl.inference(LLAMA).document().figures()),
    ("layouts", lambda _: tl.layouts(SMALL, devices=4, device="h100-sxm", fixed=ONE_PLACE).document().figures()),
    ("advise", lambda _: tl.advise(LLAMA).document().figures()),
    ("breaks", lambda _: tl.breaks(SMALL).document().figures()),
    ("optimal", lambda _: tl.optimal(**GIVEN).document().figures()),
    ("reconciliation", lambda folder: figures_of_a_run(read_run(make_run(folder / "tiny")))),
]
ANSWERS += [
    (f"calculator {each.name}", lambda _, each=each, given=given: _drawn_by(each, given))  # type: ignore[misc]
    for each in CALCULATORS.values() if not each.patient for given in ({}, *each.presets.values())
]  # fmt: skip


def _drawn_by(one: Calculator, given: dict[str, str]) -> list[Chart]:
    query = read_query(one.fields, given, any_of_run=one.any_of_run)
    return [each.chart for each in one.reply(query, lambda what, done, of: None).drawings]


@pytest.fixture(scope="module", params=ANSWERS, ids=lambda each: each[0])
def charts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sequence[Chart]:
    name, asked = request.param
    found: Sequence[Chart] = asked(tmp_path_factory.mktemp(name))
    if not found:
        pytest.skip("an answer without charts")
    return found


@pytest.mark.parametrize("width", [960, 380])
def test_a_chart_is_drawn_small_and_within_its_edges(charts: Sequence[Chart], width: int) -> None:
    for chart in charts:
        text = svg(chart, width)
        assert len(text) < 100_000, chart.title
        drawn = Drawn(text)
        assert (drawn.width, drawn.root.get("role"), drawn.root.get("aria-label")) == (width, "img", chart.title)
        for each, style in drawn.of("text"):
            wide = width_of(max((span.text or "" for span in each.iter() if span.text), key=len, default=""))
            left = float(style["x"]) - {"middle": 0.5, "end": 1.0}.get(style.get("text-anchor", ""), 0) * wide
            if "transform" not in style:
                assert left > -8, (chart.title, each.text)
                assert 0 < float(style["y"]) < drawn.height, (chart.title, each.text)
        for box in drawn.boxes:
            assert -0.1 <= box.x <= box.right <= width + 0.1, (chart.title, box)
            assert -0.1 <= box.y <= box.bottom <= drawn.height, (chart.title, box)
        assert all(0 < x < width and 0 < y < drawn.height for x, y, _ in drawn.symbols), chart.title


def test_a_drawing_has_no_script_style_or_name_that_another_could_have(charts: Sequence[Chart]) -> None:
    for chart in charts:
        text = svg(chart)
        assert "nan" not in re.sub(r">[^<]*<|aria-label=\"[^\"]*\"", "><", text)
        drawn = Drawn(text)
        assert {each.tag.split("}")[1] for each in drawn.root.iter()} <= {
            "svg", "g", "path", "rect", "line", "circle", "text", "tspan", "title",
        }  # fmt: skip
        for each in drawn.root.iter():
            assert not {"style", "id", "onload", "onclick", "href"} & set(each.attrib)
            for name in each.get("class", "").split():
                assert f".{name}{{" in STYLE


def test_every_mark_is_drawn_and_says_what_it_is(charts: Sequence[Chart]) -> None:
    for chart in charts:
        drawn = Drawn(svg(chart))
        saying = [each for each in chart.marks if isinstance(each, Bars) and (each.said is None or each.said)]
        alike = [re.search(r"and ([\d,]+) more that are as narrow", each.said) for each in drawn.boxes]
        bars = len(drawn.boxes) + sum(int(each[1].replace(",", "")) for each in alike if each)
        assert bars == sum(len(each.rows) for each in saying), chart.title
        lines = marks(chart, Line)
        assert len(drawn.symbols) == sum(len(each.xs) for each in lines if each.symbol), chart.title
        layers = [name for each in marks(chart, Area) for name in each.layers]
        named = {*layers, *(each.name for each in chart.marks if isinstance(each, Line | Bars))} - {""}
        assert len(named) < 2 or named <= set(drawn.words), chart.title
        for each in lines:
            assert not each.width or len(each.xs) < 2 or drawn.paths(stroke=each.colour) or each.said == (), chart.title
        assert {each.text for each in marks(chart, Band) if each.end is None} <= {"", *drawn.words}, chart.title


def test_a_chart_as_a_file_has_its_title_and_the_key_of_its_numbers(charts: Sequence[Chart]) -> None:
    for chart in charts:
        drawn = Drawn(standalone(chart))
        assert drawn.words[0] == chart.title
        assert (drawn.root.get("width"), drawn.root.get("height")) == (f"{drawn.width:g}", f"{drawn.height:g}")
        for at, each in enumerate(chart.key, 1):
            assert f"{at}. {each}"[:60] in " ".join(drawn.words)
