"""Verbs that measure one thing of a machine: matmuls, copies, the data loader, collectives."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from dataclasses import replace

from trainledger.answers.machine import kernels_of, machine_of
from trainledger.cli.arguments import SET, Outcome, count, option, output, takes
from trainledger.cli.asking import run_of_file
from trainledger.cli.measure import progress_bar, with_html
from trainledger.forecast.predict.predict import NO_MACHINE, predict
from trainledger.observe.measure.rates import LoaderTimes
from trainledger.report.document import Document
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.run import Run

_BACKEND = option("--backend", "auto, cpu, cuda or mps", default="auto")
_HTML = output("--html OUT.html", "also write one self-contained HTML file with figures", suffix=".html")
_DTYPES = ("fp32", "bf16")
_LARGEST = 2**20


@takes(
    option("--shapes MxNxK", "matmuls [M, K] @ [K, N], such as 1024x1024x512", nargs="+", default=[]),
    option("--sweep SIZE", "instead: a sweep of batch (rows) or width (columns and inner size)", default=None),
    option("--dtype LIST", "fp32, bf16 or fp32,bf16 (both, where bf16 is not emulated)", default=""),
    _BACKEND,
    _HTML,
)
def measure_matmul(args: Namespace) -> Document | Outcome:
    """Time matmuls: FLOP/s, bytes/s and share of the best by shape, dtype and layout of the factors; the roofline."""
    shapes, dtypes = [_shape(each) for each in args.shapes], _dtypes(args.dtype)
    if args.sweep is not None:
        if shapes:
            raise InvalidInput([Problem("--sweep", args.sweep, "replaces --shapes; give one of them")])
        if args.sweep not in ("batch", "width"):
            raise InvalidInput([Problem("--sweep", args.sweep, "must be batch or width", "batch")])
    with progress_bar() as tell:
        from trainledger.observe.measure.matmuls import measure_matmuls

        found = measure_matmuls(args.backend, shapes=shapes, sweep=args.sweep, dtypes=dtypes, tell=tell)
    return with_html(found.document(), args.html)


@takes(
    _BACKEND,
    option("--dir DIR", "the disk that is measured: a folder on it (the temporary folder)", default=None),
    _HTML,
)
def measure_copy(args: Namespace) -> Document | Outcome:
    """Time copies: view against copy, contiguous against strided, host and device, disk; sizes from cache to memory."""
    if args.dir is not None and not os.path.isdir(args.dir):
        raise InvalidInput([Problem("--dir", args.dir, "is not a directory")])
    with progress_bar() as tell:
        from trainledger.observe.measure.copies import measure_copies

        found = measure_copies(args.backend, folder=args.dir, tell=tell)
    return with_html(found.document(), args.html)


@takes(
    option("run RUN", "a run file, whose data is read (none: text that is made here)", nargs="?", default=None),
    SET,
    _HTML,
)
def measure_loader(args: Namespace) -> Document | Outcome:
    """Time the data loader by workers: tokens/s of a run's data, or of made text, against what its steps need."""
    if args.run is None and args.set:
        raise InvalidInput([Problem("--set", args.set[0], "changes a run file; name one")])
    run = None if args.run is None else run_of_file(args)
    with progress_bar() as tell:
        from trainledger.observe.measure.loader import measure_loader

        found = measure_loader(run, tell=tell)
    if run is not None:
        found = _against_steps(run, found)
    return with_html(found.document(), args.html)


def _against_steps(run: Run, found: LoaderTimes) -> LoaderTimes:
    """The same, compared with the tokens per second of a run's steps, where a forecast has them."""
    machine = machine_of(run)
    needed = predict(run, machine, backend=kernels_of(run)).tokens_per_second
    if needed is not None:
        return replace(found, needed_tokens_per_second=needed)
    why = NO_MACHINE if machine is None else "no forecast of the time of a step"
    return replace(found, notes=(*found.notes, why))


@takes(
    count("--ranks N", "processes on this machine (2)", least=2, most=1024, default=2),
    option("--backend", "gloo, or nccl with a GPU for each rank (nccl where there are as many)", default=None),
    _HTML,
)
def measure_collectives(args: Namespace) -> Document | Outcome:
    """Time collectives between processes of this machine by size and group: bus bandwidth, latency, and the fit."""
    with progress_bar(first="starting ranks") as tell:
        from trainledger.observe.measure.collectives import report_collectives

        found = report_collectives(args.ranks, args.backend, tell=tell)
    return with_html(found.document(), args.html)


def _shape(text: str) -> tuple[int, int, int]:
    """The sizes of MxNxK; raises InvalidInput."""
    found = re.fullmatch(r"(\d{1,9})[x*](\d{1,9})[x*](\d{1,9})", text)
    if found is None:
        raise InvalidInput([Problem("--shapes", text, "must be three whole numbers, such as 1024x1024x512")])
    m, n, k = (int(each) for each in found.groups())
    for each in (m, n, k):
        if not 1 <= each <= _LARGEST:
            raise InvalidInput([Problem("--shapes", text, f"each size must be 1 to {_LARGEST:,}")])
    return m, n, k


def _dtypes(text: str) -> list[str]:
    """The names of dtypes between commas; raises InvalidInput."""
    names = [each.strip() for each in text.split(",")] if text else []
    for each in names:
        if each not in _DTYPES:
            raise InvalidInput([Problem("--dtype", each, "must be fp32 or bf16", nearest_text(each, _DTYPES))])
    return list(dict.fromkeys(names))
