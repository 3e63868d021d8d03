"""Everybody can use it: axe-core in light and dark at both widths, the keyboard alone, themes, long answers."""

from pathlib import Path

import pytest
from seen import Page

from browsing import SMALL, served, training
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
    for page in (remedies, refused, cancelled, other):
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
    exercise.page.locator("#outcome .formula").wait_for()
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
    assert page.verdict == page.api()["verdict"]
