"""The words and the commands of a shell script, before any variable has its value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem

QUOTED = "\x01"  # replaces a dollar sign that is not a variable's
PRINTED = "\x02"  # replaces that of a command's output
DEEPEST = 50  # compound commands in one another
_OPERATOR = re.compile(r"&&|\|\||\|&|;;&?|;&|(?:\d+|&)?(?:>>|>\||>&|<&|<>|<<<|>|<)|[\n;|&()]")
_HERE = re.compile(r"\d*<<-?\s*['\"]?(\w+)['\"]?")
_IF, _LOOP, _CASE = ("elif", "else", "fi"), ("done",), (";;", ";&", ";;&", "esac")


@frozen
class Word:
    """A word without its quotes, or an operator; ``parts`` are those of an array (``NAME=(...)``)."""

    text: str
    line: int
    is_operator: bool = False
    parts: tuple[str, ...] | None = None


@frozen
class Step:
    """A command with its ``words``, or one that has ``blocks``: what stands before a body, and the body's steps.

    ``joiner`` stands before it: ; && || |.
    """

    kind: str
    line: int
    joiner: str
    negated: bool
    words: tuple[Word, ...] = ()
    blocks: tuple[tuple[Any, tuple[Step, ...]], ...] = ()

    @property
    def text(self) -> str:
        return " ".join(each.text for each in self.words)


def parsed(text: str) -> tuple[Step, ...]:
    """The commands of a script; raises `InvalidInput` where they are nested too deeply."""
    reader = _Reader(list(_words(text.replace("\r\n", "\n"))))
    found: list[Step] = []
    while reader.at < len(reader.words):
        found += reader.steps()
    return tuple(found)


class _Reader:
    def __init__(self, words: list[Word]) -> None:
        self.words = [*words, Word("\n", words[-1].line if words else 1, is_operator=True)]
        self.at = self.depth = 0
        self.ended_by = ""

    def next(self) -> Word:
        self.at += 1
        return self.words[min(self.at, len(self.words)) - 1]

    def steps(self, *ends: str) -> tuple[Step, ...]:
        """The commands up to one of the words that end them, which is passed."""
        if self.depth == DEEPEST:
            raise InvalidInput([Problem("", None, f"has more than {DEEPEST} commands in one another")])
        self.depth += 1
        found: list[Step] = []
        joiner, negated, self.ended_by = ";", False, ""
        while self.at < len(self.words):
            word = self.next()
            if word.text in ends:
                self.ended_by = word.text
                break
            if word.is_operator and word.text != "(" and "<" not in word.text and ">" not in word.text:
                joiner = joiner if word.text == "\n" else word.text.replace("|&", "|")
            elif word.text == "!":
                negated = True
            elif word.text != "time":
                kind, words, blocks = self.command(word)
                if words or blocks:
                    found.append(Step(kind, word.line, joiner, negated, tuple(words), tuple(blocks)))
                joiner, negated = ";", False
        self.depth -= 1
        return tuple(found)

    def command(self, word: Word) -> tuple[str, list[Word], list[tuple[Any, tuple[Step, ...]]]]:
        """The kind of a command that begins with a word, its words and its blocks."""
        text, nothing = word.text, ()
        blocks: list[tuple[Any, tuple[Step, ...]]] = []
        if text in ("(", "{"):
            return "if", [word], [(nothing, self.steps(")" if text == "(" else "}"))]
        if text == "if":
            blocks.append((self.steps("then"), self.steps(*_IF)))
            while self.ended_by in ("elif", "else"):
                condition = self.steps("then") if self.ended_by == "elif" else nothing
                blocks.append((condition, self.steps(*_IF)))
            return "if", [word], blocks
        if text in ("while", "until"):
            return "while", [word], [(self.steps("do"), self.steps(*_LOOP))]
        if text in ("for", "select"):
            words = [each for each in self.until("\n", ";", "do") if each.text != "in"]
            if self.words[self.at - 1].text != "do":
                self.steps("do")
            return "for", words, [(nothing, self.steps(*_LOOP))]
        if text == "case":
            words = self.until("in")[:1]
            while self.at < len(self.words) and self.ended_by != "esac":
                patterns = [each for each in self.until(")", "esac") if not each.is_operator]
                if self.words[self.at - 1].text == "esac":
                    break
                blocks.append((patterns, self.steps(*_CASE)))
            self.ended_by = ""
            return "case", words, blocks
        if text == "[[":
            return "test", self.until("]]"), []
        following = [each.text for each in self.words[self.at : self.at + 2] if each.is_operator]
        if text == "function" or following == ["(", ")"]:
            name = self.next() if text == "function" else word
            while self.at < len(self.words) and self.words[self.at].text in ("(", ")", "\n"):
                self.at += 1
            return "function", [name], [(nothing, (Step(*self._body()),))]
        self.at -= 1
        words = list(self._simple())
        if words and words[0].text in ("[", "test"):
            return "test", [each for each in words[1:] if each.text != "]"], []
        return "command", words, []

    def _body(self) -> tuple[Any, ...]:
        word = self.next()
        kind, words, blocks = self.command(word)
        return kind, word.line, ";", False, tuple(words), tuple(blocks)

    def until(self, *ends: str) -> list[Word]:
        """The words up to one of these, which is passed."""
        found = []
        while self.at < len(self.words) and (word := self.next()).text not in ends:
            found.append(word)
        return found

    def _simple(self) -> Iterator[Word]:
        """The words of one command, of an assignment of an array with its parts; redirections are left out."""
        while self.at < len(self.words):
            word = self.words[self.at]
            if word.is_operator and "<" not in word.text and ">" not in word.text:
                return
            self.at += 1
            if word.is_operator:
                self.at += 1
            elif word.text.endswith("=") and self.words[min(self.at, len(self.words) - 1)].text == "(":
                self.at += 1
                parts = tuple(each.text for each in self.until(")") if not each.is_operator)
                yield Word(word.text, word.line, parts=parts)
            else:
                yield word


def _words(text: str) -> Iterator[Word]:
    word: list[str] | None = None
    at, line, begun = 0, 1, 1
    here: list[str] = []  # ends of texts given to a command (<<), which begin on the next line
    while at < len(text):
        blank = text[at] in " \t\r"
        found = None if blank or (word is not None and text[at] not in "\n;|&()<>") else _OPERATOR.match(text, at)
        if (blank or found) and word is not None:
            yield Word("".join(word), begun)
            word = None
        if blank:
            at += 1
        elif begins := _HERE.match(text, at) if found else None:
            here.append(begins[1])
            at = begins.end()
        elif found and text.startswith("((", at) and text[: (end := closing(text, at))].endswith("))"):
            yield Word(text[at:end], line)
            at, line = end, line + text.count("\n", at, end)
        elif found:
            yield Word(found[0], line, is_operator=True)
            at = found.end()
            if found[0] == "\n":
                end = _behind(text, at, here.pop(0)) if here else at
                line, at = line + 1 + text.count("\n", at, end), end
        elif text[at] == "#" and word is None:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        else:
            piece, end = _piece(text, at)
            begun = line if word is None else begun
            line, at = line + text.count("\n", at, end), end
            if piece is not None:
                word = [*(word or ()), piece]
    if word is not None:
        yield Word("".join(word), begun)


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
        return text[at + 1 : end].replace("$", QUOTED), end + 1
    if character == '"':
        parts: list[str] = []
        at += 1
        while at < len(text) and text[at] != '"':
            part, at = _inside(text, at)
            parts.append(part)
        return "".join(parts), at + 1
    if character == "\\":
        following = text[at + 1 : at + 2]
        return (None if following == "\n" else following.replace("$", QUOTED)), at + 2
    return _inside(text, at)


def _inside(text: str, at: int) -> tuple[str, int]:
    """A character, a variable in braces, arithmetic, or what a command would print, which is never run."""
    character = text[at]
    if character == "\\" and at + 1 < len(text):
        return ("" if text[at + 1] == "\n" else text[at + 1].replace("$", QUOTED)), at + 2
    if character == "`":
        end = text.find("`", at + 1)
        return f"{PRINTED}(...)", len(text) if end < 0 else end + 1
    if text.startswith("$(", at):
        end = closing(text, at + 1)
        return (text[at:end] if text[at:end].startswith("$((") else f"{PRINTED}(...)"), end
    if text.startswith("${", at):
        end = closing(text, at + 1, "{}")
        return text[at:end].replace('"', "").replace("'", ""), end
    return character, at + 1


def closing(text: str, at: int, pair: str = "()") -> int:
    """The place after the parenthesis that closes the one at ``at``."""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] == pair[0]) - (text[place] == pair[1])
        if depth == 0:
            return place + 1
    return len(text)
