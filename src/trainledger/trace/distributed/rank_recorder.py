"""The recorder of one rank: its shards of tensors, and what it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from trainledger.ledger.entry import Event, Origin, Storage
from trainledger.trace.distributed.collectives import Collective, collective_of, communication_marked, local
from trainledger.trace.operators.table import operator_of
from trainledger.trace.patches import Args, Kwargs, around, replaced
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.storages import tensors_in

COMMUNICATION = "communication"
_READ = torch.ops.aten._local_scalar_dense.default
_GATHER_COPY_IN = "fsdp::all_gather_copy_in"


class RankRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Records what a rank does: of a DTensor its local part, of FSDP2 what it gathers and frees, and collectives.

    A collective may be overlapped with what follows (``overlap``) where FSDP2 or DDP start it, where the caller does
    not wait for it, or where a matmul is computed before its result is waited for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._communicating = 0
        self._unit_path: str | None = None
        self._unwaited: dict[int, int] = {}
        self._stack = ExitStack()
        super().__init__(*args, **kwargs)

    def begin(self) -> None:
        """Follow modules and resized storages from now on; operations come one by one from a `Gate`."""
        self.attribution.follow()
        self._stack.enter_context(communication_marked(self.communicating, self.at))
        self._stack.enter_context(replaced(torch.UntypedStorage, "resize_", around(self._resize)))

    def end(self) -> None:
        """Follow no longer."""
        self._stack.close()
        self.attribution.leave()

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Memory made inside is of category ``communication``."""
        self._communicating += 1
        try:
            yield
        finally:
            self._communicating -= 1

    @contextmanager
    def at(self, module: nn.Module) -> Iterator[None]:
        """What runs inside is attributed to this module, the owner of the parameters."""
        before, path = self._unit_path, self.attribution.path_of(module)
        self._unit_path = before if path is None else path
        try:
            yield
        finally:
            self._unit_path = before

    def _path(self) -> str:
        return self.attribution.path(self.phases.current) if self._unit_path is None else self._unit_path

    local = staticmethod(local)

    # Memory that grows and shrinks

    def _resize(self, resize: Callable[..., Any], storage: Any, size: int) -> Any:
        # FSDP2 frees what it has gathered by storage.resize_(0), and makes it large again (_fsdp_param.py, free_storage
        # and alloc_storage).
        done = resize(storage, size)
        known = self.storages.live.get(storage._cdata)
        if known is None or known.nbytes != storage.nbytes():
            if known is not None:
                self.storages.free(storage._cdata)
            if storage.nbytes():
                self._grown(storage)
        return done

    def _grown(self, storage: Any) -> None:
        made = Storage(storage.nbytes(), self.phases.current, COMMUNICATION if self._communicating else "scratch")
        made.origin = Origin("resize_", (storage.nbytes(),), "uint8", self._path(), "", len(self.events))
        self.storages.watch(storage, made)
        source, line = "torch.UntypedStorage.resize_", self.attribution.line()
        self._note([made], name="resize_", kind="allocate", source=source, line=line)

    def _note(self, made: list[Storage], **facts: Any) -> None:
        """Record what FSDP2 does without an operation."""
        self.events.append(Event(made, path=self._path(), phase=self.phases.current, **facts))

    # Operations

    def _record(self, func: OpOverload, args: Args, kwargs: Kwargs, out: Any, *measured: Any) -> Event | None:
        if self._begins_forward(func, args):
            self.phases.begin("forward")
        collective = collective_of(func, args, kwargs, out) if operator_of(func).kind == "collective" else None
        if collective is not None and collective.name == "recv":
            # Buffers that are there for what arrives
            self.resident(tensors_in(args), COMMUNICATION)
        event = super()._record(func, args, kwargs, out, *measured)
        if event is None:
            if func._schema.name == _GATHER_COPY_IN:
                self._copied_in(args[0])
            return None
        if self._unit_path is not None:
            event.facts["path"] = self._unit_path
            for record in event.allocated:
                if record.origin is not None:
                    record.origin.path = self._unit_path
        if self._communicating:
            for storage in event.allocated:
                storage.category = COMMUNICATION
        if collective is not None:
            self._sent(event, collective, args, out)
        return event

    def _begins_forward(self, func: OpOverload, args: Args) -> bool:
        """Whether an operation outside of any phase is the first of a forward."""
        outside = self.phases.current == "other" and func is not _READ and torch.is_grad_enabled()
        return outside and any(tensor.requires_grad for tensor in tensors_in(args))

    def was_read(self, func: OpOverload, args: Args) -> None:
        """A value goes to the host."""
        self._record(func, args, {}, 0, None)

    def _sent(self, event: Event, collective: Collective, args: Args, out: Any) -> None:
        made = sum(record.nbytes for record in event.allocated)
        inside = sum(each.nbytes for each in tensors_in(args)) if not made else 0
        payload = collective.payload
        if made:
            read, written = sum(each.nbytes for each in tensors_in(args)), made
        elif collective.name in ("all_gather", "reduce_scatter"):
            read, written = inside - payload, payload
            if collective.name == "reduce_scatter":
                read, written = written, read
        else:
            read = 0 if collective.name == "recv" else payload
            written = 0 if collective.name == "send" else payload
        overlaps = self._communicating or collective.waits is False
        event.facts |= {"name": collective.name, "group": collective.group, "ranks": collective.ranks, "read": read}
        event.facts |= {"payload": payload if collective.ranks > 1 else 0, "written": written}
        event.facts["overlap"] = "compute" if overlaps else ""
        if collective.name == "all_to_all" and any(isinstance(argument, list) and argument for argument in args[1:]):
            # What others send this rank depends on their data
            event.facts["basis"] = "assumed"
        if made:
            for tensor in tensors_in(out):
                self._unwaited[tensor.untyped_storage()._cdata] = len(self.events) - 1

    def waited(self, tensor: Tensor) -> None:
        """The result of a collective is needed from here on."""
        started = self._unwaited.pop(tensor.untyped_storage()._cdata, None)
        if started is not None and any(
            event.facts["kind"] in ("matmul", "attention") for event in self.events[started + 1 :]
        ):
            self.events[started].facts["overlap"] = "compute"

    def _copied_in(self, pieces: Any) -> None:
        """This rank's own piece goes into the buffer that is gathered into."""
        moved = sum(tensor.nbytes for tensor in tensors_in(pieces))
        self._note([], name="all_gather_copy_in", kind="copy", read=moved, written=moved, source=_GATHER_COPY_IN)
