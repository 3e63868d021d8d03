"""Charts as files: what is written, what is refused with a sentence, and what a browser makes of it."""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trainledger.report import show as show_module
from trainledger.report.chart import Axis, Chart, Line
from trainledger.report.draw.chart import WIDTH
from trainledger.report.show import check_plot, write_plot
from trainledger.spec.problem import InvalidInput

EVIL = "attention </script>"
BROWSER = next((each for each in ("chromium", "chromium-browser", "google-chrome") if shutil.which(each)), None)


def _dots(title: str = "Dots", *key: str) -> Chart:
    return Chart(title, (Line([1, 2], [0, 1], symbol="circle"),), Axis("days"), Axis(names=("napkin", EVIL)), key)


def test_a_page_holds_every_chart_and_fetches_nothing(tmp_path: Path) -> None:
    where = tmp_path / "out.html"
    assert write_plot([_dots("First"), _dots("Second")], where, title="a <run>") == f"Written to {where}"
    page = where.read_text()
    assert "<h1>a &lt;run&gt;</h1>" in page
    assert "<h2>First</h2>" in page
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert page.count(">attention &lt;/script&gt;</text>") == 4  # both charts, for a screen and for a telephone


@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome here, so the page was not looked at")
def test_a_browser_shows_the_drawing_that_suits_its_width(tmp_path: Path) -> None:
    where = tmp_path / "out.html"
    write_plot([_dots()], where, title="a run")
    page = where.read_text()
    for width, hidden in ((1000, "narrow"), (500, "broad")):
        where.write_text(page)
        whole = _picture(where, width)
        for left_out in ("narrow", "broad"):
            where.write_text(re.sub(rf'<div class="{left_out}">.*?</svg></div>', "", page, flags=re.DOTALL))
            assert (_picture(where, width) == whole) is (left_out == hidden)


def _picture(page: Path, width: int) -> bytes:
    assert BROWSER is not None
    shot = page.with_suffix(".shot.png")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--window-size={width},700"]
    command = [BROWSER, *flags, f"--user-data-dir={page.parent / 'profile'}", f"--screenshot={shot}", page.as_uri()]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    return shot.read_bytes()


def test_what_a_page_says_above_its_charts_and_below_them(tmp_path: Path) -> None:
    where = tmp_path / "out.html"
    write_plot([_dots("A run", "first <dot>", "second")], where, title="A run", about=["It does <NOT> fit."])
    page = where.read_text()
    assert '<h1>A run</h1>\n<p class="note">It does &lt;NOT&gt; fit.</p>' in page
    assert "<h2>" not in page  # the same words again
    assert "<ol><li>first &lt;dot&gt;</li><li>second</li></ol>" in page


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_images_hold_a_chart_each_and_it_is_said_which(tmp_path: Path, suffix: str) -> None:
    if suffix == "png":
        pytest.importorskip("resvg_py")
    where = tmp_path / f"out.{suffix}"
    printed = write_plot([_dots("First"), _dots("Second", "what one is")], where, title="a run")
    files = [where, tmp_path / f"out-2.{suffix}"]
    assert " ".join(printed.split()) == f"Written to {files[0]} (First) Written to {files[1]} (Second)"
    first, second = (each.read_bytes() for each in files)
    if suffix == "png":
        for content in (first, second):
            assert content[:8] == b"\x89PNG\r\n\x1a\n"
            assert int.from_bytes(content[16:20], "big") == 2 * WIDTH
    else:
        words = [each.text for each in ElementTree.fromstring(first).iter() if each.text]
        assert words[0] == "First"
        assert {"napkin", EVIL} <= set(words)
        assert "1. what one is" in ElementTree.fromstring(second).itertext()
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


def test_only_a_png_needs_more_than_the_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show_module, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"a PNG needs resvg-py: pip install 'trainledger\[web\]'.*works: .*out.svg"):
        check_plot(tmp_path / "out.png")
    for suffix in ("html", "svg"):
        write_plot([_dots()], tmp_path / f"out.{suffix}", title="a run")
    heavy = "{'numpy', 'torch', 'resvg_py'}"
    code = f"import sys; from trainledger.report.show import write_plot; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_png_without_letters_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resvg = pytest.importorskip("resvg_py")
    monkeypatch.setattr(resvg, "svg_to_bytes", partial(resvg.svg_to_bytes, skip_system_fonts=True))
    with pytest.raises(InvalidInput, match="no font for the words of a PNG"):
        write_plot([_dots()], tmp_path / "out.png", title="a run")
    assert os.listdir(tmp_path) == []
