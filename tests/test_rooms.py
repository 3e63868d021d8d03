"""Who imports whom: data flows down the list of rooms, and a room imports only those it may."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import house
import trainledger

SOURCE = Path(trainledger.__file__).parent
CORE = {"spec", "report"}
LEDGER = {*CORE, "ledger"}
FORECAST = {*LEDGER, "catalog", "forecast"}
ENGINE = {*CORE, "engine"}
EVERYTHING = None

# Room: the rooms it may import (itself always), and whether it may import torch. A room inside of another has the row
# of the longest name that it begins with.
ROOMS: dict[str, tuple[set[str] | None, bool]] = {
    "spec": (set(), False),
    "spec.convert": ({"spec"}, False),
    "report": ({"spec"}, False),
    "catalog": ({"spec"}, False),
    "ledger": ({"spec"}, False),
    "forecast": (FORECAST, False),
    "forecast.predict": ({*LEDGER, "forecast.predict"}, False),
    "trace": (LEDGER, True),
    "tensors": ({"spec", "ledger"}, True),  # torch in `tensors.inspect` only
    "engine": (ENGINE, True),
    "engine.nn": ({"spec", "engine.nn"}, True),
    "engine.data": ({*CORE, "engine.data", "engine.processors", "engine.remarks"}, True),
    "observe": ({*FORECAST, "trace", "engine"}, True),
    "observe.measure": ({*LEDGER, "trace", "engine"}, True),
    "observe.reconcile": (FORECAST, False),
    "observe.profiler": (FORECAST, False),
    "answers": (EVERYTHING, False),
    "answers.closed_loop": (EVERYTHING, True),
    "web": ({*FORECAST, "tensors", "answers", "observe"}, False),
    "cli": (EVERYTHING, False),
    "__init__": (EVERYTHING, False),
    "__main__": (EVERYTHING, False),
}
TOP = {room.partition(".")[0] for room in ROOMS if not room.startswith("__")}
MOST_ROOMS = 12
HEAVY = {
    "torch",
    "numpy",
    "rich",
    "tokenizers",
    "yaml",
    "safetensors",
    "pyarrow",
    "zstandard",
    "sympy",
    "fastapi",
    "uvicorn",
    "mcp",
    "anyio",
}
LIGHT_ROOMS = ("spec", "catalog", "ledger", "forecast", "answers", "cli", "__init__")


def top_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def room_of(module: str) -> str:
    """The longest name in `ROOMS` that a module, without the package's name, is or is in."""
    return max((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), key=len, default="")


