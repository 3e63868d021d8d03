"""Names of other libraries that mean something else for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

Made = Callable[[Any], Any]  # from what a name meant, what it means meanwhile
Patch = tuple[Any, str, Made]  # the owner of the name, the name


def answering(value: Any) -> Made:
    """A function that does nothing and returns this value."""
    return lambda _: lambda *args, **kwargs: value


def around(function: Callable[..., Any]) -> Made:
    """A function that is called with what the name meant, and then the arguments."""

    def made(before: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(before)  # some programs look at signatures
        def called(*args: Any, **kwargs: Any) -> Any:
            return function(before, *args, **kwargs)

        return called

    return made


def inside(context: Callable[[], AbstractContextManager[Any]]) -> Made:
    """The same function, run inside of a context."""

    def run(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with context():
            return before(*args, **kwargs)

    return around(run)


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
    before = vars(owner)[name] if own else getattr(owner, name)  # a classmethod is kept as one
    setattr(owner, name, made(getattr(owner, name)))
    try:
        yield
    finally:
        if own or not hasattr(owner, "__dict__"):
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def all_replaced(*patches: Patch) -> Iterator[None]:
    """Several names at once; one that is not there is left out."""
    with ExitStack() as stack:
        for owner, name, made in patches:
            stack.enter_context(replaced(owner, name, made, needed=False))
        yield
