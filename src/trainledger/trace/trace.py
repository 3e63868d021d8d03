"""Trace a training step of any module: the user's own code runs on fake tensors and leaves a ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainledger.ledger.entry import Ledger
from trainledger.trace.grouped_products import grouped_products_of_any_format
from trainledger.trace.numbers import ZeroWhereUnknown
from trainledger.trace.operators import tensors_in
from trainledger.trace.recorder import Recorder
from trainledger.trace.transformers import as_if_real

Batch = Mapping[str, Any] | Sequence[Any] | Tensor


def trace(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    first_step: bool = False,
    autocast: torch.dtype | None = None,
) -> Ledger:
    """The ledger of one training step of ``model`` on CPU kernels; nothing is computed and nothing changes.

    ``model(**batch)`` is called for a dict, ``model(*batch)`` for a tuple, ``model(batch)`` for a tensor. ``loss``
    makes a scalar of the output; without it the output's own ``loss``, or a scalar output, is taken. The
    parameters may be real, on the meta device, or fake. With an optimizer a steady-state step is traced (its
    state exists before), with ``first_step`` the one that creates it. Raises ValueError where no scalar loss
    can be had. Left out: what dispatch does not show (scratch inside a library's kernel, custom C++ memory).
    """
    mode = _mode_of(model) or FakeTensorMode()
    with mode, _on_fake(model, optimizer, mode):
        inputs = _fake_batch(batch, mode)
        if optimizer is not None and not first_step:
            with ZeroWhereUnknown():
                make_states(model, optimizer)
        model.zero_grad(set_to_none=True)
        recorder = Recorder(model, optimizer)
        norms_unknown = ZeroWhereUnknown(lambda: recorder.current_phase == "optimizer")
        recorder.resident(tensors_in(inputs), "batch")
        with norms_unknown, recorder, as_if_real(), grouped_products_of_any_format():
            _step(model, inputs, loss, optimizer, autocast, recorder)
        tokens = next((each.numel() for each in tensors_in(inputs) if not each.is_floating_point()), 0)
        ledger = recorder.ledger(tokens=tokens, writer="trace")
        model.zero_grad(set_to_none=True)
        return ledger


def make_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer take a step on zero gradients, so that its state exists; real weights may decay by it."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _step(
    model: nn.Module,
    inputs: Any,
    loss: Callable[[Any], Tensor] | None,
    optimizer: torch.optim.Optimizer | None,
    autocast: torch.dtype | None,
    recorder: Recorder,
) -> None:
    phase = recorder.phase
    with phase("forward"), torch.autocast("cpu", dtype=autocast) if autocast is not None else nullcontext():
        value = (loss or _own_loss)(_call(model, inputs))
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(f"the loss must be a scalar tensor, not {_told(value)}; give one with loss=")
    with phase("backward"):
        value.backward()  # type: ignore[no-untyped-call]
    if optimizer is not None:
        with phase("optimizer"):
            optimizer.step()


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _own_loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return output if found is None else found


def _told(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _mode_of(model: nn.Module) -> FakeTensorMode | None:
    return next((each.fake_mode for each in model.parameters() if isinstance(each, FakeTensor)), None)


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake CPU tensor of the same shape, strides and format; a single number keeps its value."""
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    if tensor.numel() == 1 and tensor.dim() == 0 and not tensor.is_meta and not isinstance(tensor, FakeTensor):
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():
            value = tensor.item()
        return torch.tensor(value, dtype=tensor.dtype)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    if isinstance(batch, Tensor):
        return _fake(batch, mode)
    if isinstance(batch, Mapping):
        return {name: _fake_batch(each, mode) for name, each in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(_fake_batch(each, mode) for each in batch)
    return batch


@contextmanager
def _on_fake(model: nn.Module, optimizer: torch.optim.Optimizer | None, mode: FakeTensorMode) -> Iterator[None]:
    """Put fake tensors in the place of a model's parameters and buffers and of an optimizer's, and take them back."""
    twins: dict[int, Tensor] = {}

    def twin(tensor: Tensor) -> Tensor:
        known = twins.get(id(tensor))
        if known is None:
            known = _fake(tensor, mode)
            if isinstance(tensor, nn.Parameter):
                known = nn.Parameter(known, requires_grad=tensor.requires_grad)
            twins[id(tensor)] = known
        return known

    places: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        slots: list[dict[str, Any]] = [module._parameters, module._buffers]
        for slot in slots:
            places += [(slot, name, value) for name, value in slot.items() if isinstance(value, Tensor)]
    fake_already = all(isinstance(value, FakeTensor) for _, _, value in places)
    groups = [] if optimizer is None else optimizer.param_groups
    lists = [group["params"] for group in groups]
    state = None if optimizer is None else optimizer.state
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True  # a loss may hold targets of its own
    try:
        if not fake_already:
            for slot, name, value in places:
                slot[name] = twin(value)
            for group in groups:
                group["params"] = [twin(each) for each in group["params"]]
        if optimizer is not None and state is not None:
            optimizer.state = defaultdict(dict)
            for parameter, values in state.items():
                new = parameter if fake_already else twin(parameter)
                optimizer.state[new] = {
                    key: _fake(each, mode) if isinstance(each, Tensor) else each for key, each in values.items()
                }
        yield
    finally:
        mode.allow_non_fake_inputs = before
        for slot, name, value in places:
            slot[name] = value
        for group, parameters in zip(groups, lists, strict=True):
            group["params"] = parameters
        if optimizer is not None and state is not None:
            optimizer.state = state
