"""Run a program under the tracer and report what each of its lines costs."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d

from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import counted
from trainledger.trace import script
from trainledger.trace.annotate.annotation import SYNC, Annotation, File, Finding, Line, Mark, Work
from trainledger.trace.annotate.copies import reads_seen
from trainledger.trace.annotate.findings import FEWEST_READS, findings
from trainledger.trace.annotate.graphs import FEWEST_LOOKS
from trainledger.trace.annotate.loops import LineRuns
from trainledger.trace.annotate.source import Files, Shape
from trainledger.trace.annotate.watcher import Steps, Watcher
from trainledger.trace.compiled import compiled_runs_eagerly
from trainledger.trace.fakes.accelerator import Accelerator, pretended
from trainledger.trace.fakes.kernels import kernels_of
from trainledger.trace.fakes.own_code import program_followed
from trainledger.trace.fakes.rules import Counts
from trainledger.trace.fakes.values import EmptyBatches, ZeroIndices, ZeroWhereUnknown
from trainledger.trace.patches import Kwargs, around, replaced
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.source_lines import Refused
from trainledger.trace.recorder.storages import tensors_in
from trainledger.trace.script import Ending, as_main, compiled

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
    assume: Sequence[str] = (),
    assume_asserts: bool = False,
    on_error: OnError | None = None,
) -> Annotation:
    """What each line of a program costs: a script, run as ``__main__`` with ``arguments``, or a function of yours.

    It runs for real, or with ``fake`` on fake tensors: then nothing is computed, a value that is read is assumed to
    be 0, and masks find as many elements as ``assume`` says (`trace`), as ``notes`` say. ``device`` "cuda" lets a
    program for one GPU run on a machine without any: its tensors pass for the GPU's. Shown are the lines of the script
    and of the modules in its directory, or of the ``files`` that these patterns name; ``steps`` ends it after so many
    optimizer steps; with ``shapes`` the tensors of each line are shown; with ``assume_asserts`` each assert of a script
    on fake tensors holds.

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
        request = _Request(path, tuple(files) or (path,), fake, device, steps, shapes, script=False, assume=assume)
        return _run(request, lambda: function(*arguments), on_error)
    path = os.fspath(program)
    asks = fake and assume_asserts
    code = compiled(path, ask_asserts=asks)
    request = _Request(code.co_filename, tuple(files), fake, device, steps, shapes, script=True, assume=assume)
    with as_main(path, [str(argument) for argument in arguments]) as module:
        if asks:
            request = request._replace(asserts=module.__dict__)
        return _run(request, lambda: exec(code, module.__dict__), on_error)


def _by_file(lines: Counter[str]) -> Iterator[tuple[str, int]]:
    """The lines of each file as ``train.py:3, 8 (2)``, with their counts above 1, and the sum of these."""
    files: dict[str, dict[str, int]] = {}
    for line, count in lines.items():
        name, _, number = line.rpartition(":")
        if count:
            files.setdefault(name, {})[number] = count
    for name, counts in files.items():
        numbers = (
            number if count == 1 or len(counts) == 1 else f"{number} ({count})" for number, count in counts.items()
        )
        yield f"{name}:{', '.join(numbers)}".lstrip(":"), sum(counts.values())


def _address(real: Callable[..., int], storage: torch.UntypedStorage) -> int:
    """An address of its own for a fake storage, which has none: torch 2.13 gives 0 for each, as if all were one."""
    return int(storage._cdata) if storage.device.type == "meta" else real(storage)


def _check(device: str | None, steps: int | None, fake: bool, program: object, arguments: Sequence[Any]) -> None:
    problems = []
    if device is not None and device not in DEVICES:
        problems.append(Problem("device", device, "must be one that can be pretended", DEVICES[0]))
    if steps is not None and steps < 1:
        problems.append(Problem("steps", steps, "must be at least 1", 1))
    if fake and callable(program) and arguments:
        rule = "a function on fake tensors creates its own: give it no arguments, and build the model inside"
        problems.append(Problem("arguments", None, rule))
    if problems:
        raise InvalidInput(problems)


