"""A trace that cannot go on: what ran so far is a ledger, and a sentence says where and why it ends."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from torch import Tensor

from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.source_lines import is_users, shown_file

_WHY = {
    "DataDependentOutputException": "its result is a value, which fake tensors do not have",
    "DynamicOutputShapeException": "how large its result is depends on values, which fake tensors do not have",
    "UnsupportedOperatorException": "it has no rule for shapes alone; torch.library.register_fake gives it one",
}


class NoScalarLossError(ValueError):
    """What should be the loss is no single number."""


def scalar_loss(value: object) -> Tensor:
    """A loss that a backward can begin with; raises `NoScalarLossError` where it is none."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    told = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise NoScalarLossError(f"the loss must be a scalar tensor, not {told}; give one with loss=")


@contextmanager
def as_far_as_it_goes(recorder: Recorder) -> Iterator[None]:
    """Let an error of the traced code end the trace and not more; one before anything ran is raised as it is.

    The sentence stands in the ledger's ``partial`` and is warned of.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, NoScalarLossError) or not recorder.events:
            raise
        end_here(recorder, error, recorder.latest_phase)


def end_here(recorder: Recorder, error: BaseException, phase: str) -> None:
    """Mark what is recorded as partial, and warn of it."""
    recorder.partial = why_it_stopped(error, phase)
    warnings.warn(f"the trace is partial: {recorder.partial}", RuntimeWarning, stacklevel=5)


def why_it_stopped(error: BaseException, phase: str) -> str:
    """The sentence: in which phase, at which line, at which operator, and why."""
    where = _line(error.__traceback__)
    at = f" at {where}" if where else ""
    known = _WHY.get(type(error).__name__)
    if known is not None:
        operator: Any = getattr(error, "func", None) or (error.args[0] if error.args else "an operator")
        return f"{phase} ended{at}: {operator} cannot go on: {known}"
    try:
        first = (str(error).strip().splitlines() or [""])[0]
    except Exception:  # an error that cannot even say what it is
        first = "(it has no words)"
    return f"{phase} ended{at}: {type(error).__name__}: {first[:300]}"


def _line(trace: TracebackType | None) -> str:
    """The innermost line of the user's code that an error passed through."""
    found = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_users(file):
            found = f"{shown_file(file)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
