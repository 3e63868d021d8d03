"""The dispatch mode that every operation of a rank's program passes, and even routing of tokens to experts.

Programs of expert parallelism count tokens by expert, send the other ranks the counts, and read them to know how large
the parts of an all-to-all are. A count is made a tensor whose values are known, the same for each expert; fake tensors
compute on with those by themselves. All ranks are assumed to be alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainledger.trace.distributed.collectives import group_of
from trainledger.trace.distributed.rank_recorder import RankRecorder
from trainledger.trace.patches import replaced

_READ = torch.ops.aten._local_scalar_dense.default
_ELEMENTWISE = ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "sqrt", "neg", "reciprocal", "abs", "sign",
                "zero", "pow", "maximum", "minimum", "rsqrt", "exp", "log")  # fmt: skip
_WAIT = torch.ops._c10d_functional.wait_tensor.default
MOST_COUNTS = 4096  # elements of a tensor whose values are followed
_TO_OTHERS = {
    torch.ops.c10d.alltoall_base_.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}
COUNTS = {torch.ops.aten.histc.default, torch.ops.aten.bincount.default}
EXCHANGED = COUNTS | _TO_OTHERS


class Follower(Protocol):
    """What a gate reports to: a recorder once there is one, and values that are read."""

    recorder: RankRecorder | None

    def routed(self) -> None:
        """Tokens were counted by the expert they are routed to."""

    def assume(self, func: OpOverload, types: Any, args: tuple[Any, ...]) -> float | int:
        """The assumed value of one that is unknown."""


class Gate(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes each operation to the recorder, once there is one; entered before it, as modes exit in reverse order."""

    def __init__(self, follower: Follower) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._follower = follower

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _WAIT:  # its rule for fake tensors makes a new one; in truth it gives back what it waits for
            if self._follower.recorder is not None:
                self._follower.recorder.waited(args[0])
            return args[0]
        if func is _READ and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return self._follower.assume(func, types, args)
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return self._on_parts(func, args, kwargs or {})
        if func in COUNTS:
            self._follower.routed()
        recorder = self._follower.recorder
        if recorder is not None:
            out = recorder.__torch_dispatch__(func, types, args, kwargs)
        else:
            out = func(*args, **(kwargs or {}))
        if func in EXCHANGED:
            give_values(func, args, out)
        return out

    def _on_parts(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation on each of many DTensors that lie alike, on the local parts at once.

        DTensor works out for each of them anew that this is what it comes to, which takes most of an optimizer's step.
        """
        if not is_elementwise_on_lists(func) or kwargs.get("out") is not None:
            return NotImplemented
        first = args[0]
        specs = [each._spec for each in first if isinstance(each, DTensor)]
        if len(specs) != len(first) or not all(_alike(specs, each) for each in (*args[1:], *kwargs.values())):
            return NotImplemented
        if any(each.is_partial() for spec in specs for each in spec.placements):
            return NotImplemented
        parts = [_local_parts(each) for each in args]
        with self:
            made = func(*parts, **{name: _local_parts(each) for name, each in kwargs.items()})
        if func._schema.is_mutable or made is None:
            return None
        wrap: Any = DTensor
        return [wrap(each, spec, requires_grad=False) for each, spec in zip(made, specs, strict=True)]


def is_elementwise_on_lists(func: OpOverload) -> bool:
    """Whether an operator computes each element of many tensors from the elements at its place."""
    name = func._schema.name.removeprefix("aten::_foreach_").removesuffix("_")
    return func._schema.name.startswith("aten::_foreach_") and name in _ELEMENTWISE


def _alike(specs: list[Any], argument: Any) -> bool:
    """Whether an argument that is a list of tensors lies over the ranks as the first one does."""
    if isinstance(argument, Tensor):
        return not isinstance(argument, DTensor)
    if not isinstance(argument, (list, tuple)) or not any(isinstance(each, Tensor) for each in argument):
        return True
    return len(argument) == len(specs) and all(
        isinstance(each, DTensor) and each._spec.placements == spec.placements and each._spec.mesh == spec.mesh
        for each, spec in zip(argument, specs, strict=True)
    )


def _local_parts(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return [each._local_tensor if isinstance(each, DTensor) else each for each in argument]
    return argument


@contextmanager
def counts_have_values() -> Iterator[None]:
    """Let fake tensors of a few integers keep values that are known, not only those of one."""
    with replaced(fake_tensor, "CONSTANT_NUMEL_LIMIT", lambda _: MOST_COUNTS, needed=False):
        yield


def give_values(func: OpOverload, args: tuple[Any, ...], out: Any) -> None:
    """Give a count, or the counts that arrive from all ranks, its assumed values."""
    if func in COUNTS:
        if isinstance(out, FakeTensor):
            out.constant = even(args[0].numel(), out.shape[0], out.dtype)
        return
    source, target = (args[1], args[0]) if func is torch.ops.c10d.alltoall_base_.default else (args[0], out)
    known = getattr(source, "constant", None)
    if known is None or not isinstance(target, FakeTensor) or known.numel() != target.numel():
        return
    group = group_of(func, args, {})
    if group is None or known.numel() % group.size():
        return
    ranks = group.size()
    with _disable_current_modes():
        mine = known.reshape(ranks, -1)[group.rank()]
        target.constant = mine.repeat(ranks).view(target.shape)


def even(total: int, pieces: int, dtype: torch.dtype) -> Tensor:
    """A total in parts that differ by one at most.

    >>> even(10, 4, torch.int64)
    tensor([3, 3, 2, 2])
    """
    with _disable_current_modes():
        each, rest = divmod(total, pieces)
        return torch.tensor([each + (at < rest) for at in range(pieces)], dtype=dtype)
