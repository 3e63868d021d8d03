"""Claims and exercises of a chapter of the lecture: what a notebook shows of them, and what a test checks.

A claim sets a value that a function gives against one that is printed somewhere or derived by hand. An exercise draws
its numbers from a seed and knows its answer from a function, so that nobody can look it up. marimo shows both; without
marimo they can still be checked.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from html import escape
from importlib.util import find_spec
from math import isclose
from typing import Any

from trainledger.spec.frozen import frozen
from trainledger.spec.units import NotAQuantity, parse_amount, parse_nbytes, parse_number

HAS_TORCH = find_spec("torch") is not None  # not in a browser: no build of it for WebAssembly
QUICK = bool(os.environ.get("CI") or os.environ.get("LECTURE_QUICK"))  # experiments take the smaller size
FAILED = "#D55E00"
_ROOM = ' style="padding: .15rem .8rem; text-align: left"'  # marimo has no space between the cells of a table
Value = float | str | bool | None
Draw = Callable[[int], "Exercise"]


@frozen
class Claim:
    """A sentence, the value that a function gives, the value expected, and the relative tolerance between them.

    >>> Claim("2 m n k FLOPs", 2 * 4 * 3 * 2, 48).holds, Claim("a third", 0.33, 1 / 3, 0.005).holds
    (True, False)
    """

    text: str
    ours: Value
    expected: Value
    tolerance: float = 0.0
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Whether both are equal, or as near as ``tolerance`` says."""
        if isinstance(self.ours, float | int) and isinstance(self.expected, float | int) and self.tolerance:
            return isclose(self.ours, self.expected, rel_tol=self.tolerance)
        return self.ours == self.expected


@frozen
class Claims:
    """Claims as a notebook shows them: a table, with a red row for each that does not hold."""

    rows: tuple[Claim, ...]

    def _repr_html_(self) -> str:
        heads = "".join(f"<th{_ROOM}>{head}</th>" for head in ("", "claim", "computed", "expected"))
        body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(map(_row, self.rows))}</tbody>"
        return f'<table class="claims" title="computed by Python on {sys.platform}">{body}</table>'


def claims(rows: Iterable[Claim]) -> Claims:
    """Claims that hold, to be shown. Raises AssertionError where one does not, unless a notebook shows it in red."""
    table = Claims(tuple(rows))
    failed = [f"{row.text}: {row.ours!r}, expected {row.expected!r}" for row in table.rows if not row.holds]
    if failed and not _in_notebook():
        raise AssertionError("; ".join(failed))
    return table


@frozen
class Exercise:
    """A question whose answer is a number, one of ``choices``, or code.

    ``answer`` is right within the relative ``tolerance``. ``mistakes`` are wrong answers that people give, with what
    each leaves out. For code, ``answer`` is a solution, ``start`` is what the reader finds, and ``check`` runs what was
    written and returns what is wrong with it, or nothing.

    >>> double = Exercise("FLOPs of (2,3) @ (3,4)?", 48, "2 m n k = 2 x 2 x 4 x 3", mistakes={24: "An addition, too."})
    >>> double.fault("48"), double.fault("24"), double.fault("7")
    ('', 'An addition, too.', 'Too low.')
    """

    question: str
    answer: float | str
    derivation: str
    hint: str = ""
    unit: str = ""
    choices: tuple[str, ...] = ()
    tolerance: float = 0.02
    mistakes: Mapping[float | str, str] = field(default_factory=dict)
    start: str = ""
    check: Callable[[str], str] | None = None

    def fault(self, given: str) -> str:
        """What is wrong with an answer; empty where it is right."""
        if self.check is not None:
            return self.check(given)
        if isinstance(self.answer, str):
            return "" if given == self.answer else self.mistakes.get(given, "No.")
        value = number(given, self.unit)
        if value is None:
            return "This is no number; write it as 12.6, 1.5e3, 2^-7, 80B or 50%."
        if isclose(value, self.answer, rel_tol=self.tolerance):
            return ""
        for mistake, remark in self.mistakes.items():
            if isclose(value, float(mistake), rel_tol=self.tolerance):
                return remark
        return "Too low." if value < self.answer else "Too high."

    @property
    def shown_answer(self) -> str:
        """The answer with its unit."""
        return self.answer if isinstance(self.answer, str) else f"{_shown(self.answer)} {self.unit}".rstrip()


@frozen
class Gives:
    """The ``check`` of an exercise in code: the function ``name`` gives each result for the arguments before it.

    >>> double = Gives("double", (((2,), 4), ((0.5,), 1.0)))
    >>> double("def double(x): return x + x"), double("def double(x): return x * x"), double("double = (")
    ('', 'double(0.5) gives 0.25, not 1.0.', "SyntaxError: '(' was never closed (<string>, line 1)")
    """

    name: str
    cases: tuple[tuple[tuple[Any, ...], Any], ...]

    def __call__(self, text: str) -> str:
        written: dict[str, Any] = {}
        try:
            exec(text, written)
            for given, wanted in self.cases:
                found = written[self.name](*given)
                if not (found == wanted or (isinstance(found, float) and isclose(found, wanted, rel_tol=1e-6))):
                    return f"{self.name}({', '.join(map(repr, given))}) gives {found!r}, not {wanted!r}."
        except (Exception, SystemExit) as error:  # of what the reader wrote
            return f"{type(error).__name__}: {error}"
        return ""


