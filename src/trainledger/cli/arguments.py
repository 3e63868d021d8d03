"""The parser of a verb, made from the options of its question; and how a verb ends."""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from trainledger.answers.question import Option, Question, word
from trainledger.catalog import device_names
from trainledger.forecast.plan.quantity import WHOLE
from trainledger.report.show import check_plot
from trainledger.spec.durable import content_of
from trainledger.spec.frozen import frozen
from trainledger.spec.plain import check_target
from trainledger.spec.problem import InvalidInput, Problem

if TYPE_CHECKING:
    from trainledger.report.document import Answer, Document

DONE, FAILED, WRONG_INPUT, DISK_FULL, INTERRUPTED, NO_READER = 0, 1, 2, 4, 130, 141
EXIT_CODES = """Exit codes: 0 done, 1 failed, 2 wrong input or a run that cannot run,
3 diverged, 4 disk full, 5 a rank is lost, 6 out of memory, 130 interrupted,
141 no reader, 143 SIGTERM."""
SOURCES = (".py", ".pyi", ".ipynb", ".toml", ".lock")
_LARGEST_NBYTES = 2**20  # of a run file whose own files are looked for
_MOST_TRIED = 1000
_UNKNOWN = "unrecognized arguments: "
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
        check_outputs(vars(found), vars(found).pop("outputs", []))
        return found

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Python 3.11 takes the value of --flag=-- away and leaves an empty list.
        if action.option_strings and arg_strings == ["--"]:
            return ["--"] if action.nargs == "+" else "--"
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        rule = f"{message}; {self.prog} --help lists its arguments"
        unknown = message.removeprefix(_UNKNOWN).split() if message.startswith(_UNKNOWN) else [""]
        near = None
        if unknown[0].lower() in device_names() and "--device" in self._option_string_actions:  # as in Python
            near = f"--device {unknown[0]}" + (
                f" --count {unknown[1]}" if unknown[1:2] and unknown[1].isdecimal() else ""
            )
        raise InvalidInput([Problem(self.prog, None, rule, near)])


@frozen
class Outcome:
    """A document, where there is one, and an exit code; ``problem`` and ``remarks`` go to standard error after it."""

    document: Answer | Document | None
    code: int = DONE
    problem: Problem | None = None
    remarks: tuple[str, ...] = ()
    width: int = 80


def flag_of(option: Option) -> str:
    """The name of an option on the command line, as errors have it."""
    named = f"--{option.name.replace('_', '-')}"
    return option.name if option.word else option.flag.split()[-1] if option.flag else named


def add(option: Option, to: argparse._ActionsContainer) -> None:
    """Add an option to a parser: texts are read by the question, so that all that is wrong is said at once."""
    about: dict[str, Any] = {"help": option.says.replace("%", "%%")}
    if option.choices:
        about["help"] += f": {', '.join(option.choices)}" + ("; may be repeated" if option.several else "")
    if option.is_switch:
        about["action"] = "store_false" if option.default else "store_true"
    else:
        metavar = "FILE" if option.suffix else "N" if option.parse in WHOLE else option.name.rpartition("_")[2]
        about["metavar"] = option.metavar or metavar.upper()
        if option.suffix:
            about |= {"action": Output, "suffix": option.suffix, "ours": option.ours}
            about |= {} if option.check is None else {"check": option.check}
    nargs = option.nargs or ("*" if option.several else "" if option.required else "?") if option.word else option.nargs
    if option.word and isinstance(option.default, str):
        about["default"] = option.default
    if nargs:
        about["nargs"] = nargs
    elif option.several:
        about["action"] = "append"
    if option.word:
        action = to.add_argument(option.name, **about)
        action.required = action.required and nargs != argparse.REMAINDER  # which may be nothing, though it asks for it
    else:
        flags = option.flag.split() or [flag_of(option)]
        to.add_argument(*flags, dest=option.name, required=option.required, **about)


RunFile = Annotated[str, word("the run file", metavar="RUN")]
RUN_OR_MODEL = (
    "a run file (run.toml), a model of the catalog, a Hugging Face config.json, or a file, a script or a launch line "
    "(in quotes) of another trainer: axolotl, DeepSpeed, LLaMA-Factory, Megatron-LM, torchtitan, TRL and others"
)
# What is short for an override: its name, the field, and what it says.
_SHORT_FOR = {
    "device": ("cluster.device", "a device of the catalog"),
    "count": ("cluster.count", "how many devices"),
    "price": ("cluster.price_per_device_hour", "what one device costs in an hour"),
    "method": (
        "method",
        "how a model that is named alone is tuned, as people begin: full, lora, qlora, dpo, orpo, kto, reward or "
        "distillation",
    ),
    "teacher": ("teacher.preset", "the teacher of distillation, a model of the catalog"),
}


