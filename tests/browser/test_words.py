"""On a telephone no word and no number is broken: lines end between words, in the page and in its drawings' tables."""

from pathlib import Path

import pytest

from browsing import SMALL, training
from trainledger.web.calculators import CALCULATORS

pytestmark = pytest.mark.process
# Words and numbers that stand on two lines; between the parts of a path and the items of a list a line may end.
BROKEN = """() => {
  const found = [], range = document.createRange();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode, parent = node.parentElement;
    if (!parent.checkVisibility() || parent.closest('pre, svg, .unseen, script, noscript')) continue;
    const around = parent.closest('td, th, li, p, dt, dd, summary')?.textContent ?? '';
    for (const { 0: word, index } of node.textContent.matchAll(/\\d{1,3}(,\\d{3})+|[^\\s,;:=[\\]\\/_]+/g)) {
      range.setStart(node, index);
      range.setEnd(node, index + word.length);
      const seen = [...range.getClientRects()].filter((each) => each.width);
      if (new Set(seen.map((each) => Math.round(each.top))).size > 1) found.push(`${word} (in: ${around})`);
    }
  }
  return found;
}"""
FOLDS = ".section summary, .headline summary, .paste summary, .folded .fold, figcaption button"
EACH = {name: SMALL.get(name, "") for name in CALCULATORS}
MORE = {
    "time": "&mfu_from=predicted&run=llama-3-70b&count=8",
    "memory": "&layout.shard=8&recipe.activation_checkpointing=selective",
    "serving": "&run=llama-3.1-405b&weights=fp8",
    "formats": "&value=1e-45",
    "data": "&run=llama-3-70b&recipe.micro_batch=1",
    "matmul": "&m=8192&n=50257&k=768",
}


def opened(page) -> list[str]:
    """The broken words once everything that folds is open and each drawing has its table."""
    page.page.evaluate("all => document.querySelectorAll(all).forEach(each => each.click())", FOLDS)
    found: list[str] = page.page.evaluate(BROKEN)
    return found


@pytest.mark.parametrize(("name", "query"), [*EACH.items(), *MORE.items()], ids=str)
def test_no_word_is_broken_on_a_telephone(name: str, query: str, fresh) -> None:
    page = fresh(f"?calculator={name}{query}", width=390)
    assert opened(page) == []
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390


def test_no_word_of_a_run_is_broken_on_a_telephone(fresh, folder: Path) -> None:
    pytest.importorskip("torch")
    training(folder, 40).wait()
    assert opened(fresh("?calculator=runs", width=390)) == []


def test_a_word_that_is_broken_is_found(fresh) -> None:
    page = fresh("?calculator=time", width=390)
    narrow = "each => Object.assign(each.style, {width: '2em', overflowWrap: 'anywhere'})"
    page.page.locator("footer p").first.evaluate(narrow)
    assert any(each.startswith("trainledger") for each in page.page.evaluate(BROKEN))


def test_words_of_the_field_have_definitions_under_the_pointer(fresh) -> None:
    page = fresh("?calculator=memory&layout.shard=8")
    defined = page.page.locator("abbr[title]")
    words = set(defined.all_inner_texts())
    assert {"peak rank", "headroom", "tensor ranks", "replicas", "MFU", "saved activations"} <= words
    assert "needs most memory" in page.page.locator("abbr", has_text="peak rank").first.get_attribute("title")
    page.fill("layout.shard", "16")
    assert set(defined.all_inner_texts()) == words


def test_print_has_the_answer_before_the_form(fresh) -> None:
    page = fresh("?calculator=memory").page
    page.emulate_media(media="print")
    tops = [page.locator(each).first.bounding_box()["y"] for each in ("#verdict", ".picture", "#form")]
    assert tops == sorted(tops)


def test_a_flag_of_the_command_line_is_on_one_line(fresh) -> None:
    page = fresh("?calculator=memory&layout.shard=8", width=390)
    lines = "[...document.querySelectorAll('.terminal code .whole')].map(each => each.getClientRects().length)"
    found = page.page.evaluate(lines)
    assert len(found) == page.command().count("--set") >= 5
    assert set(found) == {1}


def test_print_cuts_nothing_and_has_nothing_to_click(fresh) -> None:
    page = fresh("?calculator=memory", width=750).page
    page.emulate_media(media="print")
    cut = """() => [...document.querySelectorAll('#answer *, #details *')].filter((each) => each.checkVisibility()
      && !each.matches('svg *, .unseen, .headlines') && (each.scrollWidth > each.clientWidth + 1 && each.clientWidth
      && getComputedStyle(each).overflowX !== 'visible')).map((each) => each.className)"""
    assert page.evaluate(cut) == []
    right = page.locator(".remedies li").evaluate_all(
        "all => Math.max(...all.map(each => each.getBoundingClientRect().right))"
    )
    assert right <= 750
    assert not any(each.is_visible() for each in page.locator("figcaption button, .tools button").all())


def test_a_table_that_is_cut_has_a_shade_where_it_goes_on(fresh) -> None:
    page = fresh("?calculator=serving", width=390).page
    wide = page.locator("#details .section .wide")
    assert wide.evaluate_all("all => all.some(each => each.scrollWidth > each.clientWidth)")
    assert wide.first.evaluate("each => getComputedStyle(each).backgroundAttachment") == "local, local, scroll, scroll"


def test_words_of_points_lie_on_no_other_words(fresh) -> None:
    page = fresh("?calculator=optimal", width=390).page
    crossed = """() => {
      const words = [...document.querySelectorAll('.drawings svg > g[pointer-events] > g > text')];
      const boxes = words.map((each) => [each.textContent, each.getBoundingClientRect()]);
      const over = (a, b) => a.left < b.right - 1 && a.top < b.bottom - 4;
      const meeting = ([, a], at) => boxes.slice(at + 1).filter(([, b]) => over(a, b) && over(b, a));
      return boxes.flatMap((each, at) => meeting(each, at).map(([other]) => [each[0], other]));
    }"""
    assert page.locator(".drawings svg text", has_text="Llama 3 8B").count() == 1
    assert page.evaluate(crossed) == []


def test_what_has_not_to_change_is_said_in_the_place_of_what_has(fresh) -> None:
    page = fresh("?calculator=memory&layout.shard=8&recipe.activation_checkpointing=selective", width=390).page
    said, whole = (page.locator(each).bounding_box() for each in (".remedies > .leads", ".remedies"))
    assert said["height"] > 0.75 * whole["height"]
    assert whole["height"] <= 160
