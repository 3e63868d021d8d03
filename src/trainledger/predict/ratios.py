"""How well the arithmetic of a device is used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainledger.ledger.entry import Ledger
from trainledger.predict.roofline import Machine, peak_rate


def mfu(model_flops: float, seconds: float, peak_flops_per_second: float) -> float:
    """Model FLOPs utilization: the model's own FLOPs of a step over what the peak does in its time.

    Recomputation is left out (Chowdhery et al. 2022, PaLM, appendix B).

    >>> round(mfu(6 * 70e9 * 4e6, 3.317, 1024 * 989e12), 4)
    0.5001
    """
    return model_flops / (seconds * peak_flops_per_second)


def hfu(hardware_flops: float, seconds: float, peak_flops_per_second: float) -> float:
    """Hardware FLOPs utilization: as `mfu`, with recomputation (Korthikanti et al. 2022, section 5)."""
    return hardware_flops / (seconds * peak_flops_per_second)


def matmul_dtype(ledger: Ledger) -> str:
    """The dtype in which most of a step's matmul and attention FLOPs run; empty where there are none."""
    return matmul_dtype_of([(ledger, 1)])


def matmul_dtype_of(shares: Iterable[tuple[Ledger, Any]]) -> str:
    """The same of several ledgers, each with how much it counts."""
    split: dict[str, Any] = {}
    for ledger, share in shares:
        for dtype, flops in ledger.filter(lambda each: each.kind in ("matmul", "attention")).by("dtype").items():
            split[dtype] = split.get(dtype, 0) + share * flops
    return max(split, key=lambda each: split[each]) if split else ""


def step_peak(ledger: Ledger, machine: Machine) -> float:
    """The peak that a step's MFU is taken against; raises NoRate where the device has none for its dtype."""
    return peak_rate(machine, matmul_dtype(ledger))
