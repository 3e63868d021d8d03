"""The lesson, where an address says nothing: ten screens, each in the state that its calculator opens in."""

import tomllib
from importlib.resources import files

import pytest

from trainledger.web import answers
from trainledger.web.typography import in_words

pytestmark = pytest.mark.process
SCREENS = tomllib.loads(files("trainledger.web").joinpath("lesson.toml").read_text(encoding="utf-8"))["screen"]


def test_all_ten_screens_are_walked_with_their_figures_moved_and_their_questions_answered(fresh) -> None:
    page = fresh("")
    assert page.page.locator("#question").inner_text() == "You have 32 H100s for two weeks"
    for number, screen in enumerate(SCREENS, 1):
        assert page.page.locator("#name").inner_text() == f"Lesson, {number} of 10"
        assert page.page.locator("#paragraph").inner_text() == screen["text"]
        assert page.verdict == in_words(answers.answer(screen["calculator"], screen["given"])["verdict"])
        shown = page.page.eval_on_selector_all(
            "[data-field]", "all => all.filter(each => each.checkVisibility()).map(each => each.dataset.field)"
        )
        assert sorted(shown) == sorted(screen["fields"])
        page.page.locator(".outline.pinned").wait_for(state="attached" if "pin" in screen else "detached")
        page.settled()
        for name in screen["fields"]:
            if not (slider := page.slider(name)).count():
                continue
            original = page.field(name).input_value()
            before, large = page.page.locator(".picture-first .picture").inner_html(), page.headlines
            slider.press("ArrowRight" if slider.input_value() == slider.get_attribute("min") else "ArrowLeft")
            page.settled()
            assert page.page.locator(".picture-first .picture").inner_html() != before
            if number != 4:  # 1e-10 is zero in fp16 too
                assert next(iter(page.headlines.values())) != next(iter(large.values())), name
            slider.press("Home")
            page.settled()
            assert page.page.locator("#answer.old").count() == 0  # the lowest stop has an answer
            page.fill(name, original)
        assert f"lesson={number}&" in page.query
        exercise = answers._exercise(answers.CALCULATORS, screen["exercise"]["calculator"], screen["exercise"]["seed"])
        page.page.locator("#guess").fill(f"{exercise.exercise.answer:.5g}")
        page.button("Check").click()
        page.page.locator("#outcome .verdict.good").wait_for()
        if number < len(SCREENS):
            page.button("Next").click()
            page.page.wait_for_function("name => document.querySelector('#name').textContent === name",
                                        arg=f"Lesson, {number + 1} of 10")  # fmt: skip
            page.page.locator("#guess").wait_for()
            page.settled()
    assert page.page.locator("#outcome .score").inner_text() == "The set is done: 10 right of 10."
    page.button("Finish").click()
    end = page.page.get_by_role("region", name="End of the lesson")
    assert end.locator(".score").inner_text() == "10 of 10 exercises right."
    assert end.locator("ol li").all_inner_texts() == [f"{each['title']}: {each['learnt']}" for each in SCREENS]
    assert page.page.locator("#question").inner_text() == "What you have learnt"
    assert page.page.locator("#answer").is_hidden()
    marks = page.page.locator("#screens [data-right]").evaluate_all(
        "all => all.map(each => getComputedStyle(each, '::after').content)"
    )
    assert marks == ['" ✓"'] * 10
    page.page.locator("#screens a", has_text="10").click()
    page.page.locator("#guess").wait_for()
    assert page.page.locator("#answer").is_visible()
    page.button("Finish").click()
    end.get_by_role("link", name="Five more exercises on time").click()
    page.settled()
    assert page.page.locator(".guess .name").inner_text() == "Exercise 1 of 5: 0 right so far"


def test_the_numbers_of_the_screens_say_which_exercises_are_right(fresh) -> None:
    page = fresh("?lesson=2")
    marks = page.page.locator("#screens [data-right]")
    page.page.locator("#guess").fill("1")
    page.button("Check").click()
    page.page.locator("#outcome .verdict.bad").wait_for()
    assert marks.count() == 0  # a second try is left
    page.button("Check").click()
    page.page.locator("#screens [data-right=false]").wait_for()
    page.page.locator("#screens a", has_text="1").first.click()
    page.settled()
    assert [(each.inner_text(), each.get_attribute("data-right")) for each in marks.all()] == [("2", "false")]


def test_the_large_number_is_the_screens_and_in_the_calculator_its_own(fresh) -> None:
    page = fresh("?lesson=9")
    assert next(iter(page.headlines)) == "share of attention scores"
    page.page.locator("#screens > a").click()
    page.settled()
    assert next(iter(page.headlines)) == "parameters"


def test_a_screen_opens_its_calculator_in_the_same_state_and_back_leads_to_the_screen(fresh) -> None:
    page = fresh("?lesson=5")
    page.slider("recipe.micro_batch").press("ArrowRight")
    page.settled()
    verdict, link = page.verdict, page.page.locator("#screens > a")
    assert link.get_attribute("href") == page.query.replace("lesson=5&", "")
    link.click()
    page.settled()
    assert page.verdict == verdict
    assert page.page.locator("#name").inner_text() == "Memory"
    assert page.page.locator("#details .body").is_visible()
    assert page.page.locator("#task").inner_text() == ""
    page.back()
    assert page.page.locator("#name").inner_text() == "Lesson, 5 of 10"
    assert page.verdict == verdict


def test_a_link_to_a_screen_that_was_changed_brings_that_back(fresh) -> None:
    page = fresh("?lesson=1")
    page.fill("count", "64")
    other = fresh(page.query)
    assert other.verdict == page.verdict
    assert other.page.locator("#name").inner_text() == "Lesson, 1 of 10"


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_a_screen_has_its_figure_without_scrolling_and_nothing_to_complain_of(width, height, fresh, axe) -> None:
    for number in (1, 4, 6, 10):
        page = fresh(f"?lesson={number}", width=width, height=height).page
        assert page.evaluate("document.documentElement.scrollWidth") == width
        box = page.locator(".picture-first figure").bounding_box()
        assert box["y"] + 0.5 * min(box["height"], 300) < height, number
        page.locator("#guess").wait_for()
        page.evaluate(axe)
        found = page.evaluate("axe.run().then(said => said.violations.map(each => each.id))")
        assert found == [], number


@pytest.mark.parametrize("width", [870, 1000, 1130, 1240, 1280, 1400])
def test_the_names_of_all_calculators_are_seen_at_once(width, fresh, folder) -> None:
    page = fresh("?calculator=memory", width=width).page
    nav = page.locator("#calculators")
    assert nav.evaluate("nav => nav.scrollWidth - nav.clientWidth") <= 0
    assert page.locator("#calculators a", has_text="Runs").is_visible()
