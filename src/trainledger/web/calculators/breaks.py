"""What breaks first: one size of a run grows, and the limits are met in this order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import trainledger as tl
from trainledger.forecast.plan.breaks import Break, Breaks
from trainledger.forecast.plan.changes import value_of
from trainledger.forecast.plan.limits import MEMORY
from trainledger.forecast.plan.sizes import AXES
from trainledger.report.document import Table
from trainledger.web.calculator import BAD, PLAIN, UNKNOWN, Drawing, Headline, Progress, Remedy, Reply, calculator
from trainledger.web.field import Query, one_of
from trainledger.web.run import of_pasted, python_of, settings_of, source_of, without_search, words_of

_OPTIONS = ("reach", "exposed", "lost", "unique_tokens")
# What a limit asks for and one field gives.
_CURES = (
    (MEMORY, "Recompute activations in full", "recipe.activation_checkpointing", "full"),
    (MEMORY, "The loss in chunks", "recipe.loss", "chunked"),
    ("failures", "Write checkpoints while training goes on", "recipe.checkpoints.asynchronous", "true"),
)


def _reply(query: Query, progress: Progress) -> Reply:
    options: dict[str, Any] = dict(query.chosen(*_OPTIONS))
    if axis := query.get("along"):
        options["along"] = axis
    keep = query["keep"] == "tokens"

    breaks = tl.breaks(source_of(query), settings_of(query), keep_tokens=keep, progress=progress, **options)
    document = breaks.document()
    flags = [word for name, text in options.items() for word in (f"--{name.replace('_', '-')}", text)]
    flags += [] if keep else ["--keep-batch"]
    tables = [table for name, table in document.tables.items() if name in AXES]
    return Reply(
        document=document,
        headlines=tuple(_headlines(breaks)),
        verdict=document.verdict,
        tone=BAD if breaks.already else PLAIN if any(along.breaks for along in breaks.along) else UNKNOWN,
        drawings=tuple(Drawing(chart=figure, table=_joined(tables)) for figure in document.figures()),
        values={},
        unused=_unused(query),
        remedies=tuple(_remedies(breaks, query, flags)),
        words=words_of("breaks", query, *flags),
        python=python_of("breaks", query, **options),
    )


def _unused(query: Query) -> dict[str, str]:
    """The fields that do not count, with the reason."""
    found = of_pasted(query)
    if query["along"] not in ("", "sequence"):
        found["keep"] = "no sequence grows"
    return found


def _remedies(breaks: Breaks, query: Query, flags: Sequence[str]) -> Iterator[Remedy]:
    """The layouts with context ranks that hold a limit further, and what else the limits that are met ask for."""

    def remedy(title: str, fields: Mapping[str, str]) -> Remedy:
        changed = replace(query, given={**query.given, **fields})
        return Remedy(title=title, fields=fields, command=words_of("breaks", changed, *flags))

    for each in (one for along in breaks.along for one in along.breaks if one.cure is not None):
        assert each.cure is not None
        fields = dict(one.split("=", 1) for one in each.cure.changes)
        title = (
            f"Context ranks: {each.limit} holds up to {each.cure.holds:,} at least, on {each.cure.devices:,} devices"
        )
        yield remedy(title, fields)
    run = breaks.run
    met = {one.limit for along in breaks.along for one in along.breaks} | {each.limit for each in breaks.already}
    for limit, title, name, text in _CURES:
        if limit in met and str(getattr(now := value_of(run, name), "kind", now)).lower() != text:
            yield remedy(title, {name: text})


def _headlines(breaks: Breaks) -> list[Headline]:
    """The first limit along each axis, and the size that still works."""
    firsts = [(along, along.breaks[0]) for along in breaks.along if along.breaks]
    return [
        Headline(
            name=along.axis, title=f"largest {along.axis} before {first.limit}", value=first.holds or None,
            unit="integer", said="" if first.holds else "not even as planned", formula=_formula(first),
            basis=first.basis, source=first.source,
        )
        for along, first in firsts
    ]  # fmt: skip


def _formula(first: Break) -> str:
    return f"the largest {first.field} that works; at {first.breaks:,}: {first.why}"


def _joined(tables: list[Table]) -> Table:
    """The limits of all axes in one table."""
    columns = ("size", *tables[0].columns)
    rows = tuple((table.name, *row) for table in tables for row in table.rows)
    return Table("limits", columns, rows, units=("", *tables[0].units), align=f"l{tables[0].align}")


BREAKS = calculator(
    "breaks", _reply, {"along": one_of(["", *AXES], **{"": "each size in turn"})}, tl.breaks, without_search
)
