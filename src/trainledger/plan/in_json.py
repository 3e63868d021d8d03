"""What several answers have alike as JSON: the run that they are about, and the memory of a device."""

from __future__ import annotations

from typing import Any

from trainledger.plan.difference import as_override
from trainledger.predict.device_memory import DeviceMemory
from trainledger.spec.parts import field_at, table_of
from trainledger.spec.run import Run

SECTIONS = ("model", "recipe", "layout", "cluster")


def run(of: Run) -> dict[str, Any]:
    """The sections of a run as in a run file, a found layout too.

    ``assumed`` are the fields that were not given but assumed (`Run.origin`), each as ``--set`` takes it.
    """
    sections = {name: table_of(getattr(of, name)) for name in SECTIONS}
    fields = (each.partition(".") for each in of.origin.assumed)
    return {
        **sections,
        "assumed": [as_override(f"{at}.{name}", field_at(getattr(of, at), name)) for at, _, name in fields],
    }


def device_memory(held: DeviceMemory | None) -> dict[str, Any] | None:
    """What a device holds, line by line, and what it has; None where that is not known."""
    if held is None:
        return None
    return {
        "lines": [vars(each) for each in held.lines], "nbytes": held.nbytes, "usable_nbytes": held.usable_nbytes,
        "usable_source": held.usable_source, "fits": held.fits,
    }  # fmt: skip