_misses: dict[str, set[str]] = {}  # of each question, the wrong answers given in this session


def reply(exercise: Exercise, given: str | None) -> str:
    """What a reader is told: right, or what is wrong; the hint after the first miss, the derivation after the second.

    >>> half = Exercise("Half of 3?", 1.5, "3 / 2", hint="Divide.")
    >>> reply(half, "2"), reply(half, "1"), reply(half, "1.5")
    ('Too high. Hint: Divide.', 'Too low. 3 / 2 The answer: 1.5', 'Right. 3 / 2')
    """
    if given is None or not given.strip() or given == exercise.start:
        return ""
    fault = exercise.fault(given)
    if not fault:
        return f"Right. {exercise.derivation}"
    misses = _misses.setdefault(exercise.question, set())
    misses.add(given)
    return after_miss(exercise, fault, len(misses))


def after_miss(exercise: Exercise, fault: str, misses: int) -> str:
    """What is told after so many wrong answers: the hint after the first, then the derivation."""
    if misses == 1 and exercise.hint:
        return f"{fault} Hint: {exercise.hint}"
    return f"{fault} {exercise.derivation} The answer: {exercise.shown_answer}"


def fields(draws: Sequence[Draw], seed: int) -> Any:
    """The fields of a chapter's exercises, as one element of marimo: text, a choice, or an editor for code."""
    import marimo as mo

    def element(exercise: Exercise) -> Any:
        if exercise.choices:
            return mo.ui.radio(exercise.choices)
        if exercise.check is not None:
            return mo.ui.code_editor(exercise.start, language="python")
        return mo.ui.text(placeholder=exercise.unit or "your answer")

    return mo.ui.array([element(draw(seed)) for draw in draws])


def sheet(draws: Sequence[Draw], seed: int, fields: Any) -> Any:
    """The exercises of a chapter, each with its field, what is said to the answer, and the derivation folded."""
    import marimo as mo

    parts = []
    for at, (draw, entry, given) in enumerate(zip(draws, fields, fields.value, strict=True), 1):
        exercise = draw(seed)
        folded = {"Derivation": mo.md(f"{exercise.derivation}\n\nThe answer: {exercise.shown_answer}")}
        parts += [mo.md(f"**{at}.** {exercise.question}"), entry, mo.md(reply(exercise, given)), mo.accordion(folded)]
    return mo.vstack(parts)


def against(guess: str | None, value: float, unit: str = "") -> str:
    """A guess beside the value that was computed.

    >>> against("100", 143.9, "days"), against("", 143.9, "days")
    ('You guessed 100; it is 143.9 days: 1.4 times as much.', 'It is 143.9 days.')
    """
    said = f"{_shown(value)} {unit}".rstrip()
    guessed = number(guess or "")
    if guessed is None:
        return f"It is {said}."
    if isclose(guessed, value, rel_tol=0.02) or guessed <= 0:
        return f"You guessed {guess}; it is {said}."
    ratio = value / guessed
    far = f"{ratio:.2g} times as much" if ratio > 1 else f"{ratio:.2g} of it"
    return f"You guessed {guess}; it is {said}: {far}."


_POWER = re.compile(r"(?:([\d.]+)\s*[x*×]\s*)?(\d+)\s*(?:\^|\*\*)\s*([-+]?\d{1,3})")
_RATIO = re.compile(r"([\d.]+)\s*/\s*([\d.]+)")


def number(text: str, unit: str = "") -> float | None:
    """The number of a text in ``unit``: a count, a share, bytes in any unit, a power or a ratio; None where it is none.

    >>> number("1.44 x 10^22"), number("2^-7"), number("3/4"), number("1 GiB", "MB"), number("80B"), number("soon")
    (1.44e+22, 0.0078125, 0.75, 1073.741824, 80000000000.0, None)
    """
    text = text.strip().removesuffix(unit).strip()
    try:
        if power := _POWER.fullmatch(text):
            return float(power[1] or 1) * float(power[2]) ** int(power[3])
        if ratio := _RATIO.fullmatch(text):
            return float(ratio[1]) / float(ratio[2])
        if unit.endswith("B") and text.endswith("B") and text[-2:-1] in ("i", "k", "M", "G", "T"):
            return parse_nbytes(text) / parse_nbytes(f"1{unit}")
    except (ArithmeticError, ValueError):
        return None
    for parse in (parse_amount, parse_number, parse_nbytes):
        try:
            return float(parse(text))
        except NotAQuantity:
            continue
    return None


def _row(claim: Claim) -> str:
    colour = "" if claim.holds else f' style="color: {FAILED}; font-weight: 600"'
    values = (f"{_shown(each)} {claim.unit}".rstrip() for each in (claim.ours, claim.expected))
    cells = "".join(f"<td{_ROOM}>{escape(cell)}</td>" for cell in ("✓" if claim.holds else "✗", claim.text, *values))
    return f"<tr{colour}>{cells}</tr>"


def _shown(value: Value) -> str:
    """A value in words: a whole number below 1e9, and every int, with all its digits, another float with four."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        return str(value)
    whole = isinstance(value, int) or (value.is_integer() and abs(value) < 1e9)
    return f"{int(value):,}" if whole else f"{value:.4g}"


def _in_notebook() -> bool:
    if find_spec("marimo") is None:
        return False
    import marimo as mo

    return bool(mo.running_in_notebook())
