"""A class made by `frozen` behaves as one made by `dataclass(frozen=True)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any, ClassVar

import pytest

from trainledger.frozen import frozen


def made(decorate: Callable[[type[Any]], Any]) -> Any:
    class Point:
        x: int
        y: int = 2
        tags: dict[str, int] = field(default_factory=dict)

        @property
        def sum(self) -> int:
            return self.x + self.y

    Point.__qualname__ = "Point"
    return decorate(Point)


@pytest.mark.parametrize("decorate", [frozen, dataclass(frozen=True)])
def test_the_same_as_the_standard_one(decorate: Callable[[type[Any]], Any]) -> None:
    Point = made(decorate)
    point = Point(1)
    assert repr(point) == "Point(x=1, y=2, tags={})"
    assert point == Point(1, 2)
    assert point != Point(1, 3)
    assert point != (1, 2, {})
    assert replace(point, y=5) == Point(1, 5)
    assert point.sum == 3
    assert [each.name for each in fields(Point)] == ["x", "y", "tags"]
    for name in ("x", "y", "new"):
        with pytest.raises(FrozenInstanceError, match="cannot assign to field"):
            setattr(point, name, 1)
    with pytest.raises(FrozenInstanceError, match="cannot delete field"):
        del point.x
    assert point == Point(1)
    assert Point(1, tags={"a": 1}, y=3).tags == {"a": 1}
    for wrong in (lambda: Point(), lambda: Point(1, x=1), lambda: Point(1, 2, {}, 4), lambda: Point(1, z=1)):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(TypeError):
        hash(point)  # a dict among its fields


def test_equal_ones_have_equal_hashes_and_kw_only_is_kept() -> None:
    @frozen(kw_only=True)
    class Size:
        width: int
        height: int = 1

    assert hash(Size(width=1)) == hash(Size(width=1, height=1))
    assert len({Size(width=1), Size(width=1), Size(width=2)}) == 2
    with pytest.raises(TypeError):
        Size(1)  # type: ignore[misc]
    with pytest.raises(TypeError, match="lacks the argument 'width'"):
        Size(height=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="has no field 'depth'"):
        Size(width=1, depth=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("decorate", [frozen(kw_only=True), dataclass(frozen=True, kw_only=True)])
def test_fields_by_name_have_their_defaults(decorate: Callable[[type[Any]], Any]) -> None:
    Point = made(decorate)
    point = Point(x=1)
    assert repr(point) == "Point(x=1, y=2, tags={})"
    assert point.tags is not Point(x=1).tags, "each has a dict of its own"
    assert replace(point, y=5) == Point(y=5, x=1)
    assert [each.name for each in fields(Point)] == ["x", "y", "tags"]
    with pytest.raises(FrozenInstanceError, match="cannot assign to field"):
        point.x = 2


@pytest.mark.parametrize("decorate", [frozen, dataclass(frozen=True)])
def test_fields_know_their_types_and_class_variables_are_no_fields(decorate: Callable[[type[Any]], Any]) -> None:
    @decorate
    class Named:
        name: str
        size: int | None = None

    @decorate
    class Counted(Named):
        seen: ClassVar[int] = 0
        times: float = 1.0

    types = {"name": "str", "size": "int | None"}
    assert {each.name: each.type for each in fields(Named)} == types
    assert {each.name: each.type for each in fields(Counted)} == {**types, "times": "float"}
    assert Named.__annotations__ == types
    assert Counted.__annotations__ == {"seen": "ClassVar[int]", "times": "float"}
    assert repr(Counted("a", times=2.0)).endswith("Counted(name='a', size=None, times=2.0)")


@pytest.mark.parametrize("decorate", [frozen, dataclass(frozen=True)])
def test_a_class_without_fields(decorate: Callable[[type[Any]], Any]) -> None:
    @decorate
    class Nothing:
        pass

    assert fields(Nothing) == ()
    assert Nothing() == Nothing()
    with pytest.raises(TypeError):
        Nothing(1)


def test_what_is_wrong_with_arguments_is_said() -> None:
    Point = made(frozen)
    for wrong, sentence in (
        (lambda: Point(1, x=1), "Point has two values for field 'x'"),
        (lambda: Point(1, z=1), "Point has no field 'z'"),
        (lambda: Point(1, 2, {}, 4), "Point takes 3 arguments without a name, not 4"),
        (lambda: Point(y=1), "Point lacks the argument 'x'"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"^{sentence}$"):
            wrong()
