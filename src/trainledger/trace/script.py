"""A script read and run as Python would run it, and how it ended."""

from __future__ import annotations

import ast
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType, TracebackType

from trainledger.spec.durable import LARGEST_NBYTES, opened
from trainledger.spec.problem import InvalidInput, Problem, shown
from trainledger.trace.annotate.source import Files
from trainledger.trace.recorder.source_lines import Refused, why_it_stopped

HOLDS = "__trainledger_holds__"  # the name that rewritten asserts call


class _Asserts(ast.NodeTransformer):
    """``assert E`` asks ``HOLDS(E)``."""

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        holds = ast.copy_location(ast.Name(HOLDS, ast.Load()), node.test)
        node.test = ast.copy_location(ast.Call(holds, [node.test], []), node.test)
        return node


def compiled(path: str, *, ask_asserts: bool = False) -> CodeType:
    """The code of a script; raises InvalidInput where it cannot be read or is no Python.

    With ``ask_asserts`` its asserts call `HOLDS`, which the module must have.
    """
    if os.path.isdir(path):
        raise InvalidInput([Problem("script", path, "is a directory; name the file to run, such as train.py")])
    try:
        with opened(path) as file:
            source = file.read(LARGEST_NBYTES)
    except OSError as error:
        raise InvalidInput([Problem("script", path, f"cannot be read: {error.strerror or error}")]) from None
    try:
        tree = _Asserts().visit(ast.parse(source)) if ask_asserts else source
        return compile(tree, os.path.abspath(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise InvalidInput(
            [Problem("script", path, f"is not Python: {error.msg} at line {error.lineno or 1}")]
        ) from None
    except ValueError as error:
        raise InvalidInput([Problem("script", path, f"is not Python: {error}")]) from None


@contextmanager
def as_main(path: str, arguments: Sequence[str]) -> Iterator[ModuleType]:
    """A module ``__main__`` for a script, with ``sys.argv`` and ``sys.path[0]`` as Python sets them."""
    module = ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    module.__dict__["__cached__"] = None
    before = sys.argv, sys.path[:], sys.modules.get("__main__")
    sys.argv = [path, *arguments]
    # The first place is that of the running program where Python has set it so, else it is left in place.
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.modules["__main__"] = module
    try:
        yield module
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        if before[2] is not None:
            sys.modules["__main__"] = before[2]


def program_of(path: str, arguments: Sequence[str]) -> Callable[[], None]:
    """A function that runs a script with arguments, each time anew; an exit without an error is its end."""
    code = compiled(path)

    def program() -> None:
        with as_main(path, arguments) as module:
            try:
                exec(code, module.__dict__)
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise

    return program


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
    lines = [(files.name(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(trace)]
    return next((f"{name}:{line}" for name, line in reversed(lines) if name), "")


def _of_script(trace: TracebackType | None, files: Files) -> TracebackType | None:
    """A traceback without what comes before the script's own first frame."""
    at = trace
    while at is not None:
        if files.name(at.tb_frame.f_code.co_filename):
            return at
        at = at.tb_next
    return trace
