"""Who imports whom: data flows down the list of rooms, and a room imports only those it may."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import house
import trainledger

SOURCE = Path(trainledger.__file__).parent
CORE = {"document", "frozen", "durable", "remarks", "division", "units", "dtypes"}
LEDGER = {*CORE, "spec", "ledger"}
PREDICT = {*LEDGER, "predict"}
TRAIN = {*CORE, "spec", "huggingface", "nn", "data", "train"}
EVERYTHING = None

# Room: the rooms it may import (itself always), and whether it may import torch.
ROOMS: dict[str, tuple[set[str] | None, bool]] = {
    "document": ({"frozen", "units"}, False),
    "frozen": (set(), False),
    "durable": (set(), False),
    "remarks": (set(), False),
    "division": (set(), False),
    "units": (set(), False),
    "dtypes": ({"frozen", "division", "units"}, False),
    "spec": (CORE, False),
    "huggingface": ({*CORE, "spec"}, False),
    "megatron": ({*CORE, "spec"}, False),
    "catalog": ({*CORE, "spec"}, False),
    "ledger": (LEDGER, False),
    "predict": (PREDICT, False),
    "plan": ({*PREDICT, "catalog"}, False),
    "explain": ({*PREDICT, "catalog", "plan"}, False),
    "trace": (LEDGER, True),
    "annotate": ({*LEDGER, "trace"}, True),
    "tensors": ({*CORE, "spec", "ledger"}, True),  # torch in `tensors.inspect` only
    "nn": ({*CORE, "spec", "huggingface"}, True),
    "data": ({*CORE, "spec"}, True),
    "train": (TRAIN, True),
    "measure": ({*LEDGER, "trace", "nn", "data", "train"}, True),
    "meter": ({*PREDICT, "catalog", "trace", "annotate", "measure", "nn", "data", "train"}, True),
    "reconcile": (PREDICT, False),
    "profiler": ({*PREDICT, "catalog", "plan"}, False),
    "regression": ({*LEDGER, "catalog", "api", "trace", "measure"}, False),
    "report": (
        {*PREDICT, "catalog", "data", "plan", "explain", "reconcile", "regression", "annotate", "tensors", "profiler"},
        False,
    ),
    "pytest_plugin": (EVERYTHING, False),
    "api": (EVERYTHING, False),
    "closed_loop": (EVERYTHING, True),
    "web": ({*PREDICT, "catalog", "plan", "explain", "huggingface", "tensors", "report", "api", "reconcile"}, False),
    "cli": (EVERYTHING, False),
    "__init__": (EVERYTHING, False),
    "__main__": (EVERYTHING, False),
}
HEAVY = {
    "torch",
    "numpy",
    "rich",
    "plotly",
    "tokenizers",
    "yaml",
    "safetensors",
    "pyarrow",
    "zstandard",
    "sympy",
    "fastapi",
    "uvicorn",
}
LIGHT_ROOMS = (
    "division", "units", "dtypes", "spec", "huggingface", "megatron", "catalog", "ledger", "predict", "plan",
    "regression", "pytest_plugin", "api", "__init__",
)  # fmt: skip


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


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


def test_every_room_is_in_the_plan() -> None:
    assert {room_of(each) for each in files()} == set(ROOMS)


@pytest.mark.parametrize("path", files(), ids=lambda each: str(each.relative_to(SOURCE)))
def test_a_file_imports_only_rooms_above_its_own(path: Path) -> None:
    room = room_of(path)
    allowed, torch_allowed = ROOMS[room]
    for name, _ in imports(path):
        parts = name.split(".")
        if parts[0] == "trainledger" and len(parts) > 1 and parts[1] in ROOMS:
            assert allowed is None or parts[1] == room or parts[1] in allowed, f"{path.name} imports {name}"
        if parts[0] == "torch":
            assert torch_allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("room", LIGHT_ROOMS)
def test_light_rooms_import_nothing_heavy_at_once(room: str) -> None:
    for path in files():
        if room_of(path) == room:
            heavy = {name for name, at_once in imports(path) if at_once and name.split(".")[0] in HEAVY}
            assert not heavy, f"{path.name} imports {heavy} when it is imported"


def test_the_reader_of_imports_sees_what_it_must_see(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("import torch\nfrom trainledger.train import step\ndef later():\n    import numpy\n")
    assert dict(imports(file)) == {"torch": True, "trainledger.train.step": True, "numpy": False}


def test_tensors_are_described_without_torch() -> None:
    with_torch = {
        path.name
        for path in files()
        if room_of(path) == "tensors"
        for name, _ in imports(path)
        if name.split(".")[0] == "torch"
    }
    assert with_torch == {"inspect.py"}


# Of own modules inside functions: those left keep torch, numpy, sympy or an optional package out of light paths.
MOST_LATE_IMPORTS = 120


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
    rooms = [room for room in ROOMS if not room.startswith("__")]
    missing = [room for room in rooms if f"`{room}`" not in page and f"`{room}/`" not in page]
    assert not missing
