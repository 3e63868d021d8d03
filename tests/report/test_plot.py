"""Figures as files: what is written, what is refused with a sentence, and what a browser makes of it."""

import argparse
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from trainledger.cli.arguments import add_plot, check_plot_of, write_plot_of
from trainledger.report import html as html_module
from trainledger.report import plot as plot_module
from trainledger.report.plot import check_plot, write_plot
from trainledger.report.style import COLOURS, Figure, arranged
from trainledger.spec.problem import InvalidInput

BROWSER = next((each for each in ("chromium", "chromium-browser", "google-chrome") if shutil.which(each)), None)
needs_plotly = pytest.mark.skipif(html_module.plotly_js() is None, reason="plotly is not installed")


def _bars(title: str = "") -> Figure:
    bars = {"type": "bar", "orientation": "h", "x": [1, 2], "y": ["napkin", "attention </script>"]}
    return {"data": [bars], "layout": arranged(title, "days")}


@needs_plotly
def test_a_page_holds_every_figure_and_fetches_nothing(tmp_path: Path) -> None:
    where = tmp_path / "out.html"
    assert write_plot({"First": _bars(), "Second": _bars("Own title")}, where, title="a <run>") == f"Written to {where}"
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
    write_plot({"First": _bars(), "Second": _bars("Own title")}, where, title="a run")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--virtual-time-budget=8000"]
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", where.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    for at in range(2):
        drawn = shown.partition(f'id="figure-{at}"')[2].partition("</figure>")[0]
        assert 'class="main-svg"' in drawn
        assert "attention" in drawn


@needs_plotly
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_an_image_holds_the_first_figure_and_says_so(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("kaleido")
    if BROWSER is None:
        pytest.skip("no Chromium or Chrome here, so no image was drawn")
    where = tmp_path / f"out.{suffix}"
    told = write_plot({"First": _bars(), "Second": _bars()}, where, title="a run")
    assert " ".join(told.split("\n")) == f"Written to {where} (First alone; an .html has Second too)"
    content = where.read_bytes()
    if suffix == "png":
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(content[16:20], "big") == 2 * plot_module.WIDTH
    else:
        text = content.decode()
        assert text.startswith("<svg")
        assert "First" in text
        assert "napkin" in text
        assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert os.listdir(tmp_path) == [where.name]


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
        write_plot({"First": _bars()}, tmp_path / "out.png", title="a run")
    assert os.listdir(tmp_path) == []


def test_the_flag_does_nothing_where_it_is_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_plot(parser)
    args = parser.parse_args([])
    check_plot_of(args)
    write_plot_of(args, {}, "a run")
    assert capsys.readouterr() == ("", "")


@needs_plotly
def test_the_flag_writes_and_tells_on_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_plot(parser)
    args = parser.parse_args(["--plot", str(tmp_path / "out.html")])
    write_plot_of(args, {"First": _bars()}, "a run")
    assert capsys.readouterr() == ("", f"Written to {tmp_path / 'out.html'}\n")


def test_no_two_colours_are_alike() -> None:
    assert len(set(COLOURS)) == len(COLOURS)
