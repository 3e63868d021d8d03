"""In which order a compiled backward runs, and its kernels, where it recomputes a part of the forward.

The rules are two of torch 2.13. A recomputed operation runs when something first needs it, as the partitioner puts
it (torch/_functorch/partitioners.py, ``reordering_to_mimic_autograd_engine``). Of that order Inductor makes kernels
(torch/_inductor/scheduler.py): pointwise operations over as many elements that read the same, or each other's results,
become one, those first that share the most, unless something between them would wait for itself; a kernel runs when the
first of its operations would have, after all that it waits for. A result takes the place of something as large that
its own operation alone reads in that kernel, and nothing reads after it.

Left out: Inductor's search for an order with a lower peak, and what it gives memory to for the sake of a CPU's speed
(the tanh or erf of a GELU whose two uses are in two kernels).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.recording import Hook
from trainledger.ledger.core.sizes import smaller
from trainledger.ledger.entry import Event, Int, Storage
from trainledger.ledger.memory.compiled_graph import Operation, Values, typical


def on_demand(again: Sequence[Operation], backward: Sequence[Operation]) -> list[Operation]:
    """The operations of a backward, each after those of the second run whose results it is the first to need.

    The rest of the second run is not needed.
    """
    makers: dict[int, list[Operation]] = {}
    for operation in again:
        for made in operation.made or operation.reads[:1]:  # what it writes over, where it makes nothing
            makers.setdefault(id(made), []).append(operation)
    order: list[Operation] = []
    placed: set[int] = set()
    for operation in backward:
        waiting, needed = [operation], []
        while waiting:
            for read in waiting.pop().reads:
                for maker in makers.get(id(read), ()):
                    if id(maker) not in placed:
                        placed.add(id(maker))
                        needed.append(maker)
                        waiting.append(maker)
        order += [*sorted(needed, key=lambda one: one.at), operation]
    return order


class Kernel:
    """Operations that run as one; ``merged`` is the kernel that it has become a part of.

    ``reads`` says by piece of memory which of them read it.
    """

    def __init__(self, operations: Sequence[Operation], reads: Sequence[Storage], writes: Sequence[Storage]) -> None:
        self.operations = list(operations)
        own = operations[-1]
        self.fused = own.fused
        self.elements = max(map(typical, own.elements), default=0.0)
        self.reads = {id(read): (read, [own]) for read in reads}
        self.writes = {id(write): (write, own) for write in writes}
        self.order = 0
        self.merged: Kernel | None = None

    def touched(self) -> dict[int, Storage]:
        return {key: storage for known in (self.reads, self.writes) for key, (storage, _) in known.items()}

    def shared_nbytes(self, other: Kernel) -> float:
        """Bytes that both read or write."""
        theirs = other.touched()
        return sum(typical(storage.nbytes) for key, storage in self.touched().items() if key in theirs)

    def take(self, other: Kernel) -> None:
        """The other's operations run with these."""
        first, second = sorted((self, other), key=lambda kernel: kernel.order)
        self.operations = [*first.operations, *second.operations]
        self.order = first.order
        for key, (storage, readers) in other.reads.items():
            self.reads.setdefault(key, (storage, []))[1].extend(readers)
        self.writes |= other.writes
        other.merged = self

    def whole(self) -> Kernel:
        kernel = self
        while kernel.merged is not None:
            kernel = kernel.merged
        return kernel


