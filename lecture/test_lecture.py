"""Every chapter runs, its claims hold, and its exercises take the right answer and refuse a wrong one.

Each function of a chapter that is named ``claims_...`` returns claims; each named ``exercise_...`` draws an exercise
from a seed. What they use has to stand in the chapter's setup, so that they can be called alone.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import lecture_page
from trainledger.report.lesson import HAS_TORCH, Claim, Exercise

CHAPTERS = sorted(Path(__file__).parent.glob("[0-9][0-9]_*.py"))
SEEDS = range(1, 11)
LEAST_CLAIMS, LEAST_EXERCISES = 6, 3  # of a chapter


@cache
def chapter(path: Path) -> ModuleType:
    spec = spec_from_file_location(f"chapter_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def functions(kind: str) -> list[tuple[Path, str]]:
    return [(path, name) for path in CHAPTERS for name in vars(chapter(path)) if name.startswith(f"{kind}_")]


def of(path: Path, name: str) -> Callable[..., object]:
    function = getattr(chapter(path), name)
    return getattr(function, "fn", function)


def label(value: object) -> str:
    return value.stem if isinstance(value, Path) else str(value)


@pytest.mark.parametrize("path", CHAPTERS, ids=label)
def test_claims_hold(path: Path) -> None:
    rows: list[Claim] = [row for each, name in functions("claims") if each == path for row in of(path, name)()]
    failed = [f"{row.text}: {row.ours!r}, expected {row.expected!r}" for row in rows if not row.holds]
    assert failed == []
    assert len(rows) >= LEAST_CLAIMS


@pytest.mark.parametrize(("path", "name"), functions("exercise"), ids=label)
def test_an_exercise_takes_the_right_answer_and_refuses_wrong_ones(path: Path, name: str) -> None:
    answers = set()
    for seed in SEEDS:
        exercise: Exercise = of(path, name)(seed)
        assert exercise == of(path, name)(seed), "the seed alone decides"
        assert exercise.hint
        assert exercise.derivation
        answers.add((exercise.question, exercise.answer, exercise.start))
        assert exercise.fault(right_answer(exercise)) == ""
        for wrong in wrong_answers(exercise):
            assert exercise.fault(wrong) != "", f"{wrong!r} is taken for {exercise.answer!r}: {exercise.question}"
    assert len(answers) > 1, "every seed asks the same"


def right_answer(exercise: Exercise) -> str:
    """What a reader would write: a number to six digits, a choice, or the solution."""
    return exercise.answer if isinstance(exercise.answer, str) else f"{exercise.answer:.6g}"


def wrong_answers(exercise: Exercise) -> Iterator[str]:
    yield from (str(mistake) for mistake in exercise.mistakes)
    if exercise.check is not None:
        yield from ("", exercise.start, "x = (")
    elif exercise.choices:
        assert exercise.answer in exercise.choices
        yield from (choice for choice in exercise.choices if choice != exercise.answer)
    else:
        assert isinstance(exercise.answer, float | int)
        yield from ("", "many", *(f"{exercise.answer * factor + (factor - 1):.6g}" for factor in (0.5, 0.9, 1.1, 2)))


@pytest.mark.parametrize("path", CHAPTERS, ids=label)
def test_a_chapter_runs_from_top_to_bottom(path: Path) -> None:
    assert HAS_TORCH
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_each_chapter_has_exercises_enough() -> None:
    exercises = Counter(path for path, _ in functions("exercise"))
    assert {path.stem: exercises[path] for path in CHAPTERS if exercises[path] < LEAST_EXERCISES} == {}


@pytest.mark.parametrize("path", CHAPTERS, ids=label)
def test_the_answer_of_an_exercise_is_not_open_beside_it(path: Path) -> None:
    assert "@app.function\ndef exercise_" not in path.read_text()


def test_marimo_finds_nothing_to_correct() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "marimo", "check", "--strict", *CHAPTERS], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout


def test_every_item_of_the_lecture_has_a_chapter_or_a_reason() -> None:
    rows = lecture_page.items()
    stems = {path.stem for path in CHAPTERS}
    assert [int(row["number"]) for row in rows] == list(range(1, len(rows) + 1))
    assert len({row["item"] for row in rows}) == len(rows)
    for row in rows:
        assert tuple(row) == lecture_page.COLUMNS
        assert row["chapter"] in stems or row["reason"].strip(), row
    assert stems <= {row["chapter"] for row in rows}, "a chapter that teaches none of them"


def test_the_page_of_what_the_lecture_covers_is_current() -> None:
    assert lecture_page.PAGE.read_text(encoding="utf-8") == lecture_page.page(), "python tools/lecture_page.py"
    assert lecture_page.page().count("\n") <= 100


def test_the_index_has_every_chapter() -> None:
    index = (Path(__file__).parents[1] / "docs" / "learn.md").read_text(encoding="utf-8")
    assert [path.name for path in CHAPTERS if f"(../lecture/{path.name})" not in index] == []
    assert index.count("\n") <= 100
