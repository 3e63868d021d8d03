"""Every key and value of thirty JSON answers is what it was before the surface was rebuilt (`golden.py` says how)."""

from __future__ import annotations

import pytest
from golden_cases import ANSWERS

from golden import answer, frozen, leaves

pytestmark = pytest.mark.sweep
# Each predicts some hundred runs: in `make test-all`, where shorter answers of the same verbs stay in `make test`.
LONG = (
    "advise on 8b", "advise on a laid out run", "breaks of 8b as sequences grow", "fit of 8b on one a100",
    "fit of LoRA on a small card", "layouts of 8b",
)  # fmt: skip
CASES = [pytest.param(name, marks=[pytest.mark.agreement] * (name in LONG)) for name in ANSWERS]


@pytest.mark.parametrize("name", CASES)
def test_an_answer_has_the_keys_and_values_that_it_had(name: str) -> None:
    before, today = frozen("answers")[name], dict(leaves(answer(ANSWERS[name])))
    moved = {path: (before.get(path), today.get(path)) for path in before | today}
    assert not {path: values for path, values in moved.items() if values[0] != values[1]}
