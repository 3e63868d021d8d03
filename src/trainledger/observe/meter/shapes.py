"""Matmuls of sizes that matrix units do not take well, of a recorded step."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.ledger.ledger import Ledger
from trainledger.observe.meter.watch import Finding
from trainledger.spec.units import format_percent, round_up

MULTIPLE = 8  # 16 bytes of two-byte numbers: what tensor cores load at once (NVIDIA, matrix multiplication guide)
_GOOD = 64
_SHARE = 0.05  # of the FLOPs of matmuls


def odd_shapes(ledger: Ledger, step: int) -> Iterator[Finding]:
    """A finding where much of the matmuls' FLOPs has a size that is no multiple of 8."""
    sizes: dict[int, int] = {}
    total = odd = 0
    for each in ledger:
        if each.kind != "matmul" or len(each.shape) != 4:
            continue
        flops = each.flops * each.times
        total += flops
        wrong = {size for size in each.shape[1:] if size > 1 and size % MULTIPLE}
        odd += flops if wrong else 0
        for size in wrong:
            sizes[size] = sizes.get(size, 0) + flops
    if not total or odd <= _SHARE * total:
        return
    worst = max(sizes, key=lambda size: sizes[size])
    better = round_up(worst, _GOOD)
    yield Finding(
        "odd sizes", step,
        f"{format_percent(odd / total)} of the FLOPs of matmuls have a size that is no multiple of {MULTIPLE}, most "
        f"of them {worst}: kernels of matrix units are made for multiples of {MULTIPLE} and of {_GOOD}; {better} is "
        "the next good size.",
    )  # fmt: skip
