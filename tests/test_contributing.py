"""What CONTRIBUTING promises of written pages, and of tests that share code."""

import ast
import re
from functools import cache
from pathlib import Path

HOUSE = Path(__file__).parents[1]


def test_every_written_page_is_listed_with_its_command() -> None:
    written = {}
    for page in sorted((HOUSE / "docs").glob("*.md")):
        found = re.search(r"^Written by `(.+?)`", page.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            written[f"docs/{page.name}"] = found[1]
    rows = re.findall(
        r"^\| `(docs/.+?)` \| `(.+?)`", (HOUSE / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert dict(rows) == written
    for command in written.values():
        program, what = command.split()[:2]
        made = re.search(rf"^{what}:", (HOUSE / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert made if program == "make" else (HOUSE / what).exists()


@cache
def _names_of(path: Path) -> set[str]:
    """What a module binds at its top, in conditions and blocks too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


def test_tests_import_what_their_neighbours_have() -> None:
    """Of every cost: an import that fails in a test of processes is otherwise seen by `make test-all` alone."""
    for path in (HOUSE / "tests").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            neighbour = path.with_name(f"{node.module}.py") if isinstance(node, ast.ImportFrom) else path
            if neighbour != path and neighbour.is_file():
                missing = {each.name for each in node.names} - _names_of(neighbour)
                assert not missing, f"{path.name} imports {sorted(missing)} of {neighbour.name}, which has no such name"
