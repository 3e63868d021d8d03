"""What a device holds, in sentences, as a figure with its table, and for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainledger.answers.pages.interval import fits
from trainledger.answers.pages.memory import COLOUR_OF
from trainledger.answers.pages.plain_data import plain
from trainledger.forecast.plan.plan import Plan
from trainledger.forecast.predict.device_memory import TENSORS_ALONE, DeviceMemory, of_a_device
from trainledger.forecast.predict.host_memory import HostMemory
from trainledger.ledger.entry import CATEGORIES, Int
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.report.chart import DARK, GREY, PALE, Bars, Chart, bar_chart, stacked, usable_memory
from trainledger.report.document import Section, Table, section
from trainledger.report.table import sentence
from trainledger.spec.units import GIGA, format_nbytes


def device_lines(
    device: DeviceMemory | None, peak_nbytes: int, memory_nbytes: int | None, chance: float | None = None
) -> Iterator[str]:
    """Sentences on whether a device holds a peak: of a catalog device with each part outside the tensors named."""
    if device is None:
        if memory_nbytes:
            fits = "Fits in" if peak_nbytes <= memory_nbytes else "Does NOT fit in"
            yield f"{fits} the device's {format_nbytes(memory_nbytes)}."
        return
    outside = [line for line in device.lines if line.name != "tensors" and line.nbytes]
    if outside:
        parts = ", ".join(f"{line.name} {format_nbytes(line.nbytes)}" for line in outside)
        yield f"Outside the tensors ({' and '.join(sorted({line.basis for line in outside}))}): {parts}."
    elif device.tensors_alone:
        yield sentence(TENSORS_ALONE)
    if device.usable_nbytes is not None:
        yield verdict(device.nbytes, device, chance)


def verdict(nbytes: Int, device: DeviceMemory, chance: float | None = None) -> str:
    """Whether so many bytes fit in a device; of it the usable memory must be known.

    >>> verdict(3 * 10**9, DeviceMemory((), 80 * 10**9, "the driver"))
    '3 GB in all of 80 GB of usable memory: fits.'
    """
    usable = f"{format_nbytes(device.usable_nbytes or 0)} {of_a_device(device)}"
    return f"{format_nbytes(nbytes)} in all of {usable}: {fits(device.fits, chance)}."


def too_large(plan: Plan) -> str:
    """What a device or a host of a run that does not fit needs and has; empty where it fits, or that is not known."""
    forecast, host = plan.forecast, plan.host
    if forecast.fits is False and forecast.device_nbytes is not None and forecast.usable_nbytes is not None:
        needs, has = forecast.device_nbytes, f"{format_nbytes(forecast.usable_nbytes)} usable"
        return f"a device needs {format_nbytes(needs)} and has {has}"
    if host is None or host.fits is not False:
        return ""
    return f"a host needs {format_nbytes(host.node)} and has {format_nbytes(host.usable or 0)}"


def host_line(host: HostMemory) -> str:
    """What a process and a node of a run hold in host memory, and what loading the model takes there."""
    parts = [*host.parts, *([("staged checkpoint", host.staged)] if host.staged else ())]
    largest = ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in parts[:4])
    has = "" if host.usable is None else f" of {format_nbytes(host.usable)}"
    whole = f"{format_nbytes(host.process)} a process ({largest})" if parts else "nothing of a step"
    several = f", {format_nbytes(host.node)} a node of {host.processes}" if host.processes > 1 and parts else ""
    load = f"{format_nbytes(host.model)} to load the model"
    load += f", {format_nbytes(host.loading)} if every process reads all of it" if host.processes > 1 else ""
    return f"{whole}{several}{has}; {load}; besides PyTorch itself"


def memory_data(device: DeviceMemory | None) -> Any:
    """What a device holds, line by line, and whether it fits."""
    return plain(device, more={DeviceMemory: ("nbytes", "fits")})


def device_table(by_category: Mapping[str, int], device: DeviceMemory | None) -> Table:
    """What a device holds at the peak: the tensors by category, what is outside them, and each one's basis."""
    rows = [(name, by_category[name], "exact") for name in _ordered(by_category)]
    rows += [(each.name, int(each.nbytes), each.basis) for each in _outside(device)]
    total = sum(nbytes for _, nbytes, _ in rows)
    shared = [(name, nbytes, nbytes / total, basis) for name, nbytes, basis in rows]
    whole = ("in all", total, None, "")
    return Table(
        "device memory",
        ("at the peak", "bytes", "share", "basis"),
        (*shared, whole),
        units=("", "nbytes", "share"),
        align="lrrl",
    )


