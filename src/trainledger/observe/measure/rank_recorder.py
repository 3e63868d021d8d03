"""Recording the step of a real rank: its parts of tensors, what FSDP2 gathers and frees, and what it sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.trace.distributed.rank_recorder import COMMUNICATION, RankRecorder
from trainledger.trace.patches import all_replaced, inside
from trainledger.trace.recorder.storages import tensors_in

_WAIT = torch.ops._c10d_functional.wait_tensor.default


class RealRankRecorder(RankRecorder):  # type: ignore[no-untyped-call]
    """Records a rank as it runs, in processes that really send: ``with recorder: ...``."""

    def _begins_forward(self, func: OpOverload, args: tuple[Any, ...]) -> bool:
        return False  # the step says which phase it is in

    def is_of_backend(self, args: tuple[Any, ...]) -> bool:
        """Whether an operation is the backend's own: gloo reduces in a copy, of which FSDP2 knows nothing."""
        return bool(self._communicating) and any(
            each.untyped_storage()._cdata not in self.storages.live for each in tensors_in(args)
        )

    def _add_unseen(self, inputs: list[Tensor]) -> None:
        """What backward finds without having made it is memory to send from: the buckets of DDP."""
        if self.phases.current == "backward":
            self.resident(
                [each for each in inputs if each.untyped_storage()._cdata not in self.storages.live], COMMUNICATION
            )
        super()._add_unseen(inputs)


@contextmanager
def recorded(recorder: RealRankRecorder) -> Iterator[None]:
    """Record what this rank runs inside."""
    gate = _Gate(recorder)
    unseen = inside(gate.unseen)  # DTensor runs an operator on fake tensors of the whole size, to know its shape
    names = ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta")
    with all_replaced(*((ShardingPropagator, each, unseen) for each in names)), gate:
        recorder.begin()
        try:
            yield
        finally:
            recorder.end()


class _Gate(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets through to the recorder what runs on this rank's tensors; DTensor makes that of what runs on its own."""

    def __init__(self, recorder: RealRankRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self._unseen = 0

    @contextmanager
    def unseen(self) -> Iterator[None]:
        self._unseen += 1
        try:
            yield
        finally:
            self._unseen -= 1

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented
        if self._unseen or self.recorder.is_of_backend(args):
            return func(*args, **(kwargs or {}))
        if func is _WAIT:
            self.recorder.waited(args[0])
            return func(*args)
        return self.recorder.__torch_dispatch__(func, types, args, kwargs)
