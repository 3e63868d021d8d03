"""Fields, address and answer are of one question: while an answer is worked out, after a cancel, and by remedies."""

import re

import pytest
from seen import Page, said_by

from browsing import SMALL

pytestmark = pytest.mark.process
LONG = "Llama 3.1 405B on 2,048 H100"  # an example whose search takes seconds


def late(page: Page) -> None:
    """Waits until the page says that an answer takes longer."""
    page.page.locator("#working").wait_for(state="visible")


def standing(page: Page) -> str:
    return str(page.page.locator("#standing").inner_text())


def test_fields_show_the_new_question_before_its_answer_is_there(fresh) -> None:
    page = fresh(f"?calculator=layouts{SMALL['layouts']}")
    page.button(LONG).click()
    late(page)
    assert "run=llama-3.1-405b" in page.query
    assert page.field("run").input_value() == "llama-3.1-405b"
    assert page.field("cluster.count").input_value() == "2048"
    assert page.field("layout.pipeline").input_value() == ""
    assert "the question before" in standing(page)
    assert "old" in page.page.locator("#answer").get_attribute("class")


def test_a_cancelled_question_leads_back_to_the_one_that_is_answered(fresh) -> None:
    page = fresh(f"?calculator=layouts{SMALL['layouts']}")
    before = page.query, page.values, page.headlines
    page.button(LONG).click()
    late(page)
    assert page.page.locator("#progress").is_visible()
    page.field("recipe.seq_len").fill("4096")  # a further change while it is worked out
    page.button("Cancel").click()
    page.page.wait_for_function("query => location.search === query", arg=before[0])
    page.settled()
    assert (page.query, page.values, page.headlines) == before
    assert page.page.locator("#working").is_hidden()
    assert page.page.locator("#answer.old").count() == 0
    assert page.page.locator("#standing").is_hidden()
    assert page.verdict == page.api_verdict


def test_a_cancel_without_an_answer_says_what_to_do(fresh) -> None:
    page = fresh("?calculator=time")
    page.page.locator("#calculators a", has_text="Layouts").click()
    page.button(LONG).click()
    late(page)
    page.button("Cancel").click()
    page.settled()
    assert standing(page).startswith("Cancelled before there was an answer. Change a field, choose an example, or")
    assert "run=llama-3.1-405b" in page.query
    assert page.field("run").input_value() == "llama-3.1-405b"
    page.fill("run", "gpt2-xl")
    page.fill("cluster.count", "8")
    assert page.page.locator("#standing").is_hidden()
    assert page.verdict == page.api_verdict


def test_another_width_and_a_copy_wait_for_no_second_search(fresh) -> None:
    page = fresh("?calculator=time", permissions=["clipboard-read", "clipboard-write"])
    statuses: list[tuple[str, int]] = []
    page.page.on("response", lambda reply: statuses.append((reply.url, reply.status)))
    page.page.goto(page.base + "?calculator=breaks&run=gpt2-xl&recipe.seq_len=1024&along=devices")
    page.settled()
    assert statuses
    statuses.clear()
    page.page.set_viewport_size({"width": 700, "height": 900})
    page.page.wait_for_timeout(200)
    page.settled()
    page.button("Copy as").click()
    page.page.get_by_role("menuitem", name="JSON").click()
    page.page.wait_for_function("() => document.querySelector('#said').textContent === 'JSON copied'")
    assert len(statuses) >= 2
    assert {status for _, status in statuses} == {200}


def test_ask_again_asks_the_question_that_was_cancelled(fresh) -> None:
    page = fresh("?calculator=time")
    page.page.locator("#calculators a", has_text="Layouts").click()
    late(page)
    page.button("Cancel").click()
    page.button("Ask again").click()
    page.settled()
    assert page.page.locator("#standing").is_hidden()
    assert page.verdict == page.api_verdict


def test_a_link_with_a_problem_says_that_there_is_no_answer(fresh) -> None:
    page = fresh("?calculator=memory&layout.tensor=3")
    assert standing(page) == "This question has no answer; what is wrong stands at its field."
    page.fill("layout.tensor", "2")
    assert page.page.locator("#standing").is_hidden()


