"""The first screen is the answer: verdict, number and figure, on a screen and on a telephone, and nothing jumps."""

from pathlib import Path

import pytest
from seen import Page

from browsing import SMALL, training
from trainledger.web.calculators import CALCULATORS

pytestmark = pytest.mark.process
SCREENS = {"screen": (1280, 900), "telephone": (390, 844)}
LEAST = 0.6  # of the first figure
MOST_PX = 8  # that anything moves when an answer arrives

# The share of each part's height that is seen where the page begins.
_SEEN = """() => ['#verdict .said', '.headline .number', '#answer figure svg'].map((one) => {
  const box = document.querySelector(one)?.getBoundingClientRect();
  const seen = box && Math.min(innerHeight, box.bottom) - Math.max(0, box.top);
  return box?.height ? Math.max(0, seen) / box.height : 0;
})"""

# What moves by itself, as the browser tells it: the element, and by how many pixels.
_WATCH = """() => {
  window.moves = [];
  const far = ({ previousRect: a, currentRect: b }) => Math.max(Math.abs(a.top - b.top), Math.abs(a.left - b.left));
  const name = (node) => node?.closest?.('[id]')?.id + ' ' + (node?.outerHTML ?? node?.data ?? '').slice(0, 80);
  new PerformanceObserver((list) => list.getEntries().forEach((entry) => entry.sources.forEach((source) => {
    if (source.previousRect.height && source.currentRect.height) window.moves.push([far(source), name(source.node)]);
  }))).observe({ type: 'layout-shift' });
}"""


def first_screen(page: Page) -> None:
    verdict, number, figure = page.page.evaluate(_SEEN)
    assert verdict == number == 1
    assert figure >= LEAST


def moves(page: Page) -> list[object]:
    page.page.wait_for_timeout(100)
    return [each for each in page.page.evaluate("moves") if each[0] > MOST_PX]


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", CALCULATORS)
def test_verdict_number_and_figure_are_seen_without_scrolling(name: str, screen: str, fresh) -> None:
    width, height = SCREENS[screen]
    first_screen(fresh(f"?calculator={name}{SMALL.get(name, '')}", width=width, height=height))


def test_those_of_a_run_are_seen_too(fresh, folder: Path) -> None:
    pytest.importorskip("torch")
    training(folder, 40).wait()
    for width, height in SCREENS.values():
        first_screen(fresh("?calculator=runs", width=width, height=height))


def dragged(page: Page, slider: object, steps: int) -> None:
    slider.evaluate(  # type: ignore[attr-defined]
        "(one, steps) => { one.value = Number(one.value) + steps; for (const kind of ['input', 'change'])"
        " one.dispatchEvent(new Event(kind, {bubbles: true})); }",
        steps,
    )
    page.settled()
    page.page.wait_for_timeout(50)


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", [name for name, each in CALCULATORS.items() if not each.patient])
def test_nothing_moves_when_an_answer_arrives(name: str, screen: str, fresh) -> None:
    width, height = SCREENS[screen]
    page = fresh(f"?calculator={name}", width=width, height=height)
    page.page.evaluate(_WATCH)
    for place in ("#answer", "#details"):
        page.page.evaluate("one => document.querySelector(one).scrollIntoView()", place)
        for slider in page.page.locator("#form input[type=range]:visible:enabled").all()[:4]:
            for step in (4, -7):
                dragged(page, slider, step)
                if page.page.locator("#answer.old").count():  # no answer has arrived
                    dragged(page, slider, -step)
                    page.page.wait_for_timeout(100)
                    page.page.evaluate("moves.length = 0")
    assert moves(page) == []


def test_a_run_that_comes_to_fit_moves_nothing(fresh) -> None:
    page = fresh("?calculator=memory&run=llama-3.2-1b&recipe.seq_len=1024")
    assert page.verdict.startswith("Fits")
    page.page.evaluate("document.querySelector('#details').scrollIntoView()")
    page.page.evaluate(_WATCH)
    for micro_batch in ("256", "1", "256"):
        page.fill("recipe.micro_batch", micro_batch)
        page.page.wait_for_timeout(1500)  # also what each change leads to is there
    assert page.verdict.startswith("Does not fit")
    assert moves(page) == []


def test_a_refused_value_takes_the_verdict_away_and_nothing_covers_the_problem(fresh) -> None:
    page = fresh("?calculator=memory", width=390, height=844)
    field = page.field("layout.tensor")
    page.page.evaluate("document.querySelectorAll('.folded .fold').forEach(each => each.click())")
    before = page.verdict
    field.evaluate("each => window.scrollBy(0, each.getBoundingClientRect().bottom - innerHeight + 2)")
    page.fill("layout.tensor", "3")
    covered = """() => {
      const box = document.querySelector('.problem:not([hidden])').getBoundingClientRect();
      const over = document.elementFromPoint(box.left + box.width / 2, box.bottom - 4);
      return !over?.closest('.problem');
    }"""
    assert not page.page.evaluate(covered)
    words = (
        "() => [...document.querySelectorAll('body *')].filter(each => each.checkVisibility({visibilityProperty: true})"
    )
    words += " && !each.children.length).map(each => each.textContent).join(' ')"
    assert before not in page.page.evaluate(words)
