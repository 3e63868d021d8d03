"""Which line of the user's code an operation comes from, and sentences of where and why a trace is partial."""

from __future__ import annotations

import functools
import logging
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.autograd.graph
from torch import nn

from trainledger.trace.patches import around, replaced

BY_AUTOGRAD = None  # no Python called the operation: the engine of backward did

_PACKAGE = str(Path(__file__).resolve().parents[2])
_TRACER = tuple(os.path.join(_PACKAGE, room) + os.sep for room in ("trace", os.path.join("observe", "measure")))
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
OURS = _PACKAGE + os.sep
_STDLIB = tuple(sysconfig.get_path(each) + os.sep for each in ("stdlib", "platstdlib"))
_SITES = tuple({sysconfig.get_path(each) + os.sep for each in ("purelib", "platlib")})
_WRAPPERS = ("einops", "opt_einsum")  # libraries whose lines say less than those of who calls them
_END = "end"
_ENGINE = "engine"


def is_users(file: str) -> bool:
    """Whether a file is code whose lines say something to a user: not torch's, not the tracer's, not Python's own."""
    if file.startswith(_SITES):
        return not file.startswith(TORCH) and _below_site(file).split(os.sep)[0] not in _WRAPPERS
    return not file.startswith((TORCH, *_TRACER, *_STDLIB, "<"))


def is_installed(file: str) -> bool:
    """Whether a file is of a package that was installed."""
    return file.startswith(_SITES)


def is_tracers(file: str) -> bool:
    """Whether a file is the tracer's own."""
    return file.startswith(_TRACER)