def test_a_remedy_sets_the_fields_and_says_before_what_it_leads_to(fresh) -> None:
    page = fresh("?calculator=memory", permissions=["clipboard-read", "clipboard-write"])
    assert page.verdict.startswith("Does not fit")
    line = page.page.locator(".remedies li", has_text="Shard over 8 ranks")
    leads = line.locator(".leads:not(:empty)")
    leads.wait_for()
    printed = leads.inner_text().removeprefix("✓ ")
    assert printed.lstrip("✕✓≈? ").startswith("May fit (chance ")  # below 80 %
    line.get_by_role("button", name="Copy command: Shard over 8 ranks (FSDP)").click()
    page.page.wait_for_function("() => document.querySelector('#said').textContent === 'Command line copied'")
    copied = str(page.page.evaluate("navigator.clipboard.readText()"))
    page.button("Shard over 8 ranks (FSDP)").click()
    page.settled()
    assert page.verdict == printed
    assert "layout.shard=8" in page.query
    assert page.field("layout.shard").input_value() == "8"
    further = page.page.locator(".remedies li:not(.gone)", has_text="Shard over 16 ranks").count()
    assert (further > 0) == (int(re.findall(r"chance (\d+) %", printed)[0]) < 50)
    assert copied == page.page.locator(".terminal code").inner_text()
    assert said_by(page.command())["forecast"]["fits"] is True
    page.back()
    assert page.verdict.startswith("Does not fit")


def test_a_remedy_may_lead_to_the_calculator_of_layouts(fresh) -> None:
    page = fresh("?calculator=memory&run=gpt2-xl&recipe.micro_batch=64&recipe.seq_len=1024")
    page.button("Search the layouts of 8 devices").click()
    page.settled()
    assert page.query.startswith("?calculator=layouts&run=gpt2-xl")
    assert page.verdict == page.api_verdict


def test_a_field_that_does_not_count_says_why_and_cannot_be_changed(fresh) -> None:
    page = fresh("?calculator=optimal")
    box = page.page.locator('[data-field="money"]')
    assert "not counted: the budget is in days of devices" in box.inner_text()
    assert page.field("money").is_disabled()
    assert page.slider("money").is_disabled()
    page.fill("budget", "money")
    assert page.field("money").is_enabled()
    assert page.field("money").is_visible()
    assert "not counted" not in box.inner_text()
    assert page.field("count").is_disabled()


def test_a_group_that_does_not_count_says_so_once(fresh) -> None:
    page = fresh("?calculator=time")
    group = page.page.locator("fieldset", has_text="Layout of a predicted MFU")
    assert group.locator(".unused:visible").all_inner_texts() == ["not counted: the MFU is given"]
    assert group.locator("[data-field]:visible").count() == 0
    page.fill("mfu_from", "predicted")
    assert group.locator("[data-field]:visible").count() > 5


def test_a_field_with_a_problem_can_be_changed_even_where_it_did_not_count(fresh) -> None:
    page = fresh("?calculator=time&layout.tensor=2")
    assert "only a predicted MFU" in page.page.locator('[data-field="layout.tensor"] .problem').inner_text()
    page.fill("mfu_from", "predicted")
    assert page.page.locator("#answer.old").count() == 0
    page.fill("mfu_from", "given")  # it does not count any more, and is named
    assert page.field("layout.tensor").is_enabled()
    page.fill("layout.tensor", "")
    assert page.verdict == page.api_verdict


def test_an_exact_number_that_is_shown_rounded_says_so_and_has_all_digits(fresh) -> None:
    page = fresh("?calculator=formats&value=0.1")
    card = page.page.locator(".headline", has_text="in fp32")
    assert card.locator(".basis").inner_text().endswith("exact, rounded here")
    card.locator("summary").click()
    assert card.locator(".full").inner_text() == "in full: 0.100000001490116119384765625"
    whole = page.page.locator(".headline", has_text="in e5m2")
    assert whole.locator(".basis").inner_text().endswith("exact")
