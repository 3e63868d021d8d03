"""A question: a typed function whose signature is the only declaration of its options.

Python calls the function; command line, form, HTTP API and the reference in the documentation are made of its options.
Numbers may be text everywhere (``"20%"``, ``"15T"``): an option reads them within its bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar, get_args

from trainledger.forecast.plan.quantity import LARGEST, SMALLEST, read
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.units import parse_count, parse_number, parse_seconds

P = ParamSpec("P")
R = TypeVar("R")
Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much (0: not known)


def silent(what: str, done: int, of: int) -> None:
    """The progress that nobody hears."""


@frozen(kw_only=True)
class Option:
    """An option, declared in ``Annotated[type, Option(...)]``; its name and default are those of the parameter.

    ``parse`` reads a number from text, from ``least`` to ``most``; ``choices`` are the only texts that it may have.
    ``several`` may be given again. ``default_text`` is what the help says of a default that is decided later. ``flag``
    is the name on the command line where that is not the parameter's.
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
    name: str = ""
    default: Any = None

    @property
    def is_switch(self) -> bool:
        """Whether it is a yes or no."""
        return isinstance(self.default, bool)

    @property
    def says(self) -> str:
        """The help with the default in brackets."""
        default = self.default_text or ("" if self.default is None or self.is_switch else self.written)
        return f"{self.help} ({default})" if default else self.help

    @property
    def written(self) -> str:
        """The default as a person writes it.

        >>> Option(help="", parse=parse_number, most=1, default=0.2).written, Option(help="", default=64).written
        ('20%', '64')
        """
        if self.parse is parse_number and self.most == 1 and isinstance(self.default, float):
            return f"{self.default:.6%}".rstrip("0%").rstrip(".") + "%"
        return "" if self.default is None else f"{self.default:g}" if self.parse else str(self.default)

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


def number(help: str, *, least: float, most: float, **more: Any) -> Option:
    """A number within bounds."""
    return Option(help=help, parse=parse_number, least=least, most=most, **more)


def share(help: str, **more: Any) -> Option:
    """A share from 0 to 1, also in percent."""
    return Option(help=help, parse=parse_number, least=0, most=1, **more)


def seconds(help: str, *, most: float = 10**6, **more: Any) -> Option:
    """A time with its unit."""
    return Option(help=help, parse=parse_seconds, least=0, most=most, **more)


def text(help: str, **more: Any) -> Option:
    """Text as it is."""
    return Option(help=help, **more)


def choice(help: str, choices: Iterable[str], **more: Any) -> Option:
    """One of a few words, or ``several`` of them."""
    return Option(help=help, choices=tuple(choices), **more)


@frozen(kw_only=True)
class Question:
    """What a function asks: its options by name, its group and summary, and why an answer is none that works.

    ``takes`` are the names of all its parameters; of a run and progress the command line brings its own. A question
    that does not train (``trains``) reads nothing of what is assumed of a recipe.
    """

    ask: Callable[..., Any]
    group: str
    summary: str
    impossible: Callable[[Any], Problem | None] | None
    options: Mapping[str, Option]
    takes: tuple[str, ...]
    trains: bool = True

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


def question(
    group: str, summary: str, *, impossible: Callable[[Any], Problem | None] | None = None, trains: bool = True
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a question of a function: its options are read from texts too, and other rooms can list them."""

    def decorate(ask: Callable[P, R]) -> Callable[P, R]:
        code = ask.__code__
        about = Question(
            ask=ask,
            group=group,
            summary=summary,
            impossible=impossible,
            options=dict(_declared(ask)),
            takes=code.co_varnames[: code.co_argcount + code.co_kwonlyargcount],
            trains=trains,
        )

        @wraps(ask)
        def answer(*args: P.args, **given: P.kwargs) -> R:
            return ask(*args, **about.read(given))

        answer.question = about  # type: ignore[attr-defined]
        return answer

    return decorate


def question_of(ask: Callable[..., Any]) -> Question:
    """What `question` says of a function.

    >>> from trainledger.answers.breaks import breaks
    >>> question_of(breaks).options["reach"].says
    'up to so many times the planned value (64)'
    """
    about: Question = ask.question  # type: ignore[attr-defined]
    return about


def _declared(ask: Callable[..., Any]) -> Iterator[tuple[str, Option]]:
    """The options in a signature; only annotations that begin with ``Annotated`` are evaluated."""
    defaults = ask.__kwdefaults__ or {}
    for name, annotation in ask.__annotations__.items():
        if isinstance(annotation, str) and annotation.startswith("Annotated["):
            option = get_args(eval(annotation, ask.__globals__))[1]
            yield name, replace(option, name=name, default=defaults.get(name))
