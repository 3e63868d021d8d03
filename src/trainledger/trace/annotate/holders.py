"""Who holds a tensor: the name of the variable or the list, and the line that puts it there."""

from __future__ import annotations

import ast
import gc
import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from trainledger.trace.annotate.files import Files

_ADDS = ("append", "add", "extend", "insert", "appendleft", "setdefault", "update", "put")


class Holder(NamedTuple):
    """What holds it: a name in the source, what kind of thing it is, and the line that adds to it ("" if not found)."""

    name: str
    kind: str
    line: str


def holder_of(tensor: Any, frame: FrameType | None, files: Files) -> Holder | None:
    """The variable that keeps a tensor alive, looked for from a frame outwards; None where none can be named.

    A list, a dict or an object that holds it is looked for by its own name, down to an attribute of an object.
    """
    frames = list(_shown(frame, files))
    for each in frames:  # the variable itself
        for name, value in _variables(each):
            if value is tensor:
                return Holder(name, "variable", _line_that_adds(name, each, files))
    holding = [each for each in gc.get_referrers(tensor) if isinstance(each, (list, dict, set, tuple))]
    for level in range(2):
        known = {id(each): each for each in holding}
        for each in frames:
            for name, value in _variables(each):
                if id(value) in known:
                    return Holder(name, type(value).__name__, _line_that_adds(name, each, files))
                inner = _attribute(value, known)
                if inner is not None:
                    return Holder(f"{name}.{inner}", "attribute", _line_that_adds(inner, each, files, attribute=True))
        if level == 0:
            holding = [
                outer for each in holding for outer in gc.get_referrers(each) if isinstance(outer, (list, dict, tuple))
            ]  # fmt: skip
    return None


def snapshots(frame: FrameType | None, files: Files) -> list[dict[str, Any]]:
    """What a look at the variables of functions leaves behind before Python 3.13: copies that keep tensors alive.

    They may be cleared; the variables themselves lie elsewhere.
    """
    if sys.version_info >= (3, 13):
        return []
    functions = [each for each in _shown(frame, files) if each.f_code.co_flags & inspect.CO_OPTIMIZED]
    return [each.f_locals for each in functions]


def _shown(frame: FrameType | None, files: Files) -> Iterator[FrameType]:
    while frame is not None:
        if files.name(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    yield from list(frame.f_locals.items())
    if frame.f_globals is not frame.f_locals:
        yield from list(frame.f_globals.items())


def _attribute(value: Any, known: dict[int, Any]) -> str | None:
    """The attribute of an object of the user's whose value is one of those known."""
    if isinstance(value, type) or type(value).__module__ in ("builtins", "torch"):
        return None
    try:
        held = vars(value)
    except TypeError:
        return None
    return next((name for name, each in list(held.items()) if id(each) in known), None)


def _line_that_adds(name: str, frame: FrameType, files: Files, *, attribute: bool = False) -> str:
    """The first line of a file that puts something into what a name stands for."""
    file = frame.f_code.co_filename
    tree = files.shape(file).tree
    if tree is None:
        return ""
    statements = [each for each in ast.walk(tree) if isinstance(each, ast.stmt)]
    lines = sorted(each.lineno for each in statements if _adds(each, name, attribute))
    return f"{files.name(file)}:{lines[0]}" if lines else ""


def _adds(node: ast.stmt, name: str, attribute: bool) -> bool:
    def is_it(each: ast.expr) -> bool:
        if attribute:
            return isinstance(each, ast.Attribute) and each.attr == name
        return isinstance(each, ast.Name) and each.id == name

    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        return isinstance(function, ast.Attribute) and function.attr in _ADDS and is_it(function.value)
    if isinstance(node, ast.AugAssign):
        return is_it(node.target)
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and is_it(target.value):
                return True
            if is_it(target) and any(is_it(each) for each in ast.walk(node.value) if isinstance(each, ast.expr)):
                return True
    return False
