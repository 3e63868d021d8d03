"""The source of a program: its files and lines, which line calls, and which variable holds a tensor."""

from __future__ import annotations

import ast
import fnmatch
import gc
import inspect
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from trainledger.trace.patches import names
from trainledger.trace.recorder.source_lines import TORCH, callers, is_tracers, is_users, shown_file
from trainledger.trace.recorder.storages import tensors_in

_INSTALLED = tuple({sysconfig.get_path(each) + os.sep for each in ("purelib", "platlib", "stdlib", "platstdlib")})
_SITES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Parts of torch that only pass on what they are called for.
_THIN = tuple(
    TORCH + name.replace("/", os.sep)
    for name in names("""
        _tensor.py functional.py nn/functional.py nn/modules/module.py nn/modules/linear.py nn/modules/flatten.py
        nn/modules/loss.py nn/modules/container.py _tensor_str.py overrides.py utils/_device.py _jit_internal.py
        utils/_contextlib.py _dynamo/eval_frame.py _compile.py
    """)
)


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
        short = os.path.basename(whole)
        if any(fnmatch.fnmatch(whole if "/" in pattern else short, pattern) for pattern in self._patterns):
            return True
        if whole.startswith(_INSTALLED) or any(site in whole for site in _SITES) or not is_users(whole):
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
        shown = ((self._files.name(frame.f_code.co_filename), frame.f_lineno) for frame in callers())
        return tuple(f"{name}:{line}" for name, line in shown if name)

    def _from(self, frame: FrameType | None) -> Caller | None:
        inside = ""
        while frame is not None:
            file = frame.f_code.co_filename
            name = self._files.name(file)
            if name:
                key = (frame.f_code, frame.f_lasti)
                if key not in self._expressions:
                    self._expressions[key] = expression_at(frame)
                return Caller(name, frame.f_lineno, self._expressions[key], inside, frame)
            if is_tracers(file):
                inside = ""
            elif not inside and not file.startswith(("<", *_THIN)):
                inside = f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}"
            frame = frame.f_back
        return None


def expression_at(frame: FrameType) -> str:
    """The source of the expression that a frame evaluates now, on one line; "" where it cannot be had."""
    places = list(frame.f_code.co_positions())
    at = frame.f_lasti // 2
    if at >= len(places):
        return ""
    first, last, begin, end = places[at]
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, index).encode() for index in range(first, last + 1)]
    if not lines or not lines[-1]:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return " ".join(b" ".join(line.strip() for line in lines).decode(errors="replace").split())


_ADDS = ("append", "add", "extend", "insert", "appendleft", "setdefault", "update", "put")
_ADDS_ONE = ("append", "add", "insert", "appendleft", "setdefault", "put")


class Holder(NamedTuple):
    """What holds it: a name in the source, what kind of thing it is, the line that adds to it and what that puts in.

    The latter two are "" where they are not found.
    """

    name: str
    kind: str
    line: str
    added: str = ""


def holder_of(tensor: Any, frame: FrameType | None, files: Files) -> Holder | None:
    """The variable that keeps a tensor alive, looked for from a frame outwards; None where none can be named.

    A list, a dict or an object that holds it is looked for by its own name, down to an attribute of an object.
    """
    frames = list(_shown(frame, files))
    for each in frames:  # the variable itself
        for name, value in variables_of(each):
            if value is tensor:
                return Holder(name, "variable", *added_to(name, each, files))
    holding = [referrer for referrer in gc.get_referrers(tensor) if isinstance(referrer, (list, dict, set, tuple))]
    for level in range(2):
        known = {id(each): each for each in holding}
        for each in frames:
            for name, value in variables_of(each):
                if id(value) in known:
                    return Holder(name, type(value).__name__, *added_to(name, each, files))
                inner = next((attribute for attribute, held in attributes_of(value) if id(held) in known), None)
                if inner is not None:
                    return Holder(f"{name}.{inner}", "attribute", *added_to(inner, each, files, attribute=True))
        if level == 0:
            holding = [
                outer for each in holding for outer in gc.get_referrers(each) if isinstance(outer, (list, dict, tuple))
            ]
    return None


