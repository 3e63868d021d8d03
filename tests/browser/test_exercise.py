"""Exercises: the answer is hidden until a guess is checked, and a link gives everybody the same one."""

import pytest

from trainledger.web import answers

pytestmark = pytest.mark.process


def guessed(page, guess: str) -> str:
    """What is said to a guess."""
    page.page.locator("#guess").fill(guess)
    page.page.locator("#guess").press("Enter")
    page.page.wait_for_function("before => document.querySelector('#outcome').innerText !== before", arg="")
    page.page.wait_for_timeout(200)
    return str(page.page.locator("#outcome").inner_text())


def test_a_first_miss_is_given_a_hint_and_the_second_the_derivation_and_the_answer(fresh) -> None:
    page = fresh("?calculator=time")
    page.button("Exercise").click()
    page.page.wait_for_url("**exercise=*")
    page.settled()
    question = page.page.locator(".guess label").inner_text()
    assert question.endswith("?")
    assert len(question) > 60
    assert page.page.locator(".headlines").is_hidden()
    assert page.page.locator("#verdict").is_hidden()
    assert page.page.evaluate("document.title").startswith("Training time: exercise")
    assert page.page.evaluate("document.activeElement.id") == "guess"
    assert "is no number" in guessed(page, "soon")
    assert "Hint:" in guessed(page, "1")
    assert page.page.locator(".headlines").is_hidden()
    said = guessed(page, "2")
    assert "The answer:" in said
    assert "×" in said
    assert page.page.locator(".headlines").is_visible()


def test_the_fields_of_an_exercise_are_scrolled_to_and_not_changed(fresh) -> None:
    page = fresh("?calculator=memory&exercise=2")
    page.page.mouse.move(*(page.page.locator("#form").bounding_box()[side] + 80 for side in ("x", "y")))
    page.page.mouse.wheel(0, 600)
    page.page.wait_for_function("() => document.querySelector('#form').scrollTop > 100")
    assert page.field("layout.shard").is_disabled()
    page.button("Leave the exercise").click()
    page.settled()
    assert page.field("layout.shard").is_enabled()


def test_a_set_is_a_link_and_has_a_score(fresh) -> None:
    page = fresh("?calculator=formats&exercise=4")
    page.button("A set of 5").click()
    page.page.wait_for_url("**set=4-8*")
    for at in range(5):
        page.page.locator(".guess .name", has_text=f"Exercise {at + 1} of 5").wait_for()
        right = answers.check("formats", 4 + at, "0", 1)["said"].rpartition("The answer: ")[2]
        if at == 2:
            right = "0"
            assert "Hint" in guessed(page, "0")
        assert ("Right" in guessed(page, right)) == (at != 2)
        if at < 4:
            page.button("Next").click()
    assert page.page.locator(".score").inner_text() == "The set is done: 4 right of 5."
    page.page.get_by_text("Link to this set").click()
    page.page.locator(".guess .name", has_text="Exercise 1 of 5: 4 right so far").wait_for()


def _late(page, milliseconds: int) -> None:
    """Exercises of this page come late."""

    def later(route) -> None:
        page.page.wait_for_timeout(milliseconds)
        route.continue_()

    page.page.route("**/exercise/**", later)


def test_a_guess_is_kept_where_the_exercise_comes_late(fresh) -> None:
    page = fresh("?calculator=time")
    _late(page, 1_500)
    page.button("Exercise").click()
    assert "Hint" in guessed(page, "1")
    page.page.wait_for_timeout(2_000)
    assert page.page.locator("#outcome .verdict").is_visible()


def test_a_calculator_chosen_before_the_exercise_comes_is_kept(fresh) -> None:
    page = fresh("?calculator=time")
    _late(page, 1_000)
    page.button("Exercise").click()
    page.page.locator("#calculators").get_by_text("Matmul").click()
    page.page.wait_for_timeout(2_000)
    page.settled()
    assert "exercise" not in page.query
    assert page.page.locator(".headlines").is_visible()


def test_an_exercise_that_does_not_come_leaves_the_answer(fresh) -> None:
    page = fresh("?calculator=time")
    page.page.route("**/exercise/**", lambda route: route.fulfill(status=422, json={}))
    page.button("Exercise").click()
    page.page.locator(".toast", has_text="There is no exercise now").wait_for()
    page.settled()
    assert "exercise" not in page.query
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
    page = fresh("?calculator=time&exercise=3")
    solved = page.field("solve").input_value()
    assert page.field(solved).input_value() == ""
    page.button("Leave the exercise").click()
    page.settled()
    assert "exercise" not in page.query
    assert page.verdict == page.api_verdict
    assert page.field(solved).input_value()
