"""Rules of thumb and conventions of counting, for one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from trainledger.answers.load import Source, resolve
from trainledger.answers.machine import kernels_of
from trainledger.answers.pages.heading import heading
from trainledger.answers.pages.plain_data import plain, run_data
from trainledger.answers.pages.plan_figures import rules_table
from trainledger.answers.plan import planned
from trainledger.answers.question import Progress, question, silent
from trainledger.answers.source import OfCluster, with_cluster
from trainledger.forecast.plan.plan import Plan, RuleOfThumb, StepFact, step_facts
from trainledger.ledger.rules_of_thumb import CONVENTIONS
from trainledger.report.document import Answer, Content, Document, Table, details, sections
from trainledger.report.table import sentence
from trainledger.spec.frozen import frozen
from trainledger.spec.reading import Overrides
from trainledger.spec.run import Run
from trainledger.spec.units import format_percent


@frozen
class Rules(Answer, report="rules"):
    """The plan whose rules of thumb are compared with its ledger."""

    plan: Plan

    @property
    def run(self) -> Run:
        return self.plan.run


@question(plots=False)
def rules(
    run: Source, overrides: Overrides = (), *, progress: Progress = silent, **cluster: Unpack[OfCluster]
) -> Rules:
    """Rules of thumb and the ledger of a run: each rule's error and what it leaves out; and the FLOPs of a step by
    each convention in use.

    Raises `InvalidInput`.
    """
    return Rules(planned(resolve(run, with_cluster(overrides, **cluster), progress=progress)))


def page(answer: Rules) -> Document:
    """Each rule and what the ledger counts, what the recipe does in a step, and FLOPs by each convention."""
    plan, run, ledger = answer.plan, answer.run, answer.plan.ledger
    facts = step_facts(run, ledger)
    counted = {name: convention.flops(run, ledger) for name, convention in CONVENTIONS.items()}
    return Document(
        title=f"Rules of thumb for {run.model.name}",
        verdict=_verdict(plan.rules),
        sections=sections(
            heading(run, kernels_of(run)),
            rules_table(plan.rules),
            _conventions(counted, ledger.tokens),
            *details("what each rule assumes", dict.fromkeys(_why(rule) for rule in plan.rules)),
            *details("what the recipe does in a step", *_facts(facts)),
            *details(
                "sources", (sentence(f"{convention.name}: {convention.source}") for convention in CONVENTIONS.values())
            ),
        ),
        data=lambda: {
            "run": run_data(run),
            "rules_of_thumb": plain(plan.rules, more={RuleOfThumb: ("error",)}),
            "step": plain(facts),
            "tokens": ledger.tokens,
            "conventions": [
                {"name": name, "formula": convention.formula, "source": convention.source, "flops": counted[name]}
                for name, convention in CONVENTIONS.items()
            ],
        },
    )


def _verdict(rules: Sequence[RuleOfThumb]) -> str:
    """The rules that are nearest to the ledger and farthest from it."""
    near, *_, far = sorted(rules, key=lambda rule: abs(rule.error))
    named = (f"{rule.rule} ({rule.quantity}, {format_percent(rule.error, signed=True)})" for rule in (near, far))
    return "Of {} rules the nearest is {}, the farthest {}.".format(len(rules), *named)


def _why(rule: RuleOfThumb) -> str:
    return f"{rule.quantity}, {rule.rule}: {rule.why}."


def _facts(facts: Sequence[StepFact]) -> tuple[Content, ...]:
    """What the recipe does in a step."""
    if not facts:
        return ()
    rows = tuple((fact.what, fact.formula, fact.sentence) for fact in facts)
    sources = tuple(sentence(f"{fact.what}, {fact.formula}: {fact.source}") for fact in facts)
    table = Table("in a step", ("in a step", "", "here"), rows, align="lll")
    return table, sources


def _conventions(counted: dict[str, float], tokens: int) -> Table:
    """The FLOPs of one step by each convention, per step and per token."""
    rows = tuple(
        (name, convention.formula, counted[name], counted[name] / tokens) for name, convention in CONVENTIONS.items()
    )
    columns = ("convention", "counts", "a step", "a token")
    return Table("conventions", columns, rows, units=("", "", "flops", "flops"), align="llrr")
