"""Shell scripts as far as they say arguments: assignments, branches and commands, of which none is run.

Left out: what commands print, files that are sourced, and parts of a variable's text (``${NAME%.*}``).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from trainledger.spec.convert.megatron.shell_values import APPLIED, ASSIGNMENT, Values, shown, unknown
from trainledger.spec.convert.megatron.shell_words import Step, parsed
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem

MOST_STEPS, MOST_ROUNDS, MOST_WAYS = 20_000, 1000, 64  # of one way through a script; of a loop; ways that are followed
_COMPARED = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
_DECLARING = ("export", "readonly", "local", "declare", "typeset")
_OF_THE_CALL = re.compile(r"\$#|\$\{?[1-9@*]|\bread\b|\bgetopts\b")  # loops over what the script is called with


@frozen
class Decision:
    """A condition that the script leaves open: its text and line, and which of how many ways was followed."""

    text: str
    line: int
    ways: int
    way: int


@frozen
class Script:
    """One way through a script: its variables at the end, and each command as the words that it would be given.

    A word of a variable that the script does not set, or of a command's output, keeps its ``$``. ``lines`` are those
    of the commands, ``set_at`` those of the variables; ``sourced`` are files that it reads, which are not opened.
    """

    variables: dict[str, str]
    commands: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...] = ()
    set_at: dict[str, int] | None = None
    decisions: tuple[Decision, ...] = ()
    sourced: tuple[str, ...] = ()


def read_script(text: str) -> Script:
    """The first way through a script: conditions that it leaves open do not hold.

    >>> found = read_script('N=4\\nARGS="--num-layers $((N * 8)) --bf16"\\npython pretrain_gpt.py $ARGS')
    >>> found.commands
    (('python', 'pretrain_gpt.py', '--num-layers', '32', '--bf16'),)
    """
    return next(ways_through(text))


def ways_through(text: str) -> Iterator[Script]:
    """The ways through a script, one for each answer to what it leaves open, at most `MOST_WAYS`.

    >>> [each.variables["N"] for each in ways_through("N=1; if [ $1 = big ]; then N=2; fi")]
    ['1', '2']
    """
    steps = parsed(text)
    waiting: deque[tuple[int, ...]] = deque([()])
    for _ in range(MOST_WAYS):
        if not waiting:
            return
        given = waiting.popleft()
        shell = _Shell(given)
        try:
            with suppress(_LeaveError):
                shell.run(steps)
        except RecursionError:
            raise InvalidInput([Problem("", None, "has variables that contain themselves")]) from None
        for place in range(len(given), len(shell.decisions)):
            before = tuple(each.way for each in shell.decisions[:place])
            waiting += [(*before, way) for way in range(1, shell.decisions[place].ways)]
        yield shell.script()


def expanded(word: str, variables: dict[str, str]) -> str:
    """A word with its variables and its arithmetic of whole numbers; what is not known is unchanged.

    >>> expanded("${A}x$B ${C:-7}", {"A": "1"})
    '1x$B 7'
    """
    shell = _Shell(())
    shell.variables |= variables
    return shown(shell.expand(word))


class _LeaveError(Exception):
    """``exit``, ``return``, ``break`` or ``continue``."""


class _Shell(Values):
    """A way through a script that takes the given answers to what it leaves open, and the first one after them."""

    def __init__(self, given: Sequence[int]) -> None:
        self.given = given
        super().__init__()
        self.functions: dict[str, Sequence[Step]] = {}
        self.commands: list[tuple[tuple[str, ...], int]] = []
        self.decisions: list[Decision] = []
        self.sourced: list[str] = []
        self.asked = ("", 0)
        self.steps = self.depth = 0

    def script(self) -> Script:
        variables = self.variables | {name: " ".join(array.values()) for name, array in self.arrays.items()}
        commands = tuple(tuple(map(shown, words)) for words, _ in self.commands)
        return Script(
            {name: shown(value) for name, value in variables.items()},
            commands,
            tuple(line for _, line in self.commands),
            dict(self.set_at),
            tuple(self.decisions),
            tuple(self.sourced),
        )

    def decide(self, text: str, line: int, ways: int = 2) -> int:
        """The way that is followed where a condition is not known; the same one for the same text."""
        before = next((each.way for each in self.decisions if (each.text, each.ways) == (text, ways)), None)
        if before is not None:
            return before
        place = len(self.decisions)
        way = self.given[place] if place < len(self.given) else 0
        self.decisions.append(Decision(shown(text), line, ways, way))
        return way

    def run(self, steps: Sequence[Step]) -> bool | None:
        """Whether the last of the steps succeeds; None where that is not known."""
        status: bool | None = True
        for step in steps:
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise _LeaveError("exit")
            if step.joiner in ("&&", "||"):
                holds = not self.decide(*self.asked) if status is None else status
                if holds == (step.joiner == "||"):
                    status = holds
                    continue
            self.line = step.line
            status = getattr(self, f"_{step.kind}")(step)
            if step.joiner == "|":
                status = self._not_known(step.text)
            if step.negated and status is not None:
                status = not status
        return status

    def _not_known(self, text: str) -> bool | None:
        self.asked = text, self.line
        return None

    def _holds(self, steps: Sequence[Step]) -> bool:
        status = self.run(steps)
        return self.decide(*self.asked) == 1 if status is None else status

    def _if(self, step: Step) -> bool | None:  # a group is a branch without a condition
        return next((self.run(body) for condition, body in step.blocks if self._holds(condition)), True)

    def _case(self, step: Step) -> bool | None:
        word = self.expand(step.words[0].text)
        patterns = [[self.expand(each.text) for each in names] for names, _ in step.blocks]
        matches = [any(fnmatchcase(word, each) for each in names) for names in patterns]
        if unknown(word):
            always = any("*" in names for names in patterns)
            way = self.decide(f"case {word}", self.line, len(patterns) + (not always))
            matches = [place == way for place in range(len(patterns))]
        return next((self.run(body) for (_, body), found in zip(step.blocks, matches, strict=True) if found), True)

    def _for(self, step: Step) -> bool | None:
        name, *words = (each.text for each in step.words)
        if name.startswith("(("):
            begin, until, after = (*name[2:-2].split(";"), "", "")[:3]
            self.arithmetic(begin)
            self._rounds(step.blocks[0][1], lambda: bool(self.number(until)), after)
            return True
        values = [part for word in words for part in self.expand(word).split()]
        if not words or any(map(unknown, values)):
            values = [f"${name}"]
        for value in values[:MOST_ROUNDS]:
            self.assign(name, value)
            if not self._round(step.blocks[0][1]):
                break
        return True

    def _while(self, step: Step) -> bool | None:
        ((condition, body),) = step.blocks
        wanted = step.words[0].text == "while"
        status = self.run(condition)
        if status is None:
            if not _OF_THE_CALL.search(self.asked[0]) and self.decide(*self.asked) == 1:
                self._round(body)
        elif status is wanted and self._round(body):
            self._rounds(body, lambda: self.run(condition) is wanted)
        return True

    def _rounds(self, body: Sequence[Step], goes_on: Any, after: str = "") -> None:
        for _ in range(MOST_ROUNDS):
            if not goes_on() or not self._round(body):
                return
            self.arithmetic(after)

    def _round(self, body: Sequence[Step]) -> bool:
        """Run the body of a loop; whether the loop goes on."""
        try:
            self.run(body)
        except _LeaveError as leaves:
            if leaves.args[0] not in ("break", "continue"):
                raise
            return bool(leaves.args[0] == "continue")
        return True

    def _function(self, step: Step) -> bool | None:
        self.functions[step.words[0].text] = step.blocks[0][1]
        return True

    def _test(self, step: Step) -> bool | None:
        words = [each.text if each.is_operator else self.expand(each.text) for each in step.words]
        holds = self.tested(words)
        return self._not_known(step.text) if holds is None else holds

    def _command(self, step: Step) -> bool | None:
        words = list(step.words)
        while words and (found := ASSIGNMENT.fullmatch(words[0].text)):
            self.assigned(found, words.pop(0))
        if not words:
            return True
        first, rest = words[0].text, words[1:]
        if first.startswith("(("):
            number = self.arithmetic(first[2:-2])
            return self._not_known(step.text) if number is None else bool(number)
        if first in _DECLARING:
            for word in rest:
                if found := ASSIGNMENT.fullmatch(word.text):
                    self.assigned(found, word)
            return True
        if first == "let":
            return bool([self.arithmetic(each.text) for each in rest][-1:])
        given = tuple(part for word in words for part in self.expand(word.text).split())
        name, values = given[0] if given else "", given[1:]
        if name in self.functions and self.depth < 20:
            return self._called(self.functions[name], values)
        if name in ("true", ":", "false"):
            return name != "false"
        if name in ("exit", "return", "break", "continue"):
            raise _LeaveError(name)
        if name in ("source", "."):
            self.sourced += values[:1]
        elif name in ("unset", "read"):
            for each in values:
                self.variables.pop(each, None)
                self.arrays.pop(each, None)
        elif name == "shift" and self.called_with:
            self.called_with = self.called_with[1:]
        elif given:
            self.commands.append((given, self.line))
            if name == "exec":
                raise _LeaveError("exit")
        return self._not_known(step.text)

    def _called(self, body: Sequence[Step], values: tuple[str, ...]) -> bool | None:
        before, self.called_with = self.called_with, values
        self.depth += 1
        try:
            return self.run(body)
        except _LeaveError as leaves:
            if leaves.args[0] != "return":
                raise
            return self._not_known("return")
        finally:
            self.called_with = before
            self.depth -= 1

    def tested(self, words: list[str]) -> bool | None:
        """Whether what stands between brackets holds; None where that is not known."""
        for joiners, decisive in ((("||", "-o"), True), (("&&", "-a"), False)):
            depth = 0
            for place, word in enumerate(words):
                depth += (word == "(") - (word == ")")
                if word in joiners and depth == 0:
                    sides = self.tested(words[:place]), self.tested(words[place + 1 :])
                    return decisive if decisive in sides else None if None in sides else not decisive
        if words[:1] == ["!"]:
            inner = self.tested(words[1:])
            return None if inner is None else not inner
        if len(words) > 2 and words[0] == "(" and words[-1] == ")":
            return self.tested(words[1:-1])
        if any(map(unknown, words)):
            return None
        if len(words) < 2:
            return bool(words and words[0])
        if len(words) == 2 and words[0] in ("-z", "-n"):
            return (words[1] == "") == (words[0] == "-z")
        if len(words) != 3:
            return None
        left, sign, right = words
        if sign in ("=", "==", "!="):
            return fnmatchcase(left, right) == (sign != "!=")
        numbers = self.number(left), self.number(right)
        if sign not in _COMPARED or None in numbers:
            return None
        return bool(APPLIED[_COMPARED[sign]](*numbers))
