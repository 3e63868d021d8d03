"""Programs written for GPUs on a machine without one: ``cuda`` names the CPU, pipeline stages live there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining import stage as stages
from torch.overrides import TorchFunctionMode

from trainledger.trace.patches import all_replaced, answering, replaced

_NOTHING_TO_DO = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "init", "_lazy_init",
                  "reset_accumulated_memory_stats", "manual_seed", "manual_seed_all")  # fmt: skip
_CPU = torch.device("cpu")
_PLAIN = torch.empty(0)


@contextmanager
def as_cpu() -> Iterator[None]:
    """Tensors meant for a GPU are made on the CPU, and what is asked of the GPU itself is passed over.

    ``torch.autocast("cuda")`` is the CPU's, whose list of operations differs in a few.
    """

    def on_cpu(init: Callable[..., None]) -> Callable[..., None]:
        @wraps(init)  # a compiler that meets autocast asks for the names of its arguments
        def initialized(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

        return initialized

    with ExitStack() as stack:
        if not torch.cuda.is_available():
            for name in _NOTHING_TO_DO:
                stack.enter_context(replaced(torch.cuda, name, answering(None), needed=False))
            for name in ("current_device", "max_memory_allocated", "memory_allocated", "max_memory_reserved",
                         "memory_reserved"):  # fmt: skip
                stack.enter_context(replaced(torch.cuda, name, answering(0), needed=False))
        stack.enter_context(replaced(torch.amp.autocast_mode.autocast, "__init__", on_cpu))
        stack.enter_context(_OnCpu())
        yield


class _OnCpu(TorchFunctionMode):
    """Every call of torch that names a GPU names the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0].to("cpu")
        if kwargs:
            device = kwargs.get("device")
            if device is not None and _is_gpu(device):
                kwargs = {**kwargs, "device": _CPU}
        if name == "to" and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **(kwargs or {}))


def _is_gpu(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


@contextmanager
def stages_on_cpu() -> Iterator[None]:
    """A stage allocates its buffers on the device it is given; before its first step torch saves random states.

    Stages ask each other for shapes, which torch since 2.14 does not begin in a fake process group; here they are
    answered (`Messages`). Since 2.15 a stage frees what it has sent where that is a plain tensor.
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
