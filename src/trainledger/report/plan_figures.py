"""The figures of a plan: where the time goes, what memory holds over a step, and what runs when in it."""

from __future__ import annotations

from trainledger.document import Figure
from trainledger.ledger.ranks import RankAccount
from trainledger.plan.plan import Plan
from trainledger.predict.parallel_step import spans
from trainledger.predict.predict import heaviest
from trainledger.report.memory import memory_timeline
from trainledger.report.time_figures import step_timeline, waterfall
from trainledger.units import format_seconds


def figures(plan: Plan) -> dict[str, Figure]:
    """What there is to draw of a plan, by title; the waterfall first where times are known."""
    forecast = plan.forecast
    unfit = " (it does NOT fit)" if forecast.fits is False else ""
    drawn: dict[str, Figure] = {}
    if forecast.waterfall:
        whole = forecast.total_seconds
        title = ("Where the time of a step goes" if whole is None else f"Where {format_seconds(whole)} go") + unfit
        drawn[title] = waterfall(forecast.waterfall, title)
    usable = plan.memory_nbytes if forecast.usable_nbytes is None else forecast.usable_nbytes
    memory = memory_timeline(heaviest(plan.ledger, plan.ranks).ledger, None, usable)
    if memory is not None:
        device = " of the heaviest device" if plan.ranks else ""
        drawn[f"Memory{device} over one step{unfit}"] = memory
    if plan.machine is not None and forecast.step_seconds is not None:
        one = RankAccount(0, 0, 1, plan.run.model.n_layers, True, True, 1, plan.ledger)
        step = step_timeline(spans(plan.run, plan.ranks or (one,), plan.machine), forecast.step_seconds, unfit)
        if step is not None:
            drawn["One step as it runs"] = step
    return drawn