def _file_of(function: Callable[..., object]) -> str:
    """The file of a function, below decorators and bound arguments; InvalidInput for one without any source."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        rule = "is not written in Python and has no lines; wrap it in a Python function"
        raise InvalidInput([Problem("program", repr(function), rule)])
    return str(code.co_filename)


class _Request(NamedTuple):
    path: str
    files: Sequence[str]
    fake: bool
    device: str | None
    steps: int | None
    shapes: bool
    assume: Sequence[str]
    script: bool  # or a function, which may use tensors that were there before
    asserts: dict[str, Any] | None = None  # the names of a script whose asserts hold


def _run(request: _Request, program: Callable[[], object], on_error: OnError | None) -> Annotation:
    files = Files(request.path, request.files)
    files.name(request.path)
    watcher = Watcher(files, request.shapes, from_start=request.script)
    account, lines, recorder = watcher.account, watcher.lines, watcher.recorder
    notes: dict[str, None] = {}
    guesses: Counter[str] = Counter()
    runs = LineRuns(files, account.end_line, watcher.tally, watcher.loops.left)
    steps = Steps(watcher, files, request.steps)
    note = notes.setdefault

    def here() -> str:
        return lines.here() or "a line of a library"

    counts = Counts(request.assume, here)

    def guessed() -> None:
        line = here()
        guesses[line] += 1
        if guesses[line] > MOST_GUESSES:
            raise Refused(f"more than {MOST_GUESSES:,} unknown values were read here")

    def decided() -> None:
        line = here()
        steps.decided[line] += 1
        if steps.decided[line] > MOST_DECISIONS:
            rule = f"{MOST_DECISIONS:,} unknown conditions were read here in one step: a loop would never end"
            raise Refused(rule)

    failing: Counter[str] = Counter()

    def holds(value: object) -> bool:
        failing[here()] += not value
        return True

    if request.asserts is not None:
        request.asserts[script.HOLDS] = holds
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(replaced(torch, "compile", around(partial(_eager, note))))
        enter(steps.followed())
        if request.fake:
            mode = enter(FakeTensorMode(allow_non_fake_inputs=True))
            enter(program_followed(mode, note, watcher.launched, counts))
            enter(kernels_of("sm90" if request.device == "cuda" else "cpu"))  # `pretended` has generation 9
            enter(ZeroWhereUnknown(lambda: steps.in_step, guessed))
            enter(ZeroIndices(guessed, decided, EmptyBatches(here)))
            enter(replaced(torch.UntypedStorage, "data_ptr", around(_address)))
            enter(replaced(dist, "init_process_group", around(partial(_alone, stack, note))))
        else:
            enter(replaced(torch, "load", around(partial(_loaded, recorder))))
        if request.device is not None:
            accelerator = Accelerator(recorder, account.settle)
            accelerator.gpu.note = note
            watcher.device_of, watcher.after = accelerator.device_of, accelerator.after
            watcher.dies.append(accelerator.gone)
            enter(pretended(accelerator, lambda: watcher.synchronized("torch.cuda.synchronize", [], "cuda")))
        enter(reads_seen(watcher.synchronized, guessed))
        enter(watcher.habits.seen())
        enter(recorder)
        began = time.perf_counter()
        with runs, script.terminated():
            ending = script.run(program, files, on_error or (lambda text: print(text, file=sys.stderr)))
        seconds = time.perf_counter() - began
        account.settle()
        ends = {name: line.live for name, line in account.lines.items()}
    for where, count in _by_file(failing):
        asserts = "the assert at {} fails" if count == 1 else "the asserts at {} fail"
        note(f"{asserts.format(where)} on fake tensors and {'is' if count == 1 else 'are'} assumed to hold")
    for where, count in _by_file(guesses):
        note(f"{counted(count, 'value')} read at {where} assumed to be 0: fake tensors have no values")
    notes |= dict.fromkeys(counts.notes())
    if request.device is not None and not request.fake:
        note("the kernels are those of the CPU; with --fake they are those of CUDA")
    notes |= dict.fromkeys(filter(None, (too_few_steps(steps.taken), without_cuda(ending.sentence, request.device))))
    if not runs.counted:
        note("runs of lines were not counted: a debugger or coverage tool already traces them")
    found, uncounted = findings(watcher, files, steps.holder, ending), sorted(recorder.uncounted.items())
    others = (line for name, line in account.lines.items() if name.rpartition(":")[0] not in files.shown())
    elsewhere = sum((line.own + line.backward + line.recompute for line in others), Work())
    facts: Kwargs = {"total": account.total, "elsewhere": elsewhere, "seconds": seconds}
    facts |= {"peak_nbytes": watcher.peak_nbytes, "live_nbytes": sum(ends.values()), "steps": steps.taken}
    facts |= {"backwards": recorder.phases.micro_batches, "fake": request.fake, "device": request.device or ""}
    facts |= {"ended": ending.sentence, "outcome": ending.outcome, "notes": tuple(notes)}
    facts["uncounted"] = tuple((name, times, watcher.uncounted.get(name, "")) for name, times in uncounted)
    shown = tuple(_files(watcher, files, runs, ends))
    return Annotation(files.name(files.script), shown, found, **facts)


def too_few_steps(steps: int) -> str:
    """What so few optimizer steps cannot show; "" for none or enough.

    >>> too_few_steps(2)
    'too few steps to judge: 2; a graph kept alive is found from 4 on, a synchronization in a loop from 3 on'
    """
    if not 0 < steps < FEWEST_LOOKS:
        return ""
    sentence = f"too few steps to judge: {steps}; a graph kept alive is found from {FEWEST_LOOKS} on"
    return sentence + (f", a synchronization in a loop from {FEWEST_READS} on" if steps < FEWEST_READS else "")


def without_cuda(sentence: str, device: str | None) -> str:
    """What helps a program that ended because it found no GPU; "" for any other."""
    if device is not None or not any(each in sentence for each in _NO_GPU):
        return ""
    return 'a script for one GPU runs on a machine without any with --device cuda (in Python device="cuda")'


def _loaded(recorder: Recorder, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # What a file holds is in memory from here on, which no operation shows.
    found = load(*args, **kwargs)
    recorder.appear(tensors_in(found), "torch.load")
    return found


def _alone(
    stack: ExitStack, note: Callable[[str], object], before: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    """A program that begins a process group is the only rank of it."""
    # Most of torch.distributed, which few programs need
    from trainledger.trace.distributed.world import process_groups

    size = int(kwargs.get("world_size", -1))
    size = size if size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        raise Refused(f"a program of {size} ranks is no single process; trace --world-size {size} accounts for a rank")
    stack.enter_context(process_groups(1, 0))
    note("a process group of one rank: FSDP2 gathers and frees no memory that is followed here")
    distributed_c10d.init_process_group(*args, **kwargs)


def _eager(note: Callable[[str], object], compile: Any, model: Any = None, **options: Any) -> Any:
    note("torch.compile was left out: operations run one by one, before fusion")
    return model if model is not None else lambda function: function


def _files(watcher: Watcher, files: Files, runs: LineRuns, ends: dict[str, int]) -> Iterator[File]:
    """The script, and the other files of which a line did something; ``ends`` are live bytes when it ended."""
    worked = {name.rpartition(":")[0] for name in watcher.account.lines}
    for name, path in files.shown().items():
        if path == files.script or name in worked:
            shape = files.shape(path)
            numbers = range(1, len(shape.lines) + 1)
            yield File(name, tuple(_line(watcher, shape, runs, ends, name, number) for number in numbers))


def _line(watcher: Watcher, shape: Shape, runs: LineRuns, ends: dict[str, int], name: str, number: int) -> Line:
    at, text, statement = f"{name}:{number}", shape.lines[number - 1], shape.statement(number)
    line = watcher.account.lines.get(at)
    ran = runs.runs.get((name, statement), 0) if statement == number or line is not None else 0
    loop = runs.loops.get((name, number))
    marks = () if loop is None else loop.marks
    syncs = [Mark(SYNC, sync.what, sync.times) for sync in watcher.syncs.waits() if sync.caller_line == at]
    if line is None:
        return Line(number, text, ran, marks=(*marks, *syncs))
    work = line.own, line.backward, line.recompute
    live = line.alive, ends.get(at, 0), line.most_alive, line.alive_of_backward
    return Line(number, text, ran, *work, *live, (*marks, *line.marks, *syncs), tuple(line.shown))


@contextmanager
def watched_code(script: str) -> Iterator[Callable[[], tuple[Finding, ...]]]:
    """Observe what runs inside, the lines of a script and of the modules beside it; the findings are asked after it."""
    files = Files(script)
    watcher = Watcher(files)
    steps = Steps(watcher, files, None)
    with ExitStack() as stack:
        stack.enter_context(steps.followed())
        stack.enter_context(reads_seen(watcher.synchronized, lambda: None))
        stack.enter_context(compiled_runs_eagerly())
        stack.enter_context(watcher.recorder)
        yield lambda: findings(watcher, files, steps.holder, Ending())
        steps.end_step()  # the context ends with an update
    watcher.account.settle()
