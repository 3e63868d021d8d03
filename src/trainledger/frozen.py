"""Frozen dataclasses that are quick to define.

The standard decorator writes and compiles source for ``__init__``, ``__repr__``, ``__eq__``, ``__hash__``,
``__setattr__`` and ``__delattr__`` of each class. For the classes that ``plan`` needs this is a good part of its
start-up. Here all classes share the last five, ``__init__`` is a loop over the fields, and nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform, overload

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
        return made

    return define if cls is None else define(cls)


def _init(cls: Any, *, kw_only: bool) -> Callable[..., None]:
    """An ``__init__`` without a line of source for each field."""
    known = fields(cls)
    start = {each.name: each.default for each in known}
    needed = [each.name for each in known if each.default is MISSING and each.default_factory is MISSING]
    made = [(each.name, each.default_factory) for each in known if each.default_factory is not MISSING]
    in_order = () if kw_only else tuple(start)

    def __init__(self: Any, *given: Any, **named: Any) -> None:  # noqa: N807
        if len(given) > len(in_order):
            raise TypeError(f"{cls.__qualname__} takes {len(in_order)} arguments without a name, not {len(given)}")
        values = self.__dict__
        values.update(start)  # all fields in their order, which repr and hash follow
        values.update(zip(in_order, given, strict=False))
        values.update(named)
        for name in needed:
            if values[name] is MISSING:
                raise TypeError(f"{cls.__qualname__} lacks the argument {name!r}")
        if len(values) > len(start) or (given and named and not named.keys().isdisjoint(in_order[: len(given)])):
            name = next(each for each in named if each not in start or each in in_order[: len(given)])
            raise TypeError(f"{cls.__qualname__} {'has two values for' if name in start else 'has no'} field {name!r}")
        for name, make in made:
            if values[name] is MISSING:
                values[name] = make()

    return __init__


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