def callers() -> Iterator[FrameType]:
    """The frames that run now, from that of the caller outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.cache
def shown_file(file: str) -> str:
    """A file as it is printed: from its package where it is installed, else from the working directory if below."""
    if file.startswith(_SITES):
        return _below_site(file).replace(os.sep, "/")
    path = Path(file).resolve()
    if path.is_relative_to(Path(_PACKAGE).parent):
        return path.relative_to(Path(_PACKAGE).parent).as_posix()
    return path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else path.as_posix()


def _below_site(file: str) -> str:
    site = next(each for each in _SITES if file.startswith(each))
    return file[len(site) :]


class Lines:
    """Finds the line that an operation comes from while it is dispatched; ``counts`` says which files count."""

    def __init__(self, counts: Callable[[str], bool] = is_users) -> None:
        self._counts = counts
        self._known: dict[CodeType, str] = {}

    def here(self, *, past_engine: bool = False) -> str | None:
        """The innermost line that counts as "file:line"; "" where there is none, `BY_AUTOGRAD` inside its engine.

        ``past_engine`` looks on for the line that called backward.
        """
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            short = self._known.get(code)
            if short is None:
                short = self._known[code] = self._look(code)
            if short is _ENGINE:
                if not past_engine:
                    return BY_AUTOGRAD
            elif short:
                return "" if short is _END else f"{short}:{frame.f_lineno}"
            above = frame.f_back
            if above is None:
                return ""
            frame = above
        return ""

    def _look(self, code: CodeType) -> str:
        if code in _ENDS:
            return _END
        if code in _ENGINES:
            return _ENGINE
        file = code.co_filename
        return shown_file(file) if self._counts(file) else ""


_MAKERS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # of modules of torch's own


@contextmanager
def remembering_makers() -> Iterator[None]:
    """Inside, the line of the user's code that makes a module of torch's own is remembered."""

    def init(before: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any) -> None:
        before(module, *args, **kwargs)
        if _is_torchs(module):
            # A layer of torch's makes further ones (TransformerEncoderLayer its linear ones), all of the user's line
            frames = (frame for frame in callers() if is_users(frame.f_code.co_filename))
            if (frame := next(frames, None)) is not None:
                _MAKERS[module] = f"{shown_file(frame.f_code.co_filename)}:{frame.f_lineno}"

    with replaced(nn.Module, "__init__", around(init)):
        yield


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "torch"


def makers_of_parameters(root: nn.Module) -> dict[str, str]:
    """By the name of a parameter the line that made its module, where that is remembered."""
    return {
        plain_name(f"{path}.{name}".lstrip(".")): line
        for path, module in root.named_modules()
        if (line := _MAKERS.get(module))
        for name, _ in module.named_parameters(recurse=False)
    }


def makers_in_sequences(root: nn.Module) -> dict[str, str]:
    """By the path of a module that an `nn.Sequential` calls, or that is inside of such a one, the line that made it.

    No line of the user's calls it. Modules with a forward of the user's, whose lines say more, are left out.
    """

    def inside(module: nn.Module, path: str, line: str) -> Iterator[tuple[str, str]]:
        if _is_torchs(module):
            yield plain_name(path), line
            for name, child in module.named_children():
                yield from inside(child, f"{path}.{name}", line)

    # torch/nn/modules/container.py calls the children itself; a forward of a subclass has lines of its own
    sequences = (pair for pair in root.named_modules() if _MAKERS and type(pair[1]).forward is nn.Sequential.forward)
    called = (
        (f"{path}.{name}".lstrip("."), child) for path, module in sequences for name, child in module.named_children()
    )
    return {
        place: made
        for path, child in called
        if (line := _MAKERS.get(child))
        for place, made in inside(child, path, line)
    }


_ENGINES = {
    each.__code__
    for each in (getattr(torch.autograd.graph, "_engine_run_backward", None), torch.autograd.backward)
    if each is not None
}
_ENDS: set[CodeType] = set()


def ends_here(function: Callable[..., object]) -> None:
    """Who calls this function of the tracer has caused none of the operations below it."""
    _ENDS.add(function.__code__)


class Refused(Exception):  # noqa: N818
    """Something that cannot be done here; the text says what and what to do instead."""


_WHY = {
    "DataDependentOutputException": "its result is a value, which fake tensors do not have",
    "DynamicOutputShapeException": "how large its result is depends on values, which fake tensors do not have",
    "UnsupportedOperatorException": "it has no rule for shapes alone; torch.library.register_fake gives it one",
}
_LOGGER = "torch._subclasses.fake_tensor"
_LINE = "failed while attempting to run meta for"


def notes_of(eager: nn.Module | None, uncounted: Mapping[str, int], unseen: int, calls: int) -> Iterator[str]:
    """Sentences of how a ledger was recorded.

    Compiled modules of a model ran ``eager``, as they do under any dispatch mode; of ``uncounted`` operators only the
    results are known; ``unseen`` tensors were made by operations that were not recorded, ``calls`` ran in threads.
    """
    names = [plain_name(name) or "the model" for name, _ in compiled_parts(eager)] if eager is not None else []
    if names:
        who = f"{names[0]} and {len(names) - 1} more are" if len(names) > 1 else f"{names[0]} is"
        yield f"{who} compiled, and ran eagerly while each operation was recorded"
    if uncounted:
        yield f"the peak is a lower bound: what has no rule may allocate more than its results ({', '.join(uncounted)})"
    if unseen:
        yield (
            f"{unseen} tensors of the graph come from operations that were not recorded, such as those of a thread "
            "that began before the trace: their FLOPs and the memory of what they keep are missing"
        )
    if calls:
        yield (
            f"{calls} calls ran in threads of their own: their operations are recorded in the order in which they "
            "came, and memory that is live in several threads at once differs from run to run; lines and modules of "
            "their backward may be wrong"
        )


def why_it_stopped(error: BaseException, phase: str) -> str:
    """The sentence: in which phase, at which line, at which operator, and why."""
    where, own = _lines(error.__traceback__)
    at = f" at {where}" if where else ""
    # Inside a library, whose helper wanted a file or a network, say
    if own and own != where:
        at += f", called at {own}"
    if isinstance(error, Refused):
        return f"{phase} ended{at}: {error}"
    known = _WHY.get(type(error).__name__)
    if known is not None:
        operator: Any = getattr(error, "func", None) or (error.args[0] if error.args else "an operator")
        return f"{phase} ended{at}: {operator} cannot go on: {known}"
    if isinstance(error, AssertionError) and "shape_env" in str(error):
        return f"{phase} ended{at}: a jagged tensor's sizes are values, which fake tensors do not have"
    try:
        first = (str(error).strip().splitlines() or [""])[0]
    except Exception:  # an error that cannot even say what it is
        first = "(it has no words)"
    return f"{phase} ended{at}: {type(error).__name__}: {first[:300]}"


def _lines(trace: TracebackType | None) -> tuple[str, str]:
    """The innermost line that an error passed through, but for torch's and ours; and that of code not installed."""
    found = own = ""
    for frame, line in traceback.walk_tb(trace):
        file = frame.f_code.co_filename
        if is_users(file):
            found = f"{shown_file(file)}:{line}"
            own = own if is_installed(file) else found
    return found, own


@contextmanager
def quiet_fake_errors() -> Iterator[None]:
    """Suppress the log line, with its stack, that torch writes where an operator refuses fake tensors."""

    def other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_LINE)

    logger = logging.getLogger(_LOGGER)
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def plain_name(name: str) -> str:
    """A module's or parameter's name without the module that torch.compile puts around another.

    >>> plain_name("_orig_mod.layers.0._orig_mod.weight"), plain_name("layers.0._orig_mod")
    ('layers.0.weight', 'layers.0')
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def compiled_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The compiled modules of a model with their names: those that ``torch.compile`` or ``Module.compile`` made."""
    for name, module in model.named_modules():
        call = module._compiled_call_impl  # a meter that hears a module is there too
        if hasattr(module, "_torchdynamo_orig_callable") or (call is not None and getattr(call, "compiles", True)):
            yield name, module
