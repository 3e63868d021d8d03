"""Flags that several verbs share, and how arguments and results are printed."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from trainledger.api.defaults import assumptions
from trainledger.api.load import load_file
from trainledger.cli.outputs import Output, check_outputs
from trainledger.plan.quantity import LARGEST, read
from trainledger.report.plot import check_plot, write_plot
from trainledger.report.table import wrapped
from trainledger.spec.plain import finite
from trainledger.spec.problem import InvalidInput, Problem, printable, shown
from trainledger.units import parse_count

if TYPE_CHECKING:
    from pathlib import Path

    from trainledger.document import Figure
    from trainledger.spec.run import Run


_NEGATIVE = r"(?i)-(\.?\d.*|inf|infinity|nan)$"
RUN_OR_MODEL = "a run file (run.toml), a model of the catalog, or a Hugging Face config.json"


class Parser(argparse.ArgumentParser):
    """An argument parser without guessed abbreviations, whose errors are sentences of the usual kind.

    What begins with a minus sign and a digit is a value (``-70B``, ``-1e-8``), as are ``-inf`` and ``-nan``.
    """

    def __init__(self, **options: Any) -> None:
        # Without a width argparse asks shutil for the terminal's, whose import costs more than the whole parse.
        super().__init__(
            allow_abbrev=False, formatter_class=lambda prog: argparse.HelpFormatter(prog, width=80), **options
        )
        # argparse has no public word for it, and by itself knows -1 and -1.5 alone.
        self._negative_number_matcher = re.compile(_NEGATIVE)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The arguments; raises InvalidInput for what is wrong in them, and for files that must not be written."""
        found = super().parse_args(args, namespace)
        if problems := vars(found).pop("problems", None):
            raise InvalidInput(problems)
        outputs = vars(found).pop("outputs", None)
        if outputs:
            check_outputs(vars(found), outputs)
        return found

    def error(self, message: str) -> NoReturn:
        raise InvalidInput([Problem(self.prog, None, f"{message}; {self.prog} --help says what it takes")])


def add_run(
    parser: argparse.ArgumentParser, default: str | None = "run.toml", help: str = "the run file (run.toml)"
) -> None:
    """A run file and its overrides: ``args.run`` and ``args.set``; `load_run` reads them."""
    parser.add_argument("run", nargs="?" if default else None, default=default, metavar="RUN", help=help)
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE",
        help="change one field, such as recipe.micro_batch=2; may be repeated; an empty value takes it out",
    )  # fmt: skip


class _Override(argparse.Action):
    """A flag that is short for ``--set FIELD=``: what it says joins ``args.set``."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: str, **options: Any) -> None:
        super().__init__(option_strings, "set", const=const, default=[], **options)

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, flag: str | None = None) -> None:
        namespace.set = [*namespace.set, f"{self.const}={values}"]


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """``--device`` and ``--count`` beside `add_run`, in the words of the verbs that search; in ``args.set``."""
    for flag, field, help in (
        ("--device", "cluster.device", "a device of the catalog"), ("--count", "cluster.count", "how many devices"),
    ):  # fmt: skip
        parser.add_argument(
            flag, action=_Override, const=field, metavar=flag[2:].upper(), help=f"{help}; short for --set {field}="
        )


class Quantity(argparse.Action):
    """An argument that ``parse`` reads from text, not below ``least`` and not above ``most`` (None: any).

    All that are wrong are told together, when the arguments have been parsed.
    """

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, parse: Callable[[str], float], least: float,
        most: float | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(option_strings, dest, **options)
        self.parse, self.least, self.most = parse, least, most

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        problems: list[Problem] = getattr(namespace, "problems", [])
        most = LARGEST if self.most is None else self.most
        value = read(flag or self.dest, values, self.parse, problems, least=self.least, most=most)
        setattr(namespace, self.dest, value)
        namespace.problems = problems


def add_count(
    parser: argparse._ActionsContainer, flag: str, *, least: int = 1, most: int | None = None, **options: Any
) -> None:
    """A whole number, which is read as a run file's are: ``1000``, ``1,000``, ``1e3`` or ``1k``."""
    parser.add_argument(flag, action=Quantity, parse=parse_count, least=least, most=most, **options)


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``: the result for programs."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def add_output(
    parser: argparse._ActionsContainer,
    *flags: str,
    suffix: str,
    ours: Callable[[Path], bool] | None = None,
    **options: Any,
) -> None:
    """A file that the verb writes, which is never one that it reads, nor source (`cli.outputs`).

    ``suffix`` is that of what is written; ``ours`` tells a file of settings that may be written anew.
    """
    parser.add_argument(*flags, action=Output, suffix=suffix, ours=ours, **options)


