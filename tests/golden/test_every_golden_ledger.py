"""All golden ledgers, of which `test_golden.py` takes some."""

import pytest
from golden_cases import LEDGERS, ledger_of

from golden import frozen, renames

pytestmark = pytest.mark.agreement
WORDS = renames()["words"]


@pytest.mark.parametrize("name", LEDGERS)
def test_a_ledger_is_what_it_was(name: str) -> None:
    assert ledger_of(LEDGERS[name], WORDS) == frozen("ledgers")[name]


def test_no_golden_ledger_is_left_out() -> None:
    assert set(LEDGERS) == set(frozen("ledgers"))
