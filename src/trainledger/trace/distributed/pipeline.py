"""Stages of torch's pipelines in a world where nothing is on a GPU and nothing is random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining import stage as stages

from trainledger.trace.patches import all_replaced

_PLAIN = torch.empty(0)


@contextmanager
def stages_on_cpu() -> Iterator[None]:
    """A stage makes its buffers on the device it is told; before its first step torch puts random states aside.

    Stages ask each other for shapes, which torch since 2.14 does not begin in a fake process group; here they are
    answered (`Messages`). What a stage has sent it lets go of, since 2.15, where that is a tensor like any other.
    """

    def on_cpu(init: Callable[..., None]) -> Callable[..., None]:
        def initialized(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            self.device = torch.device("cpu")

        return initialized

    def as_plain(method: Callable[..., Any]) -> Callable[..., Any]:
        def asked(self: Any, output: Any) -> Any:
            return method(self, _PLAIN if type(output) is FakeTensor else output)

        return asked

    base = getattr(stages, "_PipelineStageBase", None)
    with all_replaced(
        (base, "__init__", on_cpu),
        (base, "_output_slot_is_releasable", as_plain),
        (torch.random, "fork_rng", lambda _: lambda *args, **kwargs: nullcontext()),
        (schedules, "dist", _Distributed),
    ):
        yield


class _Distributed:
    """torch.distributed as a pipeline's schedule sees it: with processes that answer."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get_backend(self, group: Any = None) -> str:
        """No fake one, of which a schedule asks nothing."""
        return "gloo"