def add_plot(parser: argparse.ArgumentParser) -> None:
    """``--plot``: the figures as a file; `check_plot_of` before the work, `write_plot_of` after it."""
    add_output(parser, "--plot", suffix=".html", metavar="FILE", help="write the figures to out.html, .png or .svg")


def check_plot_of(args: argparse.Namespace) -> None:
    """Raise InvalidInput where ``--plot`` names a file that cannot be written; nothing without it."""
    if args.plot is not None:
        check_plot(args.plot)


def write_plot_of(
    args: argparse.Namespace, figures: Mapping[str, Figure], title: str, about: Sequence[str] = ()
) -> None:
    """Write the file that ``--plot`` names, and say so on standard error; nothing without it.

    ``about`` are sentences that a page has above its figures.
    """
    if args.plot is not None:
        print(printable(write_plot(figures, args.plot, title=title, about=about)), file=sys.stderr)


def while_waiting() -> Callable[[str], None]:
    """Shows what long work is at, in one line of a terminal that the next one replaces and an empty one takes away."""
    if not sys.stderr.isatty():
        return lambda _: None

    def show(what: str) -> None:
        print(f"\r\x1b[K{printable(what)[:79]}", end="", file=sys.stderr, flush=True)

    return show


def while_searching() -> Callable[[str, int, int], None]:
    """Shows how far a search of layouts is, as `while_waiting` does; what is done is taken away."""
    say = while_waiting()

    def progress(what: str, done: int, of: int) -> None:
        full = 20 * done // max(1, of)
        say("" if done >= of or of == 1 else f"[{'#' * full:.<20}] {what}: {done:,} of {of:,}")

    return progress


def say_assumed(run: Run) -> None:
    """Say on standard error what was assumed of a model that was named alone."""
    if run.origin.assumed:
        print(wrapped(f"Assuming {assumptions(run)}; --set gives other values"), file=sys.stderr)


def load_run(args: argparse.Namespace) -> Run:
    """The run that `add_run`'s arguments name; raises InvalidInput."""
    return load_file(args.run, args.set, progress=while_searching())


def error_json(error: InvalidInput) -> dict[str, Any]:
    """What is wrong, for programs: every problem with what its sentence is made of."""
    return {"error": [problem_json(each, error.where) for each in error.problems], "where": error.where}


def problem_json(problem: Problem, where: str = "") -> dict[str, Any]:
    """A problem found ``where`` it does not say itself; its value and the nearest are null where there is none."""
    return {
        "field": problem.field, "value": _plain(problem.value), "rule": problem.rule,
        "nearest": _plain(problem.nearest), "sentence": str(problem), "where": problem.where or where,
    }  # fmt: skip


def _plain(value: object) -> object:
    """A value as JSON has it, or in words: an input may be any object."""

    def plain(one: object) -> object:
        huge = isinstance(one, int) and one.bit_length() > 200  # more digits than Python writes
        return one if one is None or (isinstance(one, int | float | str) and not huge) else shown(one)

    return [plain(each) for each in value] if isinstance(value, list | tuple) else plain(value)


def print_json(result: object) -> None:
    """A result on standard output as JSON that any parser reads: what is not finite is null."""
    import json

    print(json.dumps(finite(result), indent=2, allow_nan=False, default=str))
