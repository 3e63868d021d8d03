"""The prediction of a run on one device or on many: memory, step, the whole of it, and what the time goes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from trainledger.forecast.predict import padding
from trainledger.forecast.predict.clock import of_each_rank
from trainledger.forecast.predict.device_memory import memory_of_device
from trainledger.forecast.predict.forecast import (
    BEYOND,
    IDEAL,
    RUN_CAUSES,
    WITH_REFERENCE,
    Bar,
    Bottleneck,
    Forecast,
    bottleneck,
    nanoseconds,
    short_of_memory,
    waterfall,
)
from trainledger.forecast.predict.interval import AT_THE_PEAK, of_forecast, of_step
from trainledger.forecast.predict.roofline import Machine, NoRate, hfu, launched_as, matmul_dtype, mfu, peak_rate
from trainledger.forecast.predict.run import SHARED, Conditions, RunTime, conditions, run_time, too_few
from trainledger.forecast.predict.step import StepTime, step_of_one
from trainledger.ledger.entry import in_any_memory
from trainledger.ledger.ledger import Ledger, summary
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.ranks import RunAccount, account_run
from trainledger.ledger.rules_of_thumb import CONVENTIONS, training_flops
from trainledger.spec.device import Device, kernels_of_capability
from trainledger.spec.run import Run
from trainledger.spec.units import KILO, SECONDS_PER_DAY, SECONDS_PER_HOUR, ceil_div, format_nbytes

COMPUTED = ("forward", "recompute", "backward", "clip", "optimizer")
NO_MACHINE = (
    "no step time and no MFU: this machine was not measured yet; run `trainledger measure machine` once, "
    "or set cluster.device to a device of the catalog"
)
CUDNN_FIRST = (
    "sdpa selects cuDNN's attention on this device where cuDNN is newer than 9.15 (PyTorch 2.11 and later for "
    "CUDA 13); otherwise it selects {other}"
)
BEFORE_FLASH = "FlashAttention needs compute capability 8.0, and the device has less: attention is {kernel}"
_WHOLE = frozenset(("parameters", "gradients", "optimizer state", "frozen weights", "buffers"))  # whatever the batch
_OF_A_RUN = ("evaluation", "checkpoints", "assumed, as the run file", "interruptions")
ALONE = "one device that does all of it alone"
NEVER = "it would always be interrupted before it could save"


def predict(run: Run, machine: Machine | None, *, backend: str) -> Forecast:
    """What a run will cost on a machine (None = unknown: no times, no MFU), alone or spread over devices.

    ``backend`` (of `spec.device.KERNELS`) says whose kernels run, as in `ledger.step.account`.
    """
    return forecast(account_run(run, backend=backend), machine)


def forecast(account: RunAccount, machine: Machine | None) -> Forecast:
    """The forecast of a run from its account: nothing of the run's plan is derived again.

    Of rows of uneven length (``data.lengths``) it is the mean step, with the memory of the longest.
    """
    run = account.run
    if run.data.lengths is None:
        return _of_full_rows(account, machine)
    longest, by_length = replace(run, data=replace(run.data, lengths=None)), {}
    for length in padding.lengths_to_account(run):
        of_length = replace(account, run=longest)
        if length != run.recipe.seq_len:
            shorter = replace(longest, recipe=replace(run.recipe, seq_len=length))
            of_length = account_run(shorter, backend=account.backend)
        by_length[length] = _of_full_rows(of_length, machine)
    return padding.mean_step(run, by_length)


def _of_full_rows(account: RunAccount, machine: Machine | None) -> Forecast:
    run, ledger, ranks, heaviest = account.run, account.ledger, account.ranks, account.heaviest
    facts: dict[str, Any] = {**summary(ledger, account.peak), "matmul_dtype": matmul_dtype(ledger)}
    counted = "assumed" if ledger.uncounted else "exact"
    basis = {"parameters": "exact", "flops": counted, "kept_nbytes": "exact", "peak_nbytes": "exact"}
    notes = list(heaviest.notes)
    if ranks:
        peak_rank = summary(heaviest, account.peak)
        facts |= {name: peak_rank[name] for name in ("kept_nbytes", "kept_by_kind")}
    if ledger.uncounted:
        names = ", ".join(name for name, _ in ledger.uncounted)
        notes.append(f"operations without a rule, whose FLOPs are not counted: {names}")
    if machine is None:
        return Forecast(**facts, basis=basis, notes=(*notes, NO_MACHINE), impossible=tuple(_impossible(run, {}, None)))
    facts["device"] = machine.title
    own = machine if isinstance(machine, Device) else of_each_rank(machine, run.layout.devices)
    memory = memory_of_device(run, account.peak.nbytes, own, heaviest.reserved)
    facts |= {"device_nbytes": memory.nbytes, "usable_nbytes": memory.usable_nbytes, "fits": memory.fits}
    basis["device_nbytes"] = "assumed"
    if memory.tensors_alone:
        basis["device_nbytes"] = "bound" if isinstance(machine, Device) else "exact"
    if ranks:
        from trainledger.forecast.predict.parallel_step import layout_time

        step = layout_time(ranks, machine)
    else:
        launching = launched_as(run.recipe, machine)
        step = step_of_one(run, ledger, launching, tensors=account.tensors)
    notes += step.notes
    if isinstance(machine, Device) and run.recipe.attention == "sdpa":
        notes += _of_attention(ledger, kernels_of_capability(machine.compute_capability))
    if step.seconds:
        around = conditions(run, machine)
        whole = _whole(account, machine, step, around)
        notes += whole.notes
        basis |= dict.fromkeys(("step_seconds", "tokens_per_second", "total_seconds", "mfu"), step.basis)
        facts |= _times(run, step, whole, around)
        if facts["total_seconds"] is None:
            notes.append(f"no time of the whole run: {NEVER}")
            facts["bottleneck"] = Bottleneck("failures", NEVER)
        facts |= _against_peak(account, own, step, whole, facts["matmul_dtype"], notes)
    if memory.fits is False and memory.usable_nbytes is not None:
        unspread = run.layout.alone and run.cluster.count > 1
        who = ALONE if unspread else "a device"
        limit = short_of_memory(memory.nbytes, memory.usable_nbytes, account.peak.by_category, who=who)
        if unspread:
            limit = replace(
                limit, sentence=f"{limit.sentence}; a [layout] spreads it (--set layout=auto looks for one)"
            )
        facts["bottleneck"] = limit
    if isinstance(machine, Device) and machine.errors is not None:
        fastest = _fastest(account, machine, facts)
        if step.seconds and fastest > of_step(run, machine.errors, step.seconds).low:
            notes.append(AT_THE_PEAK)
        facts |= of_forecast(run, facts, memory, machine.errors, fastest)
    made = Forecast(**facts, basis=basis, notes=tuple(notes))
    impossible = tuple(_impossible(run, account.peak.by_category, machine))
    return replace(_alone(run, made), impossible=impossible) if impossible else made


def _fastest(account: RunAccount, device: Device, facts: Mapping[str, Any]) -> float:
    """The share of a step that is left where its kernels reach the peak and the bandwidth of the data sheet."""
    if facts.get("hfu") is None:
        return 0.0
    if device.efficiency is None:
        return 1.0  # the step is at the peak itself
    flops = CONVENTIONS["kernels"].flops(account.run, account.ledger) / account.ledger.matmul_flops
    moved = facts["step_causes"]["memory-bound operations"] / facts["step_seconds"] * device.efficiency.bandwidth_share
    return min(1.0, float(facts["hfu"] * flops + moved))


def _of_attention(ledger: Ledger, kernels: str) -> Iterator[str]:
    """A note on what sdpa selects on older and newest devices, with what it selects in other builds of PyTorch."""
    if kernels == "sm70":
        efficient = any("efficient_attention" in entry.name for entry in ledger)
        yield BEFORE_FLASH.format(kernel="the memory-efficient kernel" if efficient else "unfused")
    shapes = [entry.shape for entry in ledger if entry.kind == "attention" and "cudnn" in entry.name]
    if not shapes:
        return
    plain = all(width == value_width and causal for _, _, _, width, value_width, causal in shapes)
    other, name = ("FlashAttention", "flash") if plain else ("the memory-efficient one", "efficient")
    yield CUDNN_FIRST.format(other=f'{other} (recipe.attention = "{name}" in a run file)')


def _impossible(run: Run, peak: dict[str, int], machine: Machine | None) -> Iterator[str]:
    """Why several devices without a layout cannot share the run; ``peak`` is that of one that does all of it."""
    if not run.layout.alone or run.cluster.count == 1:
        return
    few = too_few(run)
    if few is not None:
        yield few
    if machine is None:
        return
    # Each device holds the whole model, and of what grows with the sequences its part.
    batch = run.recipe.global_batch
    part = ceil_div(batch, run.cluster.count)
    spread = peak.keys() - _WHOLE if run.recipe.micro_batch is None else peak.keys() & {"batch"}
    memory = memory_of_device(
        run, sum(each * part // batch if name in spread else each for name, each in peak.items()), machine
    )
    if memory.fits is False and memory.usable_nbytes is not None:
        needs, has = format_nbytes(memory.nbytes), format_nbytes(memory.usable_nbytes)
        yield f"a device needs {needs} for the whole model and its part of the sequences, and has {has}"


def _alone(run: Run, found: Forecast) -> Forecast:
    """The forecast of a step on the one device that does all of it."""
    short = of_one_step(run, found)
    rate = None if found.step_seconds is None else run.recipe.tokens_per_step / found.step_seconds
    notes = tuple(note for note in short.notes if not note.endswith((SHARED, NEVER)))
    return replace(short, tokens_per_second=rate, run_step_seconds=None, run_tokens_per_second=None, notes=notes)


def of_one_step(run: Run, found: Forecast) -> Forecast:
    """The same forecast without what belongs to a run and not to a step."""
    bars = step_waterfall(run, found)
    limit = bottleneck(bars, mfu=found.mfu) if found.fits is not False else found.bottleneck
    notes = tuple(note for note in found.notes if not note.startswith(_OF_A_RUN))
    intervals = {
        name: interval for name, interval in found.intervals.items() if name in ("step_seconds", "device_nbytes")
    }
    costs = ("total_seconds", "days", "device_hours", "money", "kwh", "co2_kg")
    of_a_run = (*costs, "goodput", "interruptions", "checkpoint_every")
    of_step: dict[str, Any] = {"waterfall": bars, "bottleneck": limit, "notes": notes, "intervals": intervals}
    nothing: dict[str, Any] = dict.fromkeys(of_a_run)
    return replace(found, seconds_by_phase={}, **nothing, **of_step)


def step_waterfall(run: Run, found: Forecast) -> tuple[Bar, ...]:
    """The waterfall of one step of a forecast; empty where it has none."""
    if not found.waterfall or found.step_seconds is None or found.peak_flops_per_second is None:
        return ()
    napkin = training_flops(parameters(run.model).active, run.recipe.tokens_per_step)
    bars = waterfall(
        napkin / (found.peak_flops_per_second * run.layout.devices),
        found.step_seconds,
        found.step_causes,
        {},
        found.step_seconds,
        _beyond(run),
    )
    return tuple(bar for bar in bars if bar.cause not in RUN_CAUSES)


def _beyond(run: Run) -> str:
    """The model FLOPs of a run that 6 N D does not count."""
    objective = run.recipe.objective
    return WITH_REFERENCE if objective.mismatched or objective.reference == "device" else BEYOND


def _whole(account: RunAccount, machine: Machine, step: StepTime, around: Conditions) -> RunTime:
    assert step.seconds is not None
    return run_time(
        account.run,
        step.seconds,
        forward_seconds=_forward_seconds(step),
        checkpoint_nbytes=checkpoint_nbytes(account.ledger),
        warm_up_seconds=_warm_up(account.ledger, machine),
        conditions=around,
    )


def checkpoint_nbytes(ledger: Ledger) -> int:
    """Bytes of a checkpoint, from the ledger of the whole step: the state that training resumes from."""
    state = in_any_memory(ledger.resident)
    nbytes: int = state.get("parameters", 0) + state.get("optimizer state", 0)
    return nbytes


def _forward_seconds(step: StepTime) -> float | None:
    """What a step's forward takes, with its share of what is waited for."""
    computed = sum(seconds for phase, seconds in step.by_phase.items() if phase in COMPUTED)
    if step.seconds is None or "forward" not in step.by_phase or not computed:
        return None
    return float(step.by_phase["forward"] * step.seconds / computed)


