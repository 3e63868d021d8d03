"""Everybody can use it: axe-core in light and dark at both widths, the keyboard alone, themes, long answers."""

from pathlib import Path

import pytest
from seen import Page

from browsing import SETTLED, SMALL, served, training
from trainledger.web.calculators import CALCULATORS

pytestmark = pytest.mark.process
EACH = sorted(CALCULATORS)
_CHECK = (
    "() => axe.run(document, {resultTypes: ['violations']}).then(found => found.violations.map("
    "each => `${each.id}: ${each.nodes.slice(0, 3).map(node => node.html.slice(0, 120)).join(' | ')}`))"
)


def found_open(page: Page, axe: str) -> list[tuple[int, str, str]]:
    """What axe finds once everything is open, at both widths, in light and dark."""
    for each in page.page.locator(".section summary, .paste summary").all():
        each.click()
    page.page.locator(".headline summary").first.click()
    for toggle in page.page.locator("figcaption button").all():
        toggle.click()
    page.page.evaluate(axe)
    found = []
    for width in (1280, 390):
        page.page.set_viewport_size({"width": width, "height": 900})
        page.settled()
        for theme in ("light", "dark"):
            page.page.emulate_media(color_scheme=theme)
            found += [(width, theme, each) for each in page.page.evaluate(_CHECK)]
    return found


@pytest.mark.parametrize("name", EACH)
def test_axe_finds_nothing_in_light_and_dark_at_both_widths(name: str, fresh, axe: str) -> None:
    assert found_open(fresh(f"?calculator={name}{SMALL.get(name, '')}"), axe) == []


def test_axe_finds_nothing_in_a_run(fresh, axe: str, folder: Path) -> None:
    pytest.importorskip("torch")
    training(folder, 60).wait()
    page = fresh("?calculator=runs")
    assert "finished" in page.verdict
    assert found_open(page, axe) == []


def test_axe_finds_nothing_where_there_is_no_run(browser: object, axe: str, tmp_path: Path) -> None:
    with served(tmp_path / "runs") as address:
        context = browser.new_context(viewport={"width": 390, "height": 900})  # type: ignore[attr-defined]
        page = Page(context, address)
        page.go("?calculator=runs")
        assert page.verdict == "No runs in runs."
        page.page.evaluate(axe)
        assert page.page.evaluate(_CHECK) == []
        context.close()


def test_remedies_cancelled_and_refused_questions_pass_too(fresh, axe: str) -> None:
    remedies = fresh("?calculator=memory", width=390)
    remedies.page.locator(".leads.good").first.wait_for()
    refused = fresh("?calculator=memory")
    refused.fill("layout.tensor", "3")
    cancelled = fresh("?calculator=time")
    cancelled.page.locator("#calculators a", has_text="Layouts").click()
    cancelled.button("Cancel").click()
    cancelled.button("Ask again").wait_for()
    other = fresh("?calculator=memory&run=gpt2-xl&recipe.seq_len=1024&recipe.dropout=0.1")
    pinned = fresh("?calculator=time&params=12B&pin=", width=390)
    pinned.page.locator(".outline.pinned").wait_for(state="attached")
    for page in (remedies, refused, cancelled, other, pinned):
        page.page.evaluate(axe)
        for theme in ("light", "dark"):
            page.page.emulate_media(color_scheme=theme)
            assert page.page.evaluate(_CHECK) == [], theme


def test_menus_problems_and_exercises_pass_too(fresh, axe: str) -> None:
    problem = fresh("?calculator=memory&layout.tensor=3", theme="dark")
    problem.button("Copy as").click()
    exercise = fresh("?calculator=time&exercise=3", width=390)
    exercise.page.locator("#guess").fill("12")
    exercise.page.locator("#guess").press("Enter")
    exercise.page.locator("#outcome .verdict").wait_for()
    listed = fresh("?calculator=time")
    listed.field("device").click()
    for page in (problem, exercise, listed):
        page.page.evaluate(axe)
        assert page.page.evaluate(_CHECK) == []


