"""Programs written for GPUs on a machine without one: ``cuda`` names the CPU, pipeline stages live there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining import stage as stages
from torch.overrides import TorchFunctionMode

from trainledger.trace.fakes.gpu import Gpu, gpu_answers
from trainledger.trace.patches import Patch, around
from trainledger.trace.recorder.modes import also_in_backward
from trainledger.trace.recorder.source_lines import TORCH
from trainledger.trace.recorder.tensor_facts import is_gpu

_CPU = torch.device("cpu")
_PLAIN = torch.empty(0)
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


@contextmanager
def as_cpu(gpu: Gpu) -> Iterator[None]:
    """Tensors meant for a GPU are made on the CPU, and questions about the GPU itself are answered (`fakes.gpu`).

    ``torch.autocast("cuda")`` is the CPU's, whose list of operations differs in a few.
    """
    with gpu_answers(gpu), also_in_backward(_OnCpu()):
        yield


class _OnCpu(TorchFunctionMode):
    """Every call of torch that names a GPU names the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if func == _IS_CUDA and not sys._getframe(1).f_code.co_filename.startswith(TORCH):
            return True  # a kernel of the program's own wants to know it before it is launched
        if name == "cuda":
            return args[0].to("cpu")
        if kwargs and is_gpu(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if name == "to" and len(args) > 1 and is_gpu(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **(kwargs or {}))


def _stage_on_cpu(init: Callable[..., None], stage: Any, *args: Any, **kwargs: Any) -> None:
    init(stage, *args, **kwargs)
    stage.device = _CPU


def _asked_of_plain(method: Callable[..., Any], stage: Any, output: Any) -> Any:
    return method(stage, _PLAIN if type(output) is FakeTensor else output)


class _Distributed:
    """torch.distributed as a pipeline's schedule sees it: with processes that answer."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get_backend(self, group: Any = None) -> str:
        """No fake one, of which a schedule asks nothing."""
        return "gloo"


# A stage allocates its buffers on the device it is given; before its first step torch saves random states. Stages ask
# each other for shapes, which torch since 2.14 does not begin in a fake process group; here they are answered
# (`program.Messages`). Since 2.15 a stage frees what it has sent where that is a plain tensor.
_STAGE = getattr(stages, "_PipelineStageBase", None)
STAGES: tuple[Patch, ...] = (
    (_STAGE, "__init__", around(_stage_on_cpu)),
    (_STAGE, "_output_slot_is_releasable", around(_asked_of_plain)),
    (torch.random, "fork_rng", lambda _: lambda *args, **kwargs: nullcontext()),
    (schedules, "dist", _Distributed),
)
