"""What a run meets outside its steps: interruptions, restarts, storage, loaders, power; as said or as published."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.frozen import frozen
from trainledger.predict.failures import run_mtbf
from trainledger.predict.roofline import Machine
from trainledger.spec.cluster import Device, Published
from trainledger.spec.run import Run
from trainledger.units import SECONDS_PER_HOUR, format_nbytes, format_seconds


@frozen
class Conditions:
    """Rates and waits of a whole run; None is not known, and then the time of it is left out.

    ``mtbf_seconds`` is of all devices together, as are ``storage_bytes_per_second`` and ``loader_tokens_per_second``;
    ``host_bytes_per_second`` is of one device, to its host's memory. ``notes`` names what was not said in the run file,
    with its source.
    """

    mtbf_seconds: float | None = None
    restart_seconds: float = 0.0
    storage_bytes_per_second: float | None = None
    host_bytes_per_second: float | None = None
    loader_tokens_per_second: float | None = None
    compile_seconds: float = 0.0
    power_watts: float | None = None
    notes: tuple[str, ...] = ()


def conditions(run: Run, machine: Machine) -> Conditions:
    """The conditions of a run: what [cluster] says, else what was measured here, else what others published."""
    cluster, recipe = run.cluster, run.recipe
    known = {each.name: each for each in machine.published} if isinstance(machine, Device) else {}
    taken: list[Published] = []

    def or_published(name: str, said: float | None = None) -> float | None:
        if said is None and name in known:
            taken.append(known[name])
            return known[name].value
        return said

    mtbf = or_published("mtbf_device_hours", cluster.mtbf_device_hours)
    restart = cluster.restart_seconds if mtbf is None else or_published("restart_seconds", cluster.restart_seconds)
    storage: float | None = cluster.storage_bytes_per_second
    if storage is None and isinstance(machine, Device):
        of_one = or_published("storage_bytes_per_second")
        storage = None if of_one is None else of_one * cluster.count
    elif storage is None and not isinstance(machine, Device):
        storage = machine.storage_bytes_per_second
    fabric = machine.fabric if isinstance(machine, Device) else None
    compiling = or_published("compile_seconds") if recipe.compile else None
    notes = list(_notes(taken))
    if mtbf is None and isinstance(machine, Device) and cluster.count > 1:
        notes.append(
            "interruptions are not in it: no rate is published for this device (cluster.mtbf_device_hours says yours)"
        )
    if recipe.compile and compiling is None:
        notes.append("compiling is not in it: how long it takes was not measured here")
    return Conditions(
        mtbf_seconds=None if mtbf is None else run_mtbf(mtbf * SECONDS_PER_HOUR, cluster.count),
        restart_seconds=restart or 0.0,
        storage_bytes_per_second=storage,
        host_bytes_per_second=None if fabric is None or fabric.host is None else fabric.host.reached,
        loader_tokens_per_second=cluster.loader_tokens_per_second,
        compile_seconds=compiling or 0.0,
        power_watts=machine.power_watts if isinstance(machine, Device) else None,
        notes=tuple(notes),
    )


def _notes(taken: list[Published]) -> Iterator[str]:
    """One sentence of all that others' numbers stand for."""
    if taken:
        parts = [f"{_said(each.name, each.value)} [{each.source.partition(',')[0]}]" for each in taken]
        yield f"assumed, as the run file does not say: {'; '.join(parts)}; [cluster] has a field for yours"


def _said(name: str, value: float) -> str:
    return {
        "mtbf_device_hours": f"an interruption every {value:,.0f} device-hours",
        "restart_seconds": f"{format_seconds(value)} to restart",
        "storage_bytes_per_second": f"checkpoints at {format_nbytes(value)}/s for each device",
        "compile_seconds": f"{format_seconds(value)} to compile",
    }[name]
