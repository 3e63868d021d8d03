"""What is wrong with an input, as a sentence a person can act on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one field: what it was, the rule it breaks, and the nearest value that works."""

    field: str
    value: object
    rule: str
    nearest: object = None

    def __str__(self) -> str:
        sentence = f"{self.field} = {self.value!r}: {self.rule}"
        if self.nearest is not None:
            sentence += f"; nearest that works: {self.nearest!r}" if not isinstance(self.nearest, str) else (
                f"; nearest that works: {self.nearest}"
            )
        return sentence


class InvalidInput(ValueError):
    """Every problem found in an input; the command line prints each and exits with code 2."""

    def __init__(self, problems: list[Problem], where: str = "") -> None:
        self.problems = tuple(problems)
        self.where = where
        lines = [str(each) for each in problems]
        super().__init__("\n".join([f"{where}:", *("  " + line for line in lines)] if where else lines))
