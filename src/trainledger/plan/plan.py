"""A plan: everything that can be said of a run before it starts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainledger.frozen import frozen
from trainledger.ledger.entry import Ledger
from trainledger.ledger.rules_of_thumb import training_flops, training_seconds
from trainledger.ledger.timeline import Peak
from trainledger.plan.beside import Beside, beside
from trainledger.plan.mfu import read_mfu
from trainledger.predict.forecast import Forecast, forecast
from trainledger.predict.roofline import Machine, NoRate, peak_rate
from trainledger.spec.precision import precision_of
from trainledger.spec.run import Run
from trainledger.units import SECONDS_PER_DAY

if TYPE_CHECKING:
    from trainledger.ledger.ranks import RankAccount


@frozen
class Napkin:
    """6ND over what the devices do at a share of their peak: the first line of every plan."""

    mfu: float
    dtype: str
    peak_flops_per_second: float
    tokens: int
    devices: int
    days: float


@frozen
class Plan:
    """A run's ledger, its forecast, and the rules of thumb beside them; ``napkin`` is None without a known peak.

    ``ranks`` are the distinct ranks of a run that is spread over devices; its ledger is that of the whole step.
    """

    run: Run
    ledger: Ledger
    peak: Peak
    forecast: Forecast
    rules: tuple[Beside, ...]
    napkin: Napkin | None
    memory_nbytes: int | None
    ranks: tuple[RankAccount, ...] = ()


def make_plan(run: Run, ledger: Ledger, machine: Machine | None, *, mfu: float = 0.5) -> Plan:
    """The plan of a run from its ledger and its machine (None: not known, so no times).

    Raises InvalidInput where ``mfu`` is no share of the peak.
    """
    mfu = read_mfu(mfu)
    peak = ledger.peak()
    napkin = _napkin(run, ledger, machine, mfu)
    memory = machine.memory_nbytes if machine is not None else None
    rate = None if napkin is None else napkin.devices * napkin.peak_flops_per_second * napkin.mfu
    return Plan(
        run=run,
        ledger=ledger,
        peak=peak,
        forecast=forecast(run, ledger, machine),
        rules=beside(run, ledger, peak.nbytes, memory_nbytes=memory, flops_per_second=rate, mfu=mfu),
        napkin=napkin,
        memory_nbytes=memory,
    )


def of_one_step(plan: Plan) -> Plan:
    """The same plan where the length of the run was not said: without evaluations, checkpoints and a whole time."""
    told = plan.forecast
    notes = [each for each in told.notes if not each.startswith(("evaluation", "checkpoints"))]
    notes.append("one step, without evaluation and checkpoints; --set recipe.tokens=... plans the whole run")
    short = replace(
        told, total_seconds=None, seconds_by_phase={}, device_hours=None, money=None, notes=tuple(notes)
    )  # fmt: skip
    return replace(plan, forecast=short)


def _napkin(run: Run, ledger: Ledger, machine: Machine | None, mfu: float) -> Napkin | None:
    if machine is None:
        return None
    dtype = precision_of(run.recipe).peak
    try:
        peak = peak_rate(machine, dtype)
    except NoRate:
        return None
    tokens = run.recipe.total_steps * run.recipe.tokens_per_step
    seconds = training_seconds(training_flops(ledger.parameters, tokens), run.cluster.count, peak, mfu)
    return Napkin(mfu, dtype, peak, tokens, run.cluster.count, seconds / SECONDS_PER_DAY)


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON takes it, the ledger left out."""
    return {
        "model": plan.run.model.name,
        "forecast": vars(plan.forecast),
        "rules_of_thumb": [{**vars(each), "error": each.error} for each in plan.rules],
        "napkin": None if plan.napkin is None else vars(plan.napkin),
        "memory_nbytes": plan.memory_nbytes,
        **_ranks(plan),
    }


def _ranks(plan: Plan) -> dict[str, Any]:
    if not plan.ranks:
        return {}
    from trainledger.plan.spread import rank_facts

    return {"ranks": [rank_facts(each) for each in plan.ranks]}
