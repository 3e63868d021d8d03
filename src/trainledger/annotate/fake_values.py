"""A whole program on fake tensors: what needs values is refused with a sentence, what only stores them is left out."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.utils.data
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainledger.annotate.script import Refused
from trainledger.trace.patches import all_replaced
from trainledger.trace.recorder.tensor_facts import tensors_in

Note = Callable[[str], None]
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_READ = torch.ops.aten._local_scalar_dense.default
_UNBIND, _SELECT = torch.ops.aten.unbind.int, torch.ops.aten.select.int


@contextmanager
def without_values(note: Note) -> Iterator[None]:
    """Inside, checkpoints are not read, none is written, loaders run in this process, and modules of fake tensors
    can be converted to another dtype.
    """
    finder = _Pretrained()
    sys.meta_path.insert(0, finder)
    _refuse_pretrained(sys.modules.get("transformers.modeling_utils"))
    safe = sys.modules.get("safetensors.torch")
    try:
        with all_replaced(
            (torch, "load", _refused("torch.load reads values")),
            (torch, "save", lambda _: _saved(note)),
            (nn.Module, "_apply", _converted),
            (torch.utils.data.DataLoader, "__init__", lambda before: _in_process(before, note)),
            *([(safe, "load_file", _refused("load_file reads values"))] if safe is not None else []),
        ):
            yield
    finally:
        sys.meta_path.remove(finder)


def _refused(what: str) -> Callable[[Any], Callable[..., Any]]:
    def made(_: Any) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise Refused(f"{what}, which fake tensors do not have; build it without, or run without --fake")

        return refuse

    return made


def _saved(note: Note) -> Callable[..., None]:
    def save(*args: Any, **kwargs: Any) -> None:
        note("torch.save wrote nothing: fake tensors have no values")

    return save


def _converted(before: Callable[..., Any]) -> Callable[..., Any]:
    """Where torch would swap tensors, which fake ones forbid, give the parameter the converted data."""

    def apply(self: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        if not any(isinstance(each, FakeTensor) for each in self._parameters.values()):
            result: nn.Module = before(self, fn, recurse=False)
            return result
        for parameter in self._parameters.values():
            if parameter is None:
                continue
            with torch.no_grad():
                changed = fn(parameter)
                if changed is not parameter:
                    parameter.data = changed
                if parameter.grad is not None:
                    parameter.grad = fn(parameter.grad)
        for key, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[key] = fn(buffer)
        return self

    return apply


def _in_process(before: Callable[..., None], note: Note) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("num_workers"):
            note("a DataLoader's workers were left out: fake tensors cannot go to another process")
        for name, value in (
            ("num_workers", 0), ("pin_memory", False), ("persistent_workers", False), ("prefetch_factor", None),
            ("timeout", 0), ("multiprocessing_context", None),
        ):  # fmt: skip
            if name in kwargs:
                kwargs[name] = value
        before(self, *args, **kwargs)

    return init


def _refuse_pretrained(module: ModuleType | None) -> None:
    """Weights of a hub must not be fetched to be thrown away. The refusal stays: it asks whether tensors are fake."""
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


class ZeroIndices(TorchDispatchMode):
    """Whole numbers picked one by one from a tensor of unknown values are 0, and what follows from them is known.

    ``decided`` is called at each condition that is read off such a tensor.

    Else ``data[i : i + 64]`` for each i of a tensor of random places would be empty: with i, i + 64 would be read as 0.
    """

    def __init__(self, guessed: Callable[[], None], decided: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guessed, self._decided = guessed, decided

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _READ and args[0].dtype == torch.bool and args[0].constant is None:
            self._decided()
        out = func(*args, **(kwargs or {}))
        if func is _UNBIND or func is _SELECT:
            for each in tensors_in(out):
                if each.dim() or each.dtype not in _WHOLE or not isinstance(each, FakeTensor):
                    break
                if each.constant is None:
                    self._guessed()
                    with _disable_current_modes():
                        each.constant = torch.zeros((), dtype=each.dtype)
        return out


class _Pretrained(importlib.abc.MetaPathFinder):
    """Refuses pretrained weights as soon as a script imports what would load them."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "transformers.modeling_utils" or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def then_refuse(module: ModuleType) -> None:
            execute(module)
            _refuse_pretrained(module)

        spec.loader.exec_module = then_refuse  # type: ignore[method-assign]
        return spec
