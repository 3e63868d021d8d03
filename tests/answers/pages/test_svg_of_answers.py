"""Every figure that an answer has is drawn: whole, small, within its edges, for a screen and for a telephone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from make_run import make_run

import trainledger as tl
from drawn import Drawn
from trainledger.answers.pages.memory import memory_figure
from trainledger.answers.pages.reconciliation import figures as figures_of_a_run
from trainledger.answers.pages.record import read_run
from trainledger.report.document import Figure
from trainledger.report.style import COLOURS
from trainledger.report.svg import STYLE, standalone, svg
from trainledger.report.svg.elements import width_of
from trainledger.web.answers import answer
from trainledger.web.calculators import CALCULATORS

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

# What has figures, and how they are asked for.
ANSWERS: list[tuple[str, Callable[[Path], dict[str, Figure]]]] = [
    ("plan_figures", lambda _: tl.plan(LLAMA).document().figures()),
    ("plan_figures", lambda _: tl.plan(SHARDED).document().figures()),
    ("memory", lambda _: {"memory": memory_figure(tl.account(tl.load(LLAMA)))}),
    ("compare", lambda _: tl.compare(LLAMA, SHARDED).document().figures()),
    ("fit", lambda _: tl.fit(LLAMA).document().figures()),
    ("serving", lambda _: tl.inference(LLAMA).document().figures()),
    ("layouts", lambda _: tl.layouts(SMALL, devices=4, device="h100-sxm", fixed=ONE_PLACE).document().figures()),
    ("advise", lambda _: tl.advise(LLAMA).document().figures()),
    ("breaks", lambda _: tl.breaks(SMALL).document().figures()),
    ("optimal_figures", lambda _: tl.optimal(**GIVEN).document().figures()),
    ("reconciliation", lambda folder: figures_of_a_run(read_run(make_run(folder / "tiny")))),
]
ANSWERS += [
    (f"calculator {each.name}", lambda _, each=each, given=given: answer(each.name, given)["figures"])  # type: ignore[misc]
    for each in CALCULATORS.values() if not each.patient for given in ({}, *each.presets.values())
]  # fmt: skip


@pytest.fixture(scope="module", params=ANSWERS, ids=lambda each: each[0])
def figures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figure]:
    name, asked = request.param
    found: dict[str, Figure] = asked(tmp_path_factory.mktemp(name))
    if not found:
        pytest.skip("an answer without figures")
    return found


@pytest.mark.parametrize("width", [960, 380])
def test_a_figure_is_drawn_small_and_within_its_edges(figures: dict[str, Figure], width: int) -> None:
    for name, figure in figures.items():
        text = svg(figure, width)
        assert len(text) < 100_000, name
        drawn = Drawn(text)
        assert drawn.width == width
        assert drawn.root.get("role") == "img"
        assert drawn.root.get("aria-label")
        for each, style in drawn.of("text"):
            left = float(style["x"]) - {"middle": 0.5, "end": 1.0}.get(style.get("text-anchor", ""), 0) * width_of(
                max((span.text or "" for span in each.iter() if span.text), key=len, default="")
            )
            if "transform" not in style:
                assert left > -8, (name, each.text)
                assert 0 < float(style["y"]) < drawn.height, (name, each.text)
        for box in drawn.boxes:
            assert -0.1 <= box.x <= box.right <= width + 0.1, (name, box)
            assert -0.1 <= box.y <= box.bottom <= drawn.height, (name, box)
        for x, y, _ in drawn.symbols:
            assert 0 < x < width, name
            assert 0 < y < drawn.height, name


def test_a_drawing_has_no_script_style_or_name_that_another_could_have(figures: dict[str, Figure]) -> None:
    for figure in figures.values():
        text = svg(figure)
        assert "nan" not in re.sub(r">[^<]*<|aria-label=\"[^\"]*\"", "><", text)
        drawn = Drawn(text)
        assert {each.tag.split("}")[1] for each in drawn.root.iter()} <= {
            "svg", "g", "path", "rect", "line", "circle", "text", "tspan", "title",
        }  # fmt: skip
        for each in drawn.root.iter():
            assert not {"style", "id", "onload", "onclick", "href"} & set(each.attrib)
            for name in each.get("class", "").split():
                assert f".{name}{{" in STYLE


def test_every_trace_is_drawn_and_says_what_it_is(figures: dict[str, Figure]) -> None:
    for name, figure in figures.items():
        drawn = Drawn(svg(figure))
        boxes, symbols = drawn.boxes, drawn.symbols
        bars = sum(
            len(each["x"])
            for each in figure["data"]
            if each["type"] in ("bar", "waterfall") and "hoverinfo" not in each
        )
        points = sum(len(each["x"]) for each in figure["data"] if "markers" in each.get("mode", ""))
        alike = [re.search(r"and ([\d,]+) more that are as narrow", each.said) for each in boxes]
        drawn_bars = len(boxes) + sum(int(each[1].replace(",", "")) for each in alike if each)
        assert drawn_bars == bars or "histogram" in {each["type"] for each in figure["data"]}, name
        assert len(symbols) == points, name
        named = [each["name"] for each in figure["data"] if each.get("name") and each.get("showlegend", True)]
        if len(named) > 1 and figure["layout"].get("showlegend", True):
            assert {" ".join(each.split("<br>")) for each in named} <= set(drawn.words), name
        for trace in figure["data"]:
            lines = trace["type"] == "scatter" and "lines" in trace.get("mode", "") and not trace.get("stackgroup")
            style = {"width": 2, "color": COLOURS[figure["data"].index(trace) % len(COLOURS)]} | trace.get("line", {})
            if lines and style["width"]:
                assert drawn.paths(stroke=style["color"]), (name, trace["name"])


def test_a_figure_as_a_file_has_its_title_and_the_key_of_its_numbers(figures: dict[str, Figure]) -> None:
    for name, figure in figures.items():
        drawn = Drawn(standalone(figure, name))
        title = figure["layout"].get("title", {}).get("text", name)
        assert drawn.words[0] == title
        assert (drawn.root.get("width"), drawn.root.get("height")) == (f"{drawn.width:g}", f"{drawn.height:g}")
        for at, each in enumerate(figure["layout"].get("meta", {}).get("key", []), 1):
            assert f"{at}. {each}"[:60] in " ".join(drawn.words)
