"""Every key and value of thirty JSON answers is what it was before the surface was rebuilt (`golden.py` says how)."""

import pytest
from golden_cases import ANSWERS

from golden import answer, frozen, leaves

pytestmark = pytest.mark.sweep


SEARCHES = ("breaks of 8b as sequences grow", "plan of a searched layout")
EACH = [pytest.param(name, marks=pytest.mark.agreement) if name in SEARCHES else name for name in ANSWERS]


@pytest.mark.parametrize("name", EACH)
def test_an_answer_has_the_keys_and_values_that_it_had(name: str) -> None:
    before, today = frozen("answers")[name], dict(leaves(answer(ANSWERS[name])))
    moved = {
        path: (before.get(path), today.get(path)) for path in before | today if before.get(path) != today.get(path)
    }
    assert not moved
    assert list(today) == list(before)
