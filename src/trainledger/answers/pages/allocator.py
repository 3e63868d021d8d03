"""The document of an allocator's snapshot: its peak by category and the forecast's, and the lines that allocated it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainledger.answers.pages.plain_data import plain
from trainledger.observe.profiler.allocator import AllocatorPeak
from trainledger.report.document import Document, Facts, Table, notes, section, sections, shown
from trainledger.spec.units import format_percent

_ROWS = 20


def page(peak: AllocatorPeak, predicted: Mapping[str, int] | None = None) -> Document:
    """Peak, categories and lines; with the categories of the forecast's peak, both and their difference."""
    before = predicted or {}
    names = dict.fromkeys((*peak.by_category, *before))
    rows = [(name, peak.by_category.get(name, 0), before.get(name, 0)) for name in names]
    rows.append(("in all", peak.nbytes, sum(before.values())))
    if predicted is None:
        table = Table(
            "categories",
            ("at the peak", "bytes", "share"),
            tuple((name, nbytes, nbytes / max(peak.nbytes, 1)) for name, nbytes, _ in rows),
            ("", "nbytes", "share"),
        )
    else:
        table = Table(
            "categories",
            ("at the peak", "measured", "predicted", "difference"),
            tuple((name, after, before, after - before) for name, after, before in rows),
            ("", "nbytes", "nbytes", "nbytes"),
        )
    sites = Table(
        "sites",
        ("line", "of", "allocations", "bytes"),
        tuple((site.line or "(no line)", site.category, site.count, site.nbytes) for site in peak.sites[:_ROWS]),
        ("", "", "count", "nbytes"),
    )
    idle = 1 - peak.nbytes / max(peak.reserved_nbytes, 1)
    reserved, most = shown(peak.reserved_nbytes, "nbytes"), shown(peak.most_reserved_nbytes, "nbytes")
    facts = (
        ("peak", f"{shown(peak.nbytes, 'nbytes')} requested" + (f", during {peak.during}" if peak.during else "")),
        ("reserved", f"{reserved} then ({format_percent(idle)} of it not in use), at most {most}"),
        ("events", f"{peak.events:,}, the peak is at number {peak.at:,}"),
    )
    return Document(
        title=f"{peak.path}: memory at its peak",
        sections=sections(
            Facts(facts),
            section("What is allocated then", table),
            section("By line", sites),
            notes((*peak.doubts, *_of_categories(predicted))),
        ),
        data=lambda: _data(peak, predicted),
    )


def _of_categories(predicted: Mapping[str, int] | None) -> tuple[str, ...]:
    if predicted is None:
        return ()
    return (
        "Memory that autograd allocated has no stack and is one category, backward, unless an update reads it "
        "(gradients); the forecast has it under gradients, logits and loss, and activations.",
    )


def _data(peak: AllocatorPeak, predicted: Mapping[str, int] | None) -> dict[str, Any]:
    data: dict[str, Any] = plain(peak)
    return data | ({} if predicted is None else {"predicted_by_category": dict(predicted)})
