"""Stages of torch's pipelines in a world where nothing is on a GPU and nothing is random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.pipelining import stage as stages

from trainledger.trace.replaced import all_replaced


@contextmanager
def stages_on_cpu() -> Iterator[None]:
    """A stage makes its buffers on the device it is told; before its first step torch puts random states aside."""

    def on_cpu(init: Callable[..., None]) -> Callable[..., None]:
        def initialized(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            self.device = torch.device("cpu")

        return initialized

    base = getattr(stages, "_PipelineStageBase", None)
    with all_replaced(
        (base, "__init__", on_cpu),
        (torch.random, "fork_rng", lambda _: lambda *args, **kwargs: nullcontext()),
    ):
        yield
