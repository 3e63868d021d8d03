"""Every key and value of thirty JSON answers is what it was before the surface was rebuilt (`golden.py` says how)."""

from __future__ import annotations

import pytest
from golden_cases import ANSWERS

from golden import answer, frozen, leaves

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_the_keys_and_values_that_it_had(name: str) -> None:
    before, today = frozen("answers")[name], dict(leaves(answer(ANSWERS[name])))
    moved = {path: (before.get(path), today.get(path)) for path in before | today}
    assert not {path: values for path, values in moved.items() if values[0] != values[1]}
