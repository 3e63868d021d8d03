"""What code defines by name (``package.module:build``), read from its text and never run."""

from __future__ import annotations

import ast
import re

from trainledger.spec.durable import opened
from trainledger.spec.units import MIB


def as_target(path: str, name: str = "") -> str:
    """What ``trace`` takes of a file: a name in it, or the first function or class that it defines; of a path that no
    import reaches an example."""
    module = path.removesuffix(".py").removeprefix("./").replace("/", ".")
    if not all(part.isidentifier() for part in module.split(".")):
        module = "package.module"
    return f"{module}:{name or next(iter(defined_in(path) or ()), 'build')}"


def defined_in(path: str) -> list[str] | None:
    """Functions and classes of a file that are called with nothing, first those whose name says that they build
    something; None of a file that cannot be read."""
    try:
        with opened(path) as file:
            body = ast.parse(file.read(MIB)).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the last two of expressions too deep
        return None
    names = [line.name for line in body if isinstance(line, ast.ClassDef | ast.FunctionDef) and _takes_nothing(line)]
    return sorted((name for name in names if not name.startswith("_")), key=lambda name: not _BUILDS.search(name))


_BUILDS = re.compile(r"^(build|make|create|get)|model|net", re.IGNORECASE)


def _takes_nothing(line: ast.ClassDef | ast.FunctionDef) -> bool:
    if isinstance(line, ast.ClassDef):
        init = (part for part in line.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
        return all(_needed(function) <= 1 for function in init)
    return not _needed(line)


def _needed(function: ast.FunctionDef) -> int:
    """The arguments without a default, ``self`` among them."""
    words = function.args
    return len(words.posonlyargs) + len(words.args) - len(words.defaults) + words.kw_defaults.count(None)
