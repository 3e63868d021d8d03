"""Each calculator in a real browser: its inputs are changed, and its numbers are those of the command line."""

import math

import pytest
from seen import Page, named, numbers, said_by

from browsing import SMALL
from trainledger.web.calculators import CALCULATORS
from trainledger.web.field import Field
from trainledger.web.typography import in_words

pytestmark = pytest.mark.process
EACH = sorted(CALCULATORS)


def agrees(page: Page) -> None:
    """The page shows what the API says, and the command line that it shows says the same numbers."""
    found = page.api()
    assert page.verdict == in_words(found["verdict"])
    assert list(page.headlines.values()) == [in_words(each["text"]) for each in found["headlines"]]
    said = said_by(page.command())
    known = [each for each in found["headlines"] if each["value"] is not None and list(named(said, each["name"]))]
    for each in known:
        assert any(math.isclose(each["value"], one, rel_tol=1e-9) for one in named(said, each["name"])), each
    shown = [each["value"] for each in found["headlines"] if each["value"] is not None]
    assert known or not shown or set(shown) & set(numbers(said)), (shown, page.command())


def sliders(page: Page, name: str) -> list[Field]:
    """The fields with a slider that can be moved."""
    found = [each for each in CALCULATORS[name].fields if each.stops]
    return [each for each in found if page.slider(each.name).is_enabled()]


@pytest.mark.parametrize("name", EACH)
def test_the_default_answer_is_that_of_the_command_line(name: str, fresh) -> None:
    page = fresh(f"?calculator={name}{SMALL.get(name, '')}")
    assert page.page.locator("h1").inner_text() == CALCULATORS[name].question
    assert page.page.title().startswith(f"{CALCULATORS[name].title}: {page.verdict}")
    agrees(page)


@pytest.mark.parametrize("name", EACH)
def test_a_slider_a_number_and_a_list_change_the_answer_and_the_link(name: str, fresh) -> None:
    page = fresh(f"?calculator={name}{SMALL.get(name, '')}")
    for field in sliders(page, name)[:1]:
        slider = page.slider(field.name)
        before = int(slider.input_value())
        key, step = ("ArrowRight", 1) if before + 1 < len(field.stops) else ("ArrowLeft", -1)
        slider.press(key)
        page.settled()
        assert page.field(field.name).input_value() == field.stops[before + step]
        said = slider.get_attribute("aria-valuetext")
        assert said.replace(",", "").split(" ")[0] == field.stops[before + step]
        assert f"{field.name}=" in page.query
    texts = [each for each in sliders(page, name)[1:2] if not each.choices]
    for field in texts:
        page.fill(field.name, field.stops[len(field.stops) // 2])
        assert f"{field.name}=" in page.query or field.stops[len(field.stops) // 2] == field.default
    lists = [each for each in CALCULATORS[name].fields if each.choices and not each.stops]
    for field in lists[:1]:
        page.fill(field.name, next(value for value, _ in field.choices if value != field.default and value))
        assert f"{field.name}=" in page.query
    if page.page.locator("#answer.old").count() == 0:  # else these three do not go together, and it says so
        agrees(page)
    else:
        assert page.page.locator(".problem:visible").count() > 0


@pytest.mark.parametrize("name", EACH)
def test_a_link_brings_everything_back_and_so_do_back_and_forward(name: str, fresh) -> None:
    page = fresh(f"?calculator={name}{SMALL.get(name, '')}")
    first = page.values, page.headlines
    presets = [title for title, query in CALCULATORS[name].presets.items() if query and name not in SMALL]
    if presets:
        page.button(presets[-1]).click()
    else:
        page.fill("recipe.micro_batch" if name == "breaks" else "recipe.seq_len", "2" if name == "breaks" else "512")
    page.settled()
    second = page.values, page.headlines
    assert (there := fresh(page.query)).values == second[0]
    assert there.headlines == second[1]
    page.back()
    assert (page.values, page.headlines) == first
    page.forward()
    assert (page.values, page.headlines) == second


@pytest.mark.parametrize("name", EACH)
def test_each_drawing_has_its_table_and_each_number_its_formula(name: str, fresh) -> None:
    page = fresh(f"?calculator={name}{SMALL.get(name, '')}", width=390)
    found = page.api()
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390
    for card, each in zip(page.page.locator(".headline").all(), found["headlines"], strict=True):
        card.locator("summary").click()
        assert card.locator(".formula").inner_text() == in_words(each["formula"])
        assert card.locator(".source").inner_text() == in_words(each["source"])
        assert each["basis"] in card.locator(".basis").inner_text()
    for figure in page.page.locator("figure").all():
        assert figure.locator("svg").is_visible()
        figure.locator("figcaption button").click()
        assert figure.locator("table").first.is_visible()
    for each in page.page.locator(".section summary").all():
        each.click()
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_table_is_of_the_newest_answer_whether_it_was_open_or_not(fresh) -> None:
    page = fresh("?calculator=time")
    toggle, table = (page.page.locator(f"figure {each}").first for each in ("figcaption button", ".document"))
    toggle.click()
    seen = [table.inner_text()]
    page.fill("params", "70B")
    seen.append(table.inner_text())
    toggle.click()
    page.fill("params", "3B")
    toggle.click()
    seen.append(table.inner_text())
    assert len({*seen, ""}) == 4
