"""A question: a typed function whose signature is the only declaration of its options.

Python calls the function; command line, form, HTTP API and the reference in the documentation are made of its options.
Numbers may be text everywhere (``"20%"``, ``"15T"``): an option reads them within its bounds. An option is a parameter
annotated with ``Annotated[type, option]`` or with a name for that, or a key of a ``TypedDict`` that the function
unpacks (``**code: Unpack[OfCode]``): of these it gets those that are given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from trainledger.forecast.plan.quantity import LARGEST, SMALLEST, read
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.units import parse_count, parse_length, parse_nbytes, parse_number, parse_seconds

P = ParamSpec("P")
R = TypeVar("R")
Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much (0: not known)


def silent(what: str, done: int, of: int) -> None:
    """The progress that nobody hears."""


@frozen(kw_only=True)
class Option:
    """An option, declared in ``Annotated[type, Option(...)]``; its name and default are those of the parameter.

    ``parse`` reads a number from text, from ``least`` to ``most``; ``choices`` are the only texts that it may have.
    ``several`` may be given again. ``default_text`` is what the help says of a default that is decided later.

    Of the command line: ``flag`` is its name where that is not the parameter's, a ``word`` has none, ``nargs`` is as in
    `argparse`, ``group`` a heading of the help: of the keys of a ``TypedDict`` how its docstring begins. ``suffix`` is
    that of a file that is written; ``ours`` says which files of settings may be overwritten, and ``check`` raises where
    none can be written.
    """

    help: str
    parse: Callable[[str], Any] | None = None
    least: float = SMALLEST
    most: float = LARGEST
    choices: tuple[str, ...] = ()
    several: bool = False
    default_text: str = ""
    flag: str = ""
    metavar: str = ""
    word: bool = False
    nargs: str = ""
    group: str = ""
    suffix: str = ""
    ours: Callable[[Path], bool] | None = None
    check: Callable[[str, str], None] | None = None
    name: str = ""
    default: Any = None
    required: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether it is a yes or no."""
        return isinstance(self.default, bool)

    @property
    def says(self) -> str:
        """The help with the default in brackets."""
        default = self.default_text or ("" if self.is_switch else self.written)
        return f"{self.help} ({default})" if default else self.help

    @property
    def written(self) -> str:
        """The default as a person writes it.

        >>> Option(help="", parse=parse_number, most=1, default=0.2).written, Option(help="", default=64).written
        ('20%', '64')
        """
        if self.parse is parse_number and self.most <= 1 and isinstance(self.default, float):
            return f"{self.default:.6%}".rstrip("0%").rstrip(".") + "%"
        return "" if self.default in (None, ()) else f"{self.default:g}" if self.parse else str(self.default)

    def read(self, value: Any, problems: list[Problem], label: str = "") -> Any:
        """The value of the option from what was given; what is wrong is added to problems, under ``label``."""
        label = label or self.name
        if self.parse is not None:
            return read(label, value, self.parse, problems, least=self.least, most=self.most)
        if self.several and value is not None and not isinstance(value, Mapping):
            value = (value,) if isinstance(value, str) else tuple(value)
        for text in (value if self.several else [value]) or () if self.choices else ():
            if text is not None and text not in self.choices:
                rule = f"must be one of {', '.join(self.choices)}"
                problems.append(Problem(label, text, rule, nearest_text(str(text), self.choices)))
        return value


def count(help: str, *, least: int = 1, most: float = LARGEST, **more: Any) -> Option:
    """A whole number: ``1000``, ``1,000``, ``1e3`` or ``1k``."""
    return Option(help=help, parse=parse_count, least=least, most=most, **more)


def length(help: str, **more: Any) -> Option:
    """Tokens of a sequence: ``32k`` is 32,768."""
    return Option(help=help, parse=parse_length, least=1, most=10**9, **more)


def number(help: str, *, least: float, most: float, **more: Any) -> Option:
    """A number within bounds."""
    return Option(help=help, parse=parse_number, least=least, most=most, **more)


def share(help: str, *, most: float = 1, **more: Any) -> Option:
    """A share from 0 to ``most``, also in percent."""
    return Option(help=help, parse=parse_number, least=0, most=most, **more)


def seconds(help: str, *, most: float = 10**6, **more: Any) -> Option:
    """A time with its unit."""
    return Option(help=help, parse=parse_seconds, least=0, most=most, **more)


def nbytes(help: str, **more: Any) -> Option:
    """Bytes with their unit."""
    return Option(help=help, parse=parse_nbytes, least=1, **more)


def text(help: str, **more: Any) -> Option:
    """Text as it is."""
    return Option(help=help, **more)


def word(help: str, **more: Any) -> Option:
    """Text that stands on the command line without a flag."""
    return Option(help=help, word=True, **more)


