"""trainledger accounts for every byte and every FLOP of a training run.

Every public name answers one question; a name is imported when it is first used, so that
``import trainledger`` brings in neither torch nor numpy.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# The imports of __init__.pyi, by the name that they bring in.
with open(f"{__file__.rpartition('.')[0]}.pyi", encoding="utf-8") as _stub:
    _IMPORTS = [line[5:].strip().split(" import ") for line in _stub if line.startswith("from trainledger.")]
_WHERE = {name: module for module, names in _IMPORTS for name in names.split(", ")}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(where), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})


class _Face(ModuleType):
    """Keeps ``trainledger.trace`` the function once the import system binds the room of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _WHERE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
