"""Verbs that measure one thing of a machine: matmuls, copies, the data loader, collectives."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from trainledger.answers.load import load_file
from trainledger.answers.machine import kernels_of, machine_of
from trainledger.answers.question import choice, count, question, text, word
from trainledger.cli.arguments import Outcome
from trainledger.cli.asking import while_searching
from trainledger.cli.measure import Backend, Html, progress_bar, with_html
from trainledger.forecast.predict.predict import NO_MACHINE, predict
from trainledger.observe.measure.rates import LoaderTimes
from trainledger.report.document import Document
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.reading import Overrides
from trainledger.spec.run import Run

_DTYPES = ("fp32", "bf16")
_LARGEST = 2**20


@question(plots=False)
def measure_matmul(
    *,
    shapes: Annotated[
        Sequence[str], text("matmuls [M, K] @ [K, N], such as 1024x1024x512", several=True, nargs="+", metavar="MxNxK")
    ] = (),
    sweep: Annotated[
        str | None, choice("instead: a sweep of batch (rows) or width (columns and inner size)", ("batch", "width"))
    ] = None,
    dtype: Annotated[str, text("fp32, bf16 or fp32,bf16 (both, where bf16 is not emulated)", metavar="LIST")] = "",
    backend: Backend = "auto",
    html: Html = None,
) -> Document | Outcome:
    """Time matmuls: FLOP/s, bytes/s and share of the best by shape, dtype and layout of the factors; the roofline."""
    sizes, dtypes = [_shape(shape) for shape in shapes], _dtypes(dtype)
    if sweep is not None and sizes:
        raise InvalidInput([Problem("--sweep", sweep, "replaces --shapes; give one of them")])
    with progress_bar() as tell:
        from trainledger.observe.measure.matmuls import measure_matmuls

        matmul_times = measure_matmuls(backend, shapes=sizes, sweep=sweep, dtypes=dtypes, tell=tell)
    return with_html(matmul_times.document(), html)


@question(plots=False)
def measure_copy(
    *,
    backend: Backend = "auto",
    folder: Annotated[
        str | None,
        text("the disk that is measured: a folder on it (the temporary folder)", flag="--dir", metavar="DIR"),
    ] = None,
    html: Html = None,
) -> Document | Outcome:
    """Time copies: view against copy, contiguous against strided, host and device, disk; sizes from cache to memory."""
    if folder is not None and not os.path.isdir(folder):
        raise InvalidInput([Problem("--dir", folder, "is not a directory")])
    with progress_bar() as tell:
        from trainledger.observe.measure.copies import measure_copies

        copy_times = measure_copies(backend, folder=folder, tell=tell)
    return with_html(copy_times.document(), html)


@question(plots=False)
def measure_loader(
    run: Annotated[str | None, word("a run file, whose data is read (none: text that is made here)")] = None,
    overrides: Overrides = (),
    *,
    html: Html = None,
) -> Document | Outcome:
    """Time the data loader by workers: tokens/s of a run's data, or of made text, against what its steps need."""
    if run is None and overrides:
        raise InvalidInput([Problem("--set", next(iter(overrides)), "changes a run file; name one")])
    planned = None if run is None else load_file(run, overrides, progress=while_searching())
    with progress_bar() as tell:
        from trainledger.observe.measure.loader import measure_loader

        loader_times = measure_loader(planned, tell=tell)
    if planned is not None:
        loader_times = _against_steps(planned, loader_times)
    return with_html(loader_times.document(), html)


def _against_steps(run: Run, loader_times: LoaderTimes) -> LoaderTimes:
    """The same, compared with the tokens per second of a run's steps, where a forecast has them."""
    machine = machine_of(run)
    needed = predict(run, machine, backend=kernels_of(run)).tokens_per_second
    if needed is not None:
        return replace(loader_times, needed_tokens_per_second=needed)
    why = NO_MACHINE if machine is None else "no forecast of the time of a step"
    return replace(loader_times, notes=(*loader_times.notes, why))


@question(plots=False)
def measure_collectives(
    *,
    ranks: Annotated[int, count("processes on this machine", least=2, most=1024)] = 2,
    backend: Annotated[
        str | None, text("gloo, or nccl with a GPU for each rank (nccl where there are as many)")
    ] = None,
    html: Html = None,
) -> Document | Outcome:
    """Time collectives between processes of this machine by size and group: bus bandwidth, latency, and the fit."""
    with progress_bar(first="starting ranks") as tell:
        from trainledger.observe.measure.collectives import report_collectives

        times = report_collectives(ranks, backend, tell=tell)
    return with_html(times.document(), html)


def _shape(text: str) -> tuple[int, int, int]:
    """The sizes of MxNxK; raises InvalidInput."""
    match = re.fullmatch(r"(\d{1,9})[x*](\d{1,9})[x*](\d{1,9})", text)
    if match is None:
        raise InvalidInput([Problem("--shapes", text, "must be three whole numbers, such as 1024x1024x512")])
    m, n, k = (int(group) for group in match.groups())
    for each in (m, n, k):
        if not 1 <= each <= _LARGEST:
            raise InvalidInput([Problem("--shapes", text, f"each size must be 1 to {_LARGEST:,}")])
    return m, n, k


def _dtypes(text: str) -> list[str]:
    """The names of dtypes between commas; raises InvalidInput."""
    names = [part.strip() for part in text.split(",")] if text else []
    for name in names:
        if name not in _DTYPES:
            raise InvalidInput([Problem("--dtype", name, "must be fp32 or bf16", nearest_text(name, _DTYPES))])
    return list(dict.fromkeys(names))
