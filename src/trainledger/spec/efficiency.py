"""What share of its data sheet a device reaches: a few constants, fitted on published runs or measured."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.spec.frozen import frozen
from trainledger.spec.problem import Problem

SHARES = (
    "matmul_share", "float8_share", "attention_share", "attention_backward_share", "bandwidth_share", "network_share",
    "odd_share",
)  # fmt: skip

NOT_NEGATIVE = (
    "depth", "attention_length", "kernel_seconds", "launch_seconds", "contention_share", "straggler_share",
)  # fmt: skip


@frozen(kw_only=True)
class Efficiency:
    """The constants of a device that a data sheet does not give; `forecast.predict.kernel` uses them.

    ``matmul_share`` of the peak is reached inside a large matmul in 16 bits or tf32, ``float8_share`` of the fp8
    peak in one in fp8; ``depth`` is the inner size k that takes as long as the start and the end of an output tile.
    ``attention_share`` and ``attention_backward_share`` are those of fused attention on long sequences with head
    size 128, ``attention_length`` the number of keys at which half of them is reached.
    ``odd_share`` of a matmul's rate is left where the rows of a matrix have an odd number of elements, which takes
    kernels that load them one by one.
    ``bandwidth_share`` of the memory's rate is reached by elementwise kernels. ``kernel_seconds`` is the least time of
    a kernel on the device, ``launch_seconds`` the time to launch an operation. ``contention_share`` of an overlapped
    collective's time is lost by compute; ``straggler_share`` of a step is added for each doubling
    of the nodes, since all wait for the slowest. ``network_share`` of the network's rate in a benchmark of one
    collective is reached in a step, where ranks arrive at different times and all groups communicate together.
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
    # GPT-2 124M trained 25 % faster when its vocabulary went from 50,257 to 50,304 (A. Karpathy 2023, A100), with a
    # third of its FLOPs in the head.
    odd_share: float = 0.6
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
