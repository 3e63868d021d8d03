"""Megatron-LM's arguments on their way to a run: values by their types, defaults that were supplied, and problems."""

from __future__ import annotations

from typing import Any

from trainledger.spec.convert.megatron.arguments import Arguments
from trainledger.spec.convert.megatron.flags import changes_nothing
from trainledger.spec.problem import Problem

_LARGEST = 10**12


class Reading:
    """What is read of arguments: those that were asked for, the defaults in place of others, problems and notes.

    A default is Megatron-LM's own (megatron/training/arguments.py and core/transformer/transformer_config.py).
    """

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.asked: set[str] = set()
        self.supplied: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def given(self, name: str) -> str | None:
        """The text of an argument, of several words the first; None where it is not given."""
        self.asked.add(name)
        value = self.arguments.given.get(name)
        return next(iter(value), None) if isinstance(value, tuple) else value

    def flag(self, name: str) -> bool:
        """Whether a flag is given, and not as false."""
        value = self.given(name)
        return value is not None and value.lower() not in ("false", "0", "none")

    def count(self, name: str, default: int | None = None, *, at_least: int = 1) -> int | None:
        """A whole number; the default, or None, where it is not given; raises nothing: a wrong one is a problem."""
        value = self.given(name)
        if value is None:
            return None if default is None else int(self._default(name, default))
        try:
            number = int(value) if value.lstrip("-").isdecimal() else float(value)
        except ValueError:
            number = -1.0
        if number != number or abs(number) > _LARGEST or number != int(number) or number < at_least:
            self.refuse(name, value, self._unset(value) or f"must be a whole number of at least {at_least}", default)
            return default if default is None or default >= at_least else at_least
        return int(number)

    def number(self, name: str, default: float | None = None) -> float | None:
        """A number; the default, or None, where it is not given."""
        value = self.given(name)
        if value is None:
            return None if default is None else float(self._default(name, default))
        try:
            found = float(value)
        except ValueError:
            found = float("nan")
        if found != found or abs(found) == float("inf"):
            self.refuse(name, value, self._unset(value) or "must be a number", default)
            return default
        return found

    def text(self, name: str, default: str | None = None) -> str | None:
        """A word; the default, or None, where it is not given."""
        value = self.given(name)
        return self._default(name, default) if value is None else value

    def refuse(self, name: str, value: Any, rule: str, nearest: Any = None) -> None:
        self.problems.append(Problem(f"--{name}", value, rule, nearest))

    def _default(self, name: str, default: Any) -> Any:
        if default is not None and not self.arguments.complete:
            self.supplied[name] = default
        return default

    @staticmethod
    def _unset(value: str) -> str:
        return "names a variable that the text does not set; give the number" if "$" in value else ""

    def strangers(self) -> tuple[str, ...]:
        """Arguments that nothing asked for and that are not known to change nothing."""
        return tuple(name for name in self.arguments.given if name not in self.asked and not changes_nothing(name))
