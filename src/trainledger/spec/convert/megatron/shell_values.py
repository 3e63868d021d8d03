"""The variables of a shell script while it is followed: their text, arrays and arithmetic of whole numbers."""

from __future__ import annotations

import operator
import re
from typing import Any

from trainledger.spec.convert.megatron.shell_words import QUOTED, Word, closing

LONGEST_SUM = 200  # characters of an expression
LONGEST = 2**16  # characters of a value: variables that contain themselves grow without end
_PARAMETER = re.compile(r"(#?)(\w+|[@*#?])(?:\[([^\]]*)\])?(?:(:?)([-=+?])(.*))?", re.DOTALL)
_NAME = re.compile(r"\$([A-Za-z_]\w*|[0-9#@*?])")
_CHANGED = re.compile(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", re.DOTALL)
_TERMS = re.compile(r"0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*(?:\[[^\]]*\])?|\|\||&&|[=!<>]=|\S")
_LEVELS: tuple[dict[str, Any], ...] = (
    {"||": lambda a, b: a or b},
    {"&&": lambda a, b: a and b},
    {"==": operator.eq, "!=": operator.ne},
    {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": lambda a, b: int(a / b), "%": lambda a, b: a - b * int(a / b)},
)
_SIGNS: dict[str, Any] = {"-": operator.neg, "+": operator.pos, "!": operator.not_}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=(.*)", re.DOTALL)


def shown(word: str) -> str:
    return word.replace(QUOTED, "$")


class Values:
    """Variables with the lines that set them, each an array, of which a plain one has its value at 0.

    ``called_with`` are the words of a function's call.
    """

    def __init__(self) -> None:
        self.variables: dict[str, dict[str, str]] = {}
        self.set_at: dict[str, int] = {}
        self.called_with: tuple[str, ...] | None = None
        self.line = 0

    def assigned(self, match: re.Match[str], word: Word) -> None:
        name, index, more, value = match.groups()
        array = dict(self.variables.get(name, {})) if more or index is not None else {}
        if word.parts is None:
            key = self._key(index or "0")
            array[key] = (array.get(key, "") if more else "") + self.expand(value)
        for part in word.parts or ():
            if keyed := re.fullmatch(r"\[([^\]]+)\]=(.*)", part, re.DOTALL):
                array[self._key(keyed[1])] = self.expand(keyed[2])
            else:
                array |= {str(place): each for place, each in enumerate(self.expand(part).split(), len(array))}
        self._set(name, array)

    def assign(self, name: str, value: str) -> None:
        self._set(name, {"0": value})

    def _set(self, name: str, array: dict[str, str]) -> None:
        self.variables[name] = array if sum(map(len, array.values())) <= LONGEST else {"0": ""}
        self.set_at[name] = self.line

    def _key(self, index: str) -> str:
        key = self.expand(index)
        number = self.number(key)
        return key if number is None else str(number)

    def _value(self, name: str, index: str | None = None) -> str | None:
        words, array = self.called_with, self.variables.get(name)
        if name.isdecimal():
            return None if words is None else "".join(words[int(name) - 1 : int(name)])
        if name in ("@", "*", "#"):
            return None if words is None else str(len(words)) if name == "#" else " ".join(words)
        if array is None or index in ("@", "*"):
            return None if array is None else " ".join(array.values())
        key = self._key(index or "0")
        return array.get(key, None if "$" in key else "")

    def expand(self, word: str) -> str:
        """A word with its variables and arithmetic; what is not known is unchanged."""
        parts, at, length = [], 0, len(word)
        value: str | int | None
        while at < len(word) and length <= LONGEST:
            if word.startswith("$((", at):
                end = closing(word, at + 1)
                value = self.number(word[at + 3 : end - 2])
            elif word.startswith("${", at):
                end = closing(word, at + 1)
                value = self._parameter(word[at + 2 : end - 1])
            elif named := _NAME.match(word, at):
                end, value = named.end(), self._value(named[1])
            else:
                end = word.find("$", at + 1)
                end, value = len(word) if end < 0 else end, None
            parts.append(word[at:end] if value is None else str(value))
            at, length = end, length + len(parts[-1])
        return "".join(parts) if length <= LONGEST else ""

    def _parameter(self, inner: str) -> str | None:
        """What stands between braces; None where it is not known, as parts of a variable's text are not."""
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            return None
        counted, name, index, colon, sign, other = match.groups()
        value = self._value(name, index)
        if counted and value is not None:
            return str(len(self.variables.get(name, value) if index in ("@", "*") else value))
        is_set = value is not None and not (colon and value == "")
        if sign == "+":
            return self.expand(other) if is_set else ""
        if is_set or counted or sign not in ("-", "="):
            return value
        if sign == "=":
            self.assign(name, self.expand(other))
        return self.expand(other)

    def arithmetic(self, text: str) -> int | None:
        """The number of an expression, which may set a variable; None where it is not known."""
        match = _CHANGED.fullmatch(re.sub(r"([-+])\1\s*$", r"\1=1", text))
        if match is None:
            return self.number(text)
        name, sign, value = match.groups()
        number = self.number(f"{name}{sign}({value})" if sign else value)
        self.assign(name, f"${name}" if number is None else str(number))
        return number

    def number(self, text: str) -> int | None:
        """The value of an expression of whole numbers; None where it is not known."""
        plain = self.expand(text)
        terms = _TERMS.findall(plain) if len(plain) < LONGEST_SUM else []
        try:
            number = self._sum(terms)
        except (ValueError, ArithmeticError, IndexError, RecursionError):
            return None
        return number if not terms and abs(number) < 2**63 else None

    def _sum(self, terms: list[str], level: int = 0) -> int:
        """The value at the beginning of the terms, of operators of a level and tighter ones; takes its terms away."""
        if level == len(_LEVELS):
            return self._term(terms)
        left = self._sum(terms, level + 1)
        while terms and terms[0] in _LEVELS[level]:
            left = int(_LEVELS[level][terms.pop(0)](left, self._sum(terms, level + 1)))
        return left

    def _term(self, terms: list[str]) -> int:
        term = terms.pop(0)
        if term in _SIGNS:
            return int(_SIGNS[term](self._term(terms)))
        if term == "(":
            number = self._sum(terms)
            if terms.pop(0) != ")":
                raise ValueError(term)
            return number
        name, _, index = term.rstrip("]").partition("[")
        value = None if term[0].isdecimal() else self.number(self._value(name, index or None) or "")
        return int(term, 0) if value is None else value
