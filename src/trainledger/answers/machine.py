"""What predicts the times of a run, and whose kernels run it: a device of the catalog or this machine as measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainledger import catalog
from trainledger.spec.device import Device, kernels_of_capability
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run

if TYPE_CHECKING:
    from trainledger.spec.calibration import Calibration

THIS_MACHINE = "this-machine"


def machine_of(run: Run) -> Device | Calibration | None:
    """The machine whose rates predict the times of a run: a catalog device, or the calibration of this machine.

    None where this machine was not measured yet; with backend ``auto`` an accelerator's calibration comes
    before the processor's. Raises `InvalidInput` where the device is unknown.
    """
    if not isinstance(run, Run):
        raise InvalidInput(
            [Problem("run", None, f"must be a Run, not {type(run).__name__}; trainledger.load makes one")]
        )
    if run.cluster.device != THIS_MACHINE:
        return catalog.placed(catalog.device(run.cluster.device), run.cluster)
    for name in ("power_limit_watts", "memory_margin_nbytes"):
        if (value := getattr(run.cluster, name)) is not None:
            rule = "is for devices of the catalog: this machine is predicted as it was measured"
            raise InvalidInput([Problem(f"cluster.{name}", value, rule)])
    from trainledger.spec.calibration import find_calibration

    backends = ("cuda", "mps", "cpu") if run.cluster.backend == "auto" else (run.cluster.backend,)
    return next((calibration for backend in backends if (calibration := find_calibration(backend)) is not None), None)


def device_of(run: Run) -> Device | None:
    """The machine of a run as a `Device` (peaks, memory, bandwidth), selected as in `machine_of`."""
    machine = machine_of(run)
    if machine is None or isinstance(machine, Device):
        return machine
    from trainledger.spec.calibration import to_device

    return to_device(machine)


def kernels_of(run: Run) -> str:
    """Whose kernels run it, of `spec.device.KERNELS`."""
    if run.cluster.device != THIS_MACHINE:
        return kernels_of_capability(catalog.device(run.cluster.device).compute_capability)
    if run.cluster.backend == "cpu":
        return "cpu"
    machine = machine_of(run)
    if machine is None or isinstance(machine, Device):
        return "cpu" if run.cluster.backend == "auto" else "cuda"
    if run.cluster.backend not in ("auto", machine.backend):
        return "cuda"
    return "cpu" if machine.backend == "cpu" else kernels_of_capability(machine.compute_capability)
