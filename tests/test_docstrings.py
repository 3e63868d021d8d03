"""The examples in the docstrings, all of them: a figure that is shown is the one that comes out."""

import doctest
import importlib
from pathlib import Path

import pytest

import house
import trainledger

pytest.importorskip("torch")


def test_the_examples_in_the_docstrings_hold() -> None:
    wrong, tried = [], 0
    for path in sorted(Path(trainledger.__file__).parent.rglob("*.py")):
        if ">>>" in path.read_text(encoding="utf-8"):
            module = importlib.import_module(house.module_of(path))
            result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
            tried += result.attempted
            wrong += [module.__name__] * result.failed
    assert wrong == []
    assert tried > 300
