"""Measure the house: files and lines of each room, circles of imports, late imports, long files, lone importers.

    python tools/house.py            # a table of rooms, then every circle and every file above 400 lines
    python tools/house.py --late     # also each file and own module that it imports inside a function
    python tools/house.py --lone     # also each short file with a single importer, in that importer's folder
    python tools/house.py --room X   # only what concerns the room X

`tests/test_rooms.py` reads the same functions, so that what is forbidden is what is shown.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "trainledger"
PACKAGE = "trainledger"
LONGEST_FILE = 400
SHORT_FILE = 150  # a shorter one with a single importer belongs into it


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


# A local name that says nothing of what it holds: `for layer in layers` reads better than `for each in layers`.
VAGUE = ("each", "found", "stuff", "thing", "tmp", "obj")


def vague_names() -> int:
    """How often a name of `VAGUE` is bound: as a parameter, in an assignment, in a loop."""
    count = 0
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            bound = node.arg if isinstance(node, ast.arg) else isinstance(node, ast.Name) and node.id
            count += bound in VAGUE and not isinstance(getattr(node, "ctx", None), ast.Load)
    return count


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


@dataclass(frozen=True)
class Size:
    """Lines of files: all; code (no blanks, comments, docstrings); imports; comments alone; with ``fmt: skip``."""

    files: int = 0
    lines: int = 0
    code: int = 0
    imports: int = 0
    comments: int = 0
    skips: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Size)))


SILENT = {tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def size_of(text: str) -> Size:
    """The size of one file.

    >>> size_of("'A docstring.'\\n\\nimport os  # why\\n\\n# a comment\\nnumber = 1  # fmt: skip\\n")
    Size(files=1, lines=6, code=2, imports=1, comments=1, skips=1)
    """
    docstrings: set[int] = set()
    imports: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                docstrings |= set(range(first.lineno, (first.end_lineno or 0) + 1))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    skips = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            skips += token.string.startswith("# fmt:")
            comments.add(token.start[0])
        elif token.type not in SILENT:
            code |= set(range(token.start[0], token.end[0] + 1))
    return Size(1, text.count("\n"), len(code - docstrings), len(imports), len(comments - code), skips)


@cache
def sizes() -> dict[str, Size]:
    """The size of each file of the package, by its dotted name."""
    return {module_of(path): size_of(path.read_text(encoding="utf-8")) for path in files()}


def total(modules: Iterable[str]) -> Size:
    return sum((sizes()[module] for module in modules), Size())


def lone_files() -> list[tuple[str, str]]:
    """Each short file that a single file imports, which lies in the same folder, with that importer."""
    importers: dict[str, set[str]] = {}
    for link in own_imports():
        importers.setdefault(link.module, set()).add(link.file)
    short = {module for module, size in sizes().items() if size.lines < SHORT_FILE}
    lone = [(module, *users) for module, users in importers.items() if module in short and len(users) == 1]
    return sorted((module, user) for module, user in lone if module.rpartition(".")[0] == user.rpartition(".")[0])


def line_counts() -> dict[str, int]:
    return {module: size.lines for module, size in sizes().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--late", action="store_true", help="list late imports one by one")
    parser.add_argument("--lone", action="store_true", help="list short files with a single importer")
    parser.add_argument("--room", default="", help="only this room")
    args = parser.parse_args()
    late = late_pairs()
    rooms = sorted({room_of(module) for module in sizes()})
    print(f"{'room':<12}{'files':>6}{'lines':>8}{'code':>8}{'imports':>9}{'comments':>10}{'skips':>7}{'late':>6}")

    def row(name: str, modules: list[str]) -> str:
        size = total(modules)
        count = sum(file in modules for file, _ in late)
        shares = f"{size.imports / size.lines:>9.1%}{size.comments / max(size.code, 1):>10.1%}"
        return f"{name:<12}{size.files:>6}{size.lines:>8}{size.code:>8}{shares}{size.skips:>7}{count:>6}"

    for room in rooms:
        if args.room in ("", room):
            print(row(room, [module for module in sizes() if room_of(module) == room]))
    print(row("all", list(sizes())))
    print(f"\nshort files with a single importer in their folder: {len(lone_files())}")
    if args.lone:
        print("\n".join(f"  {module} <- {user}" for module, user in lone_files() if args.room in module))
    for name, found in (("files", file_circles()), ("rooms", room_circles())):
        print(f"\ncircles of {name}: {len(found)}")
        for circle in found:
            if not args.room or any(args.room in each.split(".") for each in circle):
                print(f"  {len(circle)}: {' '.join(each.removeprefix(PACKAGE + '.') for each in circle)}")
    long = {module: lines for module, lines in line_counts().items() if lines > LONGEST_FILE}
    print(f"\nfiles above {LONGEST_FILE} lines: {long or 'none'}")
    if args.late:
        print("\nlate imports")
        for file, module in late:
            if args.room in ("", room_of(file)):
                print(f"  {file} -> {module}")


if __name__ == "__main__":
    main()
