"""A whole program on fake tensors: what needs values is refused with a sentence, what only stores them is left out.

Whole numbers on the host keep their values: loaders look for the ends of documents in their tokens, count and cut them;
of that no rule for shapes knows the result. So such fake tensors carry real ones, as torch lets them
(``FakeTensor.constant``), until something unknown is written to them.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.utils._device
import torch.utils.data
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.spec.units import GIB
from trainledger.trace.fakes.tensors import fake_batch, mapped
from trainledger.trace.patches import after_import, all_replaced, around
from trainledger.trace.recorder.source_lines import Refused
from trainledger.trace.recorder.storages import has_no_memory, is_gpu

Note = Callable[[str], None]


@contextmanager
def without_values(note: Note) -> Iterator[None]:
    """Inside, of checkpoints only shapes are read, none is written, loaders run in this process, and tensors can be
    copied.
    """
    files = _Files(note)
    safe = sys.modules.get("safetensors.torch")
    # Pretrained weights are refused as soon as a script imports what would load them.
    with (
        after_import("transformers.modeling_utils", _refuse_pretrained),
        all_replaced(
            (torch, "load", around(files.load)),
            (torch, "save", around(files.save)),
            (torch.Tensor, "__deepcopy__", around(_copied)),
            (torch.Tensor, "__reduce_ex__", around(_pickled)),
            (torch.utils.data.DataLoader, "__init__", lambda before: _in_process(before, note)),
            *([(safe, "load_file", _refused("load_file reads values"))] if safe is not None else []),
        ),
    ):
        yield


def _refused(what: str) -> Callable[[Any], Callable[..., Any]]:
    def made(_: Any) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise Refused(f"{what}, which fake tensors do not have; build it without, or annotate without --fake")

        return refuse

    return made


class _Files:
    """What a program saves and loads: of tensors the shapes, and the values of single numbers that are known."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._saved: dict[Any, tuple[Any, Any]] = {}  # by path, or by the id of what was written to, which is kept

    def save(self, before: Callable[..., None], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Write nothing, and remember the shapes."""
        self._note("torch.save wrote nothing: fake tensors have no values")
        with _disable_current_modes():
            self._saved[_key(f)] = f, mapped(obj, _shape_of)

    def load(self, before: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Fake tensors as a file has them."""
        if _key(f) in self._saved:
            found = self._saved[_key(f)][1]
        else:
            self._note("torch.load read shapes alone: what depends on the values of a file is not known")
            kwargs.pop("mmap", None)
            mapped_in = {"mmap": True} if isinstance(f, (str, os.PathLike)) else {}
            with _disable_current_modes():
                try:
                    found = before(f, "cpu", *args, **mapped_in, **kwargs)
                except RuntimeError:  # an older format, of which all must be read
                    found = before(f, "cpu", *args, **kwargs)
        mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        return fake_batch(found, mode)


def _key(f: Any) -> Any:
    return os.path.abspath(f) if isinstance(f, (str, os.PathLike)) else id(f)


def _shape_of(tensor: Tensor) -> Tensor:
    # A tensor without memory; a single number that is known keeps its value.
    constant = getattr(tensor, "constant", None)
    if constant is not None and constant.numel() == 1:
        return constant.clone()  # type: ignore[no-any-return]
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _copied(before: Callable[..., Tensor], tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    # A deep copy; torch's own gives a fake tensor the storage of another device, which ends the process later.
    if type(tensor) is not FakeTensor:
        return before(tensor, memo)
    if id(tensor) in memo:
        known: Tensor = memo[id(tensor)]
        return known
    if not tensor.is_leaf:
        rule = "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
        # As torch says it of real ones
        raise RuntimeError(rule)
    with torch.no_grad():
        if tensor.layout is not torch.strided:
            copied = tensor.clone()
        else:
            copied = _of_copied_memory(tensor, memo)
    copied.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = copied
    if tensor.grad is not None:
        copied.grad = copy.deepcopy(tensor.grad, memo)
    return copied


def _of_copied_memory(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    # A tensor that lies in a copy of its memory as it lies in its own.
    storage = tensor.untyped_storage()
    elements = storage.nbytes() // tensor.element_size()
    if elements == tensor.numel() and tensor.is_contiguous() and storage._cdata not in memo:
        # A value that is known stays known
        whole = tensor.clone()
        memo[storage._cdata] = whole.view(-1) if whole.dim() else whole
        return whole
    if storage._cdata not in memo:
        memo[storage._cdata] = tensor.as_strided((elements,), (1,), 0).clone()
    memory: Tensor = memo[storage._cdata]
    if memory.dtype != tensor.dtype:
        memory = memory.view(tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _pickled(before: Callable[..., Any], tensor: Tensor, protocol: Any) -> Any:
    if type(tensor) is FakeTensor:
        raise Refused("pickling a tensor reads its values, which fake tensors do not have; leave it out here")
    return before(tensor, protocol)


def converted(before: Callable[..., Any]) -> Callable[..., Any]:
    """Where torch would swap tensors, which fake ones forbid, give the parameter the converted data."""

    def apply(self: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        if not any(isinstance(each, FakeTensor) for each in self._parameters.values()):
            result: nn.Module = before(self, fn, recurse=False)
            return result
        for name, parameter in list(self._parameters.items()):
            if parameter is None:
                continue
            with torch.no_grad():
                changed = fn(parameter)
                # As of real ones, another parameter
                if has_no_memory(parameter) and not has_no_memory(changed):
                    self._parameters[name] = nn.Parameter(changed, parameter.requires_grad)
                elif changed is not parameter:
                    parameter.data = changed
                if parameter.grad is not None:
                    parameter.grad = fn(parameter.grad)
        for key, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[key] = fn(buffer)
        return self

    return apply


def _in_process(before: Callable[..., None], note: Note) -> Callable[..., None]:
    # Trainers make loaders anew of the arguments that its signature has
    @functools.wraps(before)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("num_workers"):
            note("a DataLoader's workers were left out: fake tensors cannot go to another process")
        alone = {"num_workers": 0, "pin_memory": False, "persistent_workers": False, "prefetch_factor": None}
        alone |= {"timeout": 0, "multiprocessing_context": None}
        before(self, *args, **kwargs | {name: value for name, value in alone.items() if name in kwargs})

    return init


def _refuse_pretrained(module: ModuleType) -> None:
    # Weights of a hub must not be fetched to be thrown away. The refusal stays: it asks whether tensors are fake.
    model = getattr(module, "PreTrainedModel", None)
    if model is None or hasattr(model.from_pretrained, "refuses"):
        return
    before = model.from_pretrained.__func__

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            rule = "from_pretrained reads weights, which fake tensors do not have"
            raise Refused(f"{rule}; build {cls.__name__} from its config, or run without --fake")
        return before(cls, *args, **kwargs)

    from_pretrained.refuses = True  # type: ignore[attr-defined]
    model.from_pretrained = classmethod(from_pretrained)


_MOST = 2**40  # elements of a file that is read
_MOST_NBYTES = 4 * GIB  # of memory that is made for a program to write to; of more the values are not known


@contextmanager
def host_values(mode: FakeTensorMode) -> Iterator[None]:
    """Inside, fake tensors of this mode have the values that their program knows on the host."""

    def with_constant(
        before: Callable[..., Any], converter: Any, of: Any, tensor: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if of is mode and not args and _is_plain(tensor):
            kwargs["make_constant"] = True
        return before(converter, of, tensor, *args, **kwargs)

    def made(before: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        # Which asks for a driver where there are values
        kwargs.pop("pin_memory", None)
        out = before(*args, **kwargs)
        of_host = not is_gpu(kwargs.get("device")) and kwargs.get("out") is None
        if of_host and type(out) is FakeTensor and out.fake_mode is mode and not is_gpu(out.device):
            _give(mode, out)
        return out

    def from_file(before: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not mode:
            # In a thread that loads ahead: two threads cannot work in one mode
            return before(*args, **kwargs)
        with _disable_current_modes():
            real = before(*args, **kwargs)
        found: Tensor = mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)
        return found

    # Remembered: `torch.device` as a context knows torch.empty by it
    torch.utils._device._device_constructors()
    with all_replaced(
        (fake_tensor, "CONSTANT_NUMEL_LIMIT", lambda _: _MOST),
        (FakeTensorConverter, "from_real_tensor", around(with_constant)),
        (torch, "from_file", around(from_file)),
        (torch, "empty", around(made)),
        (torch, "empty_like", around(made)),
        (torch.Tensor, "numpy", around(_array_of_known)),
    ):
        yield


def _is_plain(tensor: Any) -> bool:
    """Whether a real tensor is whole numbers in the memory of the host."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)


def _give(mode: FakeTensorMode, tensor: FakeTensor) -> None:
    """Memory of the host that a program will write to."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.layout is not torch.strided or tensor.is_meta:
        return
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes > _MOST_NBYTES:
        return
    # Zeros, as what nobody has written should not differ from run to run
    with _disable_current_modes():
        real = torch.zeros(nbytes // tensor.element_size(), dtype=tensor.dtype)
        real = real.as_strided(tensor.shape, tensor.stride())
    converter = mode.fake_tensor_converter
    described = converter.meta_converter.describer.describe_tensor(real)
    converter.meta_converter.set_tensor_memo(described, tensor)
    if described.storage is not None:
        converter.meta_converter.set_storage_memo(described.storage, tensor.untyped_storage())
    tensor.constant = real
    converter.add_constant_storage_mapping(tensor)


def _array_of_known(before: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if type(tensor) is FakeTensor and tensor.constant is not None:
        with _disable_current_modes():
            return tensor.constant.numpy(*args, **kwargs)
    return before(tensor, *args, **kwargs)
