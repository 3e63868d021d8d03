"""Write docs/published_memory.md: predicted memory beside published figures.

``python tools/published/published_page.py``; a test compares the page with what it would write today.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

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
from published_runs import MISSED_REASONS, ROW_REASONS

from trainledger.spec.units import GIB

PAGE = Path(__file__).parents[2] / "docs" / "published_memory.md"
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

| source | group | rows | median absolute error | median error | worst | measured |
|---|---|--:|--:|--:|--:|---|
"""
FITS = """
## What fits

"Does not fit" is predicted where the peak rank needs more than the device's usable memory. Runs with
a measured figure did fit; those marked as out of memory by their source did not. docs/accuracy.md has the chances.

| runs | true positives | false positives | missed | true negatives | precision | recall |
|---|--:|--:|--:|--:|--:|--:|
"""


def page() -> str:
    """The whole page."""
    predicted, left_out = predictions()
    found = by_source()
    rows = sum(len(each.errors) for each in found if each.source.group == COUNTS)
    parts = [HEAD.format(rows=rows, median=percent(median_that_counts())), *map(_source_row, found)]
    parts += ["\n", *_sensitivity(), FITS, _labels_row(COUNTS, labels(COUNTS)), _labels_row("all", labels())]
    missed = [each for each in predicted if each.case.too_large and each.fits]
    parts += ["\nMissed:\n\n", *(f"- {each.case.name}: {MISSED_REASONS[each.case.name]}.\n" for each in missed)]
    parts += ["\n## Above 20 %\n\n", *_above(found, predicted)]
    parts += ["\n## What is assumed, source by source\n", *(_assumed(each) for each in found)]
    parts += [
        "\n## All rows\n",
        *_all_rows(predicted),
        "\n## Left out\n\n",
        *_left_out(left_out),
    ]
    return "".join(parts)


def percent(share: float, *, sign: bool = False) -> str:
    return f"{100 * share:+.1f} %" if sign else f"{100 * share:.1f} %"


def _source_row(each: SourceErrors) -> str:
    cells = (
        each.source.title, each.source.group, str(len(each.errors)), percent(each.median),
        percent(each.bias, sign=True), percent(each.worst, sign=True),
        FIGURES[each.source.figure],
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


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


def _labels_row(name: str, each: Labels) -> str:
    counts = (each.said_and_so, each.said_in_vain, each.missed, each.fitted_and_said)
    return f"| {name} | {' | '.join(map(str, counts))} | {percent(each.precision)} | {percent(each.recall)} |\n"


def _above(found: tuple[SourceErrors, ...], predicted: tuple[Prediction, ...]) -> Iterator[str]:
    """Sources whose median is above 20 %, and rows of pretraining that are, each with its reason."""
    sources = [each for each in found if each.median > 0.2]
    yield from (f"- {each.source.title}: {each.source.reason}\n" for each in sources)
    if not sources:
        yield "No source has a median above 20 %. Rows of pretraining that are further off:\n\n"
    for each in far_off(predicted):
        yield f"- {each.case.name} ({percent(each.error, sign=True)}): {ROW_REASONS[each.case.name]}.\n"


def far_off(predicted: tuple[Prediction, ...]) -> list[Prediction]:
    """Rows of pretraining that are more than 20 % off."""
    measured = [each for each in predicted if each.case.measured is not None]
    return [each for each in measured if each.case.source.group != "fine-tuning" and abs(each.error) > 0.2]


def _assumed(each: SourceErrors) -> str:
    source = each.source
    lines = [f"\n### {source.title}\n\n`{source.name}`. Unit: {source.unit_why}.\n\n"]
    return "".join([*lines, *(f"- {line}\n" for line in source.assumed)])


def _all_rows(predicted: tuple[Prediction, ...]) -> Iterator[str]:
    for source in dict.fromkeys(each.case.source for each in predicted):
        yield f"\n### {source.title}: rows\n\n"
        yield "GiB; `tensors` are the peak of the ledger, `reserved` what the framework holds more.\n\n"
        yield "| row | model | devices | layout | batch x length | precision | measured | predicted | error | tensors |"
        yield " reserved | rank |\n|---|---|--:|---|--:|---|--:|--:|--:|--:|--:|---|\n"
        yield from (_row(each) for each in predicted if each.case.source is source)


def _row(each: Prediction) -> str:
    case, row, run = each.case, each.case.row, each.case.run
    layout = run.layout
    axes = ("replicate", "shard", "context", "tensor", "pipeline")
    sizes = ", ".join(f"{name} {getattr(layout, name)}" for name in axes if getattr(layout, name) > 1)
    measured = _gib(case.measured) if case.measured is not None else "out of memory" if case.too_large else "it fits"
    error = percent(each.error, sign=True) if case.measured is not None else "fits" if each.fits else "does not fit"
    cells = (
        case.name, row["model_family"], str(layout.devices), sizes or "-",
        f"{run.device_batch} x {run.recipe.seq_len}", row["precision"], measured, _gib(each.nbytes), error,
        _gib(each.peak_nbytes), _gib(int(each.rank.ledger.reserved_nbytes)), each.rank.title,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}"


def _left_out(left_out: tuple[tuple[dict[str, str], str], ...]) -> Iterator[str]:
    counts = Counter((_short(row["source"]), why) for row, why in left_out if why != "no memory figure")
    yield "| source | rows | why |\n|---|--:|---|\n"
    yield from (f"| {source} | {count} | {why} |\n" for (source, why), count in sorted(counts.items()))
    silent = sum(why == "no memory figure" for _, why in left_out)
    yield f"| {len({row['source'] for row, why in left_out if why == 'no memory figure'})} sources | {silent} | "
    yield "no memory figure |\n"


def _short(source: str) -> str:
    return source.split("/results/")[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
