"""The recorded operations of a step: where and when each runs, what it does to memory, and the hooks that act on it.

The lifetime of an array is the lifetime of the Python references to it: as in PyTorch. Loops are followed once:
`loop(name, count)` says that what runs inside runs ``count`` times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from trainledger.ledger.core.graph import Array, BlockLeaves, Leaf, Memory, Parameters, Saved
from trainledger.ledger.core.sizes import is_one, several, summed
from trainledger.ledger.entry import (
    HOST,
    Amounts,
    BlockRun,
    Event,
    Group,
    Int,
    Loop,
    Storage,
    copies_left_behind,
    keep_what_lives,
)
from trainledger.ledger.ledger import Ledger
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.precision import Precision

# Checkpointing, offloading, sharded parameters and compiled blocks are hooks, of which a recording knows this class
# alone. The first two are to a tape what torch.autograd.graph.saved_tensors_hooks are to autograd, sharding what hooks
# of modules are.


class Hook:
    """Each method does nothing unless a hook overrides it."""

    # Of what checkpointing unpacks nothing is left when a node's gradients are summed; other nodes hold it until then.
    frees_before_sums = False

    def recall(self, name: str) -> list[Array] | None:
        """The results of the operation that is about to run, where they are known: then it does not run."""
        return None

    def emitted(self, event: Event, reads: Sequence[Array], changes: Sequence[Array], made: Sequence[Array]) -> None:
        """An operation has run."""

    def saved(self, arrays: tuple[Array, ...]) -> Any:
        """What a node keeps instead of the arrays that it saves; None leaves them to other hooks."""
        return None

    def unpacked(self, packed: Any) -> Saved:
        """The arrays again, for the backward of the node that has kept what `saved` gave."""
        raise NotImplementedError

    def entering_block(self, run: BlockRun) -> BlockRun:
        """A block begins: its first run, or (what is returned) the one that is repeated."""
        return run

    def block_input(self, leaves: BlockLeaves, x: Array) -> Array:
        """The input of a block with these parameters."""
        return x

    def block_output(self, leaves: BlockLeaves, x: Array) -> Array:
        """The output of a block with these parameters."""
        return x

    def model_output(self, x: Array) -> Array:
        """The result of the forward of a chunk of layers, or of the whole model."""
        return x

    def finished(self, events: list[Event]) -> None:
        """The step is over; what its events say may still be changed."""


class Recording:
    """The operations of a step in a precision, as they come.

    ``backend`` (of `spec.device.KERNELS`) says which kernels run.
    ``hooks`` act on the whole step; others act on a part (`hooked`). They are called in order, the innermost last.
    """

    def __init__(self, precision: Precision, backend: str = "cpu", hooks: Sequence[Hook] = ()) -> None:
        self.precision = precision
        self.compute_dtype = precision.compute
        self.backend = backend
        # A CPU multiplies fp32 in fp32 even if tf32 is allowed.
        self._fp32_rate = precision.rate if backend != "cpu" and precision.rate else "fp32"
        self.events: list[Event] = []
        self.phase = "forward"
        self.path = ""
        self.loop_stack: Loop = ()
        self.hooks = tuple(hooks)
        self._category = ""
        self.on_host = False  # operations run on the host's processor, in its memory
        self._into: Array | None = None
        self._block: BlockRun | None = None  # that runs
        self._casts: dict[int, Array] = {}
        self._live: dict[int, Storage] = {}

    # Where and when

    @contextmanager
    def _inside(self, **values: Any) -> Iterator[None]:
        """Attributes have other values inside."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    def gradient_of(self, leaf: Leaf) -> AbstractContextManager[None]:
        """Matmuls inside make a weight's gradient, or (a `Leaf.fused`) add it up in its buffer and make no array."""
        return self._inside(_into=leaf.buffer if leaf.fused else None)

    def at(self, path: str) -> AbstractContextManager[None]:
        """Operations inside belong to this module path."""
        return self._inside(path=f"{self.path}.{path}" if self.path and path else self.path or path)

    def loop(self, name: str, count: Int) -> AbstractContextManager[None]:
        """Operations inside run ``count`` times."""
        return self._inside(loop_stack=(*self.loop_stack, (name, count)))

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Operations inside belong to this phase; what a forward leaves alive for it counts as kept."""
        if phase == "backward":
            keep_what_lives(self._live.values(), "forward")
        return self._inside(phase=phase)

    def block(self) -> AbstractContextManager[None]:
        """Operations inside are one run of a block, the first or one that is repeated."""
        run = BlockRun()
        for hook in self.hooks:
            run = hook.entering_block(run)
        return self._inside(_block=run)

    def hooked(self, *hooks: Hook) -> AbstractContextManager[None]:
        """Hooks act on what runs inside."""
        return self._inside(hooks=(*self.hooks, *hooks))

    def on_the_host(self) -> AbstractContextManager[None]:
        """Operations inside run on the host's processor, in its memory."""
        return self._inside(on_host=True)

    def autocast(self) -> AbstractContextManager[None]:
        """Low-precision copies of parameters are made once inside and dropped at the end."""
        return self._inside(_casts={})

    def computing_in(self, precision: Precision) -> AbstractContextManager[None]:
        """Operations inside are those of a model in another precision, which makes no copies of this one's."""
        return self._inside(precision=precision, compute_dtype=precision.compute)

    def holding(self, category: str) -> AbstractContextManager[None]:
        """What is made inside belongs to this category unless it turns out to be a gradient."""
        return self._inside(_category=category)

    def block_input(self, leaves: BlockLeaves, x: Array) -> Array:
        """A block's input, as hooks pass it on."""
        for hook in self.hooks:
            x = hook.block_input(leaves, x)
        return x

    def block_output(self, leaves: BlockLeaves, x: Array) -> Array:
        """A block's output, as hooks pass it on."""
        for hook in self.hooks:
            x = hook.block_output(leaves, x)
        return x

    def model_output(self, x: Array) -> Array:
        """The result of a forward, as hooks pass it on."""
        for hook in self.hooks:
            x = hook.model_output(x)
        return x

    def cast_of(self, leaf: Leaf) -> Array | None:
        """The low-precision copy of a parameter that this autocast has already made."""
        return self._casts.get(id(leaf))

    def remember_cast(self, leaf: Leaf, cast: Array) -> None:
        self._casts[id(leaf)] = cast.of_each_round()

    # Operations

    def emit(
        self,
        name: str,
        kind: str,
        *,
        reads: Sequence[Array] = (),
        makes: Sequence[tuple[Int, str]] = (),
        changes: Sequence[Array] = (),
        flops: Int = 0,
        model_flops: Int = 0,
        category: str | None = None,
        basis: str = "exact",
        source: str = "",
        **more: Any,
    ) -> list[Array]:
        """One operation: its entry, and the arrays that it makes; ``more`` are other fields of the entry."""
        for hook in self.hooks:
            known = hook.recall(name)
            if known is not None:
                return known
        into = self._into if kind == "matmul" else None
        if into is not None:
            ((elements, dtype),) = makes
            changes, makes = (into,), ()
        if category is None:
            of_loss = self.path == "loss" or self.path.endswith(".loss")
            category = self._category or ("logits and loss" if of_loss else "scratch")
        if self.on_host and kind not in ("transfer", "collective"):
            kind, category = kind if kind == "allocate" else "host", HOST
        made: list[Array] = []
        records: list[Storage] = []
        for elements, dtype in makes:
            record = Storage(nbytes_in(elements, dtype), self.phase, category, self.loop_stack)
            self._live[id(record)] = record
            records.append(record)
            made.append(Array(elements, dtype, Memory(record, self.released), nbytes=record.nbytes))
        touched = [*changes, *reads]  # torch names first what it changes
        event = Event(
            records, name=name, path=self.path, phase=self.phase, kind=kind, flops=flops,
            model_flops=0 if self.phase == "recompute" else model_flops,
            read=0 if kind == "allocate" else summed(array.nbytes for array in touched),
            written=0 if kind == "allocate" else summed(change.nbytes for change in (*made, *changes)),
            dtype=self._rate_of(kind, touched if into is None else reads), loop=self.loop_stack, basis=basis,
            source=source or f"ledger.operations.{name}", **more,
        )  # fmt: skip
        event.at, event.block = len(self.events), self._block
        self.events.append(event)
        for hook in self.hooks:
            hook.emitted(event, reads, changes, made)
        return made if into is None else [Array(elements, dtype, None)]

    def moved(self, name: str, array: Array, category: str, **more: Any) -> Array:
        """A copy of an array in another memory, the host's or the device's; ``name`` says which."""
        makes = [(array.elements, array.dtype)]
        return self.emit(name, "transfer", reads=[array], makes=makes, category=category, **more)[0]

    def make(
        self, name: str, kind: str, *reads: Array, elements: Int | None = None, dtype: str = "", **more: Any
    ) -> Array:
        """One operation that makes one array, of the size and format of the first that it reads unless given."""
        size = reads[0].elements if elements is None else elements
        return self.emit(name, kind, reads=reads, makes=[(size, dtype or reads[0].dtype)], **more)[0]

    def pointwise(self, name: str, *reads: Array, elements: Int | None = None, dtype: str = "") -> Array:
        """One elementwise operation: a FLOP for each element of the array that it makes."""
        size = reads[0].elements if elements is None else elements
        return self.make(name, "elementwise", *reads, elements=size, dtype=dtype, flops=size)

    def change(self, name: str, target: Array, *reads: Array) -> None:
        """One elementwise operation in place: a FLOP for each element of its target."""
        self.emit(name, "elementwise", reads=reads, changes=[target], flops=target.elements)

    def collective(
        self, name: str, group: Group, payload: Int, *, reads: Sequence[Array] = (),
        makes: Sequence[tuple[Int, str]] = (), **more: Any,
    ) -> list[Array]:  # fmt: skip
        """One collective of ``payload`` bytes (see `Entry`); a group of one rank sends nothing."""
        return self.emit(
            name, "collective", reads=reads, makes=makes, payload=payload * several(group.ranks), group=group.axes,
            ranks=group.ranks, source=f"ledger.collectives.{name}", **more,
        )  # fmt: skip

    def all_reduce(self, group: Group, array: Array, *, overlap: str = "") -> None:
        """The sum over a group of an array, in place; of one rank there is nothing to sum."""
        if not is_one(group.ranks):
            self.collective("all_reduce", group, array.nbytes, changes=[array], overlap=overlap)

    def all_gather(self, group: Group, array: Array, **more: Any) -> Array:
        """The arrays of a group's ranks as one, in new memory."""
        makes = [(array.elements * group.ranks, array.dtype)]
        return self.collective("all_gather", group, array.nbytes * group.ranks, reads=[array], makes=makes, **more)[0]

    def reduce_scatter(self, group: Group, array: Array) -> Array:
        """This rank's piece of the sum over a group of an array, in new memory."""
        makes = [(array.elements // group.ranks, array.dtype)]
        return self.collective("reduce_scatter", group, array.nbytes, reads=[array], makes=makes)[0]

    def _rate_of(self, kind: str, touched: Sequence[Array]) -> str:
        """The format an operation works in: that of its first input, fp32 matmuls at the rate they may run at."""
        if not touched:
            return ""
        dtype = touched[0].dtype
        return self._fp32_rate if dtype == "fp32" and kind in ("matmul", "attention") else dtype

    def free(self, array: Array) -> None:
        """The last operation frees what an array of an earlier loop refers to: once in each round of its own loop."""
        memory = array.memory
        assert memory is not None
        self._live.pop(id(memory.record), None)
        self.events[-1].freed.append((memory.record, 1))
        memory.released = lambda record: None

    def released(self, record: Storage) -> None:
        """Called when the last reference to a piece of memory is gone."""
        self._live.pop(id(record), None)
        if not self.events:
            return
        if self.events[-1].facts["loop"] != self.loop_stack:
            self.emit("release", "allocate")  # the last entry runs in another loop and would free in each round of that
        self.events[-1].freed.append((record, copies_left_behind(record, self.loop_stack)))

    def each_parameter(self, parameters: Parameters) -> Iterator[Leaf]:
        """Every parameter in torch's order inside the loops that repeat it.

        The first round of a pattern is separate: the parameter before it leaves other memory than the others find.
        """
        for pattern, count in parameters.runs:
            yield from pattern
            if pattern and not is_one(count):
                with self.loop("layers", count - 1):
                    yield from pattern

    # The ledger

    def ledger(
        self, *, resident: Amounts, parameters: Int, tokens: Int, micro_batches: Int, notes: tuple[str, ...] = ()
    ) -> Ledger:
        """The recorded step as a ledger; the tape ends with it."""
        for hook in self.hooks:
            hook.finished(self.events)
        entries = tuple(event.entry() for event in self.events)
        self.events = []
        return Ledger(entries, resident, parameters, tokens, micro_batches, writer="closed form", notes=notes)
