"""Write docs/published_memory.md: predicted memory beside published figures.

``python tools/published/published_page.py``; a test compares the page with what it would write today.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from published_case import Case
from published_memory import (
    COUNTS,
    Labels,
    Prediction,
    SourceErrors,
    by_source,
    labels,
    median_if,
    median_that_counts,
    predictions,
)
from published_sources import REASONS
from tables import Page, Table, markdown
from throughput_predictions import percent

from trainledger.spec.units import GIB

FIGURES = {
    "driver": "all that the driver counts (nvidia-smi)",
    "reserved": "reserved by PyTorch's allocator",
    "allocated": "allocated at most",
}

HEAD = """\
# Published memory and the ledger's

Written by `python tools/published/published_page.py`; a test compares it with what it would write today. The rows are
those of `tools/published/runs.csv`, facts read from public repositories, each with its source.

Each row that says enough becomes a run, with an account in closed form on a GPU for every rank of its layout
(`ledger.ranks.accounts`). Memory outside the tensors is added to the rank's peak (`predict.device_memory`: cuBLAS's
workspaces, fragmentation, the CUDA context, NCCL's buffers, and what the recipe's framework reserves). `trainledger
plan` predicts the same number, so its users see the same error. The figure is the one that the source measured: what
the driver counts, what PyTorch's allocator has reserved, or what it has allocated. No number was fitted to these rows:
each is the source's, the catalog's with its source, or follows from code that is named. The rows were looked at,
though, to find out which mechanisms were missing.

The median absolute error over the {rows} rows of dense pretraining in 16 bits is **{median}**. docs/accuracy.md has the
intervals, of sources left out.

## By source

"""
FITS = """
## What fits

"Does not fit" is predicted where the peak rank needs more than the device's usable memory. Runs with
a measured figure did fit; those marked as out of memory by their source did not. docs/accuracy.md has the chances.

"""


def page() -> Page:
    """The whole page with its tables."""
    predicted, left_out = predictions()
    found = by_source()
    rows, without = _rows(predicted), _left_out(left_out)
    count = sum(len(each.errors) for each in found if each.source.group == COUNTS)
    header = ("source", "group", "rows:", "median absolute error:", "median error:", "worst:", "measured")
    parts = [HEAD.format(rows=count, median=percent(median_that_counts())), markdown(header, map(_source_row, found))]
    parts += [
        f"\nEvery row: {rows.link}. Rows that are not predicted, and why: {without.link}. What is assumed, source "
    ]
    parts += ["by source: [sources.toml](../tools/published/sources.toml).\n\n", *_sensitivity(), FITS]
    header = ("runs", "true positives:", "false positives:", "missed:", "true negatives:", "precision:", "recall:")
    parts += [markdown(header, [_labels_row(COUNTS, labels(COUNTS)), _labels_row("all", labels())])]
    missed = [each for each in predicted if each.case.too_large and each.fits]
    parts += ["\nMissed:\n\n", *(f"- {each.case.name}: {REASONS['missed'][each.case.name]}.\n" for each in missed)]
    return Page(
        "published_memory", "".join([*parts, "\n## Above 20 %\n\n", *_above(found, predicted)]), (rows, without)
    )


def _source_row(each: SourceErrors) -> Sequence[str]:
    signed = (percent(share, sign=True) for share in (each.bias, each.worst))
    shares = (percent(each.median), *signed)
    return each.source.title, each.source.group, str(len(each.errors)), *shares, FIGURES[each.source.figure]


def _sensitivity() -> Iterator[str]:
    """How much hangs on what was assumed."""

    def in_gib(case: Case) -> Case:
        driver = case.source.figure == "driver"
        return replace(case, source=replace(case.source, unit=GIB)) if driver else case

    def at_both_ends(case: Case) -> Case:
        return replace(case, source=replace(case.source, stages="all"))

    yield "How the assumptions change that median:\n\n"
    yield f"- if BigScience's `GB` were GiB and not thousands of MiB: {percent(median_if(in_gib))};\n"
    yield f"- if every source had read its heaviest stage: {percent(median_if(at_both_ends))}.\n"


def _labels_row(name: str, each: Labels) -> Sequence[str]:
    counts = (each.said_and_so, each.said_in_vain, each.missed, each.fitted_and_said)
    return name, *map(str, counts), percent(each.precision), percent(each.recall)


def _above(found: tuple[SourceErrors, ...], predicted: tuple[Prediction, ...]) -> Iterator[str]:
    """Sources whose median is above 20 %, and rows of pretraining that are, each with its reason."""
    sources = [each for each in found if each.median > 0.2]
    yield from (f"- {each.source.title}: {each.source.reason}\n" for each in sources)
    if not sources:
        yield "No source has a median above 20 %. Rows of pretraining that are further off:\n\n"
    for each in far_off(predicted):
        yield f"- {each.case.name} ({percent(each.error, sign=True)}): {REASONS['memory'][each.case.name]}.\n"


def far_off(predicted: tuple[Prediction, ...]) -> list[Prediction]:
    """Rows of pretraining that are more than 20 % off."""
    measured = [each for each in predicted if each.case.measured is not None]
    return [each for each in measured if each.case.source.group != "fine-tuning" and abs(each.error) > 0.2]


def _rows(predicted: tuple[Prediction, ...]) -> Table:
    sources = list(dict.fromkeys(each.case.source for each in predicted))
    rows = [_row(each) for source in sources for each in predicted if each.case.source is source]
    header = ("source", "row", "model", "devices", "layout", "batch x length", "precision", "measured GiB")
    header = (*header, "predicted GiB", "error %", "peak of the ledger GiB", "reserved by the framework GiB", "rank")
    return Table("memory_rows", header, rows)


def _row(each: Prediction) -> Sequence[str]:
    case, row, run = each.case, each.case.row, each.case.run
    axes = ("replicate", "shard", "context", "tensor", "pipeline")
    sizes = ", ".join(f"{name} {getattr(run.layout, name)}" for name in axes if getattr(run.layout, name) > 1) or "-"
    measured = _gib(case.measured) if case.measured is not None else "out of memory" if case.too_large else "it fits"
    error = percent(each.error, sign=True) if case.measured is not None else "fits" if each.fits else "does not fit"
    shape = (row["model_family"], str(run.layout.devices), sizes, f"{run.device_batch} x {run.recipe.seq_len}")
    held = (_gib(each.peak_nbytes), _gib(int(each.rank.ledger.reserved_nbytes)))
    figures = (measured, _gib(each.nbytes), error, *held, each.rank.title)
    return case.source.title, case.name, *shape, row["precision"], *figures


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}"


def _left_out(left_out: tuple[tuple[dict[str, str], str], ...]) -> Table:
    silent = "no memory figure"
    counts = Counter((row["source"].split("/results/")[0], why) for row, why in left_out if why != silent)
    rows = [(source, str(count), why) for (source, why), count in sorted(counts.items())]
    sources = [row["source"] for row, why in left_out if why == silent]
    return Table(
        "memory_left_out",
        ("source", "rows", "why"),
        [*rows, (f"{len(set(sources))} sources", str(len(sources)), silent)],
    )


if __name__ == "__main__":
    page().write()
