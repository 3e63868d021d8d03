"""Sentences that a ledger says of how it was recorded: what is missing, and where and why a partial trace ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from torch import nn

from trainledger.trace.fakes.refused import Refused
from trainledger.trace.recorder.attribution import compiled_parts, plain_name
from trainledger.trace.recorder.source_lines import is_installed, is_users, shown_file

_WHY = {
    "DataDependentOutputException": "its result is a value, which fake tensors do not have",
    "DynamicOutputShapeException": "how large its result is depends on values, which fake tensors do not have",
    "UnsupportedOperatorException": "it has no rule for shapes alone; torch.library.register_fake gives it one",
}
_LOGGER = "torch._subclasses.fake_tensor"
_LINE = "failed while attempting to run meta for"


def ran_eagerly(model: nn.Module) -> Iterator[str]:
    """That compiled modules ran eagerly, as they do under any dispatch mode."""
    names = [plain_name(name) or "the model" for name, _ in compiled_parts(model)]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        are = "are" if more else "is"
        yield f"{names[0]}{more} {are} compiled, and ran eagerly while each operation was recorded"


def lower_bound(uncounted: Mapping[str, int]) -> Iterator[str]:
    """What the peak lacks where operators ran of which only the results are known."""
    if uncounted:
        yield f"the peak is a lower bound: what has no rule may allocate more than its results ({', '.join(uncounted)})"


def unseen_or_threaded(unseen: int, calls: int) -> Iterator[str]:
    """That ``unseen`` tensors were made by operations that were not recorded, and that ``calls`` ran in threads."""
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
    if own and own != where:  # inside a library, whose helper wanted a file or a network, say
        at += f", called at {own}"
    if isinstance(error, Refused):
        return f"{phase} ended{at}: {error}"
    known = _WHY.get(type(error).__name__)
    if known is not None:
        operator: Any = getattr(error, "func", None) or (error.args[0] if error.args else "an operator")
        return f"{phase} ended{at}: {operator} cannot go on: {known}"
    try:
        first = (str(error).strip().splitlines() or [""])[0]
    except Exception:  # an error that cannot even say what it is
        first = "(it has no words)"
    return f"{phase} ended{at}: {type(error).__name__}: {first[:300]}"


def _lines(trace: TracebackType | None) -> tuple[str, str]:
    """The innermost line that an error passed through, but for torch's and ours; and that of code not installed."""
    found = own = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_users(file):
            found = f"{shown_file(file)}:{trace.tb_lineno}"
            own = own if is_installed(file) else found
        trace = trace.tb_next
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
