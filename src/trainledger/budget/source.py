"""The source lines that operations come from: their text and function, which stay when lines above them move."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from trainledger.frozen import frozen

_LONGEST = 120  # characters of a source line that are kept to know it again


@frozen
class Function:
    """A function of a file: its name with those of the classes around it, and its lines, the first counted from 1."""

    name: str
    first: int
    last: int


class SourceFile:
    """A Python file as it is now; empty where it cannot be read or is not Python."""

    def __init__(self, path: Path) -> None:
        try:
            self.lines = path.read_text(encoding="utf-8").splitlines()
            tree = ast.parse("\n".join(self.lines))
        except (OSError, ValueError, SyntaxError, RecursionError):
            self.lines, self.functions = [], []
            return
        self.functions = list(_functions(tree, ""))

    def text(self, number: int) -> str:
        """A line without its indentation; "" where there is no such line."""
        text = self.lines[number - 1] if 0 < number <= len(self.lines) else ""
        return " ".join(text.split())[:_LONGEST]

    def function(self, number: int) -> str:
        """The innermost function that a line stands in; "" outside of all."""
        inside = [each for each in self.functions if each.first <= number <= each.last]
        return min(inside, key=lambda each: each.last - each.first).name if inside else ""

    def marks(self, name: str) -> list[tuple[str, int]]:
        """The lines of a function as (mark, number): four hexadecimal digits of what a line says."""
        marks = []
        for each in self.functions:
            if each.name == name:
                for number in range(each.first, each.last + 1):
                    text = self.text(number)
                    if text and not text.startswith("#"):
                        marks.append((hashlib.sha256(text.encode()).hexdigest()[:4], number))
        return marks


class Sources:
    """The files of a program, each read once; names are relative to ``root`` or begin with an installed package."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[str, SourceFile] = {}

    def file(self, name: str) -> SourceFile:
        if name not in self._files:
            self._files[name] = SourceFile(self._find(name))
        return self._files[name]

    def place(self, line: str) -> tuple[str, str]:
        """Where a line ("file:line") stands and what it says: ("model.py Block.forward", "h = F.gelu(h)").

        Where the file cannot be read, the line itself and "".
        """
        name, _, number = line.rpartition(":")
        name = self._portable(name)
        text = self.file(name).text(int(number)) if name and number.isdigit() else ""
        return (f"{name} {self.file(name).function(int(number))}".rstrip(), text) if text else (f"{name}:{number}", "")

    def is_own(self, name: str) -> bool:
        """Whether a file belongs to the project, not to an installed package."""
        return not os.path.isabs(name) and (self.root / name).is_file()

    def _portable(self, name: str) -> str:
        """A file elsewhere on this machine by its name below the place that Python imports it from."""
        if not os.path.isabs(name):
            return name
        folders = [os.path.join(os.path.abspath(each), "") for each in sys.path if each]
        below = max((each for each in folders if name.startswith(each)), key=len, default="")
        return name[len(below) :].replace(os.sep, "/")

    def _find(self, name: str) -> Path:
        if self.is_own(name) or os.path.isabs(name):
            return self.root / name
        for folder in sys.path:
            path = Path(folder) / name
            if path.is_file():
                return path
        return self.root / name


def _functions(node: ast.AST, above: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{above}.{child.name}" if above else child.name
            if not isinstance(child, ast.ClassDef):
                yield Function(name, child.lineno, child.end_lineno or child.lineno)
            yield from _functions(child, name)
        else:
            yield from _functions(child, above)
