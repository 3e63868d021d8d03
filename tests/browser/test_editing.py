"""Editing a question: undo, one entry of the history for a drag, problems at their fields, copies, and what follows."""

import json
import re
from html import unescape

import pytest
from seen import Page, said_by

from browsing import files_served
from trainledger.web.typography import in_words

pytestmark = pytest.mark.process
_HEARD = "said => document.querySelector('#said').textContent.startsWith(said)"


def test_undo_redo_and_reset_go_through_the_history_of_the_browser(fresh) -> None:
    page = fresh("?calculator=time")
    first = page.headlines
    assert page.button("Undo").is_disabled()
    page.fill("params", "70B")
    page.fill("tokens", "2T")
    assert page.query == "?calculator=time&params=70B&tokens=2T"
    page.button("Undo").click()
    page.page.wait_for_url("**params=70B")
    page.settled()
    assert page.field("tokens").input_value() == "15T"
    page.button("Redo").click()
    page.page.wait_for_url("**tokens=2T")
    page.settled()
    assert page.field("tokens").input_value() == "2T"
    page.button("Reset").click()
    page.settled()
    assert page.query == "?calculator=time"
    assert page.headlines == first
    page.back()
    assert page.field("params").input_value() == "70B"


def test_a_drag_is_one_entry_of_the_history_however_many_steps_it_has(fresh) -> None:
    page = fresh("?calculator=time")
    entries = page.page.evaluate("history.length")
    slider = page.slider("params")
    box = slider.bounding_box()
    mouse = page.page.mouse
    mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2)
    mouse.down()
    for step in range(40):
        mouse.move(box["x"] + box["width"] * (0.5 + step / 100), box["y"] + box["height"] / 2)
    mouse.up()
    page.settled()
    assert page.page.evaluate("history.length") == entries + 1
    assert f"params={page.field('params').input_value()}" in page.query
    assert page.verdict == page.api_verdict
    page.back()
    assert page.query == "?calculator=time"


def test_focus_and_open_numbers_survive_an_answer(fresh) -> None:
    page = fresh("?calculator=time")
    page.page.locator(".headline summary").first.click()
    slider = page.slider("tokens")
    slider.focus()
    for _ in range(5):
        slider.press("ArrowLeft")
    page.settled()
    assert slider.evaluate("each => each === document.activeElement")
    card = page.page.locator(".headline").first
    assert card.get_attribute("open") is not None
    assert card.locator(".formula").inner_text() == in_words(page.api()["headlines"][0]["formula"])


def test_a_field_that_the_answer_decides_cannot_be_moved(fresh) -> None:
    page = fresh("?calculator=time")
    assert page.slider("days").is_disabled()
    assert page.field("days").input_value() == "20.5609"
    page.fill("solve", "count")
    assert page.slider("days").is_enabled()
    assert page.slider("count").is_disabled()


def test_a_problem_stands_at_its_field_with_a_button_that_mends_it(fresh) -> None:
    page = fresh("?calculator=memory")
    before = page.headlines
    page.fill("layout.tensor", "3")
    problem = page.page.locator('[data-field="layout.tensor"] .problem')
    assert "must divide model.attention.n_heads = 32" in problem.inner_text()
    assert page.field("layout.tensor").get_attribute("aria-invalid") == "true"
    assert "old" in page.page.locator("#answer").get_attribute("class")
    assert page.headlines == before
    problem.get_by_role("button", name="use 2").click()
    page.settled()
    assert problem.is_hidden()
    assert page.field("layout.tensor").input_value() == "2"
    assert page.verdict == page.api_verdict


