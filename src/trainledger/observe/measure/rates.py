"""Measured rates of a machine side by side: matmuls, copies, the data loader, collectives."""

from __future__ import annotations

from trainledger.report.document import Answer
from trainledger.spec.calibration import CollectiveTime, CopyTime, LoaderTime, MatmulTime
from trainledger.spec.frozen import frozen


@frozen(kw_only=True)
class OfMachine(Answer, report="pages.rates"):
    """What was measured on a machine, and when."""

    title: str
    backend: str
    date: str
    torch_version: str
    threads: int


@frozen(kw_only=True)
class MatmulTimes(OfMachine, report="pages.rates"):
    """Matmuls measured side by side, with the rate of a large copy, which is the slope of the roofline."""

    matmuls: tuple[MatmulTime, ...]
    memory_bytes_per_second: float
    notes: tuple[str, ...] = ()

    def best(self, dtype: str) -> float:
        """FLOP/s of the fastest of them in a dtype."""
        return max(matmul.flops_per_second for matmul in self.matmuls if matmul.dtype == dtype)


@frozen(kw_only=True)
class CopyTimes(OfMachine, report="pages.rates"):
    """Copies measured side by side: in memory by layout and size, to and from a device, to and from a disk."""

    memory: tuple[CopyTime, ...]
    device: tuple[CopyTime, ...]
    disk: tuple[CopyTime, ...]
    notes: tuple[str, ...] = ()


@frozen(kw_only=True)
class LoaderTimes(Answer, report="pages.rates"):
    """The data loader measured, and what a step of the run takes (None: no run, or no forecast of its time).

    ``data`` says what was read, ``needed_tokens_per_second`` the tokens that steps of the run take in a second.
    """

    data: str
    seq_len: int
    global_batch: int
    times: tuple[LoaderTime, ...]
    needed_tokens_per_second: float | None = None
    notes: tuple[str, ...] = ()


@frozen(kw_only=True)
class CollectiveTimes(Answer, report="pages.rates"):
    """Collectives measured side by side, by name, size and group."""

    title: str
    date: str
    torch_version: str
    threads: int
    times: tuple[CollectiveTime, ...]
    notes: tuple[str, ...] = ()
