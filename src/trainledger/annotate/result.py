"""The annotation of a program that has run."""

from __future__ import annotations

from trainledger.annotate.account import LineAccount
from trainledger.annotate.annotation import BACKWARD, COPY, LOOP, SYNC, VIEW, Annotation, File, Line, Mark, Work
from trainledger.annotate.findings import findings
from trainledger.annotate.holders import Holder
from trainledger.annotate.line_runs import LineRuns, Loop
from trainledger.annotate.script import Ending
from trainledger.annotate.source import Files
from trainledger.annotate.watcher import Watcher
from trainledger.units import counted, format_flops, format_nbytes


def annotation_of(
    watcher: Watcher, files: Files, runs: LineRuns, ending: Ending, holder: Holder | None, ends: dict[str, int], *,
    seconds: float, fake: bool, device: str, steps: int, notes: tuple[str, ...],
) -> Annotation:  # fmt: skip
    """All that was seen, as data; ``ends`` are the live bytes of each line when the program ended."""
    account = watcher.account
    shown = files.shown()
    worked = {name.rpartition(":")[0] for name in account.lines}
    made = tuple(
        File(name, tuple(_line(watcher, files, runs, name, path, number, ends) for number in _numbers(files, path)))
        for name, path in shown.items()
        if path == files.script or name in worked
    )
    elsewhere = Work()
    for name, line in account.lines.items():
        if name.rpartition(":")[0] not in shown:
            elsewhere += line.own.work + line.backward.work + line.recompute.work
    return Annotation(
        script=next(iter(shown)), files=made, findings=findings(watcher, files, holder, ending),
        total=account.total.work, elsewhere=elsewhere, peak_nbytes=watcher.peak_nbytes,
        live_nbytes=sum(ends.values()), steps=steps, backwards=watcher.recorder.micro_batches, seconds=seconds,
        fake=fake, device=device, ended=ending.sentence, outcome=ending.outcome, notes=notes,
        uncounted=tuple(
            (name, times, watcher.uncounted.get(name, "")) for name, times in sorted(watcher.recorder.uncounted.items())
        ),
    )  # fmt: skip


def _numbers(files: Files, path: str) -> range:
    return range(1, len(files.shape(path).lines) + 1)


def _line(
    watcher: Watcher, files: Files, runs: LineRuns, name: str, path: str, number: int, ends: dict[str, int]
) -> Line:  # fmt: skip
    shape = files.shape(path)
    at = f"{name}:{number}"
    line = watcher.account.lines.get(at)
    statement = shape.statement(number)
    ran = runs.runs.get((name, statement), 0) if statement == number or line is not None else 0
    loop = runs.loops.get((name, number))
    marks = [*(_loop_marks(loop) if loop is not None else ())]
    text = shape.lines[number - 1]
    syncs = [Mark(SYNC, each.what, each.times) for each in watcher.syncs.waits() if each.caller_line == at]
    if line is None:
        return Line(number, text, ran, marks=(*marks, *syncs))
    return Line(
        number, text, ran, line.own.work, line.backward.work, line.recompute.work, alive=line.alive,
        at_end=ends.get(at, 0), most_alive=line.most_alive, alive_of_backward=line.alive_of_backward,
        marks=(*marks, *_marks(line), *syncs), tensors=tuple(line.shown),
    )  # fmt: skip


def _loop_marks(loop: Loop) -> tuple[Mark, ...]:
    if not loop.iterations or not (loop.flops or loop.moved):
        return ()
    flops, moved = loop.flops // loop.iterations, loop.moved // loop.iterations
    each = f"{format_flops(flops)} and {format_nbytes(moved)} moved each"
    grown = loop.grown // loop.pairs if loop.pairs else 0
    kept = f", {format_nbytes(grown)} more alive after each" if grown > 0 else ""
    return (Mark(LOOP, f"{counted(loop.iterations, 'iteration')}, {each}{kept}", loop.iterations, max(0, grown)),)


def _marks(line: LineAccount) -> list[Mark]:
    marks = [Mark(VIEW, ", ".join(line.views), line.views.total())] if line.views else []
    copies: dict[str, Mark] = {}
    for (why, _, inside, backward), copy in line.copies.items():
        what = f"{why}, {copy.source} to {copy.to}" if why == "dtype" else why
        where = " in backward" if backward else f" inside {inside}" if inside else ""
        why_and_where = f"{what}{f' by {copy.call}' if copy.call and not inside else ''}{where}"
        before = copies.get(why_and_where, Mark(COPY))
        copies[why_and_where] = Mark(COPY, why_and_where, before.times + copy.times, before.nbytes + copy.nbytes)
    marks += copies.values()
    if line.ran_backward is not None and line.ran_backward.operations:
        ran = line.ran_backward
        what = f"ran {format_flops(ran.flops)} of {counted(len(line.ran_lines - {''}), 'line')}, shown there"
        marks.append(Mark(BACKWARD, what, ran.operations, ran.allocated))
    return marks