def test_the_menu_copies_what_the_answer_is_elsewhere(fresh) -> None:
    page = fresh(
        "?calculator=memory&run=gpt2-xl&recipe.seq_len=1024", permissions=["clipboard-read", "clipboard-write"]
    )

    def copied(title: str) -> str:
        button = page.button("Copy as")
        button.focus()
        button.press("Enter")
        for _ in range(8):
            if page.page.evaluate("document.activeElement.textContent") == title:
                break
            page.page.keyboard.press("ArrowDown")
        page.page.keyboard.press("Enter")
        page.page.wait_for_function(_HEARD, arg=f"{title} copied")
        return "" if "PNG" in title else str(page.page.evaluate("navigator.clipboard.readText()"))

    found = page.api()
    assert copied("Command line") == found["paste"]["command"]
    assert copied("Python") == found["paste"]["python"]
    assert copied("Run file") == found["paste"]["run_file"]
    assert copied("Link") == page.base + page.query
    assert json.loads(copied("JSON"))["headlines"] == found["headlines"]
    figure = copied("Figure as SVG")
    assert figure.startswith("<svg")
    assert "Memory of a device at the peak" in figure
    corner = re.findall(r'text-anchor="end" font-size="10"[^>]*>([^<]*)', figure)
    assert unescape("".join(corner)) == f"trainledger {page.query}"  # this machine's address is of no use elsewhere
    assert 'class="outline' not in figure
    copied("Figure as PNG")
    size = """async () => {
        const [item] = await navigator.clipboard.read();
        const image = await createImageBitmap(await item.getType("image/png"));
        return [image.width, image.height];
    }"""
    width, height = page.page.evaluate(size)
    assert width == 2 * float(re.search(r' width="([\d.]+)"', figure)[1])
    assert 200 < height < width


def copied(page: Page, kind: str) -> str:
    """What the menu puts on the clipboard."""
    page.button("Copy as").click()
    page.page.get_by_role("menuitem", name=kind, exact=True).click()
    page.page.locator(".toast").wait_for()
    return str(page.page.evaluate("navigator.clipboard.readText()"))


def test_what_is_pinned_stands_in_a_copied_figure_and_in_a_frame_of_others(fresh, tmp_path) -> None:
    page = fresh("?calculator=memory&recipe.micro_batch=12", permissions=["clipboard-read", "clipboard-write"])
    page.button("Pin").click()
    page.page.locator(".outline.pinned").wait_for(state="attached")
    page.fill("recipe.micro_batch", "1")
    figure = copied(page, "Figure as SVG")
    outline = figure.partition('class="outline pinned"')[2]
    assert outline.count('stroke="#0b5c94"') > 5
    assert "<text" not in outline.partition("</svg>")[0]
    frame = copied(page, "Frame for a page")
    assert page.page.locator(".toast").inner_text() == "Frame for a page copied; it works on this machine only"
    (tmp_path / "own.html").write_text(f"<!doctype html><title>own</title><h1>Memory</h1>{frame}")
    with files_served(tmp_path) as address:
        other = page.context.new_page()
        other.goto(f"{address}/own.html")
        inside = other.frame_locator("iframe")
        inside.locator(".outline.pinned").wait_for(state="attached")
        assert inside.locator(".pinned-said").inner_text().startswith("Pinned: 945")
        slides = inside.locator("#form input[type=range]:visible")
        assert slides.count() == 2
        before = inside.locator(".headline .number").first.inner_text()
        slides.first.press("ArrowRight")
        inside.locator(".headline .number", has_not_text=before).first.wait_for()
        more = inside.get_by_role("link", name="Open in trainledger")
        more.evaluate("each => each.addEventListener('click', (event) => event.preventDefault())")
        more.click()
        assert "embed" not in more.get_attribute("href")
        assert "pin=" in more.get_attribute("href")


def test_the_menu_closes_with_escape_and_gives_the_focus_back(fresh) -> None:
    page = fresh("?calculator=time")
    page.button("Copy as").click()
    page.page.keyboard.press("Escape")
    assert page.page.locator("#copies").is_hidden()
    assert page.page.evaluate("document.activeElement.id") == "copy"


