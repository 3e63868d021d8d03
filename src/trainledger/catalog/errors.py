"""How far predictions were from published runs, by what is known of a device: ``errors.toml``."""

from __future__ import annotations

import os
import tomllib
from functools import cache
from typing import Any

from trainledger.spec.device import ErrorModel, MemoryErrors, PairErrors, Seen, StepErrors


def error_model(name: str, *, calibrated: bool) -> ErrorModel:
    """The errors that are expected on a device; ``calibrated`` = the catalog has constants of it."""
    entry = _errors()
    seen = {key: value for key, value in entry["steps_seen"].items() if key != "devices"}
    own = name in entry["steps_seen"]["devices"]
    basis = "own" if own else "other" if calibrated else "bound"
    return ErrorModel(
        step=StepErrors(basis=basis, **entry["step"][basis]),
        steps_seen=Seen(**seen),
        one_device=PairErrors(**entry["one_device"]),
        two_devices=PairErrors(**entry["two_devices"]),
        memory=MemoryErrors(**entry["memory"]),
        adapters=MemoryErrors(**entry["adapters"]),
        memory_seen=Seen(**entry["memory_seen"]),
        widening=entry["widening"],
    )


@cache
def _errors() -> dict[str, Any]:
    with open(os.path.join(os.path.dirname(__file__), "errors.toml"), "rb") as file:
        return tomllib.load(file)
