"""A claim that does not hold is red or stops a script; an exercise takes what is right and says what is wrong."""

import pytest

from trainledger.report.lesson import FAILED, Claim, Claims, Exercise, Gives, claims, reply

WRONG = Claim("a third", 0.33, 1 / 3, 0.005)


def test_a_claim_that_does_not_hold_is_red_in_a_notebook_and_an_error_in_a_script() -> None:
    html = Claims((Claim("bytes of 4 x 8 in fp32", 128, 128, unit="bytes"), WRONG))._repr_html_()
    assert html.count("<tr") == 3
    assert html.count(FAILED) == html.count("✗") == 1
    assert "128 bytes" in html
    with pytest.raises(AssertionError, match=r"a third: 0\.33, expected 0\.333"):
        claims([WRONG])


@pytest.mark.parametrize("ours", ["a<b>", None, True])
def test_what_a_claim_says_is_text(ours: object) -> None:
    html = Claims((Claim("<script>", ours, ours),))._repr_html_()  # type: ignore[arg-type]
    assert "<script>" not in html
    assert "<b>" not in html


def test_numbers_are_taken_as_people_write_them() -> None:
    billions = Exercise("?", 12.6e9, "derivation", unit="parameters")
    for right in ("12.6B", "12.6e9", " 12,600,000,000 ", "12.5B parameters"):
        assert billions.fault(right) == "", right
    assert billions.fault("11B") == "Too low."
    assert billions.fault("many").startswith("This is no number")
    assert Exercise("?", 0.4, "").fault("40%") == ""
    assert Exercise("?", 80e9, "", unit="bytes").fault("80 GB") == ""


def test_a_choice_and_a_mistake_have_their_remarks() -> None:
    exercise = Exercise("?", "bf16", "range", choices=("bf16", "fp16"), mistakes={"fp16": "It ends at 65,504."})
    assert exercise.fault("bf16") == ""
    assert exercise.fault("fp16") == "It ends at 65,504."


def test_code_is_run_and_whatever_it_does_is_a_sentence() -> None:
    check = Gives("double", (((2,), 4), ((0.5,), 1.0)))
    assert check("def double(x): return 2 * x") == ""
    assert check("def double(x): return x ** 2") == "double(0.5) gives 0.25, not 1.0."
    assert check("def double(x): return x / 0").startswith("ZeroDivisionError")
    assert check("exit()").startswith("SystemExit")
    assert check("triple = 3").startswith("KeyError")
    assert check("def double(:").startswith("SyntaxError")


def test_the_hint_comes_before_the_derivation_and_an_empty_field_says_nothing() -> None:
    exercise = Exercise("how much is a quarter of 3?", 0.75, "3 / 4.", hint="Divide.", start="x = 1")
    hint, end = "Too high. Hint: Divide.", "Too high. 3 / 4. The answer: 0.75"
    replies = [reply(exercise, given) for given in (None, " ", "x = 1", "3", "3", "4", "0.75")]
    assert replies == ["", "", "", hint, hint, end, "Right. 3 / 4."]
