"""Searches find the layouts that they found before the house was rebuilt."""

import pytest
from golden_cases import SEARCHES, search_of

from golden import frozen

pytestmark = pytest.mark.agreement


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_finds_what_it_found(name: str) -> None:
    assert search_of(SEARCHES[name]) == frozen("searches")[name]
