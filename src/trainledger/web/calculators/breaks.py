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
from trainledger.web.calculator import BAD, PLAIN, UNKNOWN, Calculator, Drawing, Headline, Progress, Remedy, Reply
from trainledger.web.field import Field, Query, of_question, of_run, one_of, powers
from trainledger.web.run import (
    CLUSTER,
    MODEL,
    PASTED,
    of_pasted,
    python_of,
    settings_of,
    source_of,
    without_search,
    words_of,
)

_OPTIONS = ("reach", "exposed", "lost", "unique_tokens")
# What a limit asks for and one field gives.
_CURES = (
    (MEMORY, "Recompute activations in full", "recipe.activation_checkpointing", "full"),
    (MEMORY, "The loss in chunks", "recipe.loss", "chunked"),
    ("failures", "Write checkpoints while training goes on", "recipe.checkpoints.asynchronous", "true"),
)
_SHARES = ("5%", "10%", "15%", "20%", "25%", "30%", "40%", "50%")


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


BREAKS = Calculator(
    name="breaks",
    title="What breaks first",
    question="One size of a run grows: which limit is met first, second, third, and at which value?",
    fields=(
        replace(MODEL, default="llama-3.1-8b"),
        *PASTED,
        CLUSTER[0],
        replace(CLUSTER[1], default="8"),
        of_run("layout.shard", "shard (ZeRO-3, FSDP) ranks", default="8", group="Layout", stops=powers(1, 1024)),
        of_run("layout.tensor", "tensor ranks", group="Layout", stops=powers(1, 16)),
        of_run("layout.pipeline", "pipeline stages", group="Layout", stops=powers(1, 64)),
        of_run("recipe.seq_len", "sequence length", default="4096", group="Recipe", stops=powers(256, 131072)),
        of_run("recipe.global_batch", "sequences of a step", default="256", group="Recipe", stops=powers(1, 16384)),
        of_run("recipe.micro_batch", "micro-batch", default="1", group="Recipe", stops=powers(1, 128)),
        of_run("recipe.precision", "precision", default="bf16-sharded", group="Recipe",
               choices=one_of(["bf16-sharded", "bf16-mixed", "bf16", "fp32"])),
        of_run("recipe.activation_checkpointing", "activation checkpointing", default="full", group="Recipe",
               choices=one_of(["none", "selective", "full"])),
        Field(name="along", title="what grows", default="sequence", group="Question",
              choices=one_of(["", *AXES], **{"": "each size in turn"})),
        Field(name="keep", title="longer sequences keep", default="tokens", group="Question", strict=True,
              choices=(("tokens", "the tokens of a step"), ("batch", "the sequences of a step"))),
        of_question(tl.breaks, "reach", "up to times the plan", stops=powers(2, 1024)),
        of_question(tl.breaks, "exposed", "most exposed communication", stops=_SHARES),
        of_question(tl.breaks, "lost", "most lost to failures", stops=_SHARES),
        of_question(tl.breaks, "unique_tokens", "tokens in the dataset"),
    ),
    reply=_reply,
    presets={
        "A longer context": {},
        "A deeper model": {"along": "depth"},
        "More devices": {"along": "devices", "cluster.device": "a100-sxm-80gb"},
        "Each size of GPT-2 XL": {"run": "gpt2-xl", "recipe.seq_len": "1024", "along": ""},
    },
    any_of_run=True,
    patient=True,
    refuse=without_search,
)  # fmt: skip
