"""Frozen dataclasses that are quick to define.

The standard decorator writes and compiles source for ``__init__``, ``__repr__``, ``__eq__``, ``__hash__``,
``__setattr__`` and ``__delattr__`` of each class. For the classes that ``plan`` needs this is a good part of its
start-up. Here all classes share the last five, ``__init__`` is a loop over the fields, and nothing is compiled.
"""

from __future__ import annotations

# Measured in turns with Python 3.11, medians of 24 runs: `plan gpt2 --device h100-sxm` takes 345 ms of CPU time, and
# 420 ms with ``dataclass(frozen=True)`` in place of `frozen` (the least of each: 313 and 385 ms).
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from typing import Any, TypeVar, cast, dataclass_transform, overload

T = TypeVar("T")


@overload
def frozen(cls: type[T], /) -> type[T]: ...
@overload
def frozen(*, kw_only: bool = False) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T] | None = None, /, *, kw_only: bool = False) -> Any:
    """``dataclass(frozen=True)``: the same behaviour, defined in a fraction of the time.

    >>> @frozen
    ... class Point:
    ...     x: int
    ...     y: int = 0
    >>> Point(1), Point(1) == Point(1, 0), Point(1) == Point(2), hash(Point(1)) == hash(Point(1))
    (Point(x=1, y=0), True, False, True)
    """

    def define(cls: type[T]) -> type[T]:
        for function in (__repr__, __eq__, __hash__, __setattr__, __delattr__):
            if function.__name__ not in cls.__dict__:
                setattr(cls, function.__name__, function)
        made: type[T] = dataclass(eq=False, repr=False, init=False, kw_only=kw_only)(cls)
        setattr(made, "__init__", _init(made, kw_only=kw_only))  # noqa: B010
        setattr(made, "__signature__", _SIGNATURE)  # noqa: B010
        made.__doc__ = cast(str, _Doc(made.__doc__))
        return made

    return define if cls is None else define(cls)


def _init(cls: Any, *, kw_only: bool) -> Callable[..., None]:
    """An ``__init__`` without a line of source for each field."""
    known = fields(cls)
    start = {declared.name: declared.default for declared in known}
    needed = [
        declared.name for declared in known if declared.default is MISSING and declared.default_factory is MISSING
    ]
    made = [(declared.name, declared.default_factory) for declared in known if declared.default_factory is not MISSING]
    in_order = () if kw_only else tuple(start)

    def __init__(self: Any, *given: Any, **named: Any) -> None:  # noqa: N807
        if len(given) > len(in_order):
            raise TypeError(f"{cls.__qualname__} takes {len(in_order)} arguments without a name, not {len(given)}")
        values = self.__dict__
        values.update(start)  # all fields in their order, which repr and hash follow
        if given:
            values.update(zip(in_order, given, strict=False))
        values.update(named)
        for name in needed:
            if values[name] is MISSING:
                _refuse_unknown(cls, named)
                raise TypeError(f"{cls.__qualname__} lacks the argument {name!r}")
        if len(values) > len(start):
            _refuse_unknown(cls, named)
        if given and named and not named.keys().isdisjoint(in_order[: len(given)]):
            name = next(name for name in named if name in in_order[: len(given)])
            raise TypeError(f"{cls.__qualname__} has two values for field {name!r}")
        for name, make in made:
            if values[name] is MISSING:
                values[name] = make()

    return __init__


def _refuse_unknown(cls: Any, named: dict[str, Any]) -> None:
    """Raises TypeError where a name is no field's."""
    known = [declared.name for declared in fields(cls)]
    for name in named:
        if name not in known:
            from difflib import get_close_matches

            near = [f"; nearest: {match!r}" for match in get_close_matches(name, known, n=1)]
            raise TypeError(f"{cls.__qualname__} has no field {name!r}{''.join(near)}")


class _Signature:
    """The signature of a frozen class, made on request."""

    def __get__(self, instance: object, cls: Any) -> Any:
        from inspect import Parameter, Signature

        if instance is not None or "__dataclass_fields__" not in vars(cls):
            raise AttributeError("__signature__")
        in_order = [
            Parameter(
                declared.name,
                Parameter.KEYWORD_ONLY if declared.kw_only else Parameter.POSITIONAL_OR_KEYWORD,
                default=Parameter.empty
                if declared.default is MISSING and declared.default_factory is MISSING
                else declared.default
                if declared.default_factory is MISSING
                else _Made(declared.default_factory),
                annotation=declared.type,
            )
            for declared in fields(cls)
        ]
        return Signature(in_order, return_annotation=None)


class _Made:
    """A default that is made anew for each, as a signature shows it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __repr__(self) -> str:
        return f"{getattr(self.make, '__name__', '...')}()"


class _Doc:
    """The docstring of a frozen class, with the docs of its fields, made on request."""

    def __init__(self, doc: str | None) -> None:
        self.doc = doc

    def __get__(self, instance: object, cls: Any) -> str | None:
        said = [declared for declared in fields(cls) if "doc" in declared.metadata]
        if not said:
            return self.doc
        from inspect import cleandoc
        from textwrap import fill

        lines = [
            fill(f"{_declared(name)} - {_meant(name)}", 100, initial_indent="    ", subsequent_indent=" " * 8)
            for name in said
        ]
        return "\n".join([cleandoc(self.doc or ""), "", "Fields:", *lines])


def _declared(declared: Field[Any]) -> str:
    default = "" if declared.default is MISSING else f" = {declared.default!r}"
    return f"{declared.name}: {declared.type}{default}"


def _meant(declared: Field[Any]) -> str:
    """The description of a field (`spec.setting.setting`), and the unit of its quantity."""
    rules, unit = (
        declared.metadata,
        {"nbytes": "bytes"}.get(declared.metadata["quantity"], declared.metadata["quantity"]),
    )
    words = [rules["doc"]]
    if unit in ("bytes", "bytes/s", "seconds") and unit not in rules["doc"]:
        words.append(f"in {unit}")
    if rules["choices"] and not all(one in rules["doc"] for one in rules["choices"]):
        words.append(f"one of {', '.join(rules['choices'])}")
    return "; ".join(words)


_SIGNATURE = _Signature()


def __repr__(self: Any) -> str:  # noqa: N807
    values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
    return f"{type(self).__qualname__}({values})"


def __eq__(self: Any, other: object) -> bool:  # noqa: N807
    return vars(self) == vars(other) if type(other) is type(self) else NotImplemented


def __hash__(self: Any) -> int:  # noqa: N807
    return hash((type(self), *vars(self).values()))


def __setattr__(self: Any, name: str, value: object) -> None:  # noqa: N807
    # ``__init__`` gives each field its value once; nothing does afterwards.
    if name in self.__dict__ or name not in type(self).__dataclass_fields__:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    self.__dict__[name] = value


def __delattr__(self: Any, name: str) -> None:  # noqa: N807
    raise FrozenInstanceError(f"cannot delete field {name!r}")
