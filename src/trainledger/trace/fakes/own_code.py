"""What programs bring themselves, followed on fake tensors: kernels, values on the host, code meant for a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction

from trainledger.trace.fakes.host_values import host_values
from trainledger.trace.fakes.hub_kernels import hub_kernels_followed
from trainledger.trace.fakes.launches import Launched, launches_followed
from trainledger.trace.fakes.stored import Note, converted
from trainledger.trace.patches import around, replaced


@contextmanager
def own_code_followed(mode: FakeTensorMode, note: Note, launched: Launched) -> Iterator[None]:
    """Inside, ``launched`` hears of kernels of a program, and ``note`` what is said of others and of its backwards."""
    with (
        replaced(nn.Module, "_apply", converted),
        host_values(mode),
        launches_followed(launched),
        hub_kernels_followed(note),
        _short_gradients(note),
    ):
        yield


@contextmanager
def _short_gradients(note: Note) -> Iterator[None]:
    """An autograd function may return fewer gradients than it has inputs: those left out are None."""

    def apply(before: Callable[..., Any], node: Any, *gradients: Any) -> Any:
        found = before(node, *gradients)
        inputs = len(node.needs_input_grad)
        if not isinstance(found, tuple) or len(found) >= inputs:
            return found
        name = type(node).__name__.removesuffix("Backward")
        note(
            f"backward of {name} returns {len(found)} gradients of {inputs} inputs, which eager torch refuses; "
            "the others are taken as None, as the compiler takes them"
        )
        return (*found, *(None,) * (inputs - len(found)))

    with replaced(BackwardCFunction, "apply", around(apply)):
        yield
