"""Every worked example: those that hold are reproduced, those that are wrong are shown wrong with the right number."""

import pytest
from claim import agree, line_of, numbers_in, rows, verdict
from claims_page import number, page
from worked_claims import CLAIMS, claim_of

pytestmark = pytest.mark.published

ROWS = {row["id"]: row for row in rows()}
IDS = list(ROWS)


def test_every_row_is_worked_out() -> None:
    assert set(CLAIMS) == set(ROWS)
    assert len(ROWS) == 62


@pytest.mark.parametrize("name", IDS)
def test_the_verdict_is_that_of_the_file(name: str) -> None:
    assert verdict(ROWS[name], claim_of(ROWS[name])) == ROWS[name]["verdict"]


@pytest.mark.parametrize("name", IDS)
def test_the_command_prints_the_number(name: str) -> None:
    for each in claim_of(ROWS[name]).shown:
        assert line_of(each)


@pytest.mark.parametrize("name", [name for name in IDS if ROWS[name]["verdict"] == "wrong"])
def test_a_wrong_number_has_its_cause(name: str) -> None:
    row, claim = ROWS[name], claim_of(ROWS[name])
    assert claim.how
    printed = numbers_in(row["published_value"])
    assert not agree(claim.ours, printed)
    if claim.theirs is None:
        assert claim.how.startswith("in no way")
    else:
        assert agree(claim.theirs, printed), (claim.theirs, printed)


@pytest.mark.parametrize("name", IDS)
def test_our_number_is_the_one_in_the_file(name: str) -> None:
    """Where the file names our number as one; of 1.2 times 10^-8 and the like all digits that it has."""
    text = ROWS[name]["our_value"]
    expected, ours = numbers_in(text), claim_of(ROWS[name]).ours
    if name == "fp16_min":
        assert ours[0] >= expected[0] > 0  # the smallest subnormal, and 6e-5 as fp16 holds it
    elif name == "act_rule_of_thumb":  # 32 bytes for each element of the stream in a block; the ledger has logits too
        assert expected[0] < ours[0] < 1.1 * expected[0]
    elif expected and "rows" not in text:
        assert agree(ours, expected[: len(ours)])


def test_the_page_is_what_would_be_written_today() -> None:
    assert page().stale() == [], "run python tools/published/claims_page.py"


def test_numbers_of_texts() -> None:
    assert numbers_in("143 to 144") == (143.5,)
    assert numbers_in("10 and 1000") == (10, 1000)
    assert numbers_in("6.3e24") == (6.3e24,)
    assert (number(268435456.0), number(6.3e24), number(0.25)) == ("268,435,456", "6.3e24", "0.25")
    assert agree((103.7,), (100,))
    assert not agree((103.9,), (100,))
    assert not agree((1.0, 2.0), (1.0,))