@cache
def imports(path: Path) -> tuple[tuple[str, bool], ...]:
    """The modules that a file imports, and whether it does so as soon as it is imported itself."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    tree = ast.parse(path.read_text())
    late = set()
    for node in ast.walk(tree):
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or typing_only:
            late |= {id(each) for each in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((each.name, id(node) not in late) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{each.name}", id(node) not in late) for each in node.names)


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def row_of(path: Path) -> tuple[set[str] | None, bool]:
    return ROOMS[room_of(house.module_of(path).removeprefix("trainledger.")) or path.stem]


def test_every_room_is_in_the_plan() -> None:
    assert {top_of(path) for path in files()} == TOP | {"__init__", "__main__"}
    assert len(TOP) <= MOST_ROOMS


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_only_rooms_above_its_own(path: Path) -> None:
    room = room_of(house.module_of(path).removeprefix("trainledger.")) or path.stem
    allowed, torch_allowed = ROOMS[room]
    for name, _ in imports(path):
        target = name.removeprefix("trainledger.")
        if name.startswith("trainledger.") and room_of(target) and allowed is not None:
            inside = any(f"{target}.".startswith(f"{other}.") for other in {room, *allowed})
            assert inside, f"{path.name} imports {name}"
        if name.split(".")[0] == "torch":
            assert torch_allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("room", LIGHT_ROOMS)
def test_light_rooms_import_nothing_heavy_at_once(room: str) -> None:
    for path in files():
        if top_of(path) == room and not row_of(path)[1]:
            heavy = {name for name, at_once in imports(path) if at_once and name.split(".")[0] in HEAVY}
            assert not heavy, f"{path.name} imports {heavy} when it is imported"


def test_the_reader_of_imports_sees_what_it_must_see(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("import torch\nfrom trainledger.engine.train import step\ndef later():\n    import numpy\n")
    assert dict(imports(file)) == {"torch": True, "trainledger.engine.train.step": True, "numpy": False}


def test_tensors_are_described_without_torch() -> None:
    with_torch = {
        path.name
        for path in files()
        if top_of(path) == "tensors"
        for name, _ in imports(path)
        if name.split(".")[0] == "torch"
    }
    assert with_torch == {"inspect.py"}


# The most files, lines of code and lines of imports of each room (`python tools/house.py` counts them). A commit that
# raises a number says why in its message, and lowers another.
CEILINGS: dict[str, tuple[int, int, int]] = {
    "answers": (82, 11700, 1403),
    "catalog": (3, 268, 23),
    "cli": (15, 2094, 346),
    "engine": (70, 10678, 1127),
    "forecast": (58, 10044, 905),
    "ledger": (51, 7944, 628),
    "observe": (40, 5747, 631),
    "report": (13, 1685, 146),
    "spec": (55, 8711, 493),
    "tensors": (10, 1946, 108),
    "trace": (50, 9215, 764),
    "web": (28, 3238, 478),
}
# Of the whole: files, lines, ``fmt: skip``, short files with a single importer in their folder.
MOST_FILES, MOST_LINES, MOST_SKIPS, MOST_LONE = 477, 103226, 110, 6


@pytest.mark.parametrize("room", CEILINGS)
def test_a_room_keeps_below_its_ceiling(room: str) -> None:
    size = house.total(module for module in house.sizes() if house.room_of(module) == room)
    files_most, code_most, imports_most = CEILINGS[room]
    assert size.files <= files_most
    assert size.code <= code_most
    assert size.imports <= imports_most


def test_the_house_keeps_below_its_ceilings() -> None:
    size = house.total(house.sizes())
    assert size.files <= MOST_FILES
    assert size.lines <= MOST_LINES
    assert size.skips <= MOST_SKIPS
    assert len(house.lone_files()) <= MOST_LONE


# Of own modules inside functions: those left keep torch, numpy, sympy or an optional package out of light paths.
MOST_LATE_IMPORTS = 75


def test_no_circle_of_files_over_every_import_typing_only_and_late_ones_too() -> None:
    assert house.file_circles() == []


def test_no_circle_of_rooms() -> None:
    assert house.room_circles() == []


def test_late_imports_stay_few() -> None:
    assert len(house.late_pairs()) <= MOST_LATE_IMPORTS


def test_no_file_is_two_ideas_long() -> None:
    assert {name: lines for name, lines in house.line_counts().items() if lines > house.LONGEST_FILE} == {}


def test_the_finder_of_circles_finds_one() -> None:
    edges = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "d")]
    assert house.circles(edges) == [["a", "b", "c"]]
    assert house.circles(edges[1:]) == []


def test_the_page_of_the_architecture_names_every_room():
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    missing = [room for room in TOP if f"`{room}`" not in page and f"`{room}/`" not in page]
    assert not missing


def test_the_counter_of_lines_counts_what_it_says() -> None:
    text = "'A docstring.'\n\nimport os  # a remark\n\n# a reason\nname = 'text'\nx = [1]  # fmt: skip\n"
    assert house.size_of(text) == house.Size(files=1, lines=7, code=3, imports=1, comments=1, skips=1)


MOST_VAGUE_NAMES = 1269


def test_local_names_say_what_they_hold() -> None:
    assert house.vague_names() <= MOST_VAGUE_NAMES


def lines_of(paths: Iterable[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


MOST_TEST_LINES = 75_269


def test_tests_keep_below_their_ceiling() -> None:
    assert lines_of(Path(__file__).parent.rglob("*.py")) <= MOST_TEST_LINES


@pytest.mark.parametrize("room", ["ledger", "forecast.predict", "trace", "engine"])
def test_reasons_stand_beside_hard_code(room: str) -> None:
    size = house.total(module for module in house.sizes() if f"{module}.".startswith(f"trainledger.{room}."))
    assert size.comments >= 0.03 * size.code
