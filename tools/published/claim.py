"""A claim of a public text: its right numbers, whether the printed ones agree, and the command that prints them."""

from __future__ import annotations

import csv
import io
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trainledger.cli import main

FILE = Path(__file__).with_name("worked_examples.csv")
AGREES = 0.038  # between what the file calls right (6.5 days for 6.74) and wrong (53.6M for 51.5M)
Row = dict[str, str]
Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Shown:
    """A command, and the texts that one line of what it prints must have."""

    command: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """The right numbers in the row's unit; how the printed ones come about (None: in no way), said in words too."""

    ours: Numbers
    shown: tuple[Shown, ...]
    theirs: Numbers | None = None
    how: str = ""


def rows() -> list[Row]:
    with FILE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def numbers_in(text: str) -> Numbers:
    """The numbers of a text: ``143 to 144`` is their middle, ``10 and 1000`` are two."""
    found = tuple(float(each) for each in re.findall(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", text.replace(",", "")))
    return (sum(found) / 2,) if " to " in text and len(found) == 2 else found


def agree(a: Numbers, b: Numbers) -> bool:
    """Whether all numbers are near enough to the second's."""
    return len(a) == len(b) and all(abs(x - y) <= AGREES * abs(y) for x, y in zip(a, b, strict=True))


def verdict(row: Row, claim: Claim) -> str:
    """holds, wrong or answered; what states a fact and no number of its own holds where it is so here."""
    if row["published_value"] == "unanswered":
        return "answered"
    printed = numbers_in(row["published_value"]) if row["published_value"] else claim.theirs
    assert printed is not None
    return "holds" if agree(claim.ours, printed) else "wrong"


@cache
def output(command: str) -> str:
    """What a command prints; it must end well."""
    words = shlex.split(command)
    assert words[0] == "trainledger"
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(words[1:]) == 0, command
    return printed.getvalue()


def line_of(shown: Shown) -> str:
    """The first line of a command's output that has all the texts; ValueError where none has."""
    for line in output(shown.command).splitlines():
        if all(each in line for each in shown.texts):
            return line.strip()
    raise ValueError(f"{shown.command} prints no line with {shown.texts}")


def show(command: str, *texts: str) -> tuple[Shown, ...]:
    return (Shown(f"trainledger {command}", texts),)
