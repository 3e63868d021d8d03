"""Why a run ended before its last step, with the exit code that the command line gives."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

import torch

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):  # noqa: N818 - it is an end, not always an error
    """A run that did not reach its last step; the text is a sentence for the person who started it."""

    exit_code = 1


class Diverged(Stopped):
    """The loss or the gradients left the finite numbers."""

    exit_code = 3


class CannotSave(Stopped):
    """The disk took no more; what was saved before is intact."""

    exit_code = 4


class LostRank(Stopped):
    """Another process of the run is gone, or did not answer within the time that collectives wait."""

    exit_code = 5


class EndedElsewhere(Stopped):
    """Another rank ended the run, and says why; this one ends with the same exit code and says nothing."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__("")
        self.rank, self.exit_code = rank, exit_code


class OutOfMemory(Stopped):
    """The device had no room for what the run needs."""

    exit_code = 6


class FailedBefore(Stopped):
    """A restart after an end that a restart does not mend; the exit code is that of the first end."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class Interrupted(Stopped):
    """A signal asked for the end: 128 + its number, as shells count it (130 for Ctrl-C, 143 for SIGTERM)."""

    def __init__(self, signum: int, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = 128 + signum


# What torch's CPU allocator says where the system gives no memory.
_NO_MEMORY = ("can't allocate memory", "not enough memory")


@contextmanager
def memory_told() -> Iterator[None]:
    """Turn what torch says when memory runs out into `OutOfMemory`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        out = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(each in str(error) for each in _NO_MEMORY)
        if not out:
            raise
        less = "a smaller recipe.micro_batch or recipe.activation_checkpointing = full needs less"
        raise OutOfMemory(f"The device is out of memory ({said}); {less}.") from error


class StopRequests:
    """Turns the first Ctrl-C or SIGTERM into a request (``signum``); the second one ends the run at once.

    Outside the main thread, where Python allows no handlers, signals are left as they are.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in STOP_SIGNALS:
                self._before[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise Interrupted(signum, "Stopped at once; what came after the last checkpoint is lost.")
        self.signum = signum
        print("\nFinishing this step and saving a checkpoint; once more stops at once.", file=sys.stderr, flush=True)
