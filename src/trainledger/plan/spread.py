"""The plan of a run that is spread over devices: the whole model's figures, and the memory of each distinct rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainledger.ledger.ranks import RankAccount, accounts
from trainledger.ledger.step import account
from trainledger.plan.plan import Plan, make_plan, memory_of_device
from trainledger.predict.roofline import Machine
from trainledger.spec.layout import Layout
from trainledger.spec.run import Run

NO_TIME = "no step time: what collectives cost and what they hide behind is not predicted yet"


def spread_plan(run: Run, machine: Machine | None, *, backend: str, mfu: float = 0.5) -> Plan:
    """The plan of a run with a layout: parameters and FLOPs of the whole step, memory of the heaviest rank, no times.

    Raises InvalidInput where ``mfu`` is no share of the peak.
    """
    recipe = replace(run.recipe, micro_batch=run.device_batch)
    whole = replace(run, layout=Layout(), recipe=recipe)
    plan = make_plan(whole, account(whole, backend=backend), machine, mfu=mfu)
    ranks = accounts(run, backend=backend)
    heaviest = max(ranks, key=lambda each: each.ledger.peak().nbytes).ledger
    peak = heaviest.peak()
    told = replace(
        plan.forecast, peak_nbytes=peak.nbytes, peak_by_category=peak.by_category, kept_nbytes=heaviest.kept_nbytes,
        step_seconds=None, step_seconds_by_phase={}, step_seconds_by_kind={}, step_seconds_by_bound={},
        tokens_per_second=None, total_seconds=None, seconds_by_phase={}, mfu=None, hfu=None, device_hours=None,
        money=None, notes=(NO_TIME,),
    )  # fmt: skip
    held = memory_of_device(run, peak.nbytes, machine)
    return replace(plan, run=run, peak=peak, forecast=told, ranks=ranks, device_memory=held)


def rank_facts(rank: RankAccount) -> dict[str, Any]:
    """A rank in figures: its place, its memory, its FLOPs, and the bytes of its collectives by axis and kind."""
    peak = rank.ledger.peak()
    sent: dict[str, int] = {}
    for each in rank.ledger:
        if each.kind == "collective" and each.payload:
            key = f"{each.name} over {each.group}"
            sent[key] = sent.get(key, 0) + each.payload * each.times
    return {
        "title": rank.title, "count": rank.count, "stage": rank.stage, "place": rank.place, "layers": rank.layers,
        "in_flight": rank.in_flight, "parameters": rank.ledger.parameters, "model_flops": rank.ledger.model_flops,
        "peak_nbytes": peak.nbytes, "peak_by_category": peak.by_category,
        "peak_at": f"{peak.entry.name} of {peak.entry.path or 'the update'}, {peak.entry.phase}",
        "payload_nbytes": sent,
    }  # fmt: skip
