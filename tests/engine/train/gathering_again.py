"""What Megatron-LM does with what sequence-parallel ranks gather, done to a model that DTensor has split.

Of the input of matmuls backward finds the rank's own tokens, gathers the others a second time for the first matmul
that asks, and lets go of them after the last. Here by hooks on saved tensors, not in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainledger.engine.train.parallel.model_on_rank import spread
from trainledger.spec.layout import Layout
from trainledger.spec.precision import Precision

BRANCHES = ("self_attn", "mlp", "lm_head")


class Part:
    """A rank's own tokens of an input, and all of them while matmuls of backward read them."""

    def __init__(self, own: Tensor, mesh: DeviceMesh) -> None:
        self.own = own
        self.mesh = mesh
        self.readers = 0
        self.whole: DTensor | None = None

    def read(self) -> DTensor:
        whole = self.whole
        if whole is None:
            whole = DTensor.from_local(self.own, self.mesh, (Shard(1),)).redistribute(placements=(Replicate(),))
        self.readers -= 1
        self.whole = whole if self.readers else None
        return whole


def storage_of(x: Any) -> int:
    local = x.to_local() if isinstance(x, DTensor) else x
    elem: Tensor = getattr(local, "elem", local)  # of one that is still on its way
    key: int = elem.untyped_storage()._cdata
    return key


class GatheringAgain:
    """Follows the branches of a model as they are called; what they save is replaced inside `hooks`."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._own: Tensor | None = None
        self._parts: dict[int, Part] = {}
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in BRANCHES:
                module.register_forward_pre_hook(self._before, prepend=True)
                module.register_forward_pre_hook(self._after)
                module.register_forward_hook(self._over)

    def _before(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._own = inputs[0].detach()

    def _after(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert self._own is not None
        self._parts[storage_of(inputs[0])], self._own = Part(self._own, self.mesh), None

    def _over(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._parts.clear()  # the gathered tensor goes, and another may come to lie where it was

    def pack(self, x: Tensor) -> Any:
        part = self._parts.get(storage_of(x))
        if part is None:
            return x
        part.readers += 1
        return part, x.shape

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        part, shape = packed
        return part.read().reshape(shape)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with saved_tensors_hooks(self.pack, self.unpack):
            yield


def spread_gathering(
    model: nn.Module, layout: Layout, mesh: DeviceMesh, precision: Precision
) -> tuple[nn.Module, Callable[[], AbstractContextManager[None]]]:
    """The model as this rank holds it, and what its steps run in: gathering again is not the engine's."""
    if not layout.gathers_again:
        return spread(model, layout, mesh, precision), nullcontext
    model = spread(model, replace(layout, sequence_gather="kept"), mesh, precision)
    return model, GatheringAgain(model, mesh["tensor"]).hooks
