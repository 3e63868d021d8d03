"""What verbs share: questions of a run, what is assumed of it, and the line that long work shows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainledger.answers.defaults import assumptions
from trainledger.answers.load import load_file, resolve
from trainledger.answers.question import Option, Question
from trainledger.cli.arguments import DONE, INTERRUPTED, PLOT, RUN, WRONG_INPUT, Argument, Group, Outcome, Verb, options
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
        if not of:
            show(what)
            return
        full = 20 * done // of
        show("" if done >= of or of == 1 else f"[{'#' * full:.<20}] {what}: {done:,} of {of:,}")

    return progress


def lines(text: str, data: Mapping[str, Any]) -> Document:
    """Lines of text, and what JSON has instead."""
    return Document("", (Section("", (Code(text),)),) if text else (), data=lambda: data)


def verb_of_question(question: Question) -> Verb:
    """The verb of a question; where its answer does not work, the exit code is 2 and standard error says why."""

    def ask(args: argparse.Namespace) -> Outcome:
        given = {name: getattr(args, name) for name in question.options if hasattr(args, name)}
        read = question.read(given, lambda name: flag_of(question.options[name]))
        if "progress" in question.takes:
            read["progress"] = while_searching()
        if "overrides" not in question.takes:
            return Outcome(question.ask(**read))
        answer = question.ask(args.run, args.set, **read)
        interrupted = getattr(answer, "interrupted", False)
        if interrupted and not answer.ranked:
            raise KeyboardInterrupt
        if question.trains:
            say_assumed(answer.run)
        problem = None if question.impossible is None else question.impossible(answer)
        code = INTERRUPTED if interrupted else DONE
        return Outcome(answer, code if problem is None else WRONG_INPUT, problem)

    ask.__doc__ = (question.ask.__doc__ or "").partition("\n\n    Raises")[0].partition("\n\n    ``")[0]
    return Verb(ask, tuple(_arguments(question)))


def _arguments(question: Question) -> Iterator[Argument | Group]:
    if "overrides" in question.takes:
        yield from RUN
    for option in question.options.values():
        yield Argument((flag_of(option),), _as_argparse(option))
    yield PLOT


def flag_of(option: Option) -> str:
    """The name of an option on the command line."""
    return option.flag or f"--{option.name.replace('_', '-')}"


def _as_argparse(option: Option) -> dict[str, object]:
    """What `argparse` hears of an option: texts are read by the question, so that all that is wrong is said at once."""
    help = option.says.replace("%", "%%")
    if option.is_switch:
        return {"help": help, "action": "store_false" if option.default else "store_true", "dest": option.name}
    if option.choices:
        help += f": {', '.join(option.choices)}" + ("; may be repeated" if option.several else "")
    metavar = option.metavar or (option.name.rpartition("_")[2]).upper()
    action = "append" if option.several else "store"
    return {"help": help, "metavar": metavar, "action": action, "dest": option.name}
