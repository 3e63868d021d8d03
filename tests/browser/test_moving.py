"""The picture moves: marks stay and change, axes change where they must, and an outline shows what was before."""

import pytest
from seen import Page

from browsing import SMALL
from trainledger.web.calculators import CALCULATORS

pytestmark = pytest.mark.process
_BAR = "#answer .picture > svg > [data-key^='Bars parameters'] rect"
_OUTLINE = "#answer .picture .outline"


def axis(page: Page) -> list[float]:
    """The ends of the axis of the first figure."""
    said: str = page.page.evaluate("document.querySelector('#answer .picture > svg').dataset.x")
    return [float(each) for each in said.split()[:2]]


def test_a_bar_is_the_same_element_after_an_answer_and_moves_there(fresh) -> None:
    page = fresh("?calculator=memory")
    page.page.emulate_media(reduced_motion="no-preference")
    bar = page.page.locator(_BAR).element_handle()
    before = bar.get_attribute("width")
    page.fill("recipe.micro_batch", "12")
    assert bar.evaluate("each => each.isConnected")
    assert float(bar.get_attribute("width")) < float(before)  # of a longer axis
    glides = "each => getComputedStyle(each).transitionProperty.includes('width')"
    assert bar.evaluate(glides)
    page.page.emulate_media(reduced_motion="reduce")
    assert not bar.evaluate(glides)


def test_an_axis_changes_only_where_its_bar_leaves_it_or_takes_less_than_half(fresh) -> None:
    page = fresh("?calculator=memory&run=llama-3.2-1b&recipe.seq_len=1024")
    usable = axis(page)
    page.fill("recipe.micro_batch", "2")
    assert axis(page) == usable  # the frame of the device stays
    page.fill("recipe.micro_batch", "64")
    large = axis(page)
    assert large[1] > usable[1]
    page.fill("recipe.micro_batch", "48")
    assert axis(page) == large
    page.fill("recipe.micro_batch", "1")
    assert axis(page)[1] < large[1]


def test_an_outline_shows_the_state_before_a_change_on_the_axis_of_now(fresh) -> None:
    page = fresh("?calculator=memory")
    width = "one => document.querySelector(one).getBoundingClientRect().width"
    assert page.page.locator(_OUTLINE).count() == 0
    before, ends = page.page.evaluate(width, _BAR), axis(page)
    page.fill("recipe.micro_batch", "12")
    drawn = page.page.evaluate(width, f"{_OUTLINE} [data-key^='Bars parameters'] rect")
    assert drawn == pytest.approx(before * ends[1] / axis(page)[1], abs=2)
    page.page.locator("#calculators a", has_text="Model").click()
    page.settled()
    assert page.page.locator(_OUTLINE).count() == 0


def test_a_pinned_state_stands_in_the_figure_and_in_the_link(fresh) -> None:
    page = fresh("?calculator=memory&recipe.micro_batch=12")
    pinned, said = page.page.locator(".outline.pinned"), page.page.locator(".pinned-said")
    number = page.page.locator(".headline .number").first.inner_text()
    page.button("Pin").click()
    pinned.wait_for(state="attached")
    page.fill("recipe.micro_batch", "1")
    assert number in said.inner_text()
    assert axis(page)[1] > 987  # what is pinned is on the axis too
    assert "pin=recipe.micro_batch%3D12" in page.query
    there = fresh(page.query)
    there.page.locator(".outline.pinned").wait_for(state="attached")
    assert there.page.locator(".pinned-said").inner_text() == said.inner_text()
    assert there.headlines == page.headlines
    page.button("Pin").click()
    pinned.wait_for(state="detached")
    page.back()
    pinned.wait_for(state="attached")
    page.page.locator("#calculators a", has_text="Model").click()
    page.settled()
    assert "pin" not in page.query
    assert said.is_hidden()
    wrong = fresh("?calculator=time&pin=nothing%3D1")
    wrong.page.locator(".pinned-said", has_text="is no field").wait_for()


# The elements of the first figure in words, and those of an SVG text that is drawn at once.
_DRAWN = """async (text) => {
  const { pictureOf } = await import('./moving.js');
  const own = ({ name }) => !['data-key', 'aria-label'].includes(name);
  const said = ({ name, value }) => `${name}=${value}`;
  const words = (each) => [each.tagName, ...[...each.attributes].filter(own).map(said).sort(),
    each.childElementCount ? '' : each.textContent].join(' ');
  document.querySelectorAll('.outline').forEach((each) => each.remove());
  return [document.querySelector('#answer .picture > svg'), pictureOf(text)].map(
    (svg) => [svg, ...svg.querySelectorAll('*')].map(words));
}"""


@pytest.mark.parametrize("name", CALCULATORS)
def test_a_picture_that_has_moved_is_the_one_that_the_answer_has(name: str, fresh) -> None:
    page = fresh(f"?calculator={name}{SMALL.get(name, '')}")
    views = []
    page.page.on(
        "response", lambda reply: views.append(reply) if "/view/" in reply.url and reply.status == 200 else None
    )
    for slider in page.page.locator("#form input[type=range]:visible:enabled").all()[:2]:
        for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
            slider.press(key)
            page.settled()
            asked = [each for each in views if "held=" in each.url]  # others ask what a change would lead to
            moved, drawn = page.page.evaluate(_DRAWN, asked[-1].json()["drawings"][0]["svg"])
            assert moved == drawn
