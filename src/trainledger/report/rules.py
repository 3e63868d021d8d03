"""Rules of thumb and conventions of counting for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from trainledger.report.table import sentence, table, wrapped
from trainledger.units import format_count, format_flops, format_nbytes, format_percent, format_seconds

if TYPE_CHECKING:
    from trainledger.ledger.conventions import Convention
    from trainledger.plan.rules_of_thumb_error import RuleOfThumb, StepFact

SHOW: dict[str, Callable[[float], str]] = {
    "count": format_count, "flops": format_flops, "nbytes": format_nbytes, "seconds": format_seconds,
}  # fmt: skip


def rules(rows: Iterable[RuleOfThumb]) -> str:
    """Each rule beside the ledger, and under the table what each leaves out."""
    rows = list(rows)
    cells = [
        [each.quantity, each.rule, SHOW[each.unit](each.by_rule), SHOW[each.unit](each.by_ledger),
         format_percent(each.error, signed=True)]
        for each in rows
    ]  # fmt: skip
    notes = dict.fromkeys(wrapped(f"{each.quantity}, {each.rule}: {each.why}.") for each in rows)
    return "\n".join([table(["", "rule", "says", "ledger", "off by"], cells, align="llrrr"), "", *notes])


def facts_of_step(facts: Iterable[StepFact]) -> str:
    """What the recipe does in a step."""
    facts = list(facts)
    cells = [[each.what, each.formula, each.sentence] for each in facts]
    sources = [wrapped(sentence(f"{each.what}, {each.formula}: {each.source}")) for each in facts]
    return "\n".join([table(["in a step", "", "here"], cells, align="lll"), "", *sources])


def conventions(named: Iterable[Convention], counted: Mapping[str, float], tokens: int) -> str:
    """The FLOPs of one step by each convention, per step and per token."""
    named = list(named)
    cells = [
        [each.name, each.formula, format_flops(counted[each.name]), format_flops(counted[each.name] / tokens)]
        for each in named
    ]  # fmt: skip
    sources = [wrapped(sentence(f"{each.name}: {each.source}")) for each in named]
    return "\n".join([table(["convention", "counts", "a step", "a token"], cells, align="llrr"), "", *sources])
