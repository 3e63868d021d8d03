"""A traced step of somebody's own code for a terminal: totals, where they come from, and what is not known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainledger.document import shown
from trainledger.ledger.entry import CATEGORIES, Entry
from trainledger.ledger.ledger import Ledger
from trainledger.report.table import table, wrapped
from trainledger.units import counted

SPLITS = ("phase", "kind", "path", "line", "category")
LONGEST = 20  # rows of a split
_SENT = "Payload: the bytes of all these messages, counted whole: what a reduction adds up, what a gather makes."


def text(ledger: Ledger, title: str, by: str = "", top: int = LONGEST) -> str:
    """Totals of the step, its peak, one split, and everything that must be said of them."""
    operations = sum(each.times for each in ledger)
    head = f"{title}: {counted(operations, 'operation')} traced"
    if ledger.partial:
        head = f"PARTIAL: {head}, then {ledger.partial}"
    parts = [wrapped(head), table(["", "in one step"], [[name, shown(*each)] for name, each in totals(ledger)])]
    if len(ledger):
        peak = ledger.peak()
        parts.append(wrapped(f"The peak is at {place(peak.entry)}."))
    sent = collectives(ledger)
    if sent:
        columns = ["collective", "phase", "over", "ranks", "times", "payload"]
        body = [[*each[:3], f"{each[3]:,}", f"{each[4]:,}", shown(each[5], "nbytes")] for each in sent]
        parts.append(table(columns, body, align="lllrrr") + "\n" + wrapped(_SENT))
    if by:
        parts.append(split(ledger, by, top))
    parts += [wrapped(f"note: {each}") for each in ledger.notes]
    parts += ["\n".join(uncounted(ledger))] if ledger.uncounted else []
    return "\n\n".join(parts)


def totals(ledger: Ledger) -> Iterator[tuple[str, tuple[int, str]]]:
    """Names, amounts and units of a step's totals; those that are part of one above begin with a dash."""
    yield "parameters trained", (ledger.parameters, "count")
    yield "FLOPs", (ledger.flops, "flops")
    for kind, flops in sorted(ledger.by("kind").items(), key=lambda each: -each[1]):
        if flops:
            yield f"- {kind}", (flops, "flops")
    yield "model FLOPs", (ledger.model_flops, "flops")
    yield "kept for backward", (ledger.kept_nbytes, "nbytes")
    collectives = ledger.filter(lambda each: each.kind == "collective")
    if len(collectives):
        yield "sent in collectives", (collectives.total("payload"), "nbytes")
    if len(ledger):
        peak = ledger.peak()
        yield "peak memory", (peak.nbytes, "nbytes")
        for category in CATEGORIES:
            if peak.by_category.get(category):
                yield f"- {category}", (peak.by_category[category], "nbytes")


def collectives(ledger: Ledger) -> list[tuple[str, str, str, int, int, int]]:
    """What is sent: collective, phase, mesh axes, ranks, how often, and the bytes of all its messages."""
    found: dict[tuple[str, str, str, int], list[int]] = {}
    for each in ledger:
        if each.kind == "collective":
            sums = found.setdefault((each.name, each.phase, each.group, each.ranks), [0, 0])
            sums[0] += each.times
            sums[1] += each.payload * each.times
    return [(*key, times, payload) for key, (times, payload) in found.items()]


def place(entry: Entry) -> str:
    """Where an entry stands: its operation, phase, module and line.

    >>> place(Entry("mm", "layers.0.mlp", "backward", "matmul", line="model.py:41"))
    'mm of layers.0.mlp in backward (model.py:41)'
    """
    module = f" of {entry.path}" if entry.path else ""
    line = f" ({entry.line})" if entry.line else ""
    return f"{entry.name}{module} in {entry.phase}{line}"


def split(ledger: Ledger, by: str, top: int = LONGEST) -> str:
    """The largest rows of a split: FLOPs, bytes moved and bytes kept; by category the most bytes of each."""
    if by == "category":
        rows = [[name, shown(nbytes, "nbytes")] for name, nbytes in highest(ledger).items()]
        return table(["category at its most", ""], rows)
    amounts = {name: ledger.by(by, name) for name in ("flops", "read", "written", "kept")}
    labels = sorted(amounts["flops"], key=lambda each: (-amounts["flops"][each], -amounts["written"][each]))
    rows = [
        [_named(each, by), shown(amounts["flops"][each], "flops")]
        + [shown(amounts[name][each], "nbytes") for name in ("read", "written", "kept")]
        for each in labels[:top]
    ]
    if len(labels) > top:
        rest = [sum(amounts[name][each] for each in labels[top:]) for name in amounts]
        more = f"{len(labels) - top} more"
        rows.append([more, shown(rest[0], "flops"), *(shown(each, "nbytes") for each in rest[1:])])
    return table([by, "FLOPs", "read", "written", "kept"], rows, align="lrrrr")


def _named(label: str, by: str) -> str:
    return label or ("no line of yours" if by == "line" else "outside the model")


def highest(ledger: Ledger) -> dict[str, int]:
    """The most bytes that each category has at any time of the step."""
    from trainledger.ledger.memory.timeline import highest_by_category

    most = highest_by_category(ledger)
    return {each: most[each] for each in CATEGORIES if most.get(each)}


def uncounted(ledger: Ledger) -> tuple[str, ...]:
    """A sentence for each operator and line that has no rule.

    >>> uncounted(Ledger((Entry("my_lib::op", "", "forward", "unknown", line="model.py:41"),)))
    ('uncounted: 1 x my_lib::op at model.py:41',)
    """
    found: dict[tuple[str, str], int] = {}
    for each in ledger:
        if each.kind == "unknown":
            found[each.name, each.line] = found.get((each.name, each.line), 0) + each.times
    return tuple(
        f"uncounted: {times} x {name}" + (f" at {line}" if line else "") for (name, line), times in found.items()
    )


def to_json(ledger: Ledger, by: str = "") -> dict[str, Any]:
    """The same for programs."""
    peak = ledger.peak() if len(ledger) else None
    told: dict[str, Any] = {
        "operations": sum(each.times for each in ledger),
        "parameters": ledger.parameters,
        "flops": ledger.flops,
        "flops_by_kind": ledger.by("kind"),
        "model_flops": ledger.model_flops,
        "kept_nbytes": ledger.kept_nbytes,
        "peak_nbytes": peak.nbytes if peak else None,
        "peak_by_category": peak.by_category if peak else {},
        "peak_at": place(peak.entry) if peak else None,
        "collectives": [
            {"name": name, "phase": phase, "group": group, "ranks": ranks, "times": times, "payload": payload}
            for name, phase, group, ranks, times, payload in collectives(ledger)
        ],
        "partial": ledger.partial,
        "notes": list(ledger.notes),
        "uncounted": list(uncounted(ledger)),
    }
    if by == "category":
        told["by"] = highest(ledger)
    elif by:
        told["by"] = {name: ledger.by(by, name) for name in ("flops", "read", "written", "kept")}
    return told
