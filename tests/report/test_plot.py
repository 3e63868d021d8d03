"""Figures as files: what is written, what is refused with a sentence, and what a browser makes of it."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from trainledger.document import Figure
from trainledger.report import html as html_module
from trainledger.report import plot as plot_module
from trainledger.report.plot import check_plot, write_plot
from trainledger.report.style import COLOURS, arranged
from trainledger.spec.problem import InvalidInput

BROWSER = next((each for each in ("chromium", "chromium-browser", "google-chrome") if shutil.which(each)), None)
needs_plotly = pytest.mark.skipif(html_module.plotly_js() is None, reason="plotly is not installed")


def _dots(title: str = "") -> Figure:
    dots = {"type": "scatter", "x": [1, 2], "y": ["napkin", "attention </script>"]}
    return {"data": [dots], "layout": arranged(title, "days")}


@needs_plotly
def test_a_page_holds_every_figure_and_fetches_nothing(tmp_path: Path) -> None:
    where = tmp_path / "out.html"
    assert write_plot({"First": _dots(), "Second": _dots("Own title")}, where, title="a <run>") == f"Written to {where}"
    page = where.read_text()
    assert "<h1>a &lt;run&gt;</h1>" in page
    assert "<h2>First</h2>" in page
    assert "<h2>Second</h2>" not in page  # it has a title of its own
    assert "default-src 'none'" in page
    held = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)
    assert held is not None
    assert [each["data"][0]["y"][1] for each in json.loads(held[1])] == ["attention </script>"] * 2


@needs_plotly
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome here, so the page was not looked at")
def test_a_browser_draws_every_figure_of_the_page(tmp_path: Path) -> None:
    assert BROWSER is not None
    where = tmp_path / "out.html"
    write_plot({"First": _dots(), "Second": _dots("Own title")}, where, title="a run")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--virtual-time-budget=8000"]
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", where.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    for at in range(2):
        drawn = shown.partition(f'id="figure-{at}"')[2].partition("</figure>")[0]
        assert 'class="main-svg"' in drawn
        assert "attention" in drawn


@needs_plotly
def test_no_setting_of_the_page_sends_a_chart_anywhere(tmp_path: Path) -> None:
    where = tmp_path / "out.html"
    write_plot({"First": _dots()}, where, title="a run")
    held = re.search(r'<script type="application/json" id="config">(.*?)</script>', where.read_text(), re.S)
    assert held is not None
    config = json.loads(held[1])
    assert config["plotlyServerURL"] == ""
    assert {"sendDataToCloud", "sendChartToCloud"} <= set(config["modeBarButtonsToRemove"])


@needs_plotly
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome here, so the page was not looked at")
def test_the_tool_bar_has_no_button_that_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Share chart" not in (bar := _tool_bar(tmp_path))
    assert "Download plot" in bar
    monkeypatch.setattr(html_module, "CONFIG", {})
    assert "Share chart" in _tool_bar(tmp_path)  # Plotly's own settings have it


def _tool_bar(tmp_path: Path) -> str:
    write_plot({"First": _dots()}, tmp_path / "out.html", title="a run")
    return _shown(tmp_path, 1280).partition('class="modebar-container"')[2].partition("</figure>")[0]


@needs_plotly
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome here, so the page was not looked at")
def test_a_figure_grows_by_its_legend_so_that_the_plot_keeps_its_height(tmp_path: Path) -> None:
    def plot_height(names: int, width: int) -> float:
        dots = [{"type": "scatter", "x": [1, 2], "y": [1, 2], "name": f"one long name, number {at}"}
                for at in range(names)]  # fmt: skip
        write_plot({"First": {"data": dots, "layout": arranged("Dots")}}, tmp_path / "out.html", title="a run")
        page = _shown(tmp_path, width)
        found = re.search(r'<clipPath id="[^"]*xyplot"[^>]*><rect[^>]* height="([\d.]+)"', page)
        assert found is not None
        return float(found[1])

    few = plot_height(2, 1280)
    for width in (1280, 500):
        assert plot_height(9, width) > few - 20


def _shown(tmp_path: Path, width: int) -> str:
    """The page's document after its scripts have run."""
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--virtual-time-budget=8000"]
    window = [f"--window-size={width},900", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *flags, *window, "--dump-dom", (tmp_path / "out.html").as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


@needs_plotly
def test_what_a_page_says_above_its_figures_and_below_them(tmp_path: Path) -> None:
    where = tmp_path / "out.html"
    dots = {"data": [], "layout": arranged("A run", meta={"key": ["first <dot>", "second"]})}
    write_plot({"First": dots}, where, title="A run", about=["It does <NOT> fit."])
    page = where.read_text()
    assert '<h1>A run</h1>\n<p class="note">It does &lt;NOT&gt; fit.</p>' in page
    assert "<h2>" not in page  # the same words again
    assert "<ol><li>first &lt;dot&gt;</li><li>second</li></ol>" in page


@needs_plotly
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_images_hold_a_figure_each_and_it_is_said_which(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("kaleido")
    if BROWSER is None:
        pytest.skip("no Chromium or Chrome here, so no image was drawn")
    where = tmp_path / f"out.{suffix}"
    keyed = _dots() | {"layout": arranged(meta={"key": ["what one is"]})}
    told = write_plot({"First": _dots(), "Second": keyed}, where, title="a run")
    files = [where, tmp_path / f"out-2.{suffix}"]
    assert " ".join(told.split()) == f"Written to {files[0]} (First) Written to {files[1]} (Second)"
    first, second = (each.read_bytes() for each in files)
    if suffix == "png":
        for content in (first, second):
            assert content[:8] == b"\x89PNG\r\n\x1a\n"
            assert int.from_bytes(content[16:20], "big") == 2 * plot_module.WIDTH
    else:
        text = first.decode()
        assert text.startswith("<svg")
        assert "First" in text
        assert "napkin" in text
        assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
        assert "1. what one is" in second.decode()
    assert sorted(os.listdir(tmp_path)) == sorted(each.name for each in files)


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ("out.gif", "must be one of .html, .png, .svg; nearest that works: {}/out.html"),
        ("out", "must be one of .html, .png, .svg; nearest that works: {}/out.html"),
        ("nowhere/out.html", "there is no directory '{}/nowhere'"),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_work(tmp_path: Path, named: str, sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_plot(tmp_path / named)
    assert str(caught.value).startswith("--plot = ")
    assert str(caught.value).endswith(sentence.format(tmp_path))


@needs_plotly
def test_without_kaleido_or_plotly_the_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot_module, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"needs kaleido, and a Chromium.*pip install 'trainledger\[web\]'"):
        check_plot(tmp_path / "out.png")
    check_plot(tmp_path / "out.html")
    monkeypatch.setattr(html_module, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install 'trainledger\[web\]'"):
        check_plot(tmp_path / "out.html")


@needs_plotly
def test_without_a_browser_the_sentence_says_so_and_no_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kaleido = pytest.importorskip("kaleido")
    from kaleido.errors import ChromeNotFoundError

    def none_found(*_: object, **__: object) -> bytes:
        raise ChromeNotFoundError("none")

    monkeypatch.setattr(kaleido, "calc_fig_sync", none_found)
    with pytest.raises(InvalidInput, match=r"is drawn by a Chromium, Chrome or Edge, and none was found"):
        write_plot({"First": _dots()}, tmp_path / "out.png", title="a run")
    assert os.listdir(tmp_path) == []


def test_no_two_colours_are_alike() -> None:
    assert len(set(COLOURS)) == len(COLOURS)
