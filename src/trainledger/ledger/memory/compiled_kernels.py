"""What a compiler makes one kernel of: pointwise operations and row-wise norms of a block, between its matmuls.

A compiled kernel reads what comes from outside of it once, however many of its operations need it, and writes only
what something outside of it reads. The rule here: an operation joins the kernel that its inputs come from until a
matmul, an attention kernel or a sum over rows reads one of that kernel's results, or the pass or the block ends; then
it has run. So does torch.compile's Inductor (pointwise operations are computed in the kernel of their reader; matmuls
are library calls), without its limits on how much one kernel may hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.hooks import Hook
from trainledger.ledger.core.record import Event, Storage
from trainledger.ledger.core.sizes import smaller
from trainledger.ledger.entry import Int

JOINED = ("elementwise", "norm", "softmax", "copy", "random")
ROW_WISE = ("mean",)  # the only reduction in a block whose result the same rows need again: that of RMSNorm
PHASES = ("forward", "recompute", "backward")
# Gradients are added to those of micro-batches before by autograd itself, once the compiled backward has written them.
ACCUMULATES = ("backward", "add_")


class _Kernel:
    """Operations that run as one; others may join while it is open."""

    def __init__(self, first: _Operation) -> None:
        self.operations = [first]
        self.open = True

    def take(self, other: _Kernel) -> None:
        if other is not self:
            self.operations += other.operations
            for each in other.operations:
                each.kernel = self


class _Operation:
    """One operation of a kernel: what it reads from outside of it, and what of its results leaves it."""

    def __init__(self, event: Event) -> None:
        self.event = event
        self.read: list[tuple[Storage | None, Int]] = []
        self.written: dict[int, Int] = {}
        self.kernel = _Kernel(self)


class Kernels(Hook):
    """Follows the operations of a step and says what each costs where blocks are compiled."""

    def __init__(self) -> None:
        self._maker: dict[int, _Operation] = {}  # by piece of memory, as the next
        self._reader: dict[int, _Operation] = {}
        self._operations: list[_Operation] = []
        self._open: list[_Kernel] = []
        self._where: tuple[object, ...] = ()

    def emitted(self, event: Event, reads: Sequence[Array], changes: Sequence[Array], made: Sequence[Array]) -> None:
        """An operation has run that reads and changes these arrays and has made what the event allocates."""
        facts = event.facts
        inside = facts["phase"] in PHASES and facts["path"].startswith("layers.")
        where = (facts["phase"], facts["loop"], inside)
        if where != self._where:
            for kernel in self._open:
                kernel.open = False
            self._open, self._where = [], where
        touched = [*changes, *reads]
        accumulates = (facts["phase"], facts["name"]) == ACCUMULATES
        if inside and not accumulates and (facts["kind"] in JOINED or facts["name"] in ROW_WISE):
            self._join(_Operation(event), touched, changes)
            return
        for each in touched:
            if each.memory is not None:
                self._leaves(each.memory.record, closing=not accumulates)

    def _join(self, operation: _Operation, touched: Sequence[Array], changes: Sequence[Array]) -> None:
        """Join the open kernels that made what the operation reads, or that have read it as well."""
        records = [None if each.memory is None else each.memory.record for each in touched]
        for record in records:
            for known in (self._maker, self._reader):
                other = known.get(id(record))
                if other is not None and other.kernel.open:
                    other.kernel.take(operation.kernel)
        for record, array in zip(records, touched, strict=True):
            maker = self._maker.get(id(record))
            if maker is not None and maker.kernel is operation.kernel:
                continue
            if record is not None:
                self._leaves(record, closing=False)
                self._reader[id(record)] = operation
            operation.read.append((record, array.nbytes))
        self._maker.update((id(each), operation) for each in operation.event.allocated)
        for each in changes:
            if each.memory is None:
                operation.written[id(each)] = each.nbytes
            else:
                self._maker[id(each.memory.record)] = operation
        self._open.append(operation.kernel)
        self._operations.append(operation)

    def _leaves(self, record: Storage, *, closing: bool) -> None:
        """Something outside of its kernel reads a piece of memory: the kernel has run by then, and has written it."""
        maker = self._maker.get(id(record))
        if maker is not None:
            maker.written[id(record)] = record.nbytes
            if closing:
                maker.kernel.open = False

    def finished(self, events: list[Event]) -> None:
        """Say in the events what their operations cost."""
        seen: dict[tuple[int, int], Int] = {}  # by kernel and piece of memory
        begun: set[int] = set()
        for each in self._operations:
            kernel = id(each.kernel)
            gradients = [storage for storage in each.event.allocated if storage.category == "gradients"]
            each.written.update((id(storage), storage.nbytes) for storage in gradients)
            read: Int = 0
            for record, nbytes in each.read:
                more = nbytes
                if record is not None:  # another part of it, or the same again
                    before = seen.get((kernel, id(record)), 0)
                    if not (isinstance(before, int) and before == 0):
                        more = smaller(record.nbytes - before, nbytes)
                    seen[kernel, id(record)] = before + more
                read = read + more
            each.event.facts["fused"] = (read, sum(each.written.values()), int(kernel not in begun))
            begun.add(kernel)
