"""The page follows a run while it trains, is killed and resumed, without being touched."""

import re
from pathlib import Path

import pytest
from seen import Page

from browsing import training

pytest.importorskip("torch")
pytestmark = pytest.mark.process
STEPS = 800


def step(page: Page) -> int:
    found = re.search(r"step ([\d,]+)", page.verdict)
    return int(found[1].replace(",", "")) if found else 0


def waits(page: Page, text: str) -> None:
    """Until the verdict says this."""
    page.page.wait_for_function(
        "text => document.querySelector('#verdict .said').textContent.includes(text)", arg=text, timeout=300_000
    )


def test_the_page_follows_a_run_that_is_killed_and_resumed(fresh, folder: Path) -> None:
    process = training(folder, STEPS)
    try:
        page = fresh("?calculator=runs")
        while "running" not in page.verdict:
            page.page.wait_for_timeout(200)
            page.go("?calculator=runs")
        first = step(page)
        page.page.wait_for_function(
            "before => document.querySelector('#verdict .said').textContent !== before",
            arg=page.verdict,
            timeout=60_000,
        )
        assert step(page) > first
        loss = page.page.locator("figure svg").first.inner_html()
        page.page.wait_for_function(
            "before => document.querySelector('figure svg').innerHTML !== before", arg=loss, timeout=60_000
        )
    finally:
        process.kill()
        process.wait()
    waits(page, "killed")
    assert page.page.locator("#verdict.bad").count() == 1
    process = training(folder, STEPS, "--resume")
    try:
        waits(page, f"finished, step {STEPS:,}")
    finally:
        process.kill()
        process.wait()
