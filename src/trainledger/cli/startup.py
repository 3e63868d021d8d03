"""What keeps the verbs that only calculate quick to start, and to end."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn


class _Later(ModuleType):
    """Stands for a module until something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        from importlib import import_module

        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def start_light() -> None:
    """Spare a short-lived process what it does not need: 9 of 57 ms of a plan, measured.

    `dataclasses` imports `inspect` (with ast, dis and tokenize, 6 ms) for classes without a docstring, of which there
    are none here, and `copy` (with weakref, 0.7 ms) for records as dicts. `argparse` asks gettext for its words in the
    reader's language (2 ms with `locale`); they stay English, as all else is. Nothing that a plan allocates is garbage
    before it ends.
    """
    import gc

    gc.disable()
    for name in ("inspect", "copy"):
        if name not in sys.modules:
            sys.modules[name] = _Later(name)
    if "gettext" not in sys.modules:
        sys.modules["gettext"] = _english()


def _english() -> ModuleType:
    """A gettext that translates nothing."""
    module = ModuleType("gettext")
    vars(module).update(gettext=str, ngettext=lambda one, many, count: one if count == 1 else many)
    return module


def leave(code: int) -> NoReturn:
    """End a process that only calculated and printed: nothing is open that taking the interpreter apart would close.

    That would cost 5 of 64 ms of a plan, measured.
    """
    import os

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)
