"""The figures of a plan: where the time goes, what is held in memory over a step, and what runs when in it."""

from __future__ import annotations

from trainledger.ledger.ranks import RankAccount
from trainledger.plan.plan import Plan
from trainledger.predict.parallel_step import spans
from trainledger.predict.predict import heaviest
from trainledger.predict.roofline import Machine
from trainledger.report.figures import memory_timeline
from trainledger.report.step_timeline import step_timeline
from trainledger.report.style import Figure
from trainledger.report.waterfall import figure
from trainledger.units import format_seconds


def figures(plan: Plan, machine: Machine | None = None) -> dict[str, Figure]:
    """What there is to draw of a plan, by title; the waterfall first where times are known.

    With the ``machine`` also the step as it runs.
    """
    told = plan.forecast
    unfit = " (it does NOT fit)" if told.fits is False else ""
    drawn: dict[str, Figure] = {}
    if told.waterfall:
        whole = told.total_seconds
        title = ("Where the time of a step goes" if whole is None else f"Where {format_seconds(whole)} go") + unfit
        drawn[title] = figure(told.waterfall, title)
    memory = memory_timeline(heaviest(plan.ledger, plan.ranks).ledger, None, _usable(plan))
    if memory is not None:
        device = " of the heaviest device" if plan.ranks else ""
        drawn[f"Memory{device} over one step{unfit}"] = memory
    if machine is not None and told.step_seconds is not None:
        step = step_timeline(spans(plan.run, plan.ranks or (_alone(plan),), machine), told.step_seconds, unfit)
        if step is not None:
            drawn["One step as it runs"] = step
    return drawn


def _usable(plan: Plan) -> int | None:
    told = plan.forecast
    return plan.memory_nbytes if told.usable_nbytes is None else told.usable_nbytes


def _alone(plan: Plan) -> RankAccount:
    """The one rank of a run on one device."""
    return RankAccount(0, 0, 1, plan.run.model.n_layers, True, True, 1, plan.ledger)
