"""A class made by `frozen` behaves as one made by `dataclass(frozen=True)`."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any, ClassVar

import pytest

from trainledger.spec.frozen import frozen


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


def test_an_unknown_field_is_named_before_one_that_lacks() -> None:
    @frozen(kw_only=True)
    class Recipe:
        seq_len: int
        steps: int = 1

    for wrong in (lambda: Recipe(seqlen=3), lambda: Recipe(seq_len=1, seqlen=3)):  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"Recipe has no field 'seqlen'; nearest: 'seq_len'$"):
            wrong()


@pytest.mark.parametrize("kw_only", [False, True])
def test_the_signature_is_that_of_the_standard_one(kw_only: bool) -> None:
    def parameters(decorate: Callable[[type[Any]], Any]) -> list[tuple[Any, ...]]:
        found = inspect.signature(made(decorate)).parameters.values()
        return [(each.name, each.kind, each.annotation, each.default) for each in found][:2]

    assert parameters(frozen(kw_only=kw_only)) == parameters(dataclass(frozen=True, kw_only=kw_only))
    assert "tags: 'dict[str, int]' = dict()" in str(inspect.signature(made(frozen(kw_only=kw_only))))


def test_the_docstring_has_what_settings_say_and_others_keep_theirs() -> None:
    from trainledger import Cluster, Recipe
    from trainledger.spec.cluster import Fabric

    for cls in (Recipe, Cluster):
        printed = " ".join((cls.__doc__ or "").split())
        for each in fields(cls):
            assert f" {each.name}: {each.type}" in printed
            assert " ".join(each.metadata["doc"].split()) in printed
        assert max(map(len, (cls.__doc__ or "").splitlines())) <= 100
    assert "restart_seconds: float | None = None - from an interruption" in " ".join((Cluster.__doc__ or "").split())
    assert "Fields:" not in (Fabric.__doc__ or "")
    assert "seq_len: int - tokens in a sequence" in pydoc.render_doc(Recipe, renderer=pydoc.plaintext)


def test_no_signature_is_made_before_it_is_asked_for() -> None:
    code = "import inspect; made = []; old = inspect.Signature.__init__\n"
    code += "inspect.Signature.__init__ = lambda *given, **named: (made.append(1), old(*given, **named))[1]\n"
    code += "import trainledger.spec.run as run; assert not made; inspect.signature(run.Run); assert made"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
