"""A reload, an address that is half wrong, a slow line, a server that is gone: the page answers, or says why not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from seen import Page

from browsing import SMALL, files_served, training
from trainledger.web.calculators import CALCULATORS

pytestmark = pytest.mark.process
# Bytes a second and milliseconds, as DevTools has them.
LINES = {"Fast 3G": (180_000, 562), "Slow 3G": (50_000, 2000)}
DRAGGED = [name for name, each in CALCULATORS.items() if not each.patient and any(field.stops for field in each.fields)]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", DRAGGED)
def test_a_drag_on_a_slow_line_ends_with_the_answer_to_its_question(name: str, line: str, fresh) -> None:
    page = fresh(f"?calculator={name}")
    rate, latency = LINES[line]
    conditions = {"offline": False, "downloadThroughput": rate, "uploadThroughput": rate, "latency": latency}
    page.context.new_cdp_session(page.page).send("Network.emulateNetworkConditions", conditions)
    slider = page.page.locator("#form input[type=range]:visible:enabled").first
    slider.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowLeft", "ArrowRight"):
        slider.press(key)
        page.page.wait_for_timeout(latency + 150)  # the next question comes while the answer's body is on its way
    page.settled()
    assert page.verdict == page.api_verdict
    assert page.page.locator("#answer.old").count() == 0


@pytest.mark.parametrize("name", CALCULATORS)
def test_each_state_is_the_same_after_a_reload(name: str, fresh) -> None:
    for query in (SMALL.get(name, ""), *(("&exercise=7",) if name not in SMALL else ())):
        page = fresh(f"?calculator={name}{query}")
        before = page.query, page.values, page.page.title()
        page.page.reload()
        page.settled()
        assert (page.query, page.values, page.page.title()) == before


def test_the_runs_are_a_list_and_the_address_of_one_can_be_reloaded(fresh, folder: Path) -> None:
    for _ in range(2):
        training(folder, 3).wait()
    page = fresh("?calculator=runs")
    page.field("name").click()
    options = page.page.locator("[role=option]")
    assert options.count() == len(list((folder / "runs").iterdir()))
    name = options.last.inner_text()
    options.last.click()
    page.settled()
    page.page.reload()
    page.settled()
    assert page.verdict.startswith(name.split()[0])


def test_names_that_nothing_has_are_left_out_and_said(fresh) -> None:
    page = fresh("?calculator=time&params=13B&utm_source=mail")
    assert "utm_source" in page.page.locator("#said").inner_text()
    assert page.query == "?calculator=time&params=13B"
    assert page.verdict == page.api_verdict
    page = fresh("?calculator=tiem")
    assert "There is no calculator tiem" in page.page.locator("#said").inner_text()
    assert page.query == "?calculator=time"


def test_a_figure_with_chosen_sliders_stands_in_a_page_of_others(base: str, browser, tmp_path: Path) -> None:
    query = "calculator=memory&embed=recipe.seq_len&recipe.seq_len=2048"
    (tmp_path / "index.html").write_text(f'<iframe width="700" height="800" src="{base}?{query}"></iframe>')
    with files_served(tmp_path) as address:
        context = browser.new_context(viewport={"width": 900, "height": 900})
        page = context.new_page()
        page.goto(address)
        frame = page.frame_locator("iframe")
        frame.locator("#answer[aria-busy=false]").wait_for()
        assert frame.locator(".picture svg").first.is_visible()
        assert frame.locator(".field:visible").count() == 1
        assert not frame.locator("#calculators").is_visible()
        before = frame.locator("#verdict").inner_text()
        frame.locator(".field input[type=range]:visible").press("ArrowRight")
        frame.locator("#answer[aria-busy=false]").wait_for()
        assert frame.locator("#verdict").inner_text() != before
        with page.expect_popup() as opened:
            frame.get_by_text("Open in trainledger").click()
        opened.value.wait_for_url("**seq_len=3072")
        assert "embed" not in opened.value.url
        context.close()


def test_a_frame_that_names_no_field_has_the_first_two_sliders(fresh) -> None:
    for embed in ("1", "nonsense"):
        page = fresh(f"?calculator=memory&embed={embed}").page
        shown = page.locator("[data-chosen]")
        assert [each.get_attribute("data-field") for each in shown.all()] == ["recipe.micro_batch", "recipe.seq_len"]
        assert shown.first.is_visible()


def test_what_to_change_is_seen_whole_on_a_screen(fresh) -> None:
    page = fresh("?calculator=memory").page
    right = page.locator(".remedies").bounding_box()
    lines = page.locator(".remedies li:not(.gone)").all()
    assert len(lines) == 6
    for line in lines:
        box = line.bounding_box()
        assert box["x"] + box["width"] <= right["x"] + right["width"] + 4
        assert box["y"] + box["height"] <= right["y"] + right["height"]


def served_at(port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainledger", "serve", "--port", str(port), "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_server_that_is_gone_is_said_and_asked_again_until_it_is_back(browser) -> None:
    server = served_at(0)
    assert server.stdout is not None
    base = json.loads(server.stdout.readline())["url"]
    context = browser.new_context(reduced_motion="reduce")
    page = Page(context, base)
    page.go("?calculator=time")
    server.kill()
    server.wait()
    page.fill("params", "13B")
    standing = page.page.locator("#standing")
    assert "Is the server still running" in standing.inner_text()
    assert page.button("Ask again").is_visible()
    server = served_at(int(base.rstrip("/").rpartition(":")[2]))
    standing.wait_for(state="hidden", timeout=60_000)
    page.settled()
    assert page.verdict == page.api_verdict
    context.close()
    server.terminate()
    server.wait()
