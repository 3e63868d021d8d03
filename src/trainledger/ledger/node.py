"""A step of the graph on a tape: what its backward needs, and where its gradients go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trainledger.ledger.array import Array, Port, Target
from trainledger.ledger.entry import Int

if TYPE_CHECKING:
    from trainledger.ledger.tape import Tape

Gradients = list[Array | None]
Backward = Callable[..., Gradients]
Sums = Sequence[tuple[int, Int]]


class Node:
    """One step of the graph: what it saved, how its backward runs, and where gradients go on.

    ``sums`` says which of its gradients belong to a broadcast input, and that input's elements: they are
    summed after its backward, by the engine and not by the step itself. So are gradients cast to ``formats``, those
    of the inputs, where these are given.
    """

    __slots__ = ("backward", "formats", "frame", "loop", "offload", "path", "ports", "saved", "sums", "targets", "unit")

    def __init__(
        self,
        tape: Tape,
        targets: Sequence[Target],
        saved: tuple[Array, ...],
        backward: Backward,
        outputs: int,
        sums: Sums,
        formats: Sequence[str],
    ) -> None:
        self.targets = list(targets)
        self.formats = formats
        self.backward = backward
        self.sums = sums
        self.path = tape.path
        self.loop = tape.loop_stack
        self.unit = None if tape.units is None else tape.units.now
        self.ports = [Port() for _ in range(outputs)]
        self.frame = tape.frame if saved else None
        self.offload = tape.offload if saved else None
        self.saved: Any = saved
        if self.frame is not None:
            self.saved = self.frame.expect(saved)
        elif self.offload is not None:
            self.saved = self.offload.pack(saved)

    def run(self, tape: Tape) -> Gradients:
        """Gradients for the targets; the incoming gradients and what was saved are let go afterwards.

        What a checkpointed block saves is let go before the sums: its node holds no reference of its own.
        """
        incoming = [each.take() for each in self.ports]
        checkpointed = self.frame is not None
        saved = self._take_saved()
        gradients = self.backward(*incoming, *saved)
        if checkpointed:
            del saved
        for index, elements in self.sums:
            if self.targets[index] is None:
                continue
            whole = taken(gradients, index)
            gradients[index] = tape.sum(whole, elements)
            del whole
        for index, dtype in enumerate(self.formats):
            if self.targets[index] is None:
                continue
            wide = taken(gradients, index)
            gradients[index] = tape.cast(wide, dtype) if wide.dtype != dtype else wide
            del wide
        self.frame = None
        return gradients

    def _take_saved(self) -> tuple[Array, ...]:
        saved, self.saved = self.saved, ()
        if self.frame is not None:
            return self.frame.recomputed(saved)
        result: tuple[Array, ...] = saved if self.offload is None else self.offload.unpack(saved)
        return result


def taken(gradients: Gradients, index: int) -> Array:
    """A gradient given away, so that its receiver holds the only reference."""
    gradient, gradients[index] = gradients[index], None
    assert gradient is not None
    return gradient
