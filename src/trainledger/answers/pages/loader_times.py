"""The document of the measured data loader: tokens per second by workers, against what the steps of a run take."""

from __future__ import annotations

from trainledger.answers.pages.plain_data import plain
from trainledger.observe.measure.rates import LoaderTimes
from trainledger.report.document import Cell, Document, Table, sections
from trainledger.report.table import sentence
from trainledger.spec.calibration import LoaderTime
from trainledger.spec.units import format_count


def document(found: LoaderTimes) -> Document:
    """Tokens per second by workers, and how often that is what the steps need."""
    needed = found.needed_tokens_per_second
    read = [each.tokens_per_second for each in found.times if each.what.startswith("read ahead")]
    return Document(
        title="The data loader",
        sections=sections(
            f"{found.data}: batches of {found.global_batch:,} sequences of {found.seq_len:,} tokens",
            _table(found),
            _verdict(needed, max(read)) if needed is not None and read else None,
            (f"Note: {each}." for each in found.notes),
        ),
        data=lambda: plain(found, more={LoaderTime: ("tokens_per_second",)}),
    )


def _table(found: LoaderTimes) -> Table:
    needed = found.needed_tokens_per_second
    rows: list[tuple[Cell, ...]] = []
    for each in found.times:
        share = None if needed is None or each.what.startswith("tokenize") else each.tokens_per_second / needed
        rows.append((each.what, each.workers, each.tokens, each.seconds, each.tokens_per_second, share))
    columns = ("", "workers", "tokens", "time", "tokens/s", "" if needed is None else "of need")
    return Table("loader", columns, tuple(rows), ("", "integer", "count", "seconds", "count", "factor"), "lrrrrr")


def _verdict(needed: float, read: float) -> str:
    what = f"steps take {format_count(needed)} tokens/s by the forecast"
    if read >= needed:
        return sentence(f"{what}, and the loader reads {read / needed:,.1f} times as many ahead: they do not wait")
    return sentence(f"{what}, and the loader reads {format_count(read)} ahead: steps wait for tokens")