def output(help: str, suffix: str, **more: Any) -> Option:
    """A file to write, which is never one that the question reads, nor source (`cli.arguments`)."""
    return Option(help=help, suffix=suffix, **more)


def choice(help: str, choices: Iterable[str], **more: Any) -> Option:
    """One of a few words, or ``several`` of them."""
    return Option(help=help, choices=tuple(choices), **more)


@frozen(kw_only=True)
class Question:
    """What a function asks: its options by name, and why an answer is none that works (``impossible``).

    ``takes`` are the names of all its parameters; of a run, overrides and progress the command line brings its own. A
    question that does not train (``trains``) reads nothing of what is assumed of a recipe. ``plots`` says whether its
    answers have figures; words of an ``intermixed`` one may follow flags; ``usage`` replaces that of `argparse`.
    """

    ask: Callable[..., Any]
    options: Mapping[str, Option]
    takes: tuple[str, ...]
    impossible: Callable[[Any], Problem | None] | None = None
    trains: bool = True
    plots: bool = True
    intermixed: bool = False
    usage: str = ""

    def read(self, given: Mapping[str, Any], label: Callable[[str], str] = str) -> dict[str, Any]:
        """Options that were given, texts read; raises `InvalidInput` with every problem, named by ``label``."""
        problems: list[Problem] = []
        options = self.options
        values = {
            name: options[name].read(value, problems, label(name)) if name in options else value
            for name, value in given.items()
        }
        if problems:
            raise InvalidInput(problems)
        return values


def question(**about: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a question of a function: its options are read from texts too, and other rooms can list them.

    ``about`` are fields of `Question`.
    """

    def decorate(ask: Callable[P, R]) -> Callable[P, R]:
        code = ask.__code__
        takes = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        asked = Question(ask=ask, options=dict(_declared(ask)), takes=takes, **about)
        other = dict(_spelled_otherwise(asked))

        @wraps(ask)
        def answer(*args: P.args, **given: P.kwargs) -> R:
            rule = "is a word of the command line; Python has it as"
            if problems := [Problem(name, None, f"{rule} {other[name]}") for name in given if name in other]:
                raise InvalidInput(problems)
            if len(args) == 3 and takes[1] == "overrides":  # run, device and count, as `fits` takes them
                return ask(*args[:2], **asked.read({"count": args[2], **given}))  # type: ignore[arg-type]
            return ask(*args, **asked.read(given))

        answer.question = asked  # type: ignore[attr-defined]
        return answer

    return decorate


def _spelled_otherwise(asked: Question) -> Iterator[tuple[str, str]]:
    """Words of the command line that are no keywords of the function, and what its keywords for them are."""
    if "overrides" in asked.takes:
        yield "set", "overrides"
    for name, option in asked.options.items():
        word = option.flag.rpartition(" ")[2].removeprefix("--").replace("-", "_")
        if word and word not in (*asked.takes, *asked.options):
            yield word, f"{name}=False" if option.is_switch and option.default else name


def question_of(ask: Callable[..., Any]) -> Question:
    """What `question` says of a function.

    >>> from trainledger.answers.breaks import breaks
    >>> question_of(breaks).options["reach"].says
    'up to so many times the planned value (64)'
    """
    about: Question = ask.question  # type: ignore[attr-defined]
    return about


def _declared(ask: Callable[..., Any]) -> Iterator[tuple[str, Option]]:
    """The options in a signature, in its order."""
    code, names = ask.__code__, ask.__globals__
    positional, last = code.co_varnames[: code.co_argcount], ask.__defaults__ or ()
    defaults = dict(zip(positional[code.co_argcount - len(last) :], last, strict=True)) | (ask.__kwdefaults__ or {})
    for name, annotation in ask.__annotations__.items():
        if annotation.startswith("Unpack["):
            shared = names[annotation.removeprefix("Unpack[").removesuffix("]")]
            group = shared.__doc__.partition(":")[0].lower()
            for key, reference in shared.__annotations__.items():
                option = _option(reference.__forward_arg__, vars(sys.modules[reference.__forward_module__]))
                if option is not None:
                    yield key, replace(option, name=key, group=group)
        elif (option := _option(annotation, names)) is not None:
            required = name not in defaults
            yield name, replace(option, name=name, default=defaults.get(name), required=required)


def _option(annotation: str, names: dict[str, Any]) -> Option | None:
    """The option in an annotation; only what begins with ``Annotated``, or is a name for it, is evaluated."""
    if annotation.startswith("Annotated["):
        annotated = eval(annotation, names)
    else:
        annotated = names.get(annotation)
    option: Option | None = getattr(annotated, "__metadata__", (None,))[0]
    return option
