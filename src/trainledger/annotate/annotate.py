"""Run a program under the tracer and report what each of its lines costs."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainledger.annotate import script
from trainledger.annotate.accelerator import Accelerator, pretended
from trainledger.annotate.account import Account
from trainledger.annotate.annotation import Annotation
from trainledger.annotate.fake_values import ZeroIndices, without_values
from trainledger.annotate.findings import FEWEST_READS
from trainledger.annotate.graphs import FEWEST_LOOKS
from trainledger.annotate.line_runs import LineRuns
from trainledger.annotate.result import annotation_of
from trainledger.annotate.source import Callers, Files
from trainledger.annotate.steps import Steps
from trainledger.annotate.syncs import reads_seen
from trainledger.annotate.watcher import Watcher
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.trace.fakes.kernels import kernels_of
from trainledger.trace.fakes.rules import as_if_real, fake_rules
from trainledger.trace.fakes.scalar_reads import ZeroWhereUnknown
from trainledger.trace.patches import replaced
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.source_lines import Lines
from trainledger.units import counted

DEVICES = ("cuda",)
_NO_GPU = ("not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs are available", "device type cuda")
MOST_DECISIONS = 200  # at one line in one step
MOST_GUESSES = 100_000  # of one line: a loop that waits for a value would never end

OnError = Callable[[str], None]


def annotate(
    program: str | os.PathLike[str] | Callable[..., object],
    arguments: Sequence[Any] = (),
    *,
    fake: bool = False,
    device: str | None = None,
    files: Sequence[str] = (),
    steps: int | None = None,
    shapes: bool = False,
    on_error: OnError | None = None,
) -> Annotation:
    """What each line of a program costs: a script, run as ``__main__`` with ``arguments``, or a function of yours.

    It runs for real, or with ``fake`` on fake tensors: then nothing is computed, and a value that is read is assumed to
    be 0, as ``notes`` say. ``device`` "cuda" lets a program for one GPU run on a machine without any: its tensors pass
    for the GPU's. Shown are the lines of the script and of the modules in its directory, or of the ``files`` that these
    patterns name; ``steps`` ends it after so many optimizer steps; with ``shapes`` the tensors of each line are shown.

    However the program ends, what ran is reported; ``ended`` says why where it did not come to its end, and
    ``on_error`` is called with the traceback. Raises InvalidInput where there is no such script.

    >>> def double():
    ...     x = torch.ones(4, 8)
    ...     return (x.t() * 2).sum()
    >>> annotate(double).total.flops
    64
    """
    _check(device, steps, fake, program, arguments)
    if callable(program):
        function = program
        path = _file_of(program)
        request = _Request(path, tuple(files) or (path,), fake, device, steps, shapes)
        return _run(request, lambda: function(*arguments), on_error)
    path = os.fspath(program)
    code = script.compiled(path)
    request = _Request(code.co_filename, tuple(files), fake, device, steps, shapes)
    with script.as_main(path, [str(each) for each in arguments]) as module:
        return _run(request, lambda: exec(code, module.__dict__), on_error)


def _check(device: str | None, steps: int | None, fake: bool, program: object, arguments: Sequence[Any]) -> None:
    problems = []
    if device is not None and device not in DEVICES:
        problems.append(Problem("device", device, "must be one that can be pretended", DEVICES[0]))
    if steps is not None and steps < 1:
        problems.append(Problem("steps", steps, "must be at least 1", 1))
    if fake and callable(program) and arguments:
        rule = "a function that runs on fake tensors makes them itself; take no arguments, and build the model inside"
        problems.append(Problem("arguments", None, rule))
    if problems:
        raise InvalidInput(problems)


def _file_of(function: Callable[..., object]) -> str:
    """The file of a function, below decorators and bound arguments; InvalidInput for one without any source."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        rule = "is no function written in Python, so that it has no lines; wrap it into one"
        raise InvalidInput([Problem("program", repr(function), rule)])
    return str(code.co_filename)


class _Request:
    def __init__(
        self, path: str, files: Sequence[str], fake: bool, device: str | None, steps: int | None, shapes: bool
    ) -> None:
        self.path, self.files, self.fake, self.device = path, files, fake, device
        self.steps, self.shapes = steps, shapes


