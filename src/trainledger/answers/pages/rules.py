"""The document of rules of thumb and conventions of counting, for one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainledger.answers.pages.heading import heading
from trainledger.answers.pages.plain_data import plain, run_data
from trainledger.forecast.plan.plan import Plan, RuleOfThumb, StepFact, step_facts
from trainledger.ledger.rules_of_thumb import CONVENTIONS
from trainledger.report.document import Amount, Content, Document, Table, details, sections
from trainledger.report.table import sentence


def page(plan: Plan, backend: str) -> Document:
    """Each rule and what the ledger counts, what the recipe does in a step, and FLOPs by each convention."""
    run, ledger = plan.run, plan.ledger
    facts = step_facts(run, ledger)
    counted = {name: each.flops(run, ledger) for name, each in CONVENTIONS.items()}
    return Document(
        title=f"Rules of thumb for {run.model.name}",
        sections=sections(
            heading(run, backend),
            rules_table(plan.rules),
            _conventions(counted, ledger.tokens),
            *details("what each rule assumes", dict.fromkeys(_why(rule) for rule in plan.rules)),
            *details("what the recipe does in a step", *_facts(facts)),
            *details("sources", (sentence(f"{each.name}: {each.source}") for each in CONVENTIONS.values())),
        ),
        data=lambda: {
            "run": run_data(run),
            "rules_of_thumb": plain(plan.rules, more={RuleOfThumb: ("error",)}),
            "step": plain(facts),
            "tokens": ledger.tokens,
            "conventions": [
                {"name": name, "formula": each.formula, "source": each.source, "flops": counted[name]}
                for name, each in CONVENTIONS.items()
            ],
        },
    )


def _why(rule: RuleOfThumb) -> str:
    return f"{rule.quantity}, {rule.rule}: {rule.why}."


def _facts(facts: Sequence[StepFact]) -> tuple[Content, ...]:
    """What the recipe does in a step."""
    if not facts:
        return ()
    rows = tuple((each.what, each.formula, each.sentence) for each in facts)
    sources = tuple(sentence(f"{each.what}, {each.formula}: {each.source}") for each in facts)
    table = Table("in a step", ("in a step", "", "here"), rows, align="lll")
    return table, sources


def _conventions(counted: dict[str, float], tokens: int) -> Table:
    """The FLOPs of one step by each convention, per step and per token."""
    rows = tuple((name, each.formula, counted[name], counted[name] / tokens) for name, each in CONVENTIONS.items())
    columns = ("convention", "counts", "a step", "a token")
    return Table("conventions", columns, rows, units=("", "", "flops", "flops"), align="llrr")


def rules_table(rules: Iterable[RuleOfThumb]) -> Table:
    """Rules of thumb and how far each is off the ledger."""
    rows = tuple(
        (each.quantity, each.rule, Amount(each.by_rule, each.unit), Amount(each.by_ledger, each.unit), each.error)
        for each in rules
    )
    columns = ("", "rule of thumb", "estimate", "ledger", "error")
    return Table("rules of thumb", columns, rows, units=("", "", "", "", "change"), align="llrrr")
