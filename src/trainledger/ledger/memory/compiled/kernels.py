"""What a compiler makes one kernel of: pointwise operations and row-wise norms of a block, between its products.

A compiled kernel reads what comes from outside of it once, however many of its operations need it, and writes only
what something outside of it reads. Taken here: an operation joins the kernel that its inputs come from until a product,
an attention kernel or a sum over rows reads one of that kernel's results, or the pass or the block ends; then it has
run. That is how torch.compile's Inductor goes about (pointwise operations are computed in the kernel of their reader;
products are library calls), without its limits on how much one kernel may hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.hooks import Hook
from trainledger.ledger.core.record import BlockRun, Event, Storage
from trainledger.ledger.core.sizes import smaller
from trainledger.ledger.entry import Int

JOINED = ("elementwise", "norm", "softmax", "copy", "random")
ROW_WISE = ("mean",)  # the only reduction in a block whose result the same rows need again: that of RMSNorm
PHASES = ("forward", "recompute", "backward")
# Gradients are added to those of micro-batches before by autograd itself, once the compiled backward has written them.
ACCUMULATES = ("backward", "add_")


class _Operation:
    """One operation of a kernel: what it reads from outside of it, and what of its results leaves it."""

    __slots__ = ("event", "joined", "read", "written")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.read: list[tuple[Storage | None, Int]] = []
        self.written: dict[int, Int] = {}
        self.joined = _Kernel(self)


class _Kernel:
    """Operations that run as one; ``merged`` is the kernel that it has become a part of."""

    __slots__ = ("merged", "open", "operations")

    def __init__(self, first: _Operation) -> None:
        self.operations = [first]
        self.open = True
        self.merged: _Kernel | None = None

    def whole(self) -> _Kernel:
        kernel = self
        while kernel.merged is not None:
            kernel = kernel.merged
        return kernel

    def take(self, other: _Kernel) -> None:
        if other is not self:
            self.operations += other.operations
            other.merged = self


class Kernels(Hook):
    """Follows the operations of a step and says what each costs where blocks are compiled."""

    def __init__(self) -> None:
        self._maker: dict[int, _Operation] = {}  # by piece of memory, as the next
        self._reader: dict[int, _Operation] = {}
        self._operations: list[_Operation] = []
        self._open: list[_Kernel] = []
        self._where: tuple[object, ...] = ()

    def emitted(
        self,
        event: Event,
        at: int,
        block: BlockRun | None,
        reads: Sequence[Array],
        changes: Sequence[Array],
        made: Sequence[Array],
    ) -> None:
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
        own = operation.joined
        records = [None if each.memory is None else each.memory.record for each in touched]
        for record in records:
            for known in (self._maker, self._reader):
                other = known.get(id(record))
                if other is not None and other.joined.whole().open:
                    other.joined.whole().take(own.whole())
                    own = own.whole()
        for record, array in zip(records, touched, strict=True):
            maker = self._maker.get(id(record))
            if maker is not None and maker.joined.whole() is own:
                continue
            if record is not None:
                self._leaves(record, closing=False)
                self._reader[id(record)] = operation
            operation.read.append((record, array.nbytes))
        for storage in operation.event.allocated:
            self._maker[id(storage)] = operation
        for each in changes:
            if each.memory is None:
                operation.written[id(each)] = each.nbytes
            else:
                self._maker[id(each.memory.record)] = operation
        self._open.append(own)
        self._operations.append(operation)

    def _leaves(self, record: Storage, *, closing: bool) -> None:
        """Something outside of its kernel reads a piece of memory: the kernel has run by then, and has written it."""
        maker = self._maker.get(id(record))
        if maker is not None:
            maker.written[id(record)] = record.nbytes
            if closing:
                maker.joined.whole().open = False

    def finished(self, events: list[Event]) -> None:
        """Tell the events what their operations cost."""
        seen: dict[tuple[int, int], Int] = {}  # by kernel and piece of memory
        begun: set[int] = set()
        for each in self._operations:
            kernel = id(each.joined.whole())
            for storage in each.event.allocated:
                if storage.category == "gradients":
                    each.written[id(storage)] = storage.nbytes
            read: Int = 0
            for record, nbytes in each.read:
                if record is None:
                    read = read + nbytes
                    continue
                before = seen.get((kernel, id(record)), 0)
                # Another part of it, or the same again.
                more = nbytes if isinstance(before, int) and before == 0 else smaller(record.nbytes - before, nbytes)
                seen[kernel, id(record)] = before + more
                read = read + more
            each.event.facts["fused"] = (read, sum(each.written.values()), int(kernel not in begun))
            begun.add(kernel)
