"""Why a run ended before its last step, with the exit code that the command line gives."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any, Self


class Stopped(Exception):  # noqa: N818 - it is an end, not always an error
    """A run that did not reach its last step; the text is a sentence for the person who started it."""

    exit_code = 1


class Diverged(Stopped):
    """The loss or the gradients left the finite numbers."""

    exit_code = 3


class CannotSave(Stopped):
    """The disk took no more; what was saved before is intact."""

    exit_code = 4


class Interrupted(Stopped):
    """A signal asked for the end: 128 + its number, as shells count it (130 for Ctrl-C, 143 for SIGTERM)."""

    def __init__(self, signum: int, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = 128 + signum


class StopRequests:
    """Turns the first Ctrl-C or SIGTERM into a request (``signum``); the second one ends the run at once.

    Outside the main thread, where Python allows no handlers, signals are left as they are.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
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
