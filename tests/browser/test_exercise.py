"""Exercises: the answer is hidden until a guess is checked, and a link gives everybody the same one."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.process


def test_an_exercise_hides_the_answer_checks_a_guess_and_reveals_the_formula(fresh) -> None:
    page = fresh("?calculator=time")
    page.button("Exercise").click()
    page.page.wait_for_url("**exercise=*")
    page.settled()
    assert page.page.locator(".headlines").is_hidden()
    assert page.page.locator("#verdict").is_hidden()
    assert page.page.evaluate("document.title").startswith("Training time: exercise")
    assert page.page.evaluate("document.activeElement.id") == "guess"
    page.page.locator("#guess").fill("1")
    page.page.locator("#guess").press("Enter")
    outcome = page.page.locator("#outcome")
    outcome.locator(".formula").wait_for()
    assert outcome.inner_text().lstrip("✓✕ \n").startswith(("No: it is", "Close: it is", "Right: it is"))
    assert page.page.locator(".headlines").is_visible()


def test_a_link_to_an_exercise_asks_everybody_the_same(fresh) -> None:
    one, other = (fresh("?calculator=time&exercise=7") for _ in range(2))
    assert one.values == other.values
    asked = one.page.locator(".guess label").inner_text()
    assert asked == other.page.locator(".guess label").inner_text()
    one.button("Another").click()
    one.page.wait_for_url("**exercise=8")
    one.settled()
    assert one.values != other.values


def test_what_the_answer_decides_is_not_given_away_by_its_field(fresh) -> None:
    page = fresh("?calculator=time&exercise=2")
    solved = page.field("solve").input_value()
    assert page.field(solved).input_value() == ""
    page.button("Leave the exercise").click()
    page.settled()
    assert "exercise" not in page.query
    assert page.verdict == page.api()["verdict"]
    assert page.field(solved).input_value()
