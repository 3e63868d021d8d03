"""Operations of a profile beside those of an account: matmuls and attention by shape, collectives by what they send.

A matmul and its transpose are one: [m, k] @ [k, n] and [n, k] @ [k, m] have the same sizes here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.observe.profiler.collectives import collective_named
from trainledger.observe.profiler.flops import MatmulRate
from trainledger.observe.profiler.step_work import Sent

Amounts = tuple[int, int]  # how often it runs, and FLOPs or bytes in all
_BACKWARD = ", backward"


@dataclass(frozen=True)
class Operation:
    """One operation of a step: how often it runs, and its ``unit`` (FLOPs or bytes) in all, predicted and measured."""

    kind: str
    shape: str
    unit: str
    predicted_count: int
    measured_count: int
    predicted: int
    measured: int

    @property
    def equal(self) -> bool:
        return (self.predicted_count, self.predicted) == (self.measured_count, self.measured)

    @property
    def difference(self) -> str:
        """What differs, in words; empty where nothing does."""
        if self.equal:
            return ""
        if not self.measured_count:
            return "not in the trace"
        if not self.predicted_count:
            return "not in the account"
        if self.predicted == self.measured:
            return f"the same {self.unit} in other pieces"
        return "another count" if self.predicted_count != self.measured_count else f"other {self.unit}"


def operations(ledger: Ledger, matmuls: tuple[MatmulRate, ...], sent: tuple[Sent, ...]) -> tuple[Operation, ...]:
    """All matmuls, attentions and collectives of an account and of a profile's step, those with most FLOPs first."""
    computed = _rows("FLOPs", _by_key(_of_account(ledger)), _by_key(_of_trace(matmuls)))
    moved = _rows("bytes", _by_key(_sent_by_account(ledger)), _by_key(_sent_by_trace(sent)))
    return (*computed, *moved)


def _rows(
    unit: str, predicted: dict[tuple[str, str], Amounts], measured: dict[tuple[str, str], Amounts]
) -> Iterator[Operation]:
    nothing = (0, 0)
    keys = dict.fromkeys((*predicted, *measured))
    most = sorted(keys, key=lambda key: -max(predicted.get(key, nothing)[1], measured.get(key, nothing)[1]))
    for kind, shape in most:
        before, after = predicted.get((kind, shape), nothing), measured.get((kind, shape), nothing)
        yield Operation(kind, shape, unit, before[0], after[0], before[1], after[1])


def _by_key(found: Iterator[tuple[tuple[str, str], int, int]]) -> dict[tuple[str, str], Amounts]:
    summed: dict[tuple[str, str], Amounts] = {}
    for key, count, amount in found:
        before = summed.get(key, (0, 0))
        summed[key] = (before[0] + count, before[1] + amount)
    return summed


def _of_account(ledger: Ledger) -> Iterator[tuple[tuple[str, str], int, int]]:
    for each in ledger:
        if each.kind in ("matmul", "attention") and each.flops and each.shape:
            yield (each.kind, _shape(each.kind, each.shape, _is_backward(each))), each.times, each.times * each.flops


def _is_backward(entry: Entry) -> bool:
    return entry.kind == "attention" and "backward" in entry.name


def _of_trace(matmuls: tuple[MatmulRate, ...]) -> Iterator[tuple[tuple[str, str], int, int]]:
    for each in matmuls:
        backward = each.shape.endswith(_BACKWARD)
        shape = _shape(each.kind, each.sizes, backward) if each.sizes else each.shape
        yield (each.kind, shape), each.count, each.flops


def _shape(kind: str, sizes: tuple[int, ...], backward: bool) -> str:
    """The sizes of an operation as text, the same for a matmul and its transpose.

    >>> _shape("matmul", (1, 64, 16, 32), False), _shape("matmul", (2, 16, 64, 32), False)
    ('16 x 32 x 64', '2 of 16 x 32 x 64')
    """
    if kind == "attention":
        heads, queries, keys, width = sizes[:4]
        return f"{heads} heads, {queries} x {keys} x {width}{_BACKWARD if backward else ''}"
    batch, m, n, k = sizes
    low, high = sorted((m, n))
    return f"{low} x {k} x {high}" if batch == 1 else f"{batch} of {low} x {k} x {high}"


def _sent_by_account(ledger: Ledger) -> Iterator[tuple[tuple[str, str], int, int]]:
    for each in ledger:
        if each.kind == "collective" and each.payload:
            kind = collective_named(each.name) or each.name
            yield (kind, f"{each.ranks} ranks"), each.times, each.times * each.payload


def _sent_by_trace(sent: tuple[Sent, ...]) -> Iterator[tuple[tuple[str, str], int, int]]:
    for each in sent:
        yield (each.collective, f"{each.ranks} ranks"), each.count, each.count * (each.payload_nbytes or 0)
