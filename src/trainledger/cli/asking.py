"""What verbs share: questions of a run, what is assumed of it, and the line that long work shows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trainledger.answers.defaults import assumptions
from trainledger.answers.load import load_file, resolve
from trainledger.cli.arguments import options
from trainledger.report.document import Code, Document, Section
from trainledger.report.table import wrapped
from trainledger.spec.problem import printable

if TYPE_CHECKING:
    from trainledger.spec.run import Run


def asked(question: Callable[..., Any], args: argparse.Namespace, **more: Any) -> Any:
    """The answer to a question of a run, its arguments by their names; what it assumes goes to standard error."""
    answer = question(args.run, args.set, progress=while_searching(), **options(args), **more)
    say_assumed(answer.run)
    return answer


def run_asked(args: argparse.Namespace) -> Run:
    """The run of a file or of a model that is named alone; what is assumed of it goes to standard error."""
    run = resolve(args.run, args.set, progress=while_searching())
    say_assumed(run)
    return run


def run_of_file(args: argparse.Namespace) -> Run:
    """The run of a run file."""
    return load_file(args.run, args.set, progress=while_searching())


def say_assumed(run: Run) -> None:
    """Say on standard error what is assumed of a model that is named alone."""
    if run.origin.assumed:
        say(f"Assuming {assumptions(run)}; --set gives other values", wrap=True)


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
        full = 20 * done // max(1, of)
        show("" if done >= of or of == 1 else f"[{'#' * full:.<20}] {what}: {done:,} of {of:,}")

    return progress


def lines(text: str, data: Mapping[str, Any]) -> Document:
    """Lines of text, and what JSON has instead."""
    return Document("", (Section("", (Code(text),)),) if text else (), data=lambda: data)
