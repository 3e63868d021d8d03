"""What a step costs in the few figures that a lock holds, and at which source lines or modules.

Lines are known by their text and function, which stay when lines above them move.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import Peak
from trainledger.spec.frozen import frozen

QUANTITIES = {
    # name: (title, unit)
    "parameters": ("parameters", "count"),
    "flops": ("FLOPs done", "flops"),
    "model_flops": ("model FLOPs", "flops"),
    "kept": ("kept for backward", "nbytes"),
    "peak": ("peak memory", "nbytes"),
    "collectives": ("collectives", "count"),
    "payload": ("payload of collectives", "nbytes"),
    "uncounted": ("operations without a rule", "count"),
}
PLACED = ("parameters", "kept", "peak", "flops")  # of these it is known at which lines they arise


@frozen
class Collectives:
    """How many collectives of a kind run in a step, and the bytes of their messages together."""

    count: int
    payload: int


@frozen
class Place:
    """What arises at one source line, or in one module where no line is known.

    ``where`` is the file and function (``model.py Block.forward``), the module's path or a parameter's name, ``text``
    what the line says.
    ``kept`` are bytes by operation that one micro-batch's forward makes here for its backward, ``peak`` bytes made here
    that are live at the step's peak. ``lines`` are the numbers of the line now, which no lock holds.
    """

    where: str
    text: str = ""
    parameters: int = 0
    flops: int = 0
    peak: int = 0
    kept: tuple[tuple[str, int], ...] = ()
    lines: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """Its name in a lock."""
        return f"{self.where}: {self.text}" if self.text else self.where

    def amount(self, quantity: str) -> int:
        """One of the quantities of `PLACED`."""
        if quantity == "kept":
            return sum(nbytes for _, nbytes in self.kept)
        return {"parameters": self.parameters, "flops": self.flops, "peak": self.peak}[quantity]


@frozen
class Summary:
    """The figures of one step: totals, the peak by category, collectives by kind, what has no rule, and places.

    ``functions`` are the project's functions that operations come from, each with the marks of its lines.
    """

    totals: dict[str, int]
    peak: dict[str, int]
    collectives: dict[str, Collectives]
    uncounted: dict[str, int]
    places: tuple[Place, ...]
    functions: dict[str, str]


def summarize(ledger: Ledger, *, root: Path, by_line: bool = True) -> Summary:
    """The figures of a ledger of numbers; ``root`` is the directory that its lines are relative to.

    With ``by_line`` off, or where no line is known, places are module paths, those of a model's blocks merged.
    """
    sources = Sources(root)
    at, live = (highest.index, highest.by_category) if (highest := _peak(ledger)) else (-1, dict(ledger.resident))
    totals = {
        "parameters": ledger.parameters,
        "flops": ledger.flops,
        "model_flops": ledger.model_flops,
        "kept": ledger.kept_nbytes,
        "peak": sum(live.values()),
    }
    places = _Places(sources, by_line)
    for entry in ledger.entries:
        there = places.at(entry.line, entry.path, entry.phase)
        there.flops += int(entry.flops * entry.times)
        there.kept[operation(entry)] += int(entry.kept * entry.times)
    for life in ledger.tensors:
        if life.category == "parameters" and by_line:
            module, _, name = life.name.rpartition(".")
            places.at(life.line, f"{_of_all_blocks(module, by_line)}.{name}".lstrip("."), "").parameters += prod(
                life.shape
            )
        elif life.born >= 0 and life.lives(at):
            places.at(life.line, life.path, life.phase).peak += life.nbytes
    return Summary(
        totals={name: int(amount) for name, amount in totals.items()},
        peak={name: int(nbytes) for name, nbytes in live.items()},
        collectives=_collectives(ledger.entries),
        uncounted=dict(ledger.uncounted),
        places=places.found(ledger.micro_batches),
        functions=places.functions(),
    )


def _peak(ledger: Ledger) -> Peak | None:
    """The peak; None of a step in which nothing runs."""
    return ledger.peak() if ledger.entries else None


def operation(entry: Entry) -> str:
    """The name of an entry's operation; one that is not PyTorch's own with its library."""
    return entry.source.removeprefix("aten::") if "::" in entry.source else entry.name


def _collectives(entries: Iterable[Entry]) -> dict[str, Collectives]:
    collectives: dict[str, Collectives] = {}
    for entry in entries:
        if entry.kind == "collective":
            kind = f"{entry.name} over {entry.group}" if entry.group else entry.name
            before = collectives.get(kind, Collectives(0, 0))
            payload = before.payload + entry.payload * entry.times
            collectives[kind] = Collectives(int(before.count + entry.times), int(payload))
    return dict(sorted(collectives.items()))


@dataclass(slots=True)
class _Amounts:
    parameters: int = 0
    flops: int = 0
    peak: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    lines: set[int] = field(default_factory=set)


class _Places:
    """Collects amounts by place: file and function, and the text of the line."""

    def __init__(self, sources: Sources, by_line: bool) -> None:
        self._sources = sources
        self._by_line = by_line
        self._amounts: defaultdict[tuple[str, str], _Amounts] = defaultdict(_Amounts)
        self._place_of: dict[str, tuple[str, str]] = {}

    def at(self, line: str, path: str, phase: str) -> _Amounts:
        """The amounts at the place of a line, or of a path where no line is known."""
        if not (line and self._by_line):
            return self._amounts[_of_all_blocks(path, self._by_line) or phase, ""]
        if line not in self._place_of:
            self._place_of[line] = place = self._sources.place(line)
            if place[1]:
                self._amounts[place].lines.add(int(line.rpartition(":")[2]))
        return self._amounts[self._place_of[line]]

    def found(self, micro_batches: int) -> tuple[Place, ...]:
        """The places where anything arises, by file and function, and in the order of their lines."""
        places = []
        for place, amount in self._amounts.items():
            kept = tuple((name, nbytes // micro_batches) for name, nbytes in sorted(amount.kept.items()) if nbytes)
            if amount.parameters or amount.flops or amount.peak or kept:
                lines = tuple(sorted(amount.lines))
                places.append(Place(*place, amount.parameters, amount.flops, amount.peak, kept, lines))
        return tuple(sorted(places, key=lambda each: (each.where, each.lines, each.text)))

    def functions(self) -> dict[str, str]:
        """The project's functions among the places, each with the marks of its present lines."""
        functions = {}
        for where in sorted({where for where, text in self._amounts if text}):
            name, _, function = where.partition(" ")
            if function and self._sources.is_own(name):
                functions[where] = " ".join(mark for mark, _ in self._sources.file(name).marks(function))
        return functions


