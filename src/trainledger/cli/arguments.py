"""Verbs, declared: `takes` makes one of a function; `option`, `count`, `flag` and others are its arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from trainledger.cli.outputs import Output, check_outputs
from trainledger.forecast.plan.quantity import LARGEST, read
from trainledger.report.show import check_plot
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import parse_count

if TYPE_CHECKING:
    from pathlib import Path

    from trainledger.report.document import Answer, Document

DONE, FAILED, WRONG_INPUT, DISK_FULL, INTERRUPTED, NO_READER = 0, 1, 2, 4, 130, 141
EXIT_CODES = """Exit codes: 0 done, 1 failed, 2 wrong input or a run that cannot run,
3 diverged, 4 disk full, 130 interrupted, 141 no reader, 143 SIGTERM."""
_NEGATIVE = r"(?i)-(\.?\d.*|inf|infinity|nan)$"


class Parser(argparse.ArgumentParser):
    """An argument parser without guessed abbreviations, whose errors are sentences of the usual kind.

    What is not given and has no default is absent from the arguments, so that a question's own default holds. What
    begins with a minus sign and a digit is a value (``-70B``, ``-1e-8``), as are ``-inf`` and ``-nan``.
    """

    def __init__(self, **options: Any) -> None:
        # Without a width argparse asks shutil for the terminal's, whose import costs more than the whole parse.
        super().__init__(
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, width=80),
            **options,
        )
        # argparse has no public word for it, and accepts only -1 and -1.5 without it.
        self._negative_number_matcher = re.compile(_NEGATIVE)

    def read(self, words: Sequence[str], *, intermixed: bool = False) -> argparse.Namespace:
        """The arguments; raises InvalidInput for what is wrong in them, and for files that must not be written."""
        found = self.parse_intermixed_args(words) if intermixed else self.parse_args(words)
        if problems := vars(found).pop("problems", None):
            raise InvalidInput(problems)
        check_outputs(vars(found), vars(found).pop("outputs", []))
        return found

    def error(self, message: str) -> NoReturn:
        raise InvalidInput([Problem(self.prog, None, f"{message}; {self.prog} --help lists its arguments")])


@frozen
class Argument:
    """One argument as `argparse` takes it."""

    flags: tuple[str, ...]
    options: Mapping[str, Any]

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        action = parser.add_argument(*self.flags, **self.options)
        if action.nargs == argparse.REMAINDER:  # which may be nothing, though argparse asks for it
            action.required = False


@frozen
class Group:
    """Arguments under a title in the help; of those that exclude each other there is none."""

    title: str
    arguments: tuple[Argument, ...]

    def given(self, args: argparse.Namespace) -> dict[str, Any]:
        """Those that are given, by name."""
        names = [each.flags[-1].lstrip("-").replace("-", "_") for each in self.arguments]
        return {name: getattr(args, name) for name in names if getattr(args, name, False) is not False}

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        into = parser.add_argument_group(self.title) if self.title else parser.add_mutually_exclusive_group()
        for each in self.arguments:
            each.add_to(into)


@frozen
class Outcome:
    """A document and an exit code; ``problem`` and ``remarks`` go to standard error after the document."""

    document: Answer | Document
    code: int = DONE
    problem: Problem | None = None
    remarks: tuple[str, ...] = ()
    width: int = 80


@frozen
class Verb:
    """A function of arguments that answers; its docstring is the help. ``intermixed``: words may follow flags."""

    ask: Callable[[argparse.Namespace], Answer | Document | Outcome]
    arguments: tuple[Argument | Group, ...]
    intermixed: bool = False
    usage: str = ""

    def parser(self, name: str) -> Parser:
        """The parser of its arguments and of ``--json``."""
        prog = f"trainledger {name}"
        usage = f"{prog} {self.usage}" if self.usage else None
        parser = Parser(prog=prog, description=self.ask.__doc__, usage=usage, epilog=EXIT_CODES)
        for each in (*self.arguments, FULL, JSON):
            each.add_to(parser)
        return parser


def takes(
    *arguments: Argument | Group, intermixed: bool = False, usage: str = ""
) -> Callable[[Callable[[argparse.Namespace], Answer | Document | Outcome]], Verb]:
    """Make a verb of a function: what `argparse` reads goes in, a document comes out."""
    return lambda ask: Verb(ask, arguments, intermixed, usage)


def option(spec: str, help: str, **options: Any) -> Argument:
    """An argument as ``"--name METAVAR"``, ``"-n --name METAVAR"`` or, without a flag, ``"name METAVAR"``."""
    words = spec.split()
    flags = [each for each in words if each.startswith("-")] or words[:1]
    if len(words) > len(flags):
        options["metavar"] = words[-1]
    return Argument(tuple(flags), {"help": help, **options})


def options(args: argparse.Namespace) -> dict[str, Any]:
    """What is given to a verb by name, but for its run, its overrides and the forms of its output."""
    return {name: value for name, value in vars(args).items() if name not in ("run", "set", "full", "json", "plot")}


def flag(spec: str, help: str, **options: Any) -> Argument:
    """A yes or no, which is off unless it is given."""
    return option(spec, help, action="store_true", default=False, **options)


def group(title: str, *arguments: Argument) -> Group:
    """Arguments under a title, or without one such that exclude each other."""
    return Group(title, arguments)


class Quantity(argparse.Action):
    """An argument that ``parse`` reads from text, not below ``least`` and not above ``most`` (None: any).

    All that are wrong are reported together, when the arguments have been parsed.
    """

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        *,
        parse: Callable[[str], float],
        least: float,
        most: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(option_strings, dest, **options)
        self.parse, self.least, self.most = parse, least, most

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        problems: list[Problem] = getattr(namespace, "problems", [])
        most = LARGEST if self.most is None else self.most
        value = read(flag or self.dest, values, self.parse, problems, least=self.least, most=most)
        setattr(namespace, self.dest, value)
        namespace.problems = problems


def quantity(
    spec: str, help: str, parse: Callable[[str], float], least: float, most: float | None = None, **options: Any
) -> Argument:
    """A number with its unit, within bounds."""
    return option(spec, help, action=Quantity, parse=parse, least=least, most=most, **options)


def count(spec: str, help: str, *, least: int = 1, most: int | None = None, **options: Any) -> Argument:
    """A whole number, which is read as a run file's are: ``1000``, ``1,000``, ``1e3`` or ``1k``."""
    return quantity(spec, help, parse_count, least, most, **options)


