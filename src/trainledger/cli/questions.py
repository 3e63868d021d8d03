"""A verb made of a question: its arguments from the options, its answer as a document with an exit code."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from trainledger.answers.question import Option, Question
from trainledger.cli.arguments import DONE, INTERRUPTED, PLOT, RUN, WRONG_INPUT, Argument, Group, Outcome, Verb
from trainledger.cli.asking import say_assumed, while_searching


def verb_of_question(question: Question) -> Verb:
    """The verb of a question; where its answer does not work, the exit code is 2 and standard error says why."""

    def ask(args: Namespace) -> Outcome:
        given = {name: getattr(args, name) for name in question.options if hasattr(args, name)}
        read = question.read(given, lambda name: flag_of(question.options[name]))
        if "progress" in question.takes:
            read["progress"] = while_searching()
        if "overrides" not in question.takes:
            return Outcome(question.ask(**read))
        answer = question.ask(args.run, args.set, **read)
        if question.trains:
            say_assumed(answer.run)
        problem = None if question.impossible is None else question.impossible(answer)
        code = INTERRUPTED if getattr(answer, "interrupted", False) else DONE
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
