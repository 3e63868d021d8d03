"""Names of other libraries that mean something else for a while, and modes entered by hand."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Made = Callable[[Any], Any]  # from what a name meant, what it means meanwhile
Patch = tuple[Any, str, Made]  # the owner of the name, the name


def answering(value: Any) -> Made:
    """A function that does nothing and returns this value."""
    return lambda _: lambda *args, **kwargs: value


def around(function: Callable[..., Any]) -> Made:
    """A function that is called with what the name meant, and then the arguments."""

    def made(before: Callable[..., Any]) -> Callable[..., Any]:
        # Some programs look at signatures
        @wraps(before)
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
    # A classmethod is kept as one
    before = vars(owner)[name] if own else getattr(owner, name)
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


@contextmanager
def after_import(name: str, loaded: Callable[[ModuleType], object]) -> Iterator[None]:
    """Call ``loaded`` with a module that is there already, or as soon as something inside imports it."""
    module = sys.modules.get(name)
    if module is not None:
        loaded(module)
        yield
        return
    finder = _Finder(name, loaded)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def replaced_in(name: str, patch: Callable[[ModuleType], Patch]) -> Iterator[None]:
    """Replace a name of a module, or of what is in it, that is there already or as soon as something imports it."""
    with ExitStack() as stack:
        stack.enter_context(after_import(name, lambda module: stack.enter_context(all_replaced(patch(module)))))
        yield


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as Python does, and has it looked at when it has run."""

    def __init__(self, name: str, loaded: Callable[[ModuleType], object]) -> None:
        self._name, self._loaded, self._looking = name, loaded, False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute, loaded = spec.loader.exec_module, self._loaded

        def then_look(module: ModuleType) -> None:
            execute(module)
            loaded(module)

        spec.loader.exec_module = then_look  # type: ignore[method-assign]
        return spec


@contextmanager
def dispatching(mode: TorchDispatchMode) -> Iterator[None]:
    """Inside, operations are dispatched to a mode, also while it handles one; its own ``__enter__`` is not called."""
    TorchDispatchMode.__enter__(mode)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]


def names(text: str) -> tuple[str, ...]:
    """The names in a text, as tables of them are written here.

    >>> names("add sub mul")
    ('add', 'sub', 'mul')
    """
    return tuple(text.split())