def _run(request: _Request, program: Callable[[], object], on_error: OnError | None) -> Annotation:
    files = Files(request.path, request.files)
    files.name(request.path)
    lines = Lines(files.counts)
    account = Account()
    callers = Callers(files)
    watcher = Watcher(account, callers, lines, files, request.shapes)
    recorder = watcher.recorder = Recorder(
        nn.Module(), find_phases=True, lines=lines, observers=(watcher,), keeps_events=False
    )
    notes: dict[str, None] = {}
    guesses: Counter[str] = Counter()
    runs = LineRuns(files, account.end_line, watcher.tally, watcher.loops.left)
    steps = Steps(watcher, files, request.steps)
    note = notes.setdefault

    def guessed() -> None:
        line = lines.here() or "a line of a library"
        guesses[line] += 1
        if guesses[line] > MOST_GUESSES:
            raise script.Refused(f"more than {MOST_GUESSES:,} unknown values were read here")

    def decided() -> None:
        line = lines.here() or "a line of a library"
        steps.decided[line] += 1
        if steps.decided[line] > MOST_DECISIONS:
            rule = f"{MOST_DECISIONS:,} unknown conditions were read here in one step: a loop would never end"
            raise script.Refused(rule)

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(replaced(torch, "compile", lambda _: _eager(note)))
        enter(steps.followed())
        if request.fake:
            enter(FakeTensorMode(allow_non_fake_inputs=True))
            enter(without_values(note))
            enter(
                kernels_of("sm90" if request.device == "cuda" else "cpu")
            )  # `pretended` says that it is of generation 9
            enter(ZeroWhereUnknown(lambda: steps.in_step, guessed))
            enter(ZeroIndices(guessed, decided))
            enter(fake_rules())
            enter(as_if_real())
        if request.device is not None:
            accelerator = Accelerator(recorder, account.settle)
            watcher.device_of, watcher.after = accelerator.device_of, accelerator.after
            watcher.dies.append(accelerator.gone)
            enter(pretended(accelerator, lambda: watcher.synchronized("torch.cuda.synchronize", [], "cuda")))
        enter(reads_seen(watcher.synchronized, guessed))
        enter(recorder)
        began = time.perf_counter()
        with runs:
            ending = script.run(program, files, on_error or (lambda text: print(text, file=sys.stderr)))
        seconds = time.perf_counter() - began
        account.settle()
        ends = {name: line.live for name, line in account.lines.items()}
    for line, count in guesses.items():
        note(f"{counted(count, 'value')} read at {line} assumed to be 0: fake tensors have no values")
    if request.device is not None and not request.fake:
        note("the kernels are those of the CPU; with --fake they are those of CUDA")
    for each in (too_few_steps(steps.taken), without_cuda(ending.sentence, request.device)):
        if each:
            note(each)
    if not runs.counted:
        note("lines were not counted: a debugger or a coverage tool follows them already")
    return annotation_of(
        watcher, files, runs, ending, steps.holder, ends,
        seconds=seconds, fake=request.fake, device=request.device or "", steps=steps.taken, notes=tuple(notes),
    )  # fmt: skip


def too_few_steps(steps: int) -> str:
    """What so few optimizer steps cannot show; "" for none or enough.

    >>> too_few_steps(2)
    'too few steps to judge: 2; a graph that is kept alive shows from 4 on, a synchronization in the loop from 3 on'
    """
    if not 0 < steps < FEWEST_LOOKS:
        return ""
    sentence = f"too few steps to judge: {steps}; a graph that is kept alive shows from {FEWEST_LOOKS} on"
    return sentence + (f", a synchronization in the loop from {FEWEST_READS} on" if steps < FEWEST_READS else "")


def without_cuda(sentence: str, device: str | None) -> str:
    """What helps a program that ended because it found no GPU; "" for any other."""
    if device is not None or not any(each in sentence for each in _NO_GPU):
        return ""
    return 'a script for one GPU runs on a machine without any with --device cuda (in Python device="cuda")'


def _eager(note: Callable[[str], None]) -> Callable[..., Any]:
    def compile(model: Any = None, **options: Any) -> Any:
        note("torch.compile was left out: operations are shown as they run one by one, before fusion")
        return model if model is not None else lambda each: each

    return compile
