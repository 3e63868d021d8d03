"""A plan: everything that can be said of a run before it starts."""

from __future__ import annotations

from dataclasses import replace

from trainledger.forecast.plan.quantity import checked_mfu
from trainledger.forecast.plan.rules_of_thumb_error import RuleOfThumb, rules_of_thumb
from trainledger.forecast.predict import predict
from trainledger.forecast.predict.device_memory import DeviceMemory
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.roofline import Machine, NoRate, matmul_dtype, peak_rate
from trainledger.ledger.entry import Amounts
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import Peak
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.ranks import RankAccount
from trainledger.ledger.rules_of_thumb import CONVENTIONS, training_flops, training_seconds
from trainledger.report.document import Answer
from trainledger.spec.device import Device
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.run import Run
from trainledger.spec.units import SECONDS_PER_DAY, format_percent


@frozen
class Napkin:
    """6ND over what the devices do at a share of their peak: the first line of every plan."""

    mfu: float
    dtype: str
    peak_flops_per_second: float
    parameters: int
    tokens: int
    devices: int
    days: float

    def __repr__(self) -> str:
        return f"Napkin({self.days:.4g} days at {format_percent(self.mfu)} of the {self.dtype} peak)"


@frozen
class Plan(Answer, report="plan"):
    """A run's ledger, its forecast, and the rules of thumb; ``napkin`` is None without a known peak.

    ``ranks`` are the distinct ranks of a run that is spread over devices; its ledger is that of the whole step.
    ``heaviest`` is the ledger of the device that needs most memory, whose ``peak`` it is.
    ``convention`` says how its model FLOPs are counted. ``device_memory`` is the memory of the peak rank in
    all; None where the device is not of the catalog. ``machine`` is what times are predicted for.
    """

    run: Run
    ledger: Ledger
    heaviest: Ledger
    peak: Peak
    forecast: Forecast
    rules: tuple[RuleOfThumb, ...]
    napkin: Napkin | None
    memory_nbytes: int | None
    ranks: tuple[RankAccount, ...] = ()
    device_memory: DeviceMemory | None = None
    convention: str = "dense"
    machine: Machine | None = None

    def __repr__(self) -> str:
        on = f"{self.run.cluster.count:,} x {self.run.cluster.device}"
        return f"Plan({self.run.model.name} on {on}: {self.forecast!r})"


def make_plan(run: Run, machine: Machine | None, *, backend: str, mfu: float | str = 0.5) -> Plan:
    """The plan of a run on one device or on many, and its machine (None: not known, so no times).

    ``backend`` (of `spec.device`) says whose kernels run. Raises InvalidInput where ``mfu`` is no share of the peak.
    """
    share = checked_mfu(mfu)
    ledger, ranks = predict.accounts_of(run, backend=backend)
    napkin = _napkin(run, ledger, machine, share)
    memory = machine.memory_nbytes if machine is not None else None
    given = machine.capacity_nbytes if isinstance(machine, Device) else memory
    rate = None if napkin is None else napkin.devices * napkin.peak_flops_per_second * napkin.mfu
    whole = predict.whole_run(run) if ranks else run
    heaviest = predict.heaviest(ledger, ranks)
    of_all = ledger.peak() if ranks else heaviest.peak
    return Plan(
        run=run,
        ledger=ledger,
        heaviest=heaviest.ledger,
        peak=heaviest.peak,
        forecast=predict.forecast(run, ledger, machine, ranks=ranks, heaviest_rank=heaviest),
        rules=rules_of_thumb(whole, ledger, of_all.nbytes, memory_nbytes=given, flops_per_second=rate, mfu=share),
        napkin=napkin,
        memory_nbytes=memory,
        ranks=ranks,
        device_memory=memory_of_device(run, heaviest.peak.nbytes, machine, heaviest.ledger.reserved),
        machine=machine,
    )


def memory_of_device(
    run: Run, peak_nbytes: int, machine: Machine | None, reserved: Amounts = ()
) -> DeviceMemory | None:
    """Memory of a catalog device at the peak of a rank, with its context, communicators and what is ``reserved``."""
    return predict.memory_of_device(run, peak_nbytes, machine, reserved) if isinstance(machine, Device) else None


def counted_by(plan: Plan, convention: str) -> Plan:
    """The same plan with model FLOPs and MFU by one of `CONVENTIONS`; raises InvalidInput for another name."""
    if convention not in CONVENTIONS:
        rule = f"must be one of {', '.join(CONVENTIONS)}"
        raise InvalidInput([Problem("convention", convention, rule, nearest_text(convention, CONVENTIONS))])
    forecast = plan.forecast
    flops = CONVENTIONS[convention].flops(plan.run, plan.ledger)
    mfu = forecast.mfu * flops / plan.ledger.model_flops if forecast.mfu is not None else None
    return replace(plan, convention=convention, forecast=replace(forecast, model_flops=flops, mfu=mfu))


@frozen
class Causal:
    """MFU and HFU of a plan where attention is counted without what the mask leaves out.

    ``mfu`` is by the convention ``causal``, ``hfu`` by ``kernels``: what kernels run that skip masked pairs.
    """

    mfu: float
    hfu: float


def by_causal(plan: Plan) -> Causal | None:
    """The plan's MFU and HFU without masked pairs; None where it has none."""
    forecast, ledger = plan.forecast, plan.ledger
    if forecast.mfu is None or forecast.hfu is None or not forecast.model_flops or not ledger.matmul_flops:
        return None
    model, kernels = (CONVENTIONS[name].flops(plan.run, ledger) for name in ("causal", "kernels"))
    return Causal(forecast.mfu * model / forecast.model_flops, forecast.hfu * kernels / ledger.matmul_flops)


def with_notes(plan: Plan, notes: list[str]) -> Plan:
    """The same plan with further sentences after its own."""
    forecast = plan.forecast
    return replace(plan, forecast=replace(forecast, notes=(*forecast.notes, *notes))) if notes else plan


def of_one_step(plan: Plan) -> Plan:
    """The same plan where the run has no given length: without evaluation, checkpoints and totals of the run."""
    note = "one step, without evaluation and checkpoints; --set recipe.tokens=... plans the whole run"
    return with_notes(replace(plan, forecast=predict.of_one_step(plan.run, plan.forecast)), [note])


def _napkin(run: Run, ledger: Ledger, machine: Machine | None, mfu: float) -> Napkin | None:
    if machine is None:
        return None
    dtype = matmul_dtype(ledger)  # the peak that the forecast's MFU is taken against
    try:
        peak = peak_rate(machine, dtype)
    except NoRate:
        return None
    tokens, active = run.recipe.total_steps * run.recipe.tokens_per_step, parameters(run.model).active
    seconds = training_seconds(training_flops(active, tokens), run.cluster.count, peak, mfu)
    return Napkin(mfu, dtype, peak, active, tokens, run.cluster.count, seconds / SECONDS_PER_DAY)
