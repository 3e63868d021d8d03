"""Why a run ended before its last step, with the exit code that the command line gives and a restart finds."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

# What schedulers send some time before they end a job, or a terminal that is closed; SIGTERM may follow.
WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *WARNINGS)
# A scheduler signals every process of a job, torchrun's agent hands on what it gets: a rank gets one request twice.
SECONDS_OF_AN_ECHO = 5.0


class Stopped(Exception):  # noqa: N818 - it is an end, not always an error
    """A run that did not reach its last step; the text is a sentence for the person who started it."""

    exit_code = 1
    of_all_ranks = False  # whether every rank raises it at the same point, so that the first alone says it


class Diverged(Stopped):
    """The loss or the gradients left the finite numbers."""

    exit_code = 3
    of_all_ranks = True


class CannotSave(Stopped):
    """The disk took no more, or may not be written any longer; what was saved before is intact."""

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

    def __init__(self, signum: int, sentence: str, *, of_all_ranks: bool = True) -> None:
        super().__init__(sentence)
        self.exit_code, self.of_all_ranks = 128 + signum, of_all_ranks


# What torch's CPU allocator says where the system gives no memory.
_NO_MEMORY = ("can't allocate memory", "not enough memory")


@contextmanager
def memory_told() -> Iterator[None]:
    """Turn what torch says when memory runs out into `OutOfMemory`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        out = (
            isinstance(error, MemoryError)
            or type(error).__name__ == "OutOfMemoryError"
            or any(each in str(error) for each in _NO_MEMORY)
        )
        if not out:
            raise
        less = "a smaller recipe.micro_batch or recipe.activation_checkpointing = full needs less"
        raise OutOfMemory(f"The device is out of memory ({said}); {less}.") from error


class StopRequests:
    """Turns the first of `STOP_SIGNALS` into a request (``signum``); the second one ends the run at once.

    A warning that another signal follows is one request with it; so, on one of several ranks (``echoes``), is the same
    signal again within some seconds. Where the run was started with SIGHUP ignored (nohup) that stays so. Outside the
    main thread, where Python allows no handlers, signals are left as they are. ``speaks``: this rank says what it does.
    """

    def __init__(self, *, speaks: bool = True, echoes: bool = False) -> None:
        self.signum: int | None = None
        self._speaks, self._echoes = speaks, echoes
        self._newest, self._newest_at = 0, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in STOP_SIGNALS:
                if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                    continue
                self._before[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self._before and self._echoes and isinstance(exception[1], Stopped):
            # torchrun's agent sends SIGTERM to the others as soon as one rank has ended; this one still writes why.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        before, before_at = self._newest, self._newest_at
        self._newest, self._newest_at = signum, time.monotonic()
        if self.signum is None:
            self.signum = signum
            if self._speaks:
                _say_at_once("\nFinishing this step and saving a checkpoint; once more stops at once.\n")
            return
        if signum == before and self._echoes and self._newest_at - before_at < SECONDS_OF_AN_ECHO:
            return
        if signum != before and before in WARNINGS:
            return
        sentence = "Stopped at once; what came after the last checkpoint is lost." if self._speaks else ""
        raise Interrupted(signum, sentence, of_all_ranks=False)


def _say_at_once(text: str) -> None:
    """Text on standard error past Python's buffers, in which a signal may have broken off another line."""
    with suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), text.encode())


# torchrun's agent starts ranks again after any failure. A rank leaves them the exit code of an end that a restart does
# not mend; those that find one end with it at once, before they import torch (which this module does not, therefore).


ENDED_FILE = "TRAINLEDGER_ENDED"  # the environment variable with the file's path; `launch` makes one for each run
_MENDED_BY_A_RESTART = (0, 1, 5)  # done, a failure nobody foresaw, a lost rank


# A launcher that is killed hands nothing on. It holds the writing end of a FIFO beside that file, which the system
# closes however it ends. torchrun's agent (torch 2.13) closes the descriptors of its ranks: no plain pipe reaches them.
LIFELINE = "alive"  # the FIFO's name


def end_with_launcher() -> None:
    """Let this rank get SIGTERM, and so save and end, as soon as the process that has launched it is gone."""
    try:
        reading = os.open(Path(os.environ[ENDED_FILE]).with_name(LIFELINE), os.O_RDONLY | os.O_NONBLOCK)
    except (KeyError, OSError):
        return
    os.set_blocking(reading, True)

    def wait() -> None:
        os.read(reading, 1)  # nothing is ever written
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="trainledger launcher", daemon=True).start()


def leave_end(code: int) -> None:
    """Keep the exit code of this rank where a restart would end in the same way, or nobody wants one."""
    if ENDED_FILE in os.environ and code not in _MENDED_BY_A_RESTART:
        with suppress(OSError):
            Path(os.environ[ENDED_FILE]).write_text(str(code))


def left_end() -> int | None:
    """The exit code that an earlier rank has left, if one has."""
    try:
        return int(Path(os.environ[ENDED_FILE]).read_text())
    except (KeyError, OSError, ValueError):
        return None
