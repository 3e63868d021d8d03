"""Shell scripts as far as they say arguments: assignments and commands with their variables, and nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainledger.spec.frozen import frozen

LONGEST = 2**16  # characters of a value: variables that contain themselves grow without end
_OPERATORS = "\n;|&()<>"
_KEYWORDS = (
    "if",
    "then",
    "else",
    "elif",
    "fi",
    "do",
    "done",
    "while",
    "export",
    "readonly",
    "local",
    "declare",
    "time",
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_PRODUCT = re.compile(r"\s*\d+(?:\s*[*/+-]\s*\d+)*\s*")
_QUOTED = "\x01"  # replaces a dollar sign that is not a variable's


@frozen
class Script:
    """The contents of a script: its variables at the end, and each command as the words that it would be given.

    A word of a variable that the script does not set, or of a command's output, keeps its ``$``.
    """

    variables: dict[str, str]
    commands: tuple[tuple[str, ...], ...]


def read_script(text: str) -> Script:
    """The variables and commands of a script, in the order in which they are written.

    Both branches of an ``if`` are read as if they ran one after the other, loops as if they ran once.

    >>> found = read_script('N=4\\nARGS="--num-layers $((N * 8)) --bf16"\\npython pretrain_gpt.py $ARGS')
    >>> found.commands
    (('python', 'pretrain_gpt.py', '--num-layers', '32', '--bf16'),)
    """
    variables: dict[str, str] = {}
    commands: list[tuple[str, ...]] = []
    words: list[str] = []
    tokens = list(_tokens(text))
    at = 0
    while at <= len(tokens):
        operator, word = tokens[at] if at < len(tokens) else (True, "\n")
        at += 1
        if operator:
            if words:
                commands.append(tuple(words))
                words = []
            continue
        found = _ASSIGNMENT.match(word) if not words else None
        if found is None:
            if words or word not in _KEYWORDS:
                words += expanded(word, variables).split()
            continue
        value = word[found.end() :]
        if not value and tokens[at : at + 1] == [(True, "(")]:
            parts, at = _array(tokens, at + 1)
            value = " ".join(parts)
        value = expanded(value, variables)
        name = found[1]
        variables[name] = f"{variables.get(name, '')} {value}" if found[2] else value
        if len(variables[name]) > LONGEST:
            variables[name] = ""
    return Script(variables, tuple(commands))


def _array(tokens: list[tuple[bool, str]], at: int) -> tuple[list[str], int]:
    """The words up to the closing parenthesis, and the place after it."""
    parts = []
    while at < len(tokens):
        operator, word = tokens[at]
        at += 1
        if operator and word == ")":
            break
        if not operator:
            parts.append(word)
    return parts, at


def expanded(word: str, variables: dict[str, str]) -> str:
    """A word with its variables and its arithmetic of whole numbers; what is not known is unchanged.

    >>> expanded("${A}x$B ${C:-7}", {"A": "1"})
    '1x$B 7'
    """

    def value(found: re.Match[str]) -> str:
        known = variables.get(found[1] or found[3])
        if known is not None:
            return known
        return found[0] if found[2] is None else _VARIABLE.sub(value, found[2])  # a default may name another variable

    text = _VARIABLE.sub(value, word)
    if len(text) > LONGEST:
        return ""
    return _ARITHMETIC.sub(lambda found: _number(found, variables), text).replace(_QUOTED, "$")


def _number(found: re.Match[str], variables: dict[str, str]) -> str:
    """Sums and products of whole numbers from left to right, products first."""
    named = re.sub(r"\b[A-Za-z_]\w*\b", lambda each: variables.get(each[0], each[0]), found[1])
    plain = named.replace("(", "").replace(")", "") if "(" not in named.strip("() ") else named
    if not _PRODUCT.fullmatch(plain) or len(plain) > 100:
        return found[0]
    terms: list[int] = []
    sign = "+"
    for operator, digits in re.findall(r"([*/+-]?)\s*(\d+)", plain):
        number = int(digits)
        if operator in ("*", "/") and terms:
            if operator == "/" and number == 0:
                return found[0]
            terms[-1] = terms[-1] * number if operator == "*" else terms[-1] // number
        else:
            sign = operator or "+"
            terms.append(-number if sign == "-" else number)
    return str(sum(terms))


def _tokens(text: str) -> Iterator[tuple[bool, str]]:
    """Words and operators, the words without their quotes; (True, operator) or (False, word)."""
    word: list[str] | None = None
    at = 0
    here: list[str] = []  # ends of texts given to a command (<<), which begin on the next line
    while at < len(text):
        character = text[at]
        if character in " \t\r" or character in _OPERATORS:
            if word is not None:
                yield False, "".join(word)
                word = None
            at += 1
            if character == "<" and text[at : at + 1] == "<":
                found = re.compile(r"<-?\s*['\"]?(\w+)['\"]?").match(text, at)
                if found:
                    here.append(found[1])
                    at = found.end()
            elif character in _OPERATORS:
                yield True, character
                if character == "\n" and here:
                    at = _behind(text, at, here.pop(0))
            continue
        if character == "#" and word is None:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        piece, at = _piece(text, at)
        if piece is not None:
            word = [*(word or ()), piece]
    if word is not None:
        yield False, "".join(word)


def _behind(text: str, at: int, end: str) -> int:
    """The place after a text given to a command."""
    found = re.compile(rf"^\s*{re.escape(end)}\s*$", re.MULTILINE).search(text, at)
    return len(text) if found is None else found.end()


def _piece(text: str, at: int) -> tuple[str | None, int]:
    """One part of a word, and the place after it; None for the end of a continued line."""
    character = text[at]
    if character == "'":
        end = text.find("'", at + 1)
        end = len(text) if end < 0 else end
        return text[at + 1 : end].replace("$", _QUOTED), end + 1
    if character == '"':
        parts: list[str] = []
        at += 1
        while at < len(text) and text[at] != '"':
            part, at = _inside(text, at)
            parts.append(part)
        return "".join(parts), at + 1
    if character == "\\":
        following = text[at + 1 : at + 2]
        if following == "\r" and text[at + 2 : at + 3] == "\n":
            return None, at + 3
        return (None if following == "\n" else following.replace("$", _QUOTED)), at + 2
    return _inside(text, at)


def _inside(text: str, at: int) -> tuple[str, int]:
    """A character, a variable in braces, or what a command would print, which is never run."""
    character = text[at]
    if character == "\\" and at + 1 < len(text):
        return ("" if text[at + 1] == "\n" else text[at + 1].replace("$", _QUOTED)), at + 2
    if character == "`":
        end = text.find("`", at + 1)
        return f"{_QUOTED}(...)", len(text) if end < 0 else end + 1
    if text.startswith("$(", at):
        end = _closing(text, at + 1)
        whole = text[at:end]
        return (whole if whole.startswith("$((") else f"{_QUOTED}(...)"), end
    if text.startswith("${", at):
        end = text.find("}", at)
        return (text[at : end + 1], end + 1) if end > 0 else (text[at:], len(text))
    return character, at + 1


def _closing(text: str, at: int) -> int:
    """The place after the parenthesis that closes the one at ``at``."""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place + 1
    return len(text)
