"""The variables of a shell script while it is followed: their text, arrays and arithmetic of whole numbers."""

from __future__ import annotations

import operator
import re
from typing import Any

from trainledger.spec.convert.megatron.shell_words import PRINTED, QUOTED, Word, closing

LONGEST_SUM, LONGEST_TEXT = 200, 1000  # characters of an expression, and of one with its variables' names
LONGEST = 2**16  # characters of a value: variables that contain themselves grow without end
_PARAMETER = re.compile(r"([#!]?)(\w+|[@*#?])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_NAME = re.compile(r"\$([A-Za-z_]\w*|[0-9#@*?])")
_CHANGED = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:([-+*/%]?)=(?!=)(.*)|(\+\+|--)\s*)", re.DOTALL)
_NUMBERS = re.compile(r"\s*(0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*(?:\[[^\]]*\])?|\|\||&&|[=!<>]=|[-+*/%<>!()])\s*")
_LEVELS = (("||",), ("&&",), ("==", "!="), ("<=", ">=", "<", ">"), ("+", "-"), ("*", "/", "%"), ())
APPLIED: dict[str, Any] = {
    "||": lambda a, b: a or b,
    "&&": lambda a, b: a and b,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: int(a / b),
    "%": lambda a, b: a - b * int(a / b),
}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=(.*)", re.DOTALL)


def shown(word: str) -> str:
    return word.replace(QUOTED, "$").replace(PRINTED, "$")


def unknown(word: str) -> bool:
    return "$" in word or PRINTED in word


class Values:
    """Variables and arrays with the lines that set them; ``called_with`` are the words of a function's call."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.arrays: dict[str, dict[str, str]] = {}
        self.called_with: tuple[str, ...] | None = None
        self.set_at: dict[str, int] = {}
        self.line = 0

    def assigned(self, found: re.Match[str], word: Word) -> None:
        name, index, more, value = found.groups()
        if word.parts is None and index is None:
            self.assign(name, (self.variables.get(name, "") if more else "") + self.expand(value))
            return
        array = self.arrays.setdefault(name, {})
        if index is not None:
            array[self._key(index)] = self.expand(value)
        elif not more:
            array.clear()
        for part in word.parts or ():
            if keyed := re.fullmatch(r"\[([^\]]+)\]=(.*)", part, re.DOTALL):
                array[self._key(keyed[1])] = self.expand(keyed[2])
            else:
                array |= {str(len(array) + place): each for place, each in enumerate(self.expand(part).split())}
        self.set_at[name] = self.line
        if sum(map(len, array.values())) > LONGEST:
            array.clear()

    def assign(self, name: str, value: str) -> None:
        self.arrays.pop(name, None)
        self.variables[name] = value if len(value) <= LONGEST else ""
        self.set_at[name] = self.line

    def _key(self, index: str) -> str:
        key = self.expand(index)
        number = self.number(key)
        return key if number is None else str(number)

    def _value(self, name: str, index: str | None) -> str | None:
        if name in self.arrays:
            array = self.arrays[name]
            return " ".join(array.values()) if index in ("@", "*") else array.get(self._key(index or "0"))
        if name.isdecimal() or name in ("@", "*", "#"):
            words = self.called_with
            if words is None:
                return None
            if name.isdecimal():
                return words[int(name) - 1] if 0 < int(name) <= len(words) else ""
            return str(len(words)) if name == "#" else " ".join(words)
        return self.variables.get(name)

    def expand(self, word: str) -> str:
        """A word with its variables and arithmetic; what is not known is unchanged."""
        parts, at, length = [], 0, 0 if len(word) <= LONGEST else LONGEST + 1
        while at < len(word) and length <= LONGEST:
            if word[at] != "$":
                end = word.find("$", at)
                end = len(word) if end < 0 else end
                part = word[at:end]
            elif word.startswith("$((", at):
                end = closing(word, at + 1)
                number = self.number(word[at + 3 : end - 2])
                part = word[at:end] if number is None else str(number)
            elif word.startswith("${", at):
                end = closing(word, at + 1, "{}")
                part = self._parameter(word[at + 2 : end - 1], word[at:end])
            else:
                named = _NAME.match(word, at)
                end = named.end() if named else at + 1
                value = self._value(named[1], None) if named else None
                part = word[at:end] if value is None else value
            parts.append(part)
            at, length = end, length + len(part)
        return "".join(parts) if length <= LONGEST else ""

    def _parameter(self, inner: str, whole: str) -> str:
        found = _PARAMETER.fullmatch(inner)
        if found is None:
            return whole
        before, name, index, rest = found.groups()
        value = self._value(name, index)
        if before == "#" and value is not None:
            return str(len(self.arrays[name]) if name in self.arrays and index else len(value))
        if given := re.fullmatch(r"(:?)([-=+])(.*)", rest, re.DOTALL):
            is_set = value is not None and not (given[1] and value == "")
            if given[2] == "+":
                return self.expand(given[3]) if is_set else ""
            if given[2] == "=" and not is_set:
                self.assign(name, self.expand(given[3]))
            return value if is_set and value is not None else self.expand(given[3])
        if value is None:
            return whole
        return whole if before or (rest and not rest.startswith(":?")) else value

    def arithmetic(self, text: str) -> int | None:
        """The number of an expression, which may set a variable; None where it is not known."""
        found = _CHANGED.fullmatch(text)
        if found is None:
            return self.number(text)
        name, sign, value, step = found.groups()
        number = self.number(f"{name}{step[0]}1" if step else f"{name}{sign}({value})" if sign else value)
        if number is None:
            self.variables.pop(name, None)
        else:
            self.assign(name, str(number))
        return number

    def number(self, text: str) -> int | None:
        """The value of an expression of whole numbers; None where it is not known."""
        plain = self.expand(text) if len(text) < LONGEST_TEXT else ""
        words = [found[1] for found in _NUMBERS.finditer(plain)] if len(plain) < LONGEST_SUM else []
        if sum(map(len, words)) != len("".join(plain.split())):
            return None
        try:
            number = self._sum(words)
        except (ValueError, ArithmeticError, IndexError):
            return None
        return None if words else number

    def _sum(self, words: list[str], level: int = 0) -> int:
        """The value at the beginning of the words, of operators of a level and tighter ones; takes its words away."""
        if level == len(_LEVELS) - 1:
            word = words.pop(0)
            if word in ("-", "+", "!"):
                number = self._sum(words, level)
                return {"-": -number, "+": number, "!": int(not number)}[word]
            if word == "(":
                number = self._sum(words)
                if words.pop(0) != ")":
                    raise ValueError(word)
                return number
            name, _, index = word.rstrip("]").partition("[")
            value = self._value(name, index or None) if name[0].isalpha() or name[0] == "_" else None
            inner = self.number(value) if value is not None and value != word else int(word, 0)
            if inner is None:
                raise ValueError(word)
            return inner
        left = self._sum(words, level + 1)
        while words and words[0] in _LEVELS[level]:
            left = int(APPLIED[words.pop(0)](left, self._sum(words, level + 1)))
        return left