def device_chart(
    by_category: Mapping[str, int], device: DeviceMemory | None, usable_nbytes: int | None, title: str
) -> Chart:
    """One bar of a device's memory at the peak, by category and outside the tensors, in the frame of what is usable."""
    parts = {name: [by_category[name] / GIGA] for name in _ordered(by_category)}
    outside = sum(int(each.nbytes) for each in _outside(device))
    if outside:
        parts[_OUTSIDE] = [outside / GIGA]
    needed = sum(by_category.values()) + outside
    row = f"{format_nbytes(needed)} at the peak"
    bars = stacked(parts, COLOUR_OF, lambda name, _: f"{parts[name][0]:.2f} GB of {name}")
    frame = []
    if usable_nbytes is not None:
        frame.append(Bars([0], [0], [usable_nbytes / GIGA], "", PALE, [], thick=_AROUND, edge=GREY))
    if usable_nbytes is not None and needed > usable_nbytes:
        over = [f"{format_nbytes(needed - usable_nbytes)} more than usable"]
        frame.append(Bars([_UNDER], [usable_nbytes / GIGA], [needed / GIGA], "", DARK, over, thick=_THIN))
    return bar_chart(title, "memory of the peak rank (GB)", [row], [*frame, *bars, *usable_memory(usable_nbytes)])


_AROUND = 0.62  # of a row: the height of the frame
_UNDER, _THIN = 0.38, 0.12  # the place and the height of the bar of what spills over
_OUTSIDE = "outside the tensors"


def _ordered(by_category: Mapping[str, int]) -> list[str]:
    """The categories that have bytes, states first."""
    return [fromkey for fromkey in dict.fromkeys((*CATEGORIES, *by_category)) if by_category.get(fromkey)]


def _outside(device: DeviceMemory | None) -> list[Any]:
    return [] if device is None else [line for line in device.lines if line.name != "tensors" and line.nbytes]


_MOST_PARTS = 3
_STATES = ("parameters", "gradients", "optimizer state")


def parts_at_peak(plan: Plan) -> str:
    """The largest categories of the peak rank's tensors at the peak, in one line."""
    by_category = plan.forecast.peak_by_category
    largest = sorted(by_category, key=lambda name: -by_category[name])
    rest = sum(by_category[name] for name in largest[_MOST_PARTS:])
    named = _MOST_PARTS
    if rest and by_category[largest[_MOST_PARTS]] > 0.9 * rest:  # that is no "other"
        named, rest = _MOST_PARTS + 1, rest - by_category[largest[_MOST_PARTS]]
    parts = [f"{name} {format_nbytes(by_category[name])}" for name in largest[:named]]
    return ", ".join(parts) + (f", other {format_nbytes(rest)}" if rest > by_category[largest[0]] / 1000 else "")


def memory_section(plan: Plan) -> Section:
    """The memory of a plan at its peak, by category of one device or by kind of rank."""
    if plan.ranks:
        return _of_ranks(plan)
    forecast = plan.forecast
    assert forecast.peak_nbytes is not None
    rows = [
        (name, nbytes, nbytes / forecast.peak_nbytes)
        for name, nbytes in sorted(forecast.peak_by_category.items(), key=lambda each: -each[1])
    ]
    table = Table(
        "memory",
        ("at the peak", "bytes", "share"),
        (*rows, ("peak", forecast.peak_nbytes, None)),
        units=("", "nbytes", "share"),
        align="lrr",
    )
    return section("Memory of one device that holds the whole model", table)


def memory_lines(plan: Plan) -> Iterator[str]:
    """The moment of the peak and what is outside the tensors."""
    forecast, peak = plan.forecast, plan.peak
    if plan.ranks:
        yield (
            "States: parameters, gradients and optimizer state. Comm.: gathered parameters and buffers of reductions. "
            "In flight: micro-batches whose activations a rank keeps at once."
        )
    else:
        yield f"The peak is at {peak.entry.name} of {peak.entry.path or 'the update'}, {peak.entry.phase}."
        yield f"Each micro-batch saves {format_nbytes(forecast.kept_nbytes or 0)} of activations for its backward."
    held, chance = plan.device_memory, forecast.chance_of_fitting
    yield from device_lines(held, forecast.peak_nbytes or 0, plan.memory_nbytes, chance)


def _of_ranks(plan: Plan) -> Section:
    """The first, the heaviest middle and the last stage; ranks with smaller pieces are as their stage's first."""
    stages = [rank for rank in plan.ranks if rank.plan.place == 0]
    # Of stages that are alike the first holds the most.
    firsts = {stage.stage if stage.alike is None else stage.alike: stage for stage in reversed(stages[1:-1])}
    middle = sorted(firsts.values(), key=lambda first: (-peak_nbytes(first.ledger), first.stage))[:1]
    shown = [stages[0], *middle, *stages[1:][-1:]]
    rows = []
    for rank in shown:
        peak = plan.peak if rank.ledger is plan.heaviest else rank.ledger.peak()
        states = sum(peak.by_category.get(name, 0) for name in _STATES)
        sent = peak.by_category.get("communication", 0)
        ranks = sum(other.count for other in plan.ranks if other.stage == rank.stage)
        rest = peak.nbytes - states - sent
        rows.append((rank.title, ranks, rank.plan.layers, rank.in_flight, states, sent, rest, peak.nbytes))
    table = Table(
        "memory",
        ("at the peak", "ranks", "layers", "in flight", "states", "comm.", "other", "peak"),
        tuple(rows),
        units=("", *("integer",) * 3, *("nbytes",) * 4),
        align="lrrrrrrr",
    )
    lines = [
        f"Shown are the first, the last and the middle stage of highest peak of {len(stages)}; --json has all."
    ] * (len(stages) > len(shown))
    return section("Memory of the distinct ranks", table, lines)
