"""Threads that traced code starts: torch's dispatch modes belong to a thread, so each is given those of its starter.

What several threads do is recorded in the order in which it comes, one operation at a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as pools
from contextlib import contextmanager
from typing import Any

from torch.utils import _python_dispatch as dispatch

from trainledger.trace.patches import all_replaced, around
from trainledger.trace.recorder.attribution import Attribution
from trainledger.trace.recorder.source_lines import TORCH, callers

_WORKER = getattr(pools, "_worker", None)  # of a pool, which outlives what is submitted to it
_COMPILER = tuple(os.path.join(TORCH, each) + os.sep for each in ("_inductor", "_functorch"))
_NEEDED = ("_get_current_dispatch_mode_stack", "_push_mode", "_pop_mode")


@contextmanager
def threads_follow(attribution: Attribution) -> Iterator[None]:
    """Let threads and pools that are given work dispatch as who gives it, inside of the same modules."""
    if any(not hasattr(dispatch, each) for each in _NEEDED):
        yield
        return

    def start(before: Callable[..., None], thread: threading.Thread) -> None:
        if getattr(thread, "_target", None) is not _WORKER or _WORKER is None:
            thread.run = _within(thread.run, attribution)  # type: ignore[method-assign]
        before(thread)

    def submit(
        before: Callable[..., Any], pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        return before(pool, _within(function, attribution), *args, **kwargs)

    with all_replaced((threading.Thread, "start", around(start)), (ThreadPoolExecutor, "submit", around(submit))):
        yield


def _within(function: Callable[..., Any], attribution: Attribution) -> Callable[..., Any]:
    """A function under the modes that are active here, wherever it runs."""
    modes = dispatch._get_current_dispatch_mode_stack()
    if not modes or _compiler_gives():
        return function
    inside = list(attribution.running)

    def run(*args: Any, **kwargs: Any) -> Any:
        if dispatch._get_current_dispatch_mode_stack():
            return function(*args, **kwargs)
        attribution.begin_elsewhere(inside)
        for each in modes:
            dispatch._push_mode(each)
        try:
            return function(*args, **kwargs)
        finally:
            for each in reversed(modes):
                dispatch._pop_mode(getattr(each, "_mode_key", None))

    return run


def _compiler_gives() -> bool:
    """Whether the work is that of torch's own compiler, whose threads have nothing to do with the model."""
    return any(each.f_code.co_filename.startswith(_COMPILER) for each in callers())