class _Override(argparse.Action):
    """A flag that is short for ``--set FIELD=``: its value joins ``args.overrides``."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: str, **options: Any) -> None:
        super().__init__(option_strings, "overrides", const=const, **options)

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, flag: str | None = None) -> None:
        if not values:
            raise InvalidInput([Problem(flag or "", values, "must not be empty")])
        namespace.overrides = [*namespace.overrides, f"{self.const}={values}"]


def short_for(question: Question) -> dict[str, tuple[str, str]]:
    """Names that are short for overrides of a question, each with the field and what it says; empty without a run."""
    words = {name for name, option in question.options.items() if option.word or name == "device"}
    if "overrides" not in question.takes or {"run", "device"} & words:
        return {}
    return {name: pair for name, pair in _SHORT_FOR.items() if question.trains or name not in ("method", "teacher")}


def add_overrides(to: argparse._ActionsContainer, short: Mapping[str, tuple[str, str]]) -> None:
    """Add ``--set``, by ``args.overrides``, and what is short for it."""
    help = "change one field, such as recipe.micro_batch=2; may be repeated; an empty value removes the field"
    to.add_argument("--set", metavar="SECTION.FIELD=VALUE", dest="overrides", help=help, action="append", default=[])
    for name, (field, says) in short.items():
        says += f"; short for --set {field}=" if field != name else ""
        to.add_argument(f"--{name}", metavar=name.upper(), help=says, action=_Override, const=field)


def description_of(question: Question) -> str:
    """What a question says of itself, without what is of Python alone."""
    asks = re.split(r"\n\n    (?:Raises|``)", question.ask.__doc__ or "")[0].replace("Raises `InvalidInput`.", "")
    return asks.strip()


def parser_of(name: str, question: Question) -> Parser:
    """The parser of a verb: the run that it is about, its options, and what every verb has."""
    prog = f"trainledger {name}"
    usage = f"{prog} {question.usage}" if question.usage else None
    parser = Parser(prog=prog, description=description_of(question), usage=usage, epilog=EXIT_CODES)
    options = question.options
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for parameter in dict.fromkeys((*question.takes, *options)):  # words are read in the order of the parameters
        if parameter in options:
            group = options[parameter].group
            if group not in groups:
                groups[group] = parser.add_argument_group(group)
            add(options[parameter], groups[group])
        elif parameter == "run":
            parser.add_argument("run", metavar="RUN", help=RUN_OR_MODEL, nargs="?", default="run.toml")
    if "overrides" in question.takes:
        add_overrides(parser, short_for(question))
    if question.plots:
        help = "write the figures to out.html, .png or .svg"
        parser.add_argument("--plot", help=help, action=Output, suffix=".html", check=check_plot)
    parser.add_argument("--full", help="print the details too", action="store_true", default=False)
    parser.add_argument("--json", help="print the result as JSON", action="store_true", default=False)
    return parser


class Output(argparse.Action):
    """An argument that names a file to write.

    The path is kept for `check_outputs`. ``suffix`` is that of what is written; ``ours`` says which
    files of source or settings may be written anew, and ``check`` raises where none can be written.
    """

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, suffix: str, ours: Callable[[Path], bool] | None = None,
        check: Callable[[str, str], None] = check_target, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(option_strings, dest, **options)
        self.suffix, self.ours, self.check = suffix, ours, check

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.outputs = [*getattr(namespace, "outputs", []), (flag or self.dest, self)]


def check_outputs(args: dict[str, Any], outputs: list[tuple[str, Output]]) -> None:
    """Raise InvalidInput where a file to be written is one that the command reads, is source, or is named twice."""
    asked: dict[str, tuple[str, Output]] = {action.dest: (flag, action) for flag, action in outputs}
    values = {name: value for name, value in args.items() if name not in asked}
    problems, taken = [], set[str]()
    for name, (flag, action) in asked.items():
        file = args[name]
        if not file:
            continue
        path, where = Path(file), os.path.realpath(file)
        if where in taken:
            rule: str | None = "is the name of two output files"
        else:
            rule = _why_not(path, action, values) if path.is_file() else None
        taken.add(where)
        if rule is not None:
            problems.append(Problem(flag, file, rule, _free(path, action, taken)))
    if problems:
        raise InvalidInput(problems)
    for name, (flag, action) in asked.items():
        action.check(args[name], flag)


def _why_not(path: Path, action: Output, values: dict[str, Any]) -> str | None:
    """What is lost where an existing file is written anew; None where nothing is."""
    for each in _named(values):
        if each.is_file() and each.samefile(path):
            return "is a file that this command reads, and would be overwritten"
        if each.is_dir() and each.resolve() in path.resolve().parents and path.suffix != Path(action.suffix).suffix:
            return f"is a file of {os.fspath(each)}, which this command reads, and would be overwritten"
    for each in (each for given in _named(values) for each in _named_in(given)):
        if each.is_file() and each.samefile(path):
            return "is a file that the run file names, and would be overwritten"
    if path.suffix in SOURCES and not (action.ours is not None and action.ours(path)):
        return "exists already, and source and settings are not overwritten"
    return None


def _named(values: object) -> Iterator[Path]:
    """The paths that values may be: each text, what follows its ``=`` and, of ``package.module:name``, its file."""
    if isinstance(values, Path):
        yield values
    elif isinstance(values, str):
        for each in {values, values.partition("=")[2]} - {""}:
            if "\0" not in each and len(each) < 4096:
                yield Path(each)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _named(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _named(value)


def _named_in(run_file: Path) -> Iterator[Path]:
    """The paths that a run file may name, from where it lies and from the working directory."""
    try:
        if run_file.suffix != ".toml" or run_file.stat().st_size > _LARGEST_NBYTES:
            return
        table = tomllib.loads(content_of(run_file, _LARGEST_NBYTES))
    except (OSError, ValueError, RecursionError):
        return  # whoever reads it says what is wrong
    for path in _named(table):
        yield from (path, run_file.parent / path)


def _free(path: Path, action: Output, taken: set[str]) -> str | None:
    """The nearest name, with the suffix of what is written, that no file has."""
    stem = path.name.removesuffix(action.suffix) if path.name.endswith(action.suffix) else path.stem
    for number in range(1, _MOST_TRIED):
        name = path.with_name(f"{stem}{f'-{number}' if number > 1 else ''}{action.suffix}")
        if not os.path.lexists(name) and os.path.realpath(name) not in taken:
            return os.fspath(name)
    return None
