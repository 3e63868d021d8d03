"""Which line of the user's code an operation comes from."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType

import torch
import torch.autograd.graph

BY_AUTOGRAD = None  # no Python called the operation: the engine of backward did

_PACKAGE = str(Path(__file__).resolve().parents[2])
_TRACER = tuple(os.path.join(_PACKAGE, room) + os.sep for room in ("trace", "annotate", "measure"))
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
OURS = _PACKAGE + os.sep
_STDLIB = tuple(sysconfig.get_path(each) + os.sep for each in ("stdlib", "platstdlib"))
_SITES = tuple({sysconfig.get_path(each) + os.sep for each in ("purelib", "platlib")})
_WRAPPERS = ("einops", "opt_einsum")  # libraries whose lines say less than those of who calls them
_END = "end"
_ENGINE = "engine"


def is_users(file: str) -> bool:
    """Whether a file is code whose lines say something to a user: not torch's, not the tracer's, not Python's own."""
    if file.startswith(_SITES):
        return not file.startswith(TORCH) and _below_site(file).split(os.sep)[0] not in _WRAPPERS
    return not file.startswith((TORCH, *_TRACER, *_STDLIB, "<"))


def is_installed(file: str) -> bool:
    """Whether a file is of a package that was installed."""
    return file.startswith(_SITES)


def is_tracers(file: str) -> bool:
    """Whether a file is the tracer's own."""
    return file.startswith(_TRACER)


def callers() -> Iterator[FrameType]:
    """The frames that run now, from that of the caller outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.cache
def shown_file(file: str) -> str:
    """A file as it is printed: from its package where it is installed, else from the working directory if below."""
    if file.startswith(_SITES):
        return _below_site(file).replace(os.sep, "/")
    path = Path(file).resolve()
    if path.is_relative_to(Path(_PACKAGE).parent):
        return path.relative_to(Path(_PACKAGE).parent).as_posix()
    return path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else path.as_posix()


def _below_site(file: str) -> str:
    site = next(each for each in _SITES if file.startswith(each))
    return file[len(site) :]


class Lines:
    """Finds the line that an operation comes from while it is dispatched; ``counts`` says which files count."""

    def __init__(self, counts: Callable[[str], bool] = is_users) -> None:
        self._counts = counts
        self._known: dict[CodeType, str] = {}

    def here(self, *, past_engine: bool = False) -> str | None:
        """The innermost line that counts as "file:line"; "" where there is none, `BY_AUTOGRAD` inside its engine.

        ``past_engine`` looks on for the line that called backward.
        """
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            short = self._known.get(code)
            if short is None:
                short = self._known[code] = self._look(code)
            if short is _ENGINE:
                if not past_engine:
                    return BY_AUTOGRAD
            elif short:
                return "" if short is _END else f"{short}:{frame.f_lineno}"
            above = frame.f_back
            if above is None:
                return ""
            frame = above
        return ""

    def _look(self, code: CodeType) -> str:
        if code in _ENDS:
            return _END
        if code in _ENGINES:
            return _ENGINE
        file = code.co_filename
        return shown_file(file) if self._counts(file) else ""


_ENGINES = {
    each.__code__
    for each in (getattr(torch.autograd.graph, "_engine_run_backward", None), torch.autograd.backward)
    if each is not None
}
_ENDS: set[CodeType] = set()


def ends_here(function: Callable[..., object]) -> None:
    """Who calls this function of the tracer has caused none of the operations below it."""
    _ENDS.add(function.__code__)
