"""The words and the commands of a shell script, before any variable has its value."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem

QUOTED = "\x01"  # replaces a dollar sign that is not a variable's
DEEPEST = 50  # compound commands in one another
# Between words: blanks with comments and continued lines, a text given to a command (<<), redirections, operators.
_BETWEEN = re.compile(
    r"(?P<blank>(?:[^\S\n]|\\\n(?=\s)|(?<=\s)\\\n|(?<![^\s;&|()])#[^\n]*)+)|(?P<here><<-?[^\S\n]*['\"]?(\w+)['\"]?)|"
    r"(?P<redirection>(?:(?<![^\s;&|()])\d+|&)?(?:>>|>\||>&|<&|<>|<<<|>|<))|(?P<operator>&&|\|\||;;|[\n;|&()])"
)
_CLOSES = {"(": ")", "{": "}"}


@frozen
class Word:
    """A word without its quotes, or what has a ``kind``; ``parts`` are those of an array (``NAME=(...)``)."""

    text: str
    line: int
    kind: str | None = None
    parts: tuple[str, ...] | None = None


@frozen
class Step:
    """A command with its ``words``, or one that has ``blocks``: what stands before a body, and the body's steps.

    ``joiner`` stands before it: ; && || |.
    """

    kind: str
    line: int
    words: tuple[Word, ...] = ()
    blocks: tuple[tuple[Any, tuple[Step, ...]], ...] = ()
    joiner: str = ";"
    negated: bool = False

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)


def parsed(text: str) -> tuple[Step, ...]:
    """The commands of a script; raises `InvalidInput` where they are nested too deeply."""
    return _Reader([*_words(text.replace("\r\n", "\n") + "\n"), Word("\n", 0, "operator")]).steps()


class _Reader:
    def __init__(self, words: list[Word]) -> None:
        self.words = deque(words)
        self.depth = 0
        self.ended_by = ""

    def steps(self, *ends: str) -> tuple[Step, ...]:
        """The commands up to one of the words that end them, which is passed."""
        if self.depth == DEEPEST:
            raise InvalidInput([Problem("", None, f"has more than {DEEPEST} commands in one another")])
        self.depth += 1
        found: list[Step] = []
        joiner, negated, self.ended_by = ";", False, ""
        while self.words:
            word = self.words.popleft()
            if word.text in ends:
                self.ended_by = word.text
                break
            if word.kind == "operator" and word.text != "(":
                joiner = joiner if word.text == "\n" else word.text
            elif word.text == "!":
                negated = True
            else:
                step = self.command(word)
                if step.words:
                    found.append(replace(step, joiner=joiner, negated=negated))
                joiner, negated = ";", False
        self.depth -= 1
        return tuple(found)

    def command(self, word: Word) -> Step:
        """The command that begins with a word."""
        text, line = word.text, word.line
        blocks: list[tuple[Any, tuple[Step, ...]]] = []
        if text in _CLOSES:
            return Step("if", line, (word,), (((), self.steps(_CLOSES[text])),))
        if text == "if":
            self.ended_by = "elif"
            while self.ended_by in ("elif", "else"):
                condition = self.steps("then") if self.ended_by == "elif" else ()
                blocks.append((condition, self.steps("elif", "else", "fi")))
            return Step("if", line, (word,), tuple(blocks))
        if text in ("while", "until"):
            return Step("while", line, (word,), ((self.steps("do"), self.steps("done")),))
        if text == "for":
            words = [each for each in self.until("do") if each.text not in ("in", ";", "\n")]
            return Step("for", line, tuple(words), (((), self.steps("done")),))
        if text == "case":
            words = self.until("in")[:1]
            while self.words and self.ended_by != "esac":
                patterns = [each for each in self.until(")", "esac") if each.kind is None]
                if self.ended_by == ")":
                    blocks.append((patterns, self.steps(";;", "esac")))
            return Step("case", line, tuple(words), tuple(blocks))
        if text in ("[", "[["):
            return Step("test", line, tuple(self.until(text.replace("[", "]"))))
        following = self.words[0]
        if text == "function" or (following.kind and following.text == "(" and not text.endswith("=")):
            name = self.words.popleft() if text == "function" else word
            if [each.text for each in islice(self.words, 2)] == ["(", ")"]:
                self.until(")")
            while self.words and self.words[0].text == "\n":
                self.words.popleft()
            body = (self.command(self.words.popleft()),) if self.words else ()
            return Step("function", line, (name,), (((), body),))
        self.words.appendleft(word)
        words = list(self._simple())
        return Step("test", line, tuple(words[1:])) if text == "test" else Step("command", line, tuple(words))

    def until(self, *ends: str) -> list[Word]:
        """The words up to one of these, which is passed."""
        found = []
        self.ended_by = ""
        while self.words and not self.ended_by:
            word = self.words.popleft()
            if word.text in ends:
                self.ended_by = word.text
            else:
                found.append(word)
        return found

    def _simple(self) -> Iterator[Word]:
        """The words of one command, of an assignment of an array with its parts; redirections are left out."""
        while self.words and self.words[0].kind != "operator":
            word = self.words.popleft()
            if word.kind == "redirection":
                self.words.popleft()
            elif word.text.endswith("=") and self.words[0].text == "(":
                self.words.popleft()
                yield replace(word, parts=tuple(each.text for each in self.until(")") if each.kind is None))
            else:
                yield word


def _words(text: str) -> Iterator[Word]:
    word: list[str] = []
    at, line, begun, here = 0, 1, 1, ""
    while at < len(text):
        between = _BETWEEN.match(text, at)
        if between and word:
            yield Word("".join(word), begun)
            word = []
        if between is None:
            begun = begun if word else line
            piece, end = _piece(text, at)
            word.append(piece)
        elif text.startswith("((", at) and text.endswith("))", at, end := closing(text, at)):
            yield Word(text[at:end], line)
        else:
            end = between.end()
            if between["operator"] or between["redirection"]:
                yield Word(between[0], line, between.lastgroup)
            here = between[3] or here
            if between[0] == "\n" and here:
                last = re.compile(rf"^\s*{re.escape(here)}\s*$", re.MULTILINE).search(text, end)
                end, here = last.end() if last else len(text), ""
        line, at = line + text.count("\n", at, end), end


def _piece(text: str, at: int) -> tuple[str, int]:
    """One part of a word without its quotes, and the place after it."""
    if text[at] == "'":
        end = text.find("'", at + 1) + 1 or len(text) + 1
        return text[at + 1 : end - 1].replace("$", QUOTED), end
    if text[at] != '"':
        return _inside(text, at)
    parts: list[str] = []
    at += 1
    while at < len(text) and text[at] != '"':
        part, at = _inside(text, at)
        parts.append(part)
    return "".join(parts), at + 1


def _inside(text: str, at: int) -> tuple[str, int]:
    """A character, a variable in braces, arithmetic, or what a command would print, which is never run."""
    if text[at] == "\\":
        return text[at + 1 : at + 2].replace("\n", "").replace("$", QUOTED), at + 2
    if text[at] == "`":
        return "$(...)", text.find("`", at + 1) + 1 or len(text) + 1
    if text.startswith("$(expr ", at):  # whose words are those of $(( )), but for a * that the shell would expand
        end = closing(text, at + 1)
        return f"$(({text[at + len('$(expr ') : end - 1]}))".replace("\\*", "*"), end
    if text.startswith("$(", at) and not text.startswith("$((", at):
        return "$(...)", closing(text, at + 1)
    if text.startswith(("$(", "${"), at):
        end = closing(text, at + 1)
        return text[at:end].replace('"', "").replace("'", ""), end
    return text[at], at + 1


def closing(text: str, at: int) -> int:
    """The place after the bracket that closes the one at ``at``; the end where none does."""
    opens, closes, depth = text[at], _CLOSES[text[at]], 0
    for place in range(at, len(text)):
        depth += (text[place] == opens) - (text[place] == closes)
        if depth == 0:
            return place + 1
    return len(text)
