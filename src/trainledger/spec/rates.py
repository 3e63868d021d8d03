"""Measured rates of a machine beyond its kernels: matmuls side by side, copies, the data loader, collectives."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.spec.frozen import frozen
from trainledger.spec.problem import Problem

STRAIGHT = "a @ b"  # both factors of a matmul by rows
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def _positive(record: object, *names: str) -> Iterator[Problem]:
    for name in names:
        value = getattr(record, name)
        if value is not None and value <= 0:
            yield Problem(name, value, "must be positive")


@frozen(kw_only=True)
class MatmulTime:
    """One call of a matmul [m, k] @ [k, n] of ``shape`` (m, n, k); ``factors`` says how the two lie in memory.

    ``others`` is the share of a core that other processes used meanwhile (None: unknown).
    """

    shape: tuple[int, ...]
    dtype: str
    factors: str
    flops: int
    nbytes: int
    seconds: float
    others: float | None = None

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.seconds

    @property
    def intensity(self) -> float:
        """FLOPs for each byte that is read or written once."""
        return self.flops / self.nbytes


@frozen(kw_only=True)
class CopyTime:
    """One copy, or its replacement; ``seconds`` is None where it was not measured, and ``note`` why.

    ``nbytes`` are read and written of a copy in memory, and those that pass once of any other.
    """

    what: str
    nbytes: int
    seconds: float | None = None
    note: str = ""

    def problems(self) -> Iterator[Problem]:
        yield from _positive(self, "seconds")

    @property
    def bytes_per_second(self) -> float | None:
        return None if self.seconds is None or not self.nbytes else self.nbytes / self.seconds


@frozen(kw_only=True)
class LoaderTime:
    """Tokens that were read, or made of text, in so many seconds by so many ``workers`` (threads or processes)."""

    what: str
    workers: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@frozen(kw_only=True)
class CollectiveTime:
    """One collective over ``ranks`` of one machine, of ``nbytes`` counted as `Entry.payload` counts them.

    Those are the bytes of the whole result of an all-gather, of the whole input of a reduce-scatter, else of a rank's
    tensor. ``others`` is the share of a core that other processes used meanwhile (None: unknown).
    """

    name: str
    backend: str
    ranks: int
    nbytes: int
    seconds: float
    others: float | None = None

    def problems(self) -> Iterator[Problem]:
        if self.name not in COLLECTIVES:
            yield Problem("name", self.name, f"must be one of {', '.join(COLLECTIVES)}")
        yield from _positive(self, "nbytes", "seconds")
        if self.ranks < 2:
            yield Problem("ranks", self.ranks, "must be at least 2")
