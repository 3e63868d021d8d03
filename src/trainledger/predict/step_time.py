"""The time of one optimizer step on one device, from its ledger."""

from __future__ import annotations

from collections.abc import Iterable

from trainledger.frozen import frozen
from trainledger.ledger.entry import Entry, Ledger
from trainledger.predict.roofline import EntryTime, Machine, NoRate, Roofline
from trainledger.spec.cluster import Device

Seconds = dict[str, float]


@frozen
class StepTime:
    """Predicted seconds of a step, split by phase, by kind and by what bounds each operation.

    ``seconds`` is None where a rate is unknown, and ``notes`` says which. ``basis`` is ``bound`` for peaks of
    a data sheet (no run is faster) and ``assumed`` for a roofline on measured rates.
    """

    seconds: float | None
    by_phase: Seconds
    by_kind: Seconds
    by_bound: Seconds
    basis: str
    notes: tuple[str, ...] = ()
    entries: tuple[EntryTime, ...] = ()


def step_time(ledger: Ledger, machine: Machine, *, tensors: int = 0) -> StepTime:
    """Predicted time of one optimizer step: operations one after another, nothing overlapped.

    Works on a device of the catalog, which gives a bound, and on a calibration. ``tensors`` are those that the
    optimizer updates: it looks at each of them before its kernels run.
    """
    if isinstance(machine, Device):
        basis, notes = "bound", [f"peaks of {machine.title}'s data sheet: no run is faster, most are slower"]
    else:
        basis, notes = "assumed", [f"roofline on the rates measured on {machine.date}", *machine.notes]
    try:
        roofline = Roofline(machine)
        times = tuple(
            roofline.time(each) for each in ledger if each.kind not in ("transfer", "collective") and not each.payload
        )
    except NoRate as reason:
        return StepTime(None, {}, {}, {}, basis, (f"no step time: {reason}",))
    untimed = len(ledger) - len(times)
    times += _optimizer_call(times, machine, tensors)
    if untimed:
        notes.append(f"{untimed} transfers and collectives are not timed: no link was measured")
    if ledger.uncounted:
        names = ", ".join(name for name, _ in ledger.uncounted)
        notes.append(f"FLOPs of operations without a rule are not in it: {names}")
    return StepTime(
        seconds=sum(each.seconds for each in times),
        by_phase=_split((each.entry.phase, each.seconds) for each in times),
        by_kind=_split((each.entry.kind, each.seconds) for each in times),
        by_bound=_split((each.bound, each.seconds) for each in times),
        basis=basis,
        notes=tuple(notes),
        entries=times,
    )


def _optimizer_call(times: tuple[EntryTime, ...], machine: Machine, tensors: int) -> tuple[EntryTime, ...]:
    """What calling the optimizer costs beyond its operations; an accelerator works meanwhile."""
    kernels = [each.seconds for each in times if each.entry.phase == "optimizer"]
    if isinstance(machine, Device) or not kernels:
        return ()
    seconds = machine.update_seconds + machine.update_tensor_seconds * tensors
    if machine.backend != "cpu":
        seconds = max(0.0, seconds - sum(kernels))
    if not seconds:
        return ()
    return (EntryTime(Entry("optimizer call", "", "optimizer", "update", basis="assumed"), seconds, "overhead"),)


def _split(labelled: Iterable[tuple[str, float]]) -> Seconds:
    split: Seconds = {}
    for label, seconds in labelled:
        split[label] = split.get(label, 0.0) + seconds
    return split
