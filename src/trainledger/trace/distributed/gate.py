"""Where every operation of a rank's program passes by."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.trace.distributed import even_routing
from trainledger.trace.distributed.rank_recorder import RankRecorder

_READ = torch.ops.aten._local_scalar_dense.default
_ELEMENTWISE = ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "sqrt", "neg", "reciprocal", "abs", "sign",
                "zero", "pow", "maximum", "minimum", "rsqrt", "exp", "log")  # fmt: skip
_WAIT = torch.ops._c10d_functional.wait_tensor.default


class Follower(Protocol):
    """Who is told: a recorder once there is one, and of values that are read."""

    recorder: RankRecorder | None

    def counted(self) -> None:
        """Tokens have been counted by where they go."""

    def guess(self, func: OpOverload, types: Any, args: tuple[Any, ...]) -> float | int:
        """A value for one that nobody knows."""


class Gate(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells the recorder each operation, once there is one; it stands there before, as modes leave in their order."""

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
            return self._follower.guess(func, types, args)
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return self._on_parts(func, args, kwargs or {})
        if func in even_routing.COUNTS:
            self._follower.counted()
        recorder = self._follower.recorder
        if recorder is not None:
            out = recorder.__torch_dispatch__(func, types, args, kwargs)
        else:
            out = func(*args, **(kwargs or {}))
        if func in even_routing.SPREAD:
            even_routing.tell(func, args, out)
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
