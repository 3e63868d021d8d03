"""The life of every storage while a recorder is active: from the operation that made it to its last reference."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any

from torch import Tensor

from trainledger.ledger.core.record import Event, Origin, Storage
from trainledger.ledger.entry import TensorLife
from trainledger.trace.recorder.tensor_facts import dtype_name, has_no_memory, tensors_in


class Storages:
    """Storages that are live, by their address, and records of all that ever were.

    What dies is noted as freed by the last of ``events``; before the first it was never there. ``local`` gives the
    part of a tensor that lives here, ``freed`` is called with what dies.
    """

    def __init__(
        self, events: list[Event], local: Callable[[Tensor], Tensor], freed: Callable[[Storage], None] | None = None
    ) -> None:
        self.live: dict[int, Storage] = {}
        self.there_before: list[Storage] = []
        self._replaced: dict[int, Tensor] = {}
        self._events = events
        self._local = local
        self._freed = freed
        self._guards: dict[int, weakref.ref[Any]] = {}
        self._every: list[Storage] = []

    def resident(self, tensors: Iterable[Tensor], category: str, names: Iterable[str] = ()) -> None:
        """Follow tensors that were there before; a storage is counted once."""
        for tensor, name in zip_longest(tensors, names, fillvalue=category):
            assert isinstance(tensor, Tensor)
            tensor = self._local(tensor)
            if has_no_memory(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live and storage._cdata not in self._replaced:
                record = Storage(storage.nbytes(), "resident", category)
                record.origin = Origin(str(name), tuple(tensor.shape), dtype_name(tensor.dtype), "", "", -1)
                self.watch(storage, record)
                self.there_before.append(record)

    def replaced_by_fake(self, tensors: Iterable[Tensor]) -> None:
        """Count no memory for these real tensors, which fake ones replace: a loss may still refer to them."""
        self._replaced |= {each.untyped_storage()._cdata: each for each in tensors}

    def born(self, tensor: Tensor, name: str, phase: str, line: str = "") -> Storage:
        """Follow memory that has just been made; the caller puts it into the event that it is for."""
        storage = tensor.untyped_storage()
        record = Storage(storage.nbytes(), phase)
        record.origin = Origin(name, tuple(tensor.shape), dtype_name(tensor.dtype), "", line, len(self._events))
        self.watch(storage, record)
        return record

    def watch(self, storage: Any, record: Storage) -> None:
        """Let a record live as long as a storage."""
        key = storage._cdata
        self.live[key] = record
        self._every.append(record)
        self._guards[key] = weakref.ref(storage, self._died(key))

    def move(self, before: int, storage: Any) -> None:
        """Memory that was known as one storage is another from now on."""
        record = self.live.pop(before, None)
        if record is not None:
            del self._guards[before]
            self.live[storage._cdata] = record
            self._guards[storage._cdata] = weakref.ref(storage, self._died(storage._cdata))

    def free(self, key: int) -> None:
        """Count a storage as freed though references to it remain: its memory was released."""
        self._died(key)(None)

    def _died(self, key: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            record = self.live.pop(key)
            del self._guards[key]
            if record.origin is not None:
                record.origin.died = len(self._events) - 1
            if self._events:
                self._events[-1].freed.append((record, 1))
            else:
                self.there_before.remove(record)
            if self._freed is not None:
                self._freed(record)

        return gone

    def of(self, tensor: Tensor) -> Storage | None:
        """The record of a tensor's memory, where it is followed; None of what torch.func wraps."""
        try:
            return self.live.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:
            return None

    def categorize(self, tensors: Iterable[Tensor], category: str) -> None:
        """Say what live storages turned out to be, back to their birth."""
        for tensor in tensors_in([self._local(each) for each in tensors]):
            record = self.of(tensor)
            if record is not None:
                record.category = category

    def forget_freed(self) -> None:
        """Drop records of freed memory."""
        self._every.clear()

    def lives(self) -> Iterator[TensorLife]:
        """Every piece of memory of the step, in the order of their births."""
        for each in self._every:
            origin = each.origin
            if origin is None or not each.nbytes or (origin.born < 0 and origin.died == -1):
                continue
            yield TensorLife(
                nbytes=each.nbytes, category=each.category, name=origin.name, shape=origin.shape, dtype=origin.dtype,
                path=origin.path, phase="" if origin.born < 0 else each.phase, line=origin.line, born=origin.born,
                died=origin.died,
            )  # fmt: skip
