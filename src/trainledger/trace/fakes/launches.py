"""Kernels that a program brings itself, launched on fake tensors: Triton's, and CUDA's that are compiled from source.

None is compiled or run. A launch makes no memory, so that the account of memory is whole; what a kernel computes and
moves is known to none but its author, who may say it: ``cost_rule("triton::NAME")``, ``cost_rule("cuda::NAME")``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trainledger.ledger.core.record import Event
from trainledger.trace.operators.custom import CUSTOM
from trainledger.trace.patches import after_import, all_replaced, around
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.tensor_facts import tensors_in

Launched = Callable[[str, tuple[Any, ...], dict[str, Any]], object]
_HIDDEN = ("grid", "warmup", "num_warps", "num_stages", "num_ctas", "maxnreg")  # of the launch, not of the kernel


@contextmanager
def launches_followed(launched: Launched) -> Iterator[None]:
    """Inside, ``launched(name, arguments, keywords)`` hears of each launch with a fake tensor, which does not run."""

    def run(before: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> Any:
        given = _plain((*args, *kwargs.values()))
        if not any(isinstance(each, FakeTensor) for each in given):
            return before(kernel, *args, **kwargs)
        options = {name: value for name, value in kwargs.items() if name not in _HIDDEN}
        launched(f"triton::{_name_of(kernel)}", tuple(map(_tensor_of, args)), options)
        return None

    with ExitStack() as stack:

        def triton(name: str) -> Callable[[ModuleType], None]:
            def loaded(module: ModuleType) -> None:
                stack.enter_context(all_replaced((getattr(module, name), "run", around(run))))

            return loaded

        stack.enter_context(after_import("triton.runtime.jit", triton("JITFunction")))
        stack.enter_context(after_import("triton.runtime.autotuner", triton("Autotuner")))
        compiled = [
            (torch.cuda, each, lambda _: _Compiled.by(launched)) for each in ("_compile_kernel", "compile_kernel")
        ]
        stack.enter_context(all_replaced(*compiled))
        yield


def record_launch(recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Event:
    """The entry of a launch, of the FLOPs that its `cost_rule` gives; without one it counts as unknown."""
    tensors = tensors_in(list(args)) + tensors_in(dict(kwargs))
    recorder.appear(tensors, "read first")
    rule = CUSTOM.get(name)
    flops, model_flops = (0, 0) if rule is None else rule.counted(args, dict(kwargs), None)
    if rule is None:
        recorder.uncounted[name] = recorder.uncounted.get(name, 0) + 1
    return recorder.add(
        name, [], kind="unknown" if rule is None else rule.kind, source=name if rule is None else rule.source,
        basis=recorder.sizes.of_records(map(recorder.storages.of, tensors)), flops=flops,
        model_flops=model_flops, read=0,
    )  # fmt: skip


def _plain(values: tuple[Any, ...]) -> list[Any]:
    return [_tensor_of(each) for each in values]


def _tensor_of(value: Any) -> Any:
    """The tensor that a Triton tensor descriptor is of; any other argument as it is."""
    base = getattr(value, "base", None) if type(value).__name__ == "TensorDescriptor" else None
    return base if isinstance(base, Tensor) else value


def _name_of(kernel: Any) -> str:
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return getattr(kernel, "__name__", type(kernel).__name__)


class _Compiled:
    """A CUDA kernel of source code that was not compiled."""

    def __init__(self, name: str, launched: Launched) -> None:
        self._name, self._launched = name, launched

    @classmethod
    def by(cls, launched: Launched) -> Callable[..., _Compiled]:
        """``torch.cuda._compile_kernel``."""
        return lambda source, name, *args, **kwargs: cls(name, launched)

    def set_shared_memory_config(self, nbytes: int) -> None:
        pass

    def __call__(self, grid: Any = None, block: Any = None, args: Any = None, *more: Any, **options: Any) -> None:
        self._launched(f"cuda::{self._name}", tuple(args or ()), {})
