"""A profiler's trace from the command line: alone, or compared with the forecast of its run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from trainledger.answers.pages import allocator
from trainledger.cli.arguments import Outcome
from trainledger.observe.profiler.allocator import allocator_peak
from trainledger.observe.profiler.profile import Profile, profile_of
from trainledger.observe.profiler.ranks import Ranks, ranks_of, trace_files
from trainledger.report.document import Answer, Document
from trainledger.report.html import parts, whole_page
from trainledger.spec.frozen import frozen
from trainledger.spec.plain import replace_file
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import Overrides

_ROWS_OF_A_PAGE = 1000
Progress = Callable[[str, str], AbstractContextManager[Callable[[float, str], None]]]  # of what is done, and to what


@frozen(kw_only=True)
class File:
    """A trace or a snapshot of memory, and what it is compared with."""

    trace: str
    memory: str
    against: str | None
    run: str | None
    overrides: Overrides
    run_dir: str | None


def of_trace(args: File, html: str | None, progress: Progress) -> Document | Outcome:
    """What a trace says, compared with the forecast of its run where one is given."""
    if args.run_dir:
        raise InvalidInput([Problem("--trace", args.trace, "replaces RUN_DIR; give one of them")])
    if args.run is not None and args.against is not None:
        raise InvalidInput([Problem("--against", args.against, "cannot be combined with --run; give one of them")])
    answer = _answer(args, progress)
    document = answer.document()
    if html is None:
        return document
    whole = answer.document(most=_ROWS_OF_A_PAGE)
    replace_file(html, whole_page(whole.title, parts(whole), whole.figures()).encode())
    return Outcome(document, remarks=(f"Written to {html}",))


def of_memory(args: File) -> Document:
    """A snapshot of CUDA's allocator, compared with the account of its run's peak rank."""
    for flag, value in (("RUN_DIR", args.run_dir), ("--trace", args.trace), ("--against", args.against)):
        if value:
            raise InvalidInput([Problem("--memory", args.memory, f"cannot be combined with {flag}")])
    peak = allocator_peak(args.memory)
    if args.run is None:
        return allocator.page(peak)
    import trainledger as tl

    plan = tl.plan(args.run, args.overrides)
    return allocator.page(peak, plan.forecast.peak_by_category)


def _answer(args: File, progress: Progress) -> Answer:
    if args.against is not None:
        return _against(args, args.against, progress)
    if args.run is None:
        return _read(args.trace, progress)
    import trainledger as tl
    from trainledger.observe.profiler.beside_forecast import beside

    plan = tl.plan(args.run, args.overrides)
    found = _read(args.trace, progress)
    advice = None if plan.forecast.step_seconds is None else tl.advise(plan.run, together=0)
    return beside(found, plan, advice)


def _against(args: File, other: str, progress: Progress) -> Answer:
    """One trace against another, or a directory of ranks against another."""
    from trainledger.observe.profiler.against import against, ranks_against

    folders = [Path(each).is_dir() for each in (args.trace, other)]
    if folders[0] != folders[1]:
        what = "a directory of ranks" if folders[0] else "one trace"
        raise InvalidInput([Problem("--against", other, f"must be {what}, as --trace {args.trace} is")])
    after, before = _read(args.trace, progress), _read(other, progress)
    if isinstance(after, Ranks):
        assert isinstance(before, Ranks)
        return ranks_against(after, before)
    assert isinstance(before, Profile)
    return against(after, before)


def _read(path: str, progress: Progress) -> Profile | Ranks:
    """What a trace says, or all those in a directory, under a progress bar."""
    folder = Path(path).is_dir()
    files = trace_files(path) if folder else [Path(path)]
    size, done, name = max(sum(each.stat().st_size for each in files if each.is_file()), 1), 0, path
    with progress("reading", path) as tell:

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            tell(done / size, name)

        def say(file: str) -> None:
            nonlocal name
            name = file

        return ranks_of(path, advance, say) if folder else profile_of(path, advance)