def _of_all_blocks(path: str, by_line: bool) -> str:
    """A module's path with that of its kin in the other blocks made one: ``blocks.*.up`` for ``blocks.3.up``.

    Where lines distinguish the operations of blocks, a number at the end is a separate layer: ``features.3``.
    """
    parts = path.split(".")
    last = len(parts) - 1 if by_line else len(parts)
    return ".".join("*" if part.isdigit() and at < last else part for at, part in enumerate(parts))


_LONGEST = 120  # characters of a source line that are kept to know it again


@frozen
class Function:
    """A function of a file: its name with those of the classes around it, and its lines, the first counted from 1."""

    name: str
    first: int
    last: int


class SourceFile:
    """The present text of a Python file; empty where it cannot be read or is not Python."""

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
        """The innermost function that a line is in; "" outside of all."""
        inside = [each for each in self.functions if each.first <= number <= each.last]
        return min(inside, key=lambda each: each.last - each.first).name if inside else ""

    def marks(self, name: str) -> list[tuple[str, int]]:
        """The lines of a function as (mark, number): four hexadecimal digits of what a line says."""
        marks = []
        for function in self.functions:
            if function.name == name:
                for number in range(function.first, function.last + 1):
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
        """Where a line ("file:line") is and what it says: ("model.py Block.forward", "h = F.gelu(h)").

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
        below = max((folder for folder in folders if name.startswith(folder)), key=len, default="")
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
