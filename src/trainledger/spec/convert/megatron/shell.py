"""Shell scripts as far as they say arguments: assignments, branches and commands, of which none is run.

Left out: what commands print, files that are sourced, parts of a variable's text (``${NAME%.*}``), ``select``, and
functions that call themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice, repeat

from trainledger.spec.convert.megatron.shell_values import ASSIGNMENT, Values, shown
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
    of the commands, ``set_at`` those of the variables.
    """

    variables: dict[str, str]
    commands: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    set_at: dict[str, int]
    decisions: tuple[Decision, ...]


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
    waiting: list[tuple[int, ...]] = [()]
    try:
        steps = parsed(text)
        for given in islice(waiting, MOST_WAYS):  # which grows on the way
            shell = _Shell(given)
            shell.run(steps)
            script = shell.script()
            ways = tuple(each.way for each in script.decisions)
            for place, decision in islice(enumerate(script.decisions), len(given), None):
                waiting += [(*ways[:place], way) for way in range(1, decision.ways)]
            yield script
    except RecursionError:
        raise InvalidInput([Problem("", None, "has variables in one another that are too many")]) from None


class _Shell(Values):
    """A way through a script that takes the given answers to what it leaves open, and the first one after them."""

    def __init__(self, given: Iterable[int]) -> None:
        super().__init__()
        self.given = iter(given)
        self.functions: dict[str, Sequence[Step]] = {}
        self.commands: list[tuple[str, ...]] = []
        self.lines: list[int] = []
        self.decisions: dict[tuple[str, int], Decision] = {}
        self.asked = ("", 0)  # text and line of the last command whose success is not known
        self.leaving = ""  # exit, return, break or continue
        self.steps = 0

    def script(self) -> Script:
        return Script(
            {name: shown(" ".join(array.values())) for name, array in self.variables.items()},
            tuple(self.commands),
            tuple(self.lines),
            self.set_at,
            tuple(self.decisions.values()),
        )

    def decide(self, text: str, line: int, ways: int = 2) -> int:
        """The way that is followed where a condition is not known; the same one for the same text."""
        if (text, ways) not in self.decisions:
            self.decisions[text, ways] = Decision(shown(text), line, ways, next(self.given, 0))
        return self.decisions[text, ways].way

    def run(self, steps: Sequence[Step]) -> bool | None:
        """Whether the last of the steps succeeds; None where that is not known."""
        status: bool | None = True
        for step in steps:
            self.steps += 1
            if self.steps > MOST_STEPS:
                self.leaving = "exit"
            if self.leaving:
                break
            if step.joiner in ("&&", "||"):
                holds = not self.decide(*self.asked) if status is None else status
                if holds == (step.joiner == "||"):
                    status = holds
                    continue
            self.line = step.line
            status = getattr(self, f"_{step.kind}")(step)
            if status is None and not step.blocks:
                self.asked = step.text, step.line
            elif status is not None and step.negated:
                status = not status
        return status

    def _holds(self, steps: Sequence[Step]) -> bool:
        status = self.run(steps)
        return self.decide(*self.asked) == 1 if status is None else status

    def _if(self, step: Step) -> bool | None:  # a group is a branch without a condition
        before = dict(self.variables) if step.text == "(" else None
        status = next((self.run(body) for condition, body in step.blocks if self._holds(condition)), True)
        if before is not None:  # a subshell: what it sets and leaves is its own
            self.variables, self.leaving = before, ""
        return status

    def _case(self, step: Step) -> bool | None:
        word = self.expand(step.text)
        cases = [([self.expand(pattern.text) for pattern in patterns], body) for patterns, body in step.blocks]
        if "$" in word:
            if not any("*" in patterns for patterns, _ in cases):
                cases.append(([], ()))
            return self.run(cases[self.decide(f"case {word}", self.line, len(cases))][1])
        matching = (body for patterns, body in cases if any(fnmatchcase(word, pattern) for pattern in patterns))
        return self.run(next(matching, ()))

    def _for(self, step: Step) -> bool | None:
        ((_, body),) = step.blocks
        name, *words = (word.text for word in step.words)
        if name.startswith("(("):
            return self._loop(body, self._counting(name[2:-2]))
        values = [part for word in words for part in self.expand(word).split()]
        if not words or any("$" in value for value in values):
            values = [f"${name}"]
        return self._loop(body, map(self.assign, repeat(name), values))

    def _counting(self, text: str) -> Iterator[None]:
        begin, until, after, *_ = *text.split(";"), "", ""
        self.arithmetic(begin)
        while self.number(until):
            yield
            self.arithmetic(after)

    def _while(self, step: Step) -> bool | None:
        ((condition, body),) = step.blocks
        return self._loop(body, self._holding(condition, step.text == "while"))

    def _holding(self, condition: Sequence[Step], wanted: bool) -> Iterator[None]:
        while (status := self.run(condition)) is wanted:
            yield
        if status is None and not _OF_THE_CALL.search(self.asked[0]) and self.decide(*self.asked) == 1:
            yield

    def _loop(self, body: Sequence[Step], rounds: Iterator[None]) -> bool:
        for _ in islice(rounds, MOST_ROUNDS):
            self.run(body)
            if self.leaving == "continue":
                self.leaving = ""
            if self.leaving:
                break
        if self.leaving == "break":
            self.leaving = ""
        return True

    def _function(self, step: Step) -> bool | None:
        self.functions[step.text] = step.blocks[0][1]
        return True

    def _test(self, step: Step) -> bool | None:
        return self.tested([self.expand(word.text) for word in step.words])

    def _command(self, step: Step) -> bool | None:
        words = list(step.words)
        declares = words[0].text in _DECLARING
        while words and ((match := ASSIGNMENT.fullmatch(words[0].text)) or declares):
            word = words.pop(0)
            if match:
                self.assigned(match, word)
        if not words:
            return True
        if words[0].text.startswith("(("):
            number = self.arithmetic(words[0].text[2:-2])
            return None if number is None else bool(number)
        if words[0].text == "let":
            return bool([self.arithmetic(each.text) for each in words[1:]])
        given = tuple(part for word in words for part in self.expand(word.text).split())
        name, values = given[0] if given else ":", given[1:]
        if name in self.functions:
            return self._called(name, values)
        if name in ("true", ":", "false"):
            return name != "false"
        if name in ("exit", "return", "break", "continue"):
            self.leaving = name
        elif name in ("unset", "read"):
            for value in values:
                self.variables.pop(value, None)
        elif name == "shift" and self.called_with:
            self.called_with = self.called_with[1:]
        else:
            self.commands.append(tuple(map(shown, given)))
            self.lines.append(self.line)
        if name == "exec":
            self.leaving = "exit"
        return None

    def _called(self, name: str, values: tuple[str, ...]) -> bool | None:
        body, before = self.functions.pop(name), self.called_with
        self.called_with = values
        status = self.run(body)
        self.functions[name], self.called_with = body, before
        if self.leaving == "return":
            self.leaving = ""
        return status

    def tested(self, words: list[str]) -> bool | None:
        """Whether what stands between brackets holds; None where that is not known."""
        for joiners, decisive in ((("||", "-o"), True), (("&&", "-a"), False)):
            depth = 0
            for place, word in enumerate(words):
                depth += (word == "(") - (word == ")")
                if word in joiners and depth == 0:
                    sides = self.tested(words[:place]), self.tested(words[place + 1 :])
                    return decisive if decisive in sides else None if None in sides else not decisive
        match words:
            case ["!", *inner]:
                holds = self.tested(inner)
                return None if holds is None else not holds
            case ["(", *inner, ")"]:
                return self.tested(inner)
            case _ if any("$" in word for word in words):
                return None
            case ["-z", word]:
                return word == ""
            case ["-n", word] | [word]:
                return word != ""
            case [left, "=" | "==" | "!=" as sign, right]:
                return fnmatchcase(left, right) == (sign != "!=")
            case [left, sign, right] if sign in _COMPARED:
                number = self.number(f"({left}){_COMPARED[sign]}({right})")
                return None if number is None else bool(number)
        return None if words else False
