"""What share of its data sheet a device reaches: a few constants, fitted on published runs or measured."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.frozen import frozen
from trainledger.spec.problem import Problem

SHARES = (
    "matmul_share", "float8_share", "attention_share", "attention_backward_share", "bandwidth_share", "network_share",
)  # fmt: skip

NOT_NEGATIVE = (
    "depth", "attention_length", "kernel_seconds", "launch_seconds", "contention_share", "straggler_share",
)  # fmt: skip


@frozen(kw_only=True)
class Efficiency:
    """The constants of a device beside its data sheet; `predict.kernel` says what each does.

    ``matmul_share`` of the peak is reached inside a large product in 16 bits or tf32, ``float8_share`` of the 8-bit
    peak in one in 8 bits; ``depth`` is the inner length k that takes as long as the start and the end of a tile of the
    result. ``attention_share`` and ``attention_backward_share`` are those of a fused attention kernel on long sequences
    with heads 128 wide, ``attention_length`` the number of keys at which half of them is reached.
    ``bandwidth_share`` of the memory's rate is reached by elementwise kernels. ``kernel_seconds`` is the least time of
    a kernel on the device, ``launch_seconds`` what the program needs to launch an operation. ``contention_share`` of a
    collective's time is lost to compute that runs beside it; ``straggler_share`` of a step is added for each doubling
    of the nodes, whose slowest sets the pace. ``network_share`` of what the network between nodes reaches in a
    benchmark of one collective is reached by collectives of a step, where ranks come at different times and all groups
    talk at once.
    """

    matmul_share: float
    float8_share: float
    depth: float
    attention_share: float
    attention_backward_share: float
    attention_length: float
    bandwidth_share: float
    kernel_seconds: float
    launch_seconds: float
    contention_share: float = 0.0
    straggler_share: float = 0.0
    network_share: float = 1.0
    source: str = ""
    date: str = ""

    def problems(self) -> Iterator[Problem]:
        for name in SHARES:
            share = getattr(self, name)
            if not 0 < share <= 1:
                yield Problem(name, share, "must be above 0 and at most 1")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                yield Problem(name, getattr(self, name), "must not be negative", 0.0)