def test_a_list_is_found_by_any_part_of_a_name(fresh) -> None:
    page = fresh("?calculator=time")
    device = page.field("device")
    device.fill("b200")
    options = page.page.locator("#field-device-list li")
    assert options.count() > 1
    assert all("B200" in each for each in options.all_inner_texts())
    assert options.filter(has_text="180 GB, 2.25 PFLOP/s").count() == 1
    device.press("ArrowDown")
    device.press("Enter")
    page.settled()
    assert "device=b200" in page.query
    assert page.verdict == page.api_verdict
    models = fresh("?calculator=memory").page
    models.locator("#field-run").fill("llama 3.1 70")
    assert models.locator("#field-run-list li").all_inner_texts() == ["Llama 3.1 70B"]


def test_any_other_setting_of_a_run_is_set_and_left_out(fresh) -> None:
    page = fresh("?calculator=memory&run=gpt2-xl&recipe.seq_len=1024")
    before = page.headlines
    page.page.locator("#another").fill("recipe.dropout")
    page.page.locator("#another-value").fill("0.1")
    page.button("Set").click()
    page.settled()
    assert "recipe.dropout=0.1" in page.query
    assert page.headlines != before
    assert "recipe.dropout=0.1" in page.command()
    page.page.get_by_role("button", name="leave recipe.dropout out").click()
    page.settled()
    assert page.headlines == before


def test_a_pasted_file_is_the_model_that_is_asked_about(fresh) -> None:
    config = {"model_type": "gpt2", "n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 50304, "n_positions": 512}
    page = fresh("?calculator=memory&recipe.seq_len=512")
    page.page.get_by_text("Paste a config.json").click()
    page.fill("config", json.dumps(config))
    assert page.page.locator("#answer.old").count() == 0
    assert fresh(page.query).headlines == page.headlines
    assert page.command()[2] == "config.json"


def test_presets_are_queries(fresh) -> None:
    page = fresh("?calculator=time")
    page.button("Llama 3.1 405B").click()
    page.settled()
    assert page.button("Llama 3.1 405B").get_attribute("aria-pressed") == "true"
    assert said_by(page.command())["params"] == 405 * 10**9


def test_presets_in_quick_succession_are_undone_one_by_one(fresh) -> None:
    page = fresh("?calculator=time")
    page.page.evaluate("[...document.querySelectorAll('#presets button')].slice(3, 5).forEach(each => each.click())")
    page.settled()
    page.button("Undo").click()
    page.settled()
    assert page.button("Llama 3 70B on 512 H200, predicted").get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("text", ["inf", "0x10"])
@pytest.mark.parametrize(("name", "field"), [("time", "count"), ("memory", "recipe.seq_len"), ("formats", "value")])
def test_a_text_that_is_no_quantity_is_refused_alike_everywhere(name: str, field: str, text: str, fresh) -> None:
    page = fresh(f"?calculator={name}")
    page.fill(field, text)
    if name != "formats" or text != "inf":  # a value of a format
        problem = page.page.locator(f'[data-field="{field}"] .problem')
        assert ("must be a whole number" if text == "inf" and "." in field else "': is n") in problem.inner_text()
    json.loads(page.context.request.get(f"{page.base}view/{name}?{field}={text}").text(), parse_constant=_strict)


def _strict(word: str) -> None:
    raise AssertionError(f"{word} is not strict JSON")


def test_a_field_reads_a_number_with_its_unit_and_a_name_with_its_title(fresh) -> None:
    page = fresh("?calculator=memory&recipe.seq_len=12288").page
    reads = '[data-field="{}"] .reads'
    assert page.locator(reads.format("recipe.seq_len")).inner_text() == "12,288 tokens"
    assert page.locator(reads.format("run")).inner_text() == "Llama 3 8B"
    assert page.locator(reads.format("cluster.device")).inner_text() == "H100 SXM, 80 GB, 989.5 TFLOP/s"
    slider = page.locator('[data-field="recipe.seq_len"] input[type=range]')
    slider.press("ArrowLeft")
    assert page.locator(reads.format("recipe.seq_len")).inner_text() == "8,192 tokens"  # before the answer is there
    assert slider.get_attribute("aria-valuetext") == "8,192 tokens"