def names_of(frame: FrameType | None, files: Files) -> Iterator[tuple[str, Any, str]]:
    """The variables that hold tensors, themselves or in a container or an output, and the line that assigns them."""
    for each in _shown(frame, files):
        file = each.f_code.co_filename
        tree = files.shape(file).tree
        own = {line for _, _, line in each.f_code.co_lines()}
        lines: dict[str, int] = {}
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.lineno in own:
                lines.setdefault(node.id, node.lineno)
        for name, value in list(each.f_locals.items()):
            for tensor in tensors_in([value, dict(attributes_of(value))]) if name in lines else ():
                yield name, tensor, f"{files.name(file)}:{lines[name]}"


def snapshots(frame: FrameType | None, files: Files) -> list[dict[str, Any]]:
    """What a look at the variables of functions leaves behind before Python 3.13: copies that keep tensors alive.

    They may be cleared; the variables themselves lie elsewhere.
    """
    if sys.version_info >= (3, 13):
        return []
    functions = [each for each in _shown(frame, files) if each.f_code.co_flags & inspect.CO_OPTIMIZED]
    return [function.f_locals for function in functions]


def _shown(frame: FrameType | None, files: Files) -> Iterator[FrameType]:
    while frame is not None:
        if files.name(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def variables_of(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """The variables that a frame sees, by name: its own, then those of its module."""
    yield from list(frame.f_locals.items())
    if frame.f_globals is not frame.f_locals:
        yield from list(frame.f_globals.items())


def attributes_of(value: Any) -> list[tuple[str, Any]]:
    """The attributes of an object of the user's; of anything else, none."""
    if isinstance(value, (type, ModuleType)) or type(value).__module__ in ("builtins", "torch"):
        return []
    try:
        return list(vars(value).items())
    except TypeError:
        return []


def added_to(
    name: str, frame: FrameType, files: Files, *, attribute: bool = False, within: tuple[int, int] = (0, 0)
) -> tuple[str, str]:
    """The first line of a frame's file that puts something into a variable or an attribute, and what; "" for neither.

    Lines ``within`` two come before all others, then those of the frame's own function.
    """
    file = frame.f_code.co_filename
    tree = files.shape(file).tree
    if tree is None:
        return "", ""
    own = {line for _, _, line in frame.f_code.co_lines() if line is not None}
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    statements.sort(key=lambda each: (not within[0] <= each.lineno <= within[1], each.lineno not in own, each.lineno))
    for statement in statements:
        added = _added(statement, name, attribute)
        if added is not None:
            return f"{files.name(file)}:{statement.lineno}", "" if isinstance(added, ast.stmt) else ast.unparse(added)
    return "", ""


def _added(node: ast.stmt, name: str, attribute: bool) -> ast.expr | ast.stmt | None:
    """What a statement puts into a name; the statement itself where that is no one expression, None if nothing."""

    def is_it(each: ast.expr) -> bool:
        if attribute:
            return isinstance(each, ast.Attribute) and each.attr == name
        return isinstance(each, ast.Name) and each.id == name

    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function, given = node.value.func, node.value.args
        if isinstance(function, ast.Attribute) and function.attr in _ADDS and is_it(function.value):
            one = function.attr in _ADDS_ONE and given and not isinstance(given[-1], ast.Starred)
            return given[-1] if one else node
    if isinstance(node, ast.AugAssign) and is_it(node.target):
        return node.value
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and is_it(target.value):
                return node.value
            if is_it(target) and any(
                is_it(expression) for expression in ast.walk(node.value) if isinstance(expression, ast.expr)
            ):
                if isinstance(node.value, ast.BinOp) and is_it(node.value.left):
                    return node.value.right
                return node
    return None


def sums_up(name: str, line: str, frame: FrameType, files: Files) -> bool:
    """Whether a line of a frame's file adds to a name what does not itself depend on it, as ``total += loss`` does."""
    tree = files.shape(frame.f_code.co_filename).tree
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, (ast.Assign, ast.AugAssign)) and line.endswith(f":{node.lineno}"):
            added = _added(node, name, False)
            if isinstance(added, ast.expr):
                return not any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(added))
    return False
