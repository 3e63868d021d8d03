"""Headlines that every plan has: the memory of a device, the step, and MFU, each with its numbers put in."""

from __future__ import annotations

from trainledger.answers.pages.interval import between
from trainledger.forecast.plan.plan import Plan
from trainledger.spec.units import format_flops, format_flops_per_second, format_nbytes, format_seconds
from trainledger.web.calculator import Headline

# The two ways in which MFU is counted, each under one name on every page.
SIX_ND_MFU, ATTENTION_MFU = "MFU (6 N D)", "MFU with attention"
OF_ATTENTION_MFU = "Chowdhery et al. 2022, PaLM (arXiv 2204.02311), appendix B; attention counted dense"


def of_memory(plan: Plan) -> list[Headline]:
    """What the peak rank needs, what its device has usable, and what is left; where that is unknown the first."""
    forecast, device = plan.forecast, plan.device_memory
    needed = forecast.device_nbytes if forecast.device_nbytes is not None else forecast.peak_nbytes
    assert needed is not None
    assert forecast.peak_nbytes is not None
    outside = needed - forecast.peak_nbytes
    headlines = [
        Headline(
            name="device_nbytes",
            title="memory of the peak rank",
            value=needed,
            unit="nbytes",
            formula=f"tensors + outside the tensors = {format_nbytes(forecast.peak_nbytes)} + {_nbytes(outside)}"
            f"{(within := between(forecast, 'device_nbytes', format_nbytes))}",
            interval=within.strip(),
            basis=forecast.basis.get("device_nbytes", "exact"),
            source="live bytes at each operation of a step, and what the driver and libraries take",
        )
    ]
    usable = forecast.usable_nbytes
    if usable is None:
        return headlines
    headlines.append(
        Headline(
            name="usable_nbytes",
            title="usable memory of a device",
            value=usable,
            unit="nbytes",
            basis="assumed",
            formula=f"what the driver leaves to a process of a {plan.run.cluster.device} = {format_nbytes(usable)}",
            source=plan.run.cluster.device if device is None else device.usable_source,
        )
    )
    headlines.append(
        Headline(
            name="headroom_nbytes",
            title="headroom",
            value=usable - needed,
            unit="nbytes",
            basis="assumed",
            formula=f"usable - needed = {format_nbytes(usable)} - {format_nbytes(needed)}",
            source="the two numbers before this one",
        )
    )
    return headlines


def of_time(plan: Plan) -> list[Headline]:
    """The seconds of a step by cause, and MFU; none where no times are known."""
    forecast = plan.forecast
    if forecast.step_seconds is None:
        return []
    causes = [(name, step_cause) for name, step_cause in forecast.step_causes.items() if step_cause]
    shown = " + ".join(f"{format_seconds(each)} {name}" for name, each in causes if each > 0)
    less = "".join(f" - {format_seconds(-each)} {name}" for name, each in causes if each < 0)
    basis = forecast.basis.get("step_seconds", "assumed")
    headlines = [
        Headline(
            name="step_seconds",
            title="step",
            value=forecast.step_seconds,
            unit="seconds",
            basis=basis,
            formula=f"{shown}{less}{(within := between(forecast, 'step_seconds', format_seconds))}",
            interval=within.strip(),
            source="kernels and collectives on their streams",
        )
    ]
    if forecast.mfu is None or not forecast.model_flops or not forecast.peak_flops_per_second:
        return headlines
    rate = format_flops_per_second(forecast.peak_flops_per_second)
    devices = plan.run.layout.devices
    numbers = f"{format_flops(forecast.model_flops)} / ({format_seconds(forecast.step_seconds)} x {devices:,} x {rate})"
    mfu = Headline(
        name="mfu", title=ATTENTION_MFU, value=forecast.mfu, unit="share", basis=forecast.basis.get("mfu", basis),
        formula=f"model FLOPs / (step x devices x peak) = {numbers}", source=OF_ATTENTION_MFU,
    )  # fmt: skip
    return [*headlines, mfu]


def _nbytes(nbytes: int) -> str:
    return format_nbytes(nbytes) if nbytes else "0"