class Schedule:
    """The kernels of a graph in the order in which they run.

    ``held`` are the results that have memory, ``leaving`` those among them that something outside of the graph reads.
    """

    def __init__(self, operations: Sequence[Operation], held: set[int], leaving: set[int]) -> None:
        kernels = list(_kernels(operations, held))
        for order, kernel in enumerate(kernels):
            kernel.order = order
        self._maker = {key: kernel for kernel in kernels for key in kernel.writes}
        self._fuse(kernels)
        self.kernels = self._in_turn([kernel for kernel in kernels if kernel.merged is None])
        self.last = {key: kernel for kernel in self.kernels for key in kernel.reads}
        for kernel in self.kernels:  # what only its own kernel reads needs no memory
            if kernel.fused:
                inside = [key for key in kernel.writes if key not in leaving and self.last.get(key) is kernel]
                for key in inside:
                    del kernel.writes[key]

    def _waits_for(self, kernel: Kernel) -> list[Kernel]:
        kernels = {
            id(maker): maker for key in kernel.reads if key in self._maker for maker in [self._maker[key].whole()]
        }
        return sorted((each for each in kernels.values() if each is not kernel), key=lambda each: each.order)

    def _fuse(self, kernels: Sequence[Kernel]) -> None:
        joined = True
        while joined:
            joined = False
            now = [kernel for kernel in kernels if kernel.fused and kernel.merged is None]
            alike = [(a, b) for a, b in combinations(now, 2) if a.elements == b.elements]
            pairs = [(a.shared_nbytes(b), a.order - b.order, a, b) for a, b in alike]
            for nbytes, _, a, b in sorted(pairs, key=lambda pair: pair[:2], reverse=True):
                one, other = a.whole(), b.whole()
                if nbytes and one is not other and not (self._between(one, other) or self._between(other, one)):
                    one.take(other)
                    joined = True

    def _between(self, kernel: Kernel, other: Kernel) -> bool:
        """Whether a kernel waits for something that waits for the other one."""
        waiting = [wait for wait in self._waits_for(kernel) if wait is not other]
        seen = {id(each) for each in waiting}
        while waiting:
            for wait in self._waits_for(waiting.pop()):
                if wait is other:
                    return True
                if id(wait) not in seen:
                    seen.add(id(wait))
                    waiting.append(wait)
        return False

    def _in_turn(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """The kernels in their order, each after those that it waits for."""
        order: dict[int, Kernel] = {}
        for each in sorted(kernels, key=lambda kernel: kernel.order):
            waiting = [each]
            while waiting:
                before = [one for one in self._waits_for(waiting[-1]) if id(one) not in order]
                if before:
                    waiting.append(before[0])
                else:
                    done = waiting.pop()
                    order[id(done)] = done
        return list(order.values())

    @property
    def ends(self) -> int:
        return self.kernels[-1].operations[-1].at

    def write(self, unneeded: Sequence[Operation], after: Sequence[Operation], events: list[Event]) -> None:
        """Put the events of a step in the order of the kernels.

        Those of unused operations come first, those of what reads the graph's results ``after`` it last.
        """
        order = [*unneeded, *(one for kernel in self.kernels for one in kernel.operations), *after]
        for at, each in zip(sorted(operation.at for operation in order), order, strict=True):
            events[at], each.at = each.event, at


def _kernels(operations: Sequence[Operation], held: set[int]) -> Iterator[Kernel]:
    """A kernel for each operation with a result that has memory; what others make is computed where it is read."""
    values = Values(operations)
    inlined: list[Operation] = []
    for operation in operations:
        writes = [made for made in operation.made if id(made) in held]
        if operation.fused and not writes and operation is not operations[-1]:
            inlined.append(operation)
            continue
        reads = {id(source): source for read in operation.reads for source in values.sources(read, held)}
        own, inlined = (inlined, []) if operation.fused else ([], inlined)
        yield Kernel([*own, operation], list(reads.values()), writes)


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
            for operation in other.operations:
                operation.kernel = self


class _Operation:
    """One operation of a kernel: what it reads from outside of it, and what of its results leaves it."""

    def __init__(self, event: Event) -> None:
        self.event = event
        self.read: list[tuple[Storage | None, Int]] = []
        self.written: dict[int, Int] = {}
        self.kernel = _Kernel(self)


# A compiled kernel reads what comes from outside of it once, however many of its operations need it, and writes only
# what something outside of it reads. An operation joins the kernel that its inputs come from until a matmul, an
# attention kernel or a sum over rows reads one of that kernel's results, or the pass or the block ends; then it has
# run. So does torch.compile's Inductor (pointwise operations are computed in the kernel of their reader; matmuls are
# library calls), without its limits on how much one kernel may hold.


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
        for array in touched:
            if array.memory is not None:
                self._leaves(array.memory.record, closing=not accumulates)

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
        self._maker.update((id(storage), operation) for storage in operation.event.allocated)
        for change in changes:
            if change.memory is None:
                operation.written[id(change)] = change.nbytes
            else:
                self._maker[id(change.memory.record)] = operation
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
        for operation in self._operations:
            kernel = id(operation.kernel)
            gradients = [storage for storage in operation.event.allocated if storage.category == "gradients"]
            operation.written.update((id(storage), storage.nbytes) for storage in gradients)
            read: Int = 0
            for record, nbytes in operation.read:
                more = nbytes
                if record is not None:  # another part of it, or the same again
                    before = seen.get((kernel, id(record)), 0)
                    if not (isinstance(before, int) and before == 0):
                        more = smaller(record.nbytes - before, nbytes)
                    seen[kernel, id(record)] = before + more
                read = read + more
            operation.event.facts["fused"] = (read, sum(operation.written.values()), int(kernel not in begun))
            begun.add(kernel)
