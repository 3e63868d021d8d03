"""The real server and a real browser: Chromium from this machine, driven by playwright (`make browser`)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from seen import Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
AXE = Path(sys.prefix, "axe/node_modules/axe-core/axe.min.js")
# The browser asks nobody but the page: what it would do for itself is switched off.
_QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
          "--disable-component-update", "--disable-sync")  # fmt: skip


@pytest.fixture(scope="session")
def served() -> Iterator[str]:
    """The address of `trainledger serve` on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "trainledger", "serve", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}/"
    try:
        until = time.monotonic() + 60
        while not _answers(base):
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.05)
        yield base
    finally:
        process.terminate()
        process.wait()


def _answers(base: str) -> bool:
    try:
        return bool(urlopen(f"{base}calculators.json", timeout=5).status == 200)
    except OSError:
        return False


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """Chromium, without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here (make browser installs it)")
    if CHROMIUM is None:
        pytest.skip("no Chromium or Chrome here, so the page was not looked at")
    os.environ.pop("DISPLAY", None)
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=_QUIET)
        yield opened
        opened.close()


@pytest.fixture
def fresh(served: str, browser: object) -> Iterator[object]:
    """A function that opens the page as a new reader would, with nothing remembered.

    At the end no page has logged an error, broken its own policy, or asked another host.
    """
    pages: list[Page] = []

    def open_page(query: str = "", width: int = 1280, theme: str = "light", **more: object) -> Page:
        context = browser.new_context(  # type: ignore[attr-defined]
            viewport={"width": width, "height": 900}, color_scheme=theme, reduced_motion="reduce", **more
        )
        pages.append(Page(context, served))
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
