"""The step of one rank on its streams: compute and communication.

What waits for what follows the programs that the ledger describes (`ledger.parallel`):

- Parameters are gathered ahead, gradients reduced behind, both on the communication stream.
- Buckets of gradients that are summed once a step overlap the backward of the last micro-batch, where `Layout.overlap`
  says so.
- Rounds of a ring overlap the attention that they feed; the last block's part of it waits for the last round.
- What tensor ranks send during matmuls of the same input (`predict.overlap`) is exposed for the rest of its time.
- Everything else is exposed: what comes next needs it.

Loops stay folded: a body runs until all streams in it move on by one amount, the same as in the round before (max-plus
systems do so after a few rounds: Baccelli et al. 1992, Synchronization and Linearity), and the rest is that amount
times the rounds left. While one moves on faster than the other it may yet have to be waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from trainledger.forecast.predict.stream_ops import Loop, Schedule, StreamOp
from trainledger.ledger.core.sizes import greater
from trainledger.spec.frozen import frozen
from trainledger.spec.units import counted

MOST_ROUNDS = 64  # of a loop's body, before its last increment counts for all others


@frozen
class Span:
    """What runs from when to when on which stream; rounds of a folded loop that are alike are one span.

    ``what`` is forward, backward, weights, update, communication, or more (rounds that are not drawn one by one), with
    the name of what they are where all of a round is that: "more forward".
    """

    name: str
    stream: str
    start: float
    end: float
    what: str


Record = Callable[[Span], None]


class Ring(NamedTuple):
    """Rounds of keys and values that the next attention waits for: how many, when the last of them has arrived.

    ``over`` is when the ring has done all that it was given, ``home`` the seconds of the last round of gradients.
    """

    rounds: int = 0
    arrived: float = 0.0
    over: float = 0.0
    home: float = 0.0


class Streams:
    """The clocks of a rank's streams, moved on by `run`; all in seconds since the step began.

    ``compute`` and ``communication`` are when each stream is free, ``waited`` the seconds that compute waited for
    communication or stood still for it. ``contention`` is the share of a collective's time that compute loses where
    both run at once.
    """

    def __init__(self, *, contention: float = 0.0, record: Record | None = None) -> None:
        self.compute = self.communication = self.waited = self.busy = 0.0
        self.contention = contention
        self.record = record
        self._computed: set[str] = set()  # what the round of a loop that runs has computed
        self._arriving: deque[float] = deque()  # when each gather that was not unpacked yet is over
        self._unpacked = (0.0, 0.0)  # when the block before the last, and the last, were unpacked
        self._reduced = 0.0
        self._ring = Ring()
        self._backward_began = 0.0
        self._in_backward = False
        self._buckets: list[StreamOp] = []

    def run(self, ops: Iterable[StreamOp | Loop]) -> None:
        """The ops one after the other."""
        for op in ops:
            if isinstance(op, Loop):
                self._fill_buckets()
                self._loop(op)
            else:
                if op.kind != "bucket":
                    self._fill_buckets()
                self._STEPS[op.kind](self, op)

    def synchronize(self) -> None:
        """Compute waits for all communication."""
        self._fill_buckets()
        self._wait(self.communication)

    def _loop(self, loop: Loop) -> None:
        before: list[float] | None = None
        for done in range(1, loop.count + 1):
            start = self._state()
            began, outside, self._computed = self.compute, self._computed, set()
            self.run(loop.body)
            self._fill_buckets()
            computed, self._computed = self._computed, outside | self._computed
            after = self._state()
            left = loop.count - done
            shift = [b - a for a, b in zip(start, after, strict=True)] if len(start) == len(after) else None
            if not left:
                return
            if shift is not None and (_same(shift, before, self.compute - began) or done >= MOST_ROUNDS):
                self._go_on(loop.name, left, shift, f"more {min(computed)}" if len(computed) == 1 else "more")
                return
            before = shift

    def _go_on(self, name: str, rounds: int, shift: list[float], what: str) -> None:
        """Further rounds of ``what``, each of which moves the clocks by the same."""
        at, communicated, busy = self.compute, self.communication, self.busy
        self._move([each + rounds * by for each, by in zip(self._state(), shift, strict=True)])
        if self.record is not None:
            label = f"{counted(rounds, 'more round')} of {name}"
            self.record(Span(label, "compute", at, self.compute, what))
            if self.busy > busy and self.communication > communicated:
                one = "more" if what == "more" else "more communication"
                self.record(Span(label, "communication", communicated, self.communication, one))

    def _state(self) -> list[float]:
        return [
            self.compute, self.communication, self.waited, self.busy, *self._unpacked, self._reduced,
            self._backward_began, *self._arriving,
        ]  # fmt: skip

    def _move(self, state: list[float]) -> None:
        self.compute, self.communication, self.waited, self.busy, a, b, self._reduced, began, *arriving = state
        self._unpacked = (a, b)
        self._backward_began = began
        self._arriving = deque(arriving)

    # Streams

    def _work(self, op: StreamOp) -> None:
        if op.backward != self._in_backward:
            self._in_backward = op.backward
            if op.backward:
                self._backward_began = self.compute
        self._compute(op, "backward" if op.backward else "forward")

    def _compute(self, op: StreamOp, what: str) -> None:
        start, self.compute = self.compute, self.compute + op.seconds
        if op.seconds:
            self._computed.add(what)
        if self.record is not None and op.seconds:
            self.record(Span(op.name or what, "compute", start, self.compute, what))

    def _wait(self, until: float) -> None:
        if until > self.compute:
            self.waited += until - self.compute
            self.compute = until

    def _communicate(self, name: str, start: float, seconds: float) -> float:
        """When a collective that may begin at ``start`` is over."""
        start = max(start, self.communication)
        self.communication = start + seconds
        self.busy += seconds
        self.compute += self.contention * seconds
        self._record_communication(name, start, self.communication)
        return self.communication

    def _record_communication(self, name: str, start: float, end: float) -> None:
        if self.record is not None and end > start:
            self.record(Span(name, "communication", start, end, "communication"))

    # Acts

    def _exposed(self, op: StreamOp) -> None:
        start = self.compute
        self.compute += op.seconds
        self._record_communication(op.name, start - op.before, self.compute + op.after)
        overlapped = op.before + op.after
        self.compute += self.contention * overlapped
        self.waited += op.seconds
        self.busy += op.seconds + overlapped

    def _after_sync(self, op: StreamOp) -> None:
        self._wait(self.communication)
        self._exposed(op)

    def _update(self, op: StreamOp) -> None:
        self._wait(self.communication)
        self._compute(op, "update")

    def _gather(self, op: StreamOp) -> None:
        # FSDP2's all-gather stream needs nothing of the compute stream but room: a gather waits until the block two
        # before has been unpacked.
        self._arriving.append(self._communicate(op.name, self._unpacked[0], op.seconds))

    def _upload(self, op: StreamOp) -> None:
        # Pieces of a block from host memory, before they are gathered; both are ahead of compute in one stream here.
        self._communicate(op.name, self._unpacked[0], op.seconds)

    def _unpack(self, op: StreamOp) -> None:
        if self._arriving:
            self._wait(self._arriving.popleft())
        self._work(op)
        self._unpacked = (self._unpacked[1], self.compute)

    def _reduce(self, op: StreamOp) -> None:
        # FSDP2 frees a flat buffer when the next unit's reduction begins, which waits for the one before
        # (reduce_scatter_states); the clip or the update waits for the last.
        self._wait(self._reduced)
        self._reduced = self._communicate(op.name, self.compute, op.seconds)

    def _sum(self, op: StreamOp) -> None:
        self._communicate(op.name, self._reduced, op.seconds)

    def _send_rounds(self, op: StreamOp) -> None:
        ring = self._ring
        if ring.rounds:  # gradients of keys and values, overlapped with the same attention
            start = ring.over
            self._ring = ring._replace(over=start + op.seconds, home=op.seconds / op.pieces)
        else:
            start = self.compute
            self._ring = Ring(op.pieces, start + op.seconds, start + op.seconds)
        self.busy += op.seconds
        self._record_communication(op.name, start, start + op.seconds)

    def _attend(self, op: StreamOp) -> None:
        """A ring of c ranks attends in c parts, each but the first after the round that brings it."""
        # In backward gradients go round too, home after the last part.
        ring, self._ring = self._ring, Ring()
        if ring.rounds:
            self._wait(ring.arrived - ring.rounds / (ring.rounds + 1) * op.seconds)
        self._work(op)
        if ring.home:
            self._wait(max(ring.over, self.compute + ring.home))

    def _bucket(self, op: StreamOp) -> None:
        # Buckets are sent as they are filled (DDP; Megatron-LM's and DeepSpeed's overlapped reduction).
        self._buckets.append(op)

    def _fill_buckets(self) -> None:
        """Buckets fill evenly while the last backward runs; each is sent as soon as it is full."""
        waiting, self._buckets = self._buckets, []
        pieces = sum(each.pieces for each in waiting)
        began, until, full = min(self._backward_began, self.compute), self.compute, 0
        for each in waiting:
            # Of equal pieces the first or the last decides: times of filling and of sending both go up evenly.
            step, seconds = (until - began) / pieces, each.seconds / each.pieces
            first, last = began + (full + 1) * step, began + (full + each.pieces) * step
            full += each.pieces
            end = max(max(self.communication, first) + each.seconds, last + seconds)
            self._communicate(each.name, end - each.seconds, each.seconds)

    _STEPS: dict[str, Callable[[Streams, StreamOp], None]] = {
        "work": _work, "update": _update, "exposed": _exposed, "after_sync": _after_sync, "gather": _gather,
        "upload": _upload,
        "unpack": _unpack, "reduce": _reduce, "sum": _sum, "ring": _send_rounds, "attention": _attend,
        "bucket": _bucket,
    }  # fmt: skip


def _same(shift: list[float], before: list[float] | None, seconds: float) -> bool:
    """Whether a round moved everything as the one before did, and the streams, where both of them moved, together."""
    if before is None or len(before) != len(shift):
        return False
    compute, communication, *_ = shift
    together = not communication or abs(communication - compute) <= 1e-9 * seconds
    return together and all(
        abs(a - b) <= 1e-9 * max(abs(a), abs(b), seconds) for a, b in zip(shift, before, strict=True)
    )


def rank_seconds(ops: Schedule, *, contention: float = 0.0) -> float:
    """Seconds of a rank on its own, from the first op to the end of all streams."""
    streams = Streams(contention=contention)
    streams.run(ops)
    streams.synchronize()
    return streams.compute


def perfectly_overlapped(compute: Any, communication: Any, contention: float) -> Any:
    """Seconds of both streams at least, as if neither waited for the other; arrays give arrays.

    >>> perfectly_overlapped(3.0, 2.0, 0.5), perfectly_overlapped(1.0, 4.0, 0.5)
    (4.0, 4.0)
    """
    return greater(compute + contention * communication, communication)