def output(spec: str, help: str, suffix: str, ours: Callable[[Path], bool] | None = None, **options: Any) -> Argument:
    """A file that the verb writes, which is never one that it reads, nor source (`cli.outputs`).

    ``suffix`` is that of what is written; ``ours`` says which files of settings may be written anew.
    """
    return option(spec, help, **{"action": Output, "suffix": suffix, "ours": ours, "default": None, **options})


class _Override(argparse.Action):
    """A flag that is short for ``--set FIELD=``: its value joins ``args.set``."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: str, **options: Any) -> None:
        super().__init__(option_strings, "set", const=const, **options)

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, flag: str | None = None) -> None:
        if not values:
            raise InvalidInput([Problem(flag or "", values, "must not be empty")])
        namespace.set = [*namespace.set, f"{self.const}={values}"]


def run_file(help: str) -> Argument:
    """The run that a verb is about, ``args.run``."""
    return option("run RUN", help, nargs="?", default="run.toml")


def settings(flag: str = "--set", whose: str = "") -> Argument:
    """Changes of fields, by ``args.set``."""
    help = f"change one field{whose}, such as recipe.micro_batch=2; may be repeated; an empty value removes the field"
    return option(f"{flag} SECTION.FIELD=VALUE", help, action="append", default=[])


def _short_for(field: str, help: str) -> Argument:
    name = field.partition(".")[2]
    return option(f"--{name} {name.upper()}", f"{help}; short for --set {field}=", action=_Override, const=field)


SET = settings()
RUN_OR_MODEL = (
    "a run file (run.toml), a model of the catalog, a Hugging Face config.json, or what has Megatron-LM's arguments: a "
    "script, a YAML map, a log, or the launch line itself in quotes"
)
RUN_FILE = (run_file("the run file (run.toml)"), SET)
CLUSTER = (_short_for("cluster.device", "a device of the catalog"), _short_for("cluster.count", "how many devices"))
RUN = (run_file(RUN_OR_MODEL), SET, *CLUSTER)
PLOT = output("--plot FILE", "write the figures to out.html, .png or .svg", suffix=".html", check=check_plot)
FULL = flag("--full", "print the details too")
JSON = flag("--json", "print the result as JSON")
