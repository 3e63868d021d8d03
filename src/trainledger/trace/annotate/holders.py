"""Who holds a tensor: the name of the variable or the list, and the line that puts it there."""

from __future__ import annotations

import ast
import gc
import inspect
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from trainledger.trace.annotate.source import Files

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
    holding = [each for each in gc.get_referrers(tensor) if isinstance(each, (list, dict, set, tuple))]
    for level in range(2):
        known = {id(each): each for each in holding}
        for each in frames:
            for name, value in variables_of(each):
                if id(value) in known:
                    return Holder(name, type(value).__name__, *added_to(name, each, files))
                inner = _attribute(value, known)
                if inner is not None:
                    return Holder(f"{name}.{inner}", "attribute", *added_to(inner, each, files, attribute=True))
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


def variables_of(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """The variables that a frame sees, by name: its own, then those of its module."""
    yield from list(frame.f_locals.items())
    if frame.f_globals is not frame.f_locals:
        yield from list(frame.f_globals.items())


def _attribute(value: Any, known: dict[int, Any]) -> str | None:
    """The attribute of an object of the user's whose value is one of those known."""
    return next((name for name, each in attributes_of(value) if id(each) in known), None)


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
) -> tuple[str, str]:  # fmt: skip
    """The first line of a frame's file that puts something into a variable or an attribute, and what; "" for neither.

    Lines ``within`` two come before all others, then those of the frame's own function.
    """
    file = frame.f_code.co_filename
    tree = files.shape(file).tree
    if tree is None:
        return "", ""
    own = {line for _, _, line in frame.f_code.co_lines() if line is not None}
    statements = [each for each in ast.walk(tree) if isinstance(each, ast.stmt)]
    statements.sort(key=lambda each: (not within[0] <= each.lineno <= within[1], each.lineno not in own, each.lineno))
    for each in statements:
        added = _added(each, name, attribute)
        if added is not None:
            return f"{files.name(file)}:{each.lineno}", "" if isinstance(added, ast.stmt) else ast.unparse(added)
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
            if is_it(target) and any(is_it(each) for each in ast.walk(node.value) if isinstance(each, ast.expr)):
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
