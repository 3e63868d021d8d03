"""The exported site from a plain file server: Python in the browser gives the numbers that we give, offline."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from seen import Page

import trainledger
from browsing import files_served
from lecture_site import link_back
from trainledger.web import answers
from trainledger.web.calculators import CALCULATORS
from trainledger.web.export import export
from trainledger.web.typography import in_words

pytestmark = pytest.mark.process
PYODIDE = Path(sys.prefix, "pyodide/node_modules/pyodide")
# Where the default question takes seconds, a smaller one.
SMALL = {"breaks": {"run": "gpt2", "recipe.seq_len": "512", "recipe.global_batch": "64", "along": "sequence"}}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site below a path, as on GitHub Pages."""
    if not PYODIDE.is_dir():
        pytest.skip("no Pyodide here (make browser installs it), so the exported site was not looked at")
    root = tmp_path_factory.mktemp("pages")
    folder = root / "some" / "path"
    export(folder, PYODIDE)
    link_back(folder / "lecture")
    with files_served(root) as address:
        yield f"{address}/some/path/"


@pytest.fixture(scope="module")
def page(site: str, browser: object) -> Iterator[Page]:
    """One page for all tests, since Python takes seconds to start; it logs no error and asks no other host."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")  # type: ignore[attr-defined]
    made = Page(context, site)
    made.go("?calculator=time")
    yield made
    context.close()
    assert made.complaints == []


def asked(page: Page, name: str, query: dict[str, str]) -> None:
    """Goes to a calculator as its link in the page does, then to a query of it; Python stays where it is."""
    page.page.locator("#calculators a", has_text=CALCULATORS[name].title).click()
    page.settled()
    for field, text in query.items():
        page.fill(field, text)


def test_an_example_has_its_numbers_while_python_wakes_up(site: str, browser: object) -> None:
    context = browser.new_context()  # type: ignore[attr-defined]
    page = Page(context, site)
    asleep: list[object] = []
    page.page.route("**/python.zip", lambda route: asleep.append(route))
    page.go("?calculator=memory&layout.shard=8&recipe.activation_checkpointing=selective")
    expected = answers.answer("memory", {"layout.shard": "8", "recipe.activation_checkpointing": "selective"})
    assert page.verdict == in_words(expected["verdict"])
    assert list(page.headlines.values()) == [in_words(each["text"]) for each in expected["headlines"]]
    page.page.locator("#doing", has_text="Python is loading, about 12 MB once.").wait_for()
    asleep[0].continue_()  # type: ignore[attr-defined]
    page.page.locator("#working").wait_for(state="hidden", timeout=60_000)
    page.settled()
    assert page.verdict == in_words(expected["verdict"])
    context.close()
    assert page.complaints == []


def test_it_is_there_after_a_reload_without_a_network(site: str, browser: object) -> None:
    context = browser.new_context()  # type: ignore[attr-defined]
    page = Page(context, site)
    page.go("?calculator=time")
    page.page.evaluate("navigator.serviceWorker.ready")
    context.set_offline(True)
    page.page.reload()
    page.settled()
    page.fill("params", "13B")
    assert page.verdict == in_words(answers.answer("time", {"params": "13B"})["verdict"])
    context.close()


def test_a_file_says_that_it_needs_a_server(browser: object) -> None:
    context = browser.new_context()  # type: ignore[attr-defined]
    page = context.new_page()
    page.goto(Path(trainledger.__file__).parent.joinpath("web/page/index.html").as_uri())
    assert "python -m http.server" in page.locator("#loading").inner_text()
    context.close()


@pytest.mark.parametrize("name", [name for name, each in CALCULATORS.items() if not each.needs])
def test_each_calculator_answers_as_the_server_does(name: str, page: Page) -> None:
    asked(page, name, SMALL.get(name, {}))
    found = answers.answer(name, SMALL.get(name, {}))
    assert page.verdict == in_words(found["verdict"])
    assert list(page.headlines.values()) == [in_words(each["text"]) for each in found["headlines"]]
    assert page.page.locator("main .picture > svg").count() >= len(found["figures"])


def test_a_calculator_leads_to_the_chapter_of_the_lecture_that_links_to_it(page: Page) -> None:
    link = page.page.locator("#chapter")
    asked(page, "time", {})
    assert link.get_attribute("href") == "lecture/01_budget.html"
    asked(page, "formats", {})
    assert link.get_attribute("href") == "lecture/02_numbers.html"


def test_the_lesson_has_its_numbers_at_once_and_its_questions_once_python_is_awake(site: str, browser: object) -> None:
    context = browser.new_context(reduced_motion="reduce")  # type: ignore[attr-defined]
    page = Page(context, site)
    asleep: list[object] = []
    page.page.route("**/python.zip", lambda route: asleep.append(route))
    page.go()
    assert page.page.locator("#name").inner_text() == "Lesson, 1 of 10"
    assert "11.3B parameters" in page.verdict
    page.page.locator("#screens a", has_text="5").click()
    page.page.wait_for_function("() => document.querySelector('#verdict .said').textContent.includes('149.1 GB')")
    assert page.page.locator("#guess").count() == 0
    for route in asleep:
        route.continue_()  # type: ignore[attr-defined]
    page.page.locator("#guess").fill("282.2")
    page.button("Check").click()
    page.page.locator("#outcome .verdict.good").wait_for()
    assert page.complaints == []
    context.close()


def test_it_answers_without_a_network(page: Page) -> None:
    page.context.set_offline(True)
    asked(page, "time", {"params": "70B", "tokens": "15T", "mfu": "50%"})
    assert "143.9 days" in page.verdict
    page.context.set_offline(False)
    # Chromium asks for the icon again at each new address, and logs that it has no network.
    page.complaints[:] = [each for each in page.complaints if "ERR_INTERNET_DISCONNECTED" not in each]


def test_wrong_input_gets_the_sentence_of_the_command_line(page: Page) -> None:
    asked(page, "time", {})
    page.fill("tokens", "many")
    assert 'write it like 4096, "1e9" or "15T"' in page.page.locator("#form").inner_text()


def test_layouts_are_left_out_with_a_word(page: Page) -> None:
    asked(page, "memory", {})
    assert page.page.locator("#calculators a", has_text="Layouts").count() == 0
    assert "Layouts needs numpy, which this page does not have" in page.page.locator("footer").inner_text()
    assert page.page.locator(".remedies li", has_text="Search the layouts").count() == 0


def test_a_link_opens_the_same_question_in_another_browser(site: str, page: Page, browser: object) -> None:
    asked(page, "matmul", {"m": "4096"})
    context = browser.new_context()  # type: ignore[attr-defined]
    other = Page(context, site)
    other.go(page.query)
    assert other.verdict == page.verdict
    assert other.field("m").input_value() == "4096"
    context.close()
    assert other.complaints == []


def test_a_question_that_is_cancelled_leaves_a_python_that_answers(page: Page) -> None:
    page.page.locator("#calculators a", has_text=CALCULATORS["breaks"].title).click()
    page.field("recipe.global_batch").fill("128")  # nobody has asked that before
    page.field("recipe.global_batch").press("Enter")
    page.button("Cancel").click()
    page.page.locator("#calculators a", has_text=CALCULATORS["time"].title).click()
    page.settled()
    assert "days" in page.verdict
