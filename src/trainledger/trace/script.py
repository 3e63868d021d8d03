"""A script read and run as Python would run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType

from trainledger.spec.problem import InvalidInput, Problem


def compiled(path: str) -> CodeType:
    """The code of a script; raises InvalidInput where it cannot be read or is no Python."""
    if os.path.isdir(path):
        raise InvalidInput([Problem("script", path, "is a directory; name the file to run, such as train.py")])
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise InvalidInput([Problem("script", path, f"cannot be read: {error.strerror or error}")]) from None
    try:
        return compile(source, os.path.abspath(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise InvalidInput(
            [Problem("script", path, f"is not Python: {error.msg} at line {error.lineno or 1}")]
        ) from None
    except ValueError as error:
        raise InvalidInput([Problem("script", path, f"is not Python: {error}")]) from None


@contextmanager
def as_main(path: str, arguments: Sequence[str]) -> Iterator[ModuleType]:
    """A module ``__main__`` for a script, with ``sys.argv`` and ``sys.path[0]`` as Python sets them."""
    module = ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    module.__dict__["__cached__"] = None
    before = sys.argv, sys.path[:], sys.modules.get("__main__")
    sys.argv = [path, *arguments]
    # The first place is that of the running program where Python has set it so, else it is left in place.
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.modules["__main__"] = module
    try:
        yield module
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        if before[2] is not None:
            sys.modules["__main__"] = before[2]


def program_of(path: str, arguments: Sequence[str]) -> Callable[[], None]:
    """A function that runs a script with arguments, each time anew; an exit without an error is its end."""
    code = compiled(path)

    def program() -> None:
        with as_main(path, arguments) as module:
            try:
                exec(code, module.__dict__)
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise

    return program
