"""What verbs share: questions of a run, what is assumed of it, and the line that long work shows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trainledger.answers.defaults import assumptions, how_else, reservations
from trainledger.answers.question import Question
from trainledger.cli.arguments import DONE, INTERRUPTED, WRONG_INPUT, Outcome, flag_of
from trainledger.report.document import Code, Document, Section
from trainledger.report.table import wrapped
from trainledger.spec.problem import printable

if TYPE_CHECKING:
    from trainledger.spec.run import Run


def say_assumed(run: Run) -> None:
    """Say on standard error what is assumed of a model that is named alone."""
    for remark in _assumed([run]):
        say(remark, wrap=True)


def _assumed(runs: Iterable[Run]) -> tuple[str, ...]:
    """What is assumed of runs, and how another program's file was read; of two with the same sentences once."""
    texts = dict.fromkeys((assumptions(run), how_else(run), reservations(run)) for run in runs)
    said = (
        (f"Assuming {text}; --set gives other values{how}" if text else "", f"As read: {read}" if read else "")
        for text, how, read in texts
    )
    return tuple(dict.fromkeys(sentence for pair in said for sentence in pair if sentence))


def say(sentence: str, *, wrap: bool = False) -> None:
    """A line on standard error."""
    print(wrapped(sentence) if wrap else printable(sentence), file=sys.stderr)


def while_waiting() -> Callable[[str], None]:
    """Shows what long work is at, in one line of a terminal that the next one replaces and an empty one takes away."""
    if not sys.stderr.isatty():
        return lambda _: None

    def show(what: str) -> None:
        print(f"\r\x1b[K{printable(what)[:79]}", end="", file=sys.stderr, flush=True)

    return show


def while_searching() -> Callable[[str, int, int], None]:
    """Shows how far a search of layouts is, as `while_waiting` does; what is done is taken away."""
    show = while_waiting()

    def progress(what: str, done: int, of: int) -> None:
        if not of:
            show(what)
            return
        full = 20 * done // of
        show("" if done >= of or of == 1 else f"[{'#' * full:.<20}] {what}: {done:,} of {of:,}")

    return progress


def lines(text: str, data: Mapping[str, Any]) -> Document:
    """Lines of text, and what JSON has instead."""
    return Document("", (Section("", (Code(text),)),) if text else (), data=lambda: data)


def ask(question: Question, args: argparse.Namespace) -> Outcome:
    """The answer to a verb; where it does not work, the exit code is 2 and standard error says why."""
    names = (*question.options, "run", "overrides")
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    given = question.read(given, lambda name: flag_of(question.options[name]))
    if "progress" in question.takes:
        given["progress"] = while_searching()
    if "as_json" in question.takes:
        given["as_json"] = args.json
    answer = question.ask(**given)
    if isinstance(answer, Outcome):
        return answer
    interrupted = getattr(answer, "interrupted", False)
    if interrupted and not answer.ranked:
        raise KeyboardInterrupt
    runs = [run for name in ("run", "a", "b") if (run := getattr(answer, name, None)) is not None]
    remarks = _assumed(runs) if question.trains else ()
    problem = None if question.impossible is None else question.impossible(answer)
    code = INTERRUPTED if interrupted else DONE
    return Outcome(answer, code if problem is None else WRONG_INPUT, problem, remarks)