def _warm_up(ledger: Ledger, machine: Machine) -> float:
    """What a first step takes longer: the system hands out memory that was never touched."""
    if isinstance(machine, Device) or machine.fresh_bytes_per_second is None:
        return 0.0
    used = machine.memory_bytes_per_second
    fresh = 1 / machine.fresh_bytes_per_second - (1 / used if used else 0.0)
    return max(0.0, ledger.peak().nbytes * fresh)


def _times(run: Run, step: StepTime, whole: RunTime, around: Conditions) -> dict[str, Any]:
    run_step_seconds = whole.step_seconds + whole.waiting_seconds
    facts = {
        "step_seconds": step.seconds,
        "step_seconds_by_phase": step.by_phase,
        "step_seconds_by_kind": step.by_kind,
        "step_seconds_by_bound": step.by_bound,
        "step_causes": step.causes,
        "tokens_per_second": whole.tokens_per_second,
        "checkpoint_every": whole.checkpoint_every,
        "run_step_seconds": run_step_seconds,
        "run_tokens_per_second": run.recipe.tokens_per_step / run_step_seconds,
    }
    if whole.total_seconds == float("inf"):
        return {**facts, "total_seconds": None}
    share = whole.steps_seconds / step.seconds if step.seconds else 0.0
    phases = {name: seconds * share for name, seconds in step.by_phase.items()}
    named = {"checkpoints": "checkpoint"}  # as the engine's clock calls it
    device_hours = whole.total_seconds * run.cluster.count / SECONDS_PER_HOUR
    cluster = run.cluster
    kwh = co2 = None
    if around.power_watts is not None:
        drawn = around.power_watts * (1.0 if cluster.power_share is None else cluster.power_share)
        kwh = drawn * (cluster.power_usage_effectiveness or 1.0) * device_hours / KILO
        co2 = None if cluster.grid_kg_co2_per_kwh is None else kwh * cluster.grid_kg_co2_per_kwh
    price = cluster.price_per_device_hour
    return {
        **facts,
        "total_seconds": whole.total_seconds,
        "seconds_by_phase": phases | {named.get(name, name): part for name, part in whole.parts.items()},
        "days": whole.total_seconds / SECONDS_PER_DAY,
        "device_hours": device_hours,
        "money": None if price is None else price * device_hours,
        "kwh": kwh,
        "co2_kg": co2,
        "goodput": whole.goodput,
        "interruptions": whole.interruptions,
    }