def test_the_theme_is_chosen_and_remembered(fresh) -> None:
    page = fresh("?calculator=time", theme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.page.evaluate(ground)
    page.page.get_by_role("button", name="Dark colours").click()
    dark = page.page.evaluate(ground)
    assert dark != light
    page.page.reload()
    page.settled()
    assert page.page.evaluate(ground) == dark
    page.page.get_by_role("button", name="Light colours").click()
    assert page.page.evaluate(ground) == light


def test_tabs_have_one_theme(fresh) -> None:
    page = fresh("?calculator=time", theme="light")
    other = page.context.new_page()
    other.goto(page.base)
    page.page.get_by_role("button", name="Dark colours").click()
    other.wait_for_function("document.documentElement.dataset.theme === 'dark'", timeout=5_000)
    assert other.get_by_role("button", name="Light colours").is_visible()


# The focusable elements whose ring is cut off by what scrolls or hides around them.
_CLIPPED = """() => {
  const found = [];
  for (const each of document.querySelectorAll('a, button, input, select, textarea, summary, [tabindex="0"]')) {
    if (!each.checkVisibility() || each.disabled) continue;
    each.focus({focusVisible: true});
    const style = getComputedStyle(each), ring = parseFloat(style.outlineOffset) + parseFloat(style.outlineWidth);
    const box = each.getBoundingClientRect();
    if (style.outlineStyle === 'none' || ring <= 0) continue;
    for (let up = each.parentElement; up && up !== document.body; up = up.parentElement) {
      if (getComputedStyle(up).overflow === 'visible') continue;
      const edge = up.getBoundingClientRect();
      const out = Math.max(edge.left - box.left, box.right - edge.right, edge.top - box.top, box.bottom - edge.bottom);
      if (out + ring > 0.6) found.push(`${each.outerHTML.slice(0, 90)} by ${up.id || up.className || up.tagName}`);
    }
  }
  return found;
}"""


@pytest.mark.parametrize("width", [1280, 390])
def test_the_ring_of_the_focus_is_seen_whole(width: int, fresh) -> None:
    page = fresh("?calculator=memory", width=width)
    page.page.keyboard.press("Tab")
    assert page.page.evaluate(_CLIPPED) == []


def test_who_has_no_token_reads_a_sentence(browser: object, tmp_path: Path) -> None:
    with served(tmp_path / "runs", "--host", "0.0.0.0") as address:
        context = browser.new_context()  # type: ignore[attr-defined]
        page = context.new_page()
        page.goto(address.partition("?")[0])
        assert page.locator("p").inner_text().startswith("token: is needed: open the link that trainledger serve")
        page.goto(address)
        page.wait_for_function(SETTLED)
        context.close()


def test_a_question_is_asked_with_the_keyboard_alone(fresh) -> None:
    page = fresh("?calculator=time")
    keys = page.page.keyboard
    keys.press("Tab")
    assert page.page.evaluate("document.activeElement.className") == "skip"
    keys.press("Enter")
    assert page.page.evaluate("document.activeElement.id") == "answer"
    page.page.evaluate("document.querySelector('#presets').querySelector('button').focus()")
    for _ in range(60):
        keys.press("Tab")
        if page.page.evaluate("document.activeElement.closest('[data-field]')?.dataset.field") == "params":
            break
    while page.page.evaluate("document.activeElement.type") != "range":
        keys.press("Tab")
    keys.press("End")
    page.settled()
    keys.press("Tab")
    assert page.page.evaluate("document.activeElement.value") == "10T"
    keys.type("9")  # the text was selected by the tabulator
    keys.press("Enter")
    page.settled()
    assert page.query == "?calculator=time&params=9"


def test_the_verdict_is_announced_once_the_answer_rests(fresh) -> None:
    page = fresh("?calculator=time")
    for _ in range(10):
        page.slider("params").press("ArrowRight")
    page.settled()
    page.page.wait_for_function(
        "() => document.querySelector('#said').textContent === document.querySelector('.said').textContent"
    )
    assert page.page.locator("#said").get_attribute("role") == "status"


def test_a_drag_faster_than_its_answers_leaves_no_queue(fresh) -> None:
    page = fresh("?calculator=memory")
    views: list[str] = []
    page.page.on("request", lambda request: views.append(request.url) if "/view/" in request.url else None)
    slider = page.slider("recipe.seq_len")
    slider.focus()
    page.page.evaluate(
        "() => { const slider = document.activeElement; for (let at = 0; at < 200; at++) { slider.value = at % 9;"
        " slider.dispatchEvent(new Event('input', {bubbles: true})); } }"
    )
    page.settled()
    assert 1 <= len(views) <= 3
    assert page.verdict == page.api_verdict
