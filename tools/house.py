"""Measure the house: lines and files of each room, circles of imports, late imports, long files.

    python tools/house.py            # a table of rooms, then every circle and every file above 400 lines
    python tools/house.py --late     # also each file and own module that it imports inside a function
    python tools/house.py --room X   # only what concerns the room X

`tests/test_rooms.py` reads the same functions, so that what is forbidden is what is shown.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

SOURCE = Path(__file__).resolve().parent.parent / "src" / "trainledger"
PACKAGE = "trainledger"
LONGEST_FILE = 400


@dataclass(frozen=True)
class Import:
    """One import statement's name: ``when`` is at-once, late (inside a function) or typing (only for annotations)."""

    file: str
    module: str
    when: str


def module_of(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = [PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """The dotted names that a file imports, each with when."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    when: dict[int, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            when |= {id(each): "late" for each in ast.walk(node) if when.get(id(each)) != "typing"}
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            when |= {id(each): "typing" for each in ast.walk(node)}
    for node in ast.walk(tree):
        how = when.get(id(node), "at-once")
        if isinstance(node, ast.Import):
            yield from ((each.name, how) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or node.module is None or path.name != "__init__.py", f"{path}: relative import"
            yield from ((f"{node.module}.{each.name}", how) for each in node.names)


@cache
def own_imports() -> tuple[Import, ...]:
    """Every import of one file of the package by another."""
    modules = {module_of(each): each for each in files()}
    found = []
    for module, path in modules.items():
        for name, when in imports_of(path):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module and name.split(".")[0] == PACKAGE:
                found.append(Import(module, target, when))
    return tuple(found)


def circles(edges: list[tuple[str, str]]) -> list[list[str]]:
    """The groups of nodes that reach each other (strongly connected components of more than one node; Tarjan 1972)."""
    targets: dict[str, list[str]] = {}
    for source, target in edges:
        targets.setdefault(source, []).append(target)
        targets.setdefault(target, [])
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in targets[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            cut = stack.index(node)
            if len(stack) - cut > 1:
                found.append(sorted(stack[cut:]))
            del stack[cut:]

    sys.setrecursionlimit(10_000)
    for node in targets:
        if node not in index:
            visit(node)
    return sorted(found, key=len, reverse=True)


def file_circles() -> list[list[str]]:
    """Circles of files over every import, typing-only and late ones included; the package's own face is no part."""
    return circles([(each.file, each.module) for each in own_imports() if PACKAGE not in (each.file, each.module)])


def room_of(module: str) -> str:
    """The room of a module: the first name under the package; of sub-rooms (``ledger.core``) the whole path."""
    return ".".join(module.split(".")[1:2]) or "__init__"


def room_circles() -> list[list[str]]:
    """Circles of rooms over every import."""
    edges = {(room_of(each.file), room_of(each.module)) for each in own_imports() if each.file != PACKAGE}
    return circles([(source, target) for source, target in edges if source != target and target != "__init__"])


def late_pairs() -> list[tuple[str, str]]:
    """Each pair of a file and an own module that it imports inside a function; the package's face is left out."""
    return sorted({(each.file, each.module) for each in own_imports() if each.when == "late" and each.file != PACKAGE})


def line_counts() -> dict[str, int]:
    return {module_of(path): path.read_bytes().count(b"\n") for path in files()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--late", action="store_true", help="list late imports one by one")
    parser.add_argument("--room", default="", help="only this room")
    args = parser.parse_args()
    counts = line_counts()
    late = late_pairs()
    rooms = sorted({room_of(each) for each in counts})
    print(f"{'room':<16}{'files':>6}{'lines':>8}{'median':>8}{'late':>6}")
    for room in rooms:
        if args.room in ("", room):
            own = [lines for module, lines in counts.items() if room_of(module) == room]
            count = sum(room_of(file) == room for file, _ in late)
            print(f"{room:<16}{len(own):>6}{sum(own):>8}{median(own):>8.0f}{count:>6}")
    print(f"{'all':<16}{len(counts):>6}{sum(counts.values()):>8}{median(counts.values()):>8.0f}{len(late):>6}")
    for name, found in (("files", file_circles()), ("rooms", room_circles())):
        print(f"\ncircles of {name}: {len(found)}")
        for circle in found:
            if not args.room or any(args.room in each.split(".") for each in circle):
                print(f"  {len(circle)}: {' '.join(each.removeprefix(PACKAGE + '.') for each in circle)}")
    long = {module: lines for module, lines in counts.items() if lines > LONGEST_FILE}
    print(f"\nfiles above {LONGEST_FILE} lines: {long or 'none'}")
    if args.late:
        print("\nlate imports")
        for file, module in late:
            if args.room in ("", room_of(file)):
                print(f"  {file} -> {module}")


if __name__ == "__main__":
    main()
