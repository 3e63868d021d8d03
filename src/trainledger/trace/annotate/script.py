"""Run a script as Python would, and say how it ended."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from trainledger.spec.problem import shown
from trainledger.trace.annotate.source import Files
from trainledger.trace.fakes.refused import Refused
from trainledger.trace.recorder.notes import why_it_stopped

DONE, FAILED, STOPPED, INTERRUPTED, TERMINATED = "done", "failed", "stopped", "interrupted", "terminated"


class EnoughSteps(BaseException):
    """The program has taken as many optimizer steps as were asked for."""


class Terminated(BaseException):
    """The process was asked to end, by SIGTERM."""


@contextmanager
def terminated() -> Iterator[None]:
    """Inside, SIGTERM ends the program and not the process: what ran until then is reported."""

    def raised(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, before)  # a second one ends the process as ever
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, raised)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Ending:
    """How a program ended: ``outcome`` in a word, ``sentence`` empty where it came to its end."""

    def __init__(self) -> None:
        self.outcome, self.sentence = DONE, ""
        self.live = True


def run(program: Callable[[], object], files: Files, on_error: Callable[[str], None]) -> Ending:
    """Run a program to its end, whatever that is; ``on_error`` gets an error's traceback as Python prints it."""
    ending = Ending()
    try:
        program()
    except EnoughSteps as enough:
        ending.outcome, ending.sentence = STOPPED, str(enough)
    except SystemExit as error:
        if error.code not in (None, 0):
            ending.outcome, ending.sentence = FAILED, f"the script exited with {shown(error.code)}"
            if isinstance(error.code, str):
                on_error(error.code)
    except (KeyboardInterrupt, Terminated) as error:
        ending.outcome = INTERRUPTED if isinstance(error, KeyboardInterrupt) else TERMINATED
        at = last_line(error.__traceback__, files)
        ending.sentence = ending.outcome + (f" at {at}" if at else "")
    except BaseException as error:
        ending.outcome = FAILED
        ending.sentence = why_it_ended(error, files)
        if not isinstance(error, Refused):
            on_error("".join(traceback.format_exception(type(error), error, _of_script(error.__traceback__, files))))
    return ending


def why_it_ended(error: BaseException, files: Files) -> str:
    """One sentence: where it ended and why."""
    at = last_line(error.__traceback__, files)
    if isinstance(error, Refused):
        return f"{at}: {error}" if at else str(error)
    sentence = why_it_stopped(error, "the script")
    return sentence if not at or at in sentence else f"{sentence} (from {at})"


def last_line(trace: TracebackType | None, files: Files) -> str:
    """The innermost line of the files shown that an error passed through."""
    found = ""
    while trace is not None:
        name = files.name(trace.tb_frame.f_code.co_filename)
        if name:
            found = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _of_script(trace: TracebackType | None, files: Files) -> TracebackType | None:
    """A traceback without what comes before the script's own first frame."""
    at = trace
    while at is not None:
        if files.name(at.tb_frame.f_code.co_filename):
            return at
        at = at.tb_next
    return trace
