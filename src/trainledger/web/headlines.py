"""Headlines that every plan has: the memory of a device, the step, and MFU, each with its numbers put in."""

from __future__ import annotations

from trainledger.answers.pages.interval import between
from trainledger.forecast.plan.plan import Plan
from trainledger.spec.units import format_flops, format_flops_per_second, format_nbytes, format_seconds
from trainledger.web.calculator import Headline, headline

SIX_ND_MFU = "MFU (6 N D)"  # the other way to count it is with attention


def of_memory(plan: Plan) -> list[Headline]:
    """What the peak rank needs, what its device has usable, and what is left; where that is unknown the first."""
    forecast, device = plan.forecast, plan.device_memory
    needed = forecast.device_nbytes if forecast.device_nbytes is not None else forecast.peak_nbytes
    assert needed is not None
    assert forecast.peak_nbytes is not None
    outside = needed - forecast.peak_nbytes
    within, usable = between(forecast, "device_nbytes", format_nbytes), forecast.usable_nbytes
    terms = f"{format_nbytes(forecast.peak_nbytes)} + {format_nbytes(outside) if outside else 0}"
    formula = f"tensors + outside the tensors = {terms}{within}"
    basis = forecast.basis.get("device_nbytes", "exact")
    headlines = [headline("plan.device_nbytes", needed, formula, interval=within.strip(), basis=basis)]
    if usable is None:
        return headlines
    formula = f"what the driver leaves to a process of a {plan.run.cluster.device} = {format_nbytes(usable)}"
    source = plan.run.cluster.device if device is None else device.usable_source
    headlines.append(headline("plan.usable_nbytes", usable, formula, source=source))
    formula = f"usable - needed = {format_nbytes(usable)} - {format_nbytes(needed)}"
    return [*headlines, headline("plan.headroom_nbytes", usable - needed, formula)]


def of_time(plan: Plan) -> list[Headline]:
    """The seconds of a step by cause, and MFU; none where no times are known."""
    forecast = plan.forecast
    if forecast.step_seconds is None:
        return []
    causes = [(name, step_cause) for name, step_cause in forecast.step_causes.items() if step_cause]
    shown = " + ".join(f"{format_seconds(each)} {name}" for name, each in causes if each > 0)
    less = "".join(f" - {format_seconds(-each)} {name}" for name, each in causes if each < 0)
    basis = forecast.basis.get("step_seconds", "assumed")
    within = between(forecast, "step_seconds", format_seconds)
    formula = f"{shown}{less}{within}"
    step = headline("plan.step_seconds", forecast.step_seconds, formula, basis=basis, interval=within.strip())
    if forecast.mfu is None or not forecast.model_flops or not forecast.peak_flops_per_second:
        return [step]
    rate = format_flops_per_second(forecast.peak_flops_per_second)
    devices = plan.run.layout.devices
    numbers = f"{format_flops(forecast.model_flops)} / ({format_seconds(forecast.step_seconds)} x {devices:,} x {rate})"
    formula = f"model FLOPs / (step x devices x peak) = {numbers}"
    return [step, headline("plan.mfu", forecast.mfu, formula, basis=forecast.basis.get("mfu", basis))]
