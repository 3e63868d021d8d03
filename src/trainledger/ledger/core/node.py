"""A step of the graph on a tape: what its backward needs, and where its gradients go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trainledger.ledger.core.array import Array, Port, Target
from trainledger.ledger.entry import Int

if TYPE_CHECKING:
    from trainledger.ledger.core.tape import Tape

Saved = tuple["Array | GatheredAgain", ...]
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
        # Of a checkpointed part what its second run saves is what is kept.
        kept: Saved = saved if self.frame is not None and not self.frame.collecting else _kept(saved)
        self.saved: Any = kept
        if self.frame is not None:
            self.saved = self.frame.expect(kept)
        elif self.offload is not None:
            self.saved = self.offload.pack(kept)

    def run(self, tape: Tape) -> Gradients:
        """Gradients for the targets; the incoming gradients and what was saved are let go afterwards.

        What a checkpointed block saves is let go before the sums: its node holds no reference of its own.
        """
        incoming = [each.take() for each in self.ports]
        checkpointed = self.frame is not None
        kept = self._take_saved()
        saved = tuple(each.read() if isinstance(each, GatheredAgain) else each for each in kept)
        gradients = self.backward(*incoming, *saved)
        if checkpointed:
            del saved, kept
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

    def _take_saved(self) -> Saved:
        saved, self.saved = self.saved, ()
        if self.frame is not None:
            return self.frame.recomputed(saved)
        result: Saved = saved if self.offload is None else self.offload.unpack(saved)
        return result


class GatheredAgain:
    """Stands for what ranks have gathered where nodes save it: kept is the rank's own part.

    The first of the nodes to run gathers the whole again, which is there until the last of them has run.
    """

    __slots__ = ("_gather", "_path", "_readers", "_tape", "_whole", "moved", "part")

    def __init__(self, tape: Tape, part: Array, gather: Callable[[Array], Array]) -> None:
        self.part = part
        self.moved = ""  # how it was moved last (`checkpointing.Offload`)
        self._tape = tape
        self._gather = gather
        self._path = tape.path
        self._readers = 0
        self._whole: Array | None = None

    def saved(self) -> GatheredAgain:
        """What another node saves."""
        self._readers += 1
        return self

    def read(self) -> Array:
        """The whole, for one of the nodes that have saved it."""
        tape, whole = self._tape, self._whole
        if whole is None:
            path, tape.path = tape.path, self._path
            whole = self._gather(self.part)
            tape.path = path
        self._readers -= 1
        self._whole = whole if self._readers else None
        return whole


def _kept(saved: tuple[Array, ...]) -> Saved:
    """What nodes keep: the arrays, or what stands for them."""
    again = [None if each.memory is None else each.memory.again for each in saved]
    if not any(again):
        return saved
    return tuple(each if how is None else how.saved() for each, how in zip(saved, again, strict=True))


def taken(gradients: Gradients, index: int) -> Array:
    """A gradient given away, so that its receiver holds the only reference."""
    gradient, gradients[index] = gradients[index], None
    assert gradient is not None
    return gradient
