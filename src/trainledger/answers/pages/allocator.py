"""The document of an allocator's snapshot: its peak by category and the forecast's, and the lines that allocated it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainledger.answers.pages.plain_data import plain
from trainledger.observe.profiler.allocator import AllocatorPeak
from trainledger.report.document import Document, Facts, Table, notes, section, sections, shown
from trainledger.spec.units import format_percent

_ROWS = 20


def page(found: AllocatorPeak, predicted: Mapping[str, int] | None = None) -> Document:
    """Peak, categories and lines; with the categories of the forecast's peak, both and their difference."""
    before = predicted or {}
    names = dict.fromkeys((*found.by_category, *before))
    rows = [(name, found.by_category.get(name, 0), before.get(name, 0)) for name in names]
    rows.append(("in all", found.nbytes, sum(before.values())))
    if predicted is None:
        table = Table(
            "categories",
            ("at the peak", "bytes", "share"),
            tuple((name, nbytes, nbytes / max(found.nbytes, 1)) for name, nbytes, _ in rows),
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
        tuple((each.line or "(no line)", each.category, each.count, each.nbytes) for each in found.sites[:_ROWS]),
        ("", "", "count", "nbytes"),
    )
    idle = 1 - found.nbytes / max(found.reserved_nbytes, 1)
    reserved, most = shown(found.reserved_nbytes, "nbytes"), shown(found.most_reserved_nbytes, "nbytes")
    facts = (
        ("peak", f"{shown(found.nbytes, 'nbytes')} requested" + (f", during {found.during}" if found.during else "")),
        ("reserved", f"{reserved} then ({format_percent(idle)} of it not in use), at most {most}"),
        ("events", f"{found.events:,}, the peak is at number {found.at:,}"),
    )
    return Document(
        title=f"{found.path}: memory at its peak",
        sections=sections(
            Facts(facts),
            section("What is allocated then", table),
            section("By line", sites),
            notes((*found.doubts, *_of_categories(predicted))),
        ),
        data=lambda: _data(found, predicted),
    )


def _of_categories(predicted: Mapping[str, int] | None) -> tuple[str, ...]:
    if predicted is None:
        return ()
    return (
        "Memory that autograd allocated has no stack and is one category, backward, unless an update reads it "
        "(gradients); the forecast has it under gradients, logits and loss, and activations.",
    )


def _data(found: AllocatorPeak, predicted: Mapping[str, int] | None) -> dict[str, Any]:
    data: dict[str, Any] = plain(found)
    return data | ({} if predicted is None else {"predicted_by_category": dict(predicted)})
