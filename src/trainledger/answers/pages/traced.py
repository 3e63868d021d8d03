"""The document of a traced step: totals, where they come from, and what is not known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainledger.answers.pages.memory import memory_chart, peak_chart
from trainledger.answers.pages.peak import peak_data, peak_sections, place
from trainledger.forecast.predict.step import OnDevice
from trainledger.ledger.entry import CATEGORIES
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import highest_by_category
from trainledger.report.chart import Chart
from trainledger.report.document import Amount, Cell, Document, Table, notes, section, sections
from trainledger.spec.units import counted

SPLITS = ("phase", "kind", "path", "line", "category", "basis")
LONGEST = 20  # rows of a split
_PAYLOAD = (
    "Payload: the bytes of all these messages, counted whole: the operand of a reduction, the result of a gather."
)


def page(
    ledger: Ledger,
    title: str,
    *,
    by: str = "",
    top: int = LONGEST,
    tensors: bool = False,
    on_device: OnDevice | None = None,
    assumed_cpu: bool = False,
) -> Document:
    """Totals of the step, its peak, one split, what it would take on a device, and what qualifies them.

    With ``tensors`` also what is live at the peak; with ``assumed_cpu`` that nobody said whose kernels run.
    """
    traced = " traced" if ledger.writer != "closed form" else ""
    head = f"{title}: {counted(sum(entry.times for entry in ledger), 'operation')}{traced}"
    if ledger.partial:
        head = f"PARTIAL: {head}, then {ledger.partial}"
    rows = tuple((name, Amount(*amount)) for name, amount in totals(ledger))
    sent = tuple(collectives(ledger))
    columns = ("collective", "phase", "over", "ranks", "times", "payload")
    payload = Table("collectives", columns, sent, units=("", "", "", "integer", "integer", "nbytes"), align="lllrrr")
    return Document(
        title=title,
        sections=sections(
            head,
            Table("totals", ("", "in one step"), rows),
            f"The peak is at {place(ledger.peak().entry)}." if len(ledger) else None,
            "Counted with a CPU's kernels; --device NAME or --kernels cuda counts a GPU's." if assumed_cpu else None,
            section("", payload, _PAYLOAD) if sent else None,
            split(ledger, by, top) if by else None,
            *(notes((f"note: {note}",)) for note in ledger.notes),
            uncounted(ledger),
            *(on_device.document().sections if on_device is not None else ()),
            *(peak_sections(ledger, top) if tensors else ()),
        ),
        data=lambda: _data(ledger, title, by, tensors, on_device),
        figures=lambda: figures(ledger),
    )


def figures(ledger: Ledger) -> list[Chart]:
    """Memory over the step, and what the peak is made of."""
    peak = peak_chart(ledger)
    return [memory_chart(ledger), *([] if peak is None else [peak])]


def totals(ledger: Ledger) -> Iterator[tuple[str, tuple[int, str]]]:
    """Names, amounts and units of a step's totals; those that are part of one above begin with a dash."""
    yield "parameters trained", (ledger.parameters, "count")
    yield "FLOPs", (ledger.flops, "flops")
    for kind, flops in sorted(ledger.by("kind").items(), key=lambda each: -each[1]):
        if flops:
            yield f"- {kind}", (flops, "flops")
    yield "model FLOPs", (ledger.model_flops, "flops")
    yield "kept for backward", (ledger.kept_nbytes, "nbytes")
    collectives = ledger.filter(lambda entry: entry.kind == "collective")
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
    for entry in ledger:
        if entry.kind == "collective":
            sums = found.setdefault((entry.name, entry.phase, entry.group, entry.ranks), [0, 0])
            sums[0] += entry.times
            sums[1] += entry.payload * entry.times
    return [(*key, times, payload) for key, (times, payload) in found.items()]


def split(ledger: Ledger, by: str, top: int = LONGEST) -> Table:
    """The largest rows of a split: FLOPs, bytes moved and bytes kept; by category the most bytes of each."""
    if by == "category":
        return Table(by, ("category at its most", "bytes"), tuple(highest(ledger).items()), units=("", "nbytes"))
    amounts = {name: ledger.by(by, name) for name in ("flops", "read", "written", "kept")}
    amounts["kept"] = {label: kept // ledger.micro_batches for label, kept in amounts["kept"].items()}  # as the total
    labels = sorted(amounts["flops"], key=lambda amount: (-amounts["flops"][amount], -amounts["written"][amount]))
    rows: list[tuple[Cell, ...]] = [
        (_label(label, by), *(amounts[name][label] for name in amounts)) for label in labels[:top]
    ]
    if rest := labels[top:]:
        rows.append((f"{len(rest)} more", *(sum(amounts[name][each] for each in rest) for name in amounts)))
    units = ("", "flops", "nbytes", "nbytes", "nbytes")
    return Table(by, (by, "FLOPs", "read", "written", "kept"), tuple(rows), units=units, align="lrrrr")


def _label(label: str, by: str) -> str:
    return label or ("no line of yours" if by == "line" else "outside the model")


def highest(ledger: Ledger) -> dict[str, int]:
    """The most bytes that each category has at any time of the step."""
    most = highest_by_category(ledger)
    return {category: most[category] for category in CATEGORIES if most.get(category)}


def uncounted(ledger: Ledger) -> tuple[str, ...]:
    """A sentence for each operator and line that has no rule.

    >>> from trainledger.ledger.entry import Entry
    >>> uncounted(Ledger((Entry("my_lib::op", "", "forward", "unknown", line="model.py:41"),)))
    ('uncounted: 1 x my_lib::op at model.py:41',)
    """
    found: dict[tuple[str, str], int] = {}
    for entry in ledger:
        if entry.kind == "unknown":
            found[entry.name, entry.line] = found.get((entry.name, entry.line), 0) + entry.times
    return tuple(
        f"uncounted: {times} x {name}" + (f" at {line}" if line else "") for (name, line), times in found.items()
    )


def _data(ledger: Ledger, title: str, by: str, tensors: bool, on_device: OnDevice | None) -> dict[str, Any]:
    peak = ledger.peak() if len(ledger) else None
    data: dict[str, Any] = {
        "target": title,
        "operations": sum(entry.times for entry in ledger),
        "parameters": ledger.parameters,
        "flops": ledger.flops,
        "flops_by_kind": ledger.by("kind"),
        "flops_by_basis": ledger.by("basis"),
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
        data["by"] = highest(ledger)
    elif by:
        data["by"] = {name: ledger.by(by, name) for name in ("flops", "read", "written", "kept")}
    if on_device is not None:
        data["on_device"] = on_device.document().data()
    return data | ({"tensors": peak_data(ledger)} if tensors else {})
