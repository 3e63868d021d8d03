"""Names of other libraries that mean something else for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

Made = Callable[[Any], Any]  # from what a name meant, what it means meanwhile


def answering(value: Any) -> Made:
    """A function that does nothing and gives this value."""
    return lambda _: lambda *args, **kwargs: value


def inside(context: Callable[[], AbstractContextManager[Any]]) -> Made:
    """The same function, run inside of a context."""

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            with context():
                return function(*args, **kwargs)

        return called

    return made


@contextmanager
def replaced(owner: Any, name: str, made: Made, *, needed: bool = True) -> Iterator[None]:
    """Let ``owner.name`` be ``made(what it was)``.

    Raises RuntimeError where a ``needed`` name is not there: another version of torch has it elsewhere.
    """
    if not hasattr(owner, name):
        if needed:
            where = getattr(owner, "__name__", type(owner).__name__)
            raise RuntimeError(f"this version of torch has no {where}.{name}, which a trace replaces")
        yield
        return
    own = name in vars(owner) if hasattr(owner, "__dict__") else False
    before = vars(owner)[name] if own else getattr(owner, name)  # a classmethod as it stands there
    setattr(owner, name, made(getattr(owner, name)))
    try:
        yield
    finally:
        if own or not isinstance(owner, type):
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def all_replaced(*each: tuple[Any, str, Made]) -> Iterator[None]:
    """Several names at once; one that is not there is left out."""
    with ExitStack() as stack:
        for owner, name, made in each:
            stack.enter_context(replaced(owner, name, made, needed=False))
        yield