def _against_peak(
    account: RunAccount, machine: Machine, step: StepTime, whole: RunTime, dtype: str, notes: list[str]
) -> dict[str, Any]:
    """MFU, HFU and the waterfall: what is compared with the peak of the devices."""
    run, ledger = account.run, account.ledger
    assert step.seconds is not None
    try:
        peak = peak_rate(machine, dtype)
    except NoRate as reason:
        notes.append(f"no MFU: {reason}")
        return {}
    devices = run.layout.devices  # those that share a step; of a run without a layout one runs it
    facts = {
        "peak_flops_per_second": peak,
        "devices": devices,
        "mfu": mfu(ledger.model_flops, step.seconds, peak * devices),
        "hfu": hfu(ledger.matmul_flops, step.seconds, peak * devices),
    }
    if whole.total_seconds == float("inf"):
        return facts
    tokens = run.recipe.total_steps * run.recipe.tokens_per_step
    napkin = training_flops(account.parameters.active, tokens) / (peak * run.cluster.count)
    bars = waterfall(napkin, whole.steps_seconds, step.causes, whole.parts, whole.total_seconds, _beyond(run))
    if any(bar.cause == IDEAL for bar in bars):
        counted = "gradients of frozen weights" if run.recipe.lora is not None else "the input embedding"
        begins = "the waterfall begins with the model FLOPs"
        notes.append(f"6 N D counts {counted} as matmuls too, which is more than attention adds: {begins}")
    assert sum(bar.nanoseconds for bar in bars) == nanoseconds(whole.total_seconds)
    return {**facts, "waterfall": bars, "bottleneck": bottleneck(bars, mfu=facts["mfu"])}
