"""Programs for a GPU on a machine without one: where their tensors lie.

Those of a program that is annotated pass for the GPU's and lie on the CPU; of a rank's program, ``cuda`` names the CPU.
What either asks of the GPU itself is answered by `fakes.gpu`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._device
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from trainledger.ledger.entry import Event, Storage
from trainledger.trace.fakes.gpu import Gpu, gpu_answers
from trainledger.trace.patches import Args, Kwargs, around, replaced
from trainledger.trace.recorder.recorder import Recorder
from trainledger.trace.recorder.source_lines import TORCH, is_tracers
from trainledger.trace.recorder.storages import is_gpu, tensors_in

_CPU, _GPU = torch.device("cpu"), torch.device("cuda", 0)
_DEVICE, _IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
# Parts of torch that work out what fake tensors are: to them such a tensor is on the CPU, as it is.
_OF_FAKES = tuple(
    os.path.join(TORCH, name)
    for name in """
        _subclasses _prims _refs _decomp _meta_registrations _higher_order_ops _library _ops _tensor_str _guards fx
        utils/_
    """.replace("/", os.sep).split()
)
_HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def _also_in_backward(mode: TorchFunctionMode) -> Iterator[None]:
    # Torch runs a backward without the function modes of its caller; hooks, own functions and recomputation need them.
    def run(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            return before(*args, **kwargs)
        with mode:
            return before(*args, **kwargs)

    with replaced(torch.autograd, "_engine_run_backward", around(run)), mode:
        yield


@contextmanager
def as_cpu(gpu: Gpu) -> Iterator[None]:
    """Tensors meant for a GPU are made on the CPU, and questions about the GPU itself are answered.

    ``torch.autocast("cuda")`` is the CPU's, whose list of operations differs in a few.
    """
    with gpu_answers(gpu), _also_in_backward(_OnCpu()):
        yield


class _OnCpu(TorchFunctionMode):
    """Every call of torch that names a GPU names the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if func == _IS_CUDA and not sys._getframe(1).f_code.co_filename.startswith(TORCH):
            # A kernel of the program's own wants to know it before it is launched
            return True
        if name == "cuda":
            return args[0].to("cpu")
        if kwargs and is_gpu(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if name == "to" and len(args) > 1 and is_gpu(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **(kwargs or {}))


class Accelerator(TorchFunctionMode):
    """Follows which tensors would be on the GPU: those made there or moved there, and what is computed of them.

    A move is a copy, as between the memories of two devices. ``settle`` hears of memory that went since the last
    operation.
    """

    def __init__(self, recorder: Recorder, settle: Callable[[], None]) -> None:
        super().__init__()
        self._recorder = recorder
        self.settle = settle
        self._there: set[Storage] = set()
        self._moving = False
        self.nbytes = 0  # on the GPU now
        self.gpu = Gpu(live=self._settled)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor passes for one on the GPU."""
        return self._recorder.record_of(tensor) in self._there

    def device_of(self, tensor: Tensor) -> str:
        return str(_GPU) if self.holds(tensor) else str(tensor.device)

    def gone(self, record: Storage) -> None:
        """A piece of memory is there no longer."""
        if record in self._there:
            self._there.discard(record)
            self.nbytes -= record.nbytes

    def _settled(self) -> int:
        self.settle()
        return self.nbytes

    def _arrived(self, record: Storage) -> None:
        if record not in self._there:
            self._there.add(record)
            self.nbytes += record.nbytes
            self.gpu.most_nbytes = max(self.gpu.most_nbytes, self.nbytes)

    def after(self, args: Args, kwargs: Kwargs, event: Event) -> bool:
        """What is made of a GPU's tensors is on the GPU; returns whether it is a copy between memories."""
        if event.allocated and any(map(self.holds, tensors_in(args) + tensors_in(kwargs))):
            for record in event.allocated:
                self._arrived(record)
        return self._moving and event.facts["name"] == "clone"

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute
            if func == _DEVICE:
                return _GPU if self.holds(args[0]) else func(*args)
            return self.holds(args[0]) if func == _IS_CUDA else func(*args, **kwargs)
        if name in ("to", "cuda", "cpu") and isinstance(args[0], Tensor):
            return self._move(name, args, kwargs)
        if name == "get_device" and args and isinstance(args[0], Tensor):
            return 0 if self.holds(args[0]) else -1
        device = kwargs.get("device")
        if device is None:
            device = torch.utils._device.CURRENT_DEVICE
            if not is_gpu(device) or func not in torch.utils._device._device_constructors():
                return func(*args, **kwargs)
        out = func(*args, **{**kwargs, "device": _CPU if is_gpu(device) else device})
        self._put(out, is_gpu(device))
        return out

    def _move(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """``to``, ``cuda`` and ``cpu``: a copy where the device is another, then what else was asked for."""
        tensor, rest, device = args[0], list(args[1:]), kwargs.pop("device", None)
        if name != "to":
            rest, kwargs, device = [], {}, _GPU if name == "cuda" else _CPU
        elif rest and isinstance(rest[0], Tensor):
            device, rest[0] = self._device_like(rest[0]), rest[0].dtype
        elif rest and not isinstance(rest[0], torch.dtype):
            device = rest.pop(0) if device is None else device
        if isinstance(kwargs.get("other"), Tensor):
            other = kwargs.pop("other")
            device, kwargs["dtype"] = self._device_like(other), other.dtype
        if device is not None and not is_gpu(device) and _asked_by_torch():
            # The CPU is what C++ knows the tensor to be on
            device = None
        if device is not None and is_gpu(device) != self.holds(tensor):
            self._moving = True
            try:
                tensor = tensor.clone()
            finally:
                self._moving = False
            self._put(tensor, is_gpu(device))
            kwargs.pop("copy", None)
        kwargs.pop("non_blocking", None)
        rest = [argument for argument in rest if not isinstance(argument, bool)]
        return tensor.to(*rest, **kwargs) if rest or kwargs else tensor

    def _device_like(self, tensor: Tensor) -> torch.device:
        return _GPU if self.holds(tensor) else _CPU

    def load(self, before: Callable[..., Any], file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``torch.load`` to the GPU."""
        there = isinstance(map_location, (str, torch.device)) and is_gpu(map_location)
        loaded = before(file, _CPU if there else map_location, *args, **kwargs)
        if there:
            self._put(loaded, True)
        return loaded

    def _put(self, out: Any, there: bool) -> None:
        for record in map(self._recorder.record_of, tensors_in(out)):
            if record is not None:
                (self._arrived if there else self.gone)(record)


def _asked_by_torch() -> bool:
    """Whether an optimizer or another part of torch, and not the program, wants a tensor somewhere else."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (is_tracers(frame.f_code.co_filename) or frame.f_code.co_filename.startswith("<")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith((TORCH + "optim", TORCH + "nn", TORCH + "amp"))


@contextmanager
def pretended(accelerator: Accelerator, synchronized: Callable[[], None]) -> Iterator[None]:
    """What a program asks of CUDA is answered as by one GPU with 80 GB; its numbers are those of this trace."""
    accelerator.gpu.synchronized = synchronized
    with (
        gpu_answers(accelerator.gpu),
        replaced(torch, "load", around(accelerator.load)),
        replaced(F, "cross_entropy", around(_in_fp32)),
        replaced(F, "log_softmax", around(_in_fp32)),
        replaced(FakeTensor, "device", lambda _: _FakeDevice(accelerator, FakeTensor.device)),
        _also_in_backward(accelerator),
    ):
        yield


class _FakeDevice:
    # A function mode does not see attributes of fake tensors, which define `device` in Python themselves.

    def __init__(self, accelerator: Accelerator, own: Any) -> None:
        self._accelerator, self._own = accelerator, own

    def __get__(self, tensor: Any, kind: type | None = None) -> Any:
        if tensor is None:
            return self._own
        file = sys._getframe(1).f_code.co_filename
        if not file.startswith(_OF_FAKES) and not is_tracers(file) and self._accelerator.holds(tensor):
            return _GPU
        return self._own.__get__(tensor, kind)


def _in_fp32(before: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # Losses and log_softmax are in the fp32 list of CUDA's autocast and not in that of CPUs (ATen/autocast_mode.h).
    if torch.is_autocast_enabled("cpu") and input.dtype in _HALVES:
        input = input.float()
    return before(input, *args, **kwargs)
