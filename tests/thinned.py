"""Matrices of cases of which `make test` runs some and `make test-all` all."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], every: int = 4) -> list[Any]:
    """The cases; all but one in ``every`` are marked as agreement, which `make test-all` alone runs."""
    return [
        case if at % every == 0 else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=LEFT)
        for at, case in enumerate(cases)
    ]


LEFT = pytest.mark.agreement
