"""The real server and a real browser: Chromium from this machine, driven by playwright (`make browser`)."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from seen import Page

from browsing import CHROMIUM, QUIET, served

AXE = Path(sys.prefix, "axe/node_modules/axe-core/axe.min.js")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs train; the page shows those in its ``runs``."""
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="session")
def base(folder: Path) -> Iterator[str]:
    """The address of the page."""
    with served(folder / "runs") as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """Chromium, without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here (make browser installs it)")
    if CHROMIUM is None:
        pytest.skip("no Chromium or Chrome here, so the page was not looked at")
    os.environ.pop("DISPLAY", None)
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield opened
        opened.close()


@pytest.fixture
def fresh(base: str, browser: object) -> Iterator[object]:
    """A function that opens the page as a new reader would, with nothing remembered.

    At the end no page has logged an error, broken its own policy, or asked another host.
    """
    pages: list[Page] = []

    def open_page(query: str = "", width: int = 1280, height: int = 900, theme: str = "light", **more: object) -> Page:
        look = {"viewport": {"width": width, "height": height}, "color_scheme": theme, "reduced_motion": "reduce"}
        context = browser.new_context(**look | more)  # type: ignore[attr-defined]
        pages.append(Page(context, base))
        pages[-1].go(query)
        return pages[-1]

    yield open_page
    for each in pages:
        each.context.close()
    assert [said for each in pages for said in each.complaints] == []


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, which looks for what a reader with a disability cannot use."""
    if not AXE.exists():
        pytest.skip("no axe-core here (make browser installs it), so accessibility was not checked")
    return AXE.read_text(encoding="utf-8")
