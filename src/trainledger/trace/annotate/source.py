"""The source of a program: which files are shown, how their lines hang together, and which line calls an operation."""

from __future__ import annotations

import ast
import fnmatch
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from trainledger.trace.recorder.source_lines import is_tracers, is_users, shown_file

_INSTALLED = tuple({sysconfig.get_path(each) + os.sep for each in ("purelib", "platlib", "stdlib", "platstdlib")})
_SITES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
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


class Files:
    """The files whose lines are shown: a script and the modules in its directory, or those that ``patterns`` name.

    A pattern is matched against the whole path and, without a slash, against the name alone.
    """

    def __init__(self, script: str, patterns: Sequence[str] = ()) -> None:
        self.script = script
        self._beside = os.path.dirname(os.path.abspath(script)) + os.sep if os.path.exists(script) else ""
        self._patterns = tuple(patterns)
        self._names: dict[str, str] = {}  # of each file that code came from: how it is shown, or nothing
        self._shapes: dict[str, Shape] = {}

    def counts(self, file: str) -> bool:
        """Whether the lines of a file are shown."""
        return bool(self.name(file))

    def name(self, file: str) -> str:
        """How a file is shown; "" for one that is not."""
        found = self._names.get(file)
        if found is None:
            found = self._names[file] = shown_file(file) if self._is_shown(file) else ""
        return found

    def _is_shown(self, file: str) -> bool:
        if file == self.script:
            return True
        whole = os.path.abspath(file)
        if file.startswith("<") or is_tracers(whole):
            return False
        if any(fnmatch.fnmatch(whole if "/" in each else os.path.basename(whole), each) for each in self._patterns):
            return True
        if whole.startswith(_INSTALLED) or any(each in whole for each in _SITES) or not is_users(whole):
            return False
        return not self._patterns and bool(self._beside) and whole.startswith(self._beside)

    def shown(self) -> dict[str, str]:
        """Name and path of each file that is shown and of which something ran, the script first."""
        found = {name: file for file, name in self._names.items() if name}
        first = self.name(self.script)
        return {first: self.script} | {name: found[name] for name in sorted(found) if name != first}

    def path(self, name: str) -> str:
        return next((file for file, shown in self._names.items() if shown == name), name)

    def shape(self, file: str) -> Shape:
        """The statements and loops of a file."""
        found = self._shapes.get(file)
        if found is None:
            found = self._shapes[file] = Shape(linecache.getlines(file))
        return found


class Shape:
    """How the lines of a source hang together; of one that cannot be parsed every line is by itself.

    ``first`` is the line that a statement over several lines begins at, ``loops`` the first and last line of a loop's
    body by the line of its head, ``blocks`` those of a with statement's, ``definitions`` the lines that define and run
    nothing.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = [each.rstrip("\n") for each in lines]
        self.first: dict[int, int] = {}
        self.loops: dict[int, tuple[int, int]] = {}
        self.blocks: dict[int, tuple[int, int]] = {}
        self.definitions: set[int] = set()
        self.tree: ast.Module | None
        try:
            self.tree = ast.parse("".join(lines))
        except (SyntaxError, ValueError):
            self.tree = None
            return
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.stmt):
                continue
            begin = node.lineno
            body = getattr(node, "body", None)
            head_ends = body[0].lineno - 1 if body else (node.end_lineno or begin)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.definitions.update(range(begin, max(head_ends, begin) + 1))
            elif isinstance(node, (ast.With, ast.AsyncWith)):
                self.blocks[begin] = (node.body[0].lineno, node.body[-1].end_lineno or begin)
            elif isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
                self.loops[begin] = (node.body[0].lineno, node.body[-1].end_lineno or begin)
            for line in range(begin + 1, head_ends + 1):
                self.first[line] = begin

    def statement(self, line: int) -> int:
        """The line at which the statement begins that a line belongs to."""
        return self.first.get(line, line)

    def in_loop(self, line: int) -> bool:
        """Whether a line is in the body of a loop."""
        return any(first <= line <= last for first, last in self.loops.values())


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
