"""Who called the operation that runs now: the frame of the user's, the expression in it, the library in between."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from trainledger.annotate.files import Files
from trainledger.trace.recorder.source_lines import is_tracers

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# Parts of torch that only pass on what they are called for.
_THIN = tuple(
    _TORCH + each.replace("/", os.sep)
    for each in (
        "_tensor.py", "functional.py", "nn/functional.py", "nn/modules/module.py", "nn/modules/linear.py",
        "nn/modules/flatten.py", "nn/modules/loss.py", "nn/modules/container.py", "_tensor_str.py", "overrides.py",
        "utils/_device.py", "_jit_internal.py", "utils/_contextlib.py", "_dynamo/eval_frame.py", "_compile.py",
    )
)  # fmt: skip


class Caller(NamedTuple):
    """A place in the user's code: file as shown, line, expression, and the library inside which it happens, or ""."""

    file: str
    line: int
    expression: str
    inside: str
    frame: FrameType

    @property
    def at(self) -> str:
        return f"{self.file}:{self.line}"


Chain = tuple[str, ...]  # "file:line" of the user's lines that call one another, the innermost first


class Callers:
    """Finds who called; what an instruction's expression is, is remembered."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._thread = threading.get_ident()
        self._expressions: dict[tuple[CodeType, int], str] = {}

    def now(self) -> Caller | None:
        """The innermost caller in a file that is shown; None where there is none.

        On another thread, as that on which autograd serves a device, it is the program's own that waits for it.
        """
        return self._from(sys._getframe(1)) or (
            None if threading.get_ident() == self._thread else self._from(sys._current_frames().get(self._thread))
        )

    def chain(self) -> Chain:
        """All lines of the files shown that are being run."""
        found = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = self._files.name(frame.f_code.co_filename)
            if name:
                found.append(f"{name}:{frame.f_lineno}")
            frame = frame.f_back
        return tuple(found)

    def _from(self, frame: FrameType | None) -> Caller | None:
        inside = ""
        while frame is not None:
            file = frame.f_code.co_filename
            name = self._files.name(file)
            if name:
                return Caller(name, frame.f_lineno, self._expression(frame), inside, frame)
            if is_tracers(file):
                inside = ""
            elif not inside and not file.startswith(("<", *_THIN)):
                inside = _module_of(frame)
            frame = frame.f_back
        return None

    def _expression(self, frame: FrameType) -> str:
        key = (frame.f_code, frame.f_lasti)
        found = self._expressions.get(key)
        if found is None:
            found = self._expressions[key] = expression_at(frame)
        return found


def _module_of(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__", "")
    return f"{name}.{frame.f_code.co_name}"


def expression_at(frame: FrameType) -> str:
    """The source of the expression that a frame evaluates now, on one line; "" where it cannot be had."""
    places = list(frame.f_code.co_positions())
    at = frame.f_lasti // 2
    if at >= len(places):
        return ""
    first, last, begin, end = places[at]
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, each).encode() for each in range(first, last + 1)]
    if not lines or not lines[-1]:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return " ".join(b" ".join(each.strip() for each in lines).decode(errors="replace").split())
