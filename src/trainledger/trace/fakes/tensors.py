"""Replaces tensors of a model, an optimizer and a batch by fake ones, and restores all afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.trace.loss import make_state, needs_closure
from trainledger.trace.patches import all_replaced, around

_DEEPEST = 4  # containers in containers whose contents are put back


def mode_of(model: nn.Module) -> FakeTensorMode | None:
    """The mode of a model that was built of fake tensors; None for any other."""
    return next((each.fake_mode for each in model.parameters() if isinstance(each, FakeTensor)), None)


def fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake CPU tensor of the same shape, strides and format; a single number keeps its value.

    So does a switch in a buffer, as modules that quantize have them: one element that is no floating-point number.
    """
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    single = tensor.numel() == 1 and (tensor.dim() == 0 or not (tensor.is_floating_point() or tensor.is_complex()))
    if single and not tensor.is_meta and not isinstance(tensor, FakeTensor):
        with _disable_current_modes():
            value: Any = tensor.reshape(()).item()
        for _ in range(tensor.dim()):
            value = [value]
        return torch.tensor(value, dtype=tensor.dtype)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """A batch with fake tensors in the place of its own, in dicts, lists and tuples.

    Tensors that share memory, as tokens and labels often do, share it afterwards.
    """
    seen: dict[int, dict[int, Tensor]] = {}
    for each in _tensors(batch):
        seen.setdefault(each.untyped_storage()._cdata, {})[id(each)] = each
    known: dict[int, Tensor] = {}
    for group in seen.values():
        first = next(iter(group.values()))
        alike = all(each.dtype == first.dtype for each in group.values())
        if len(group) == 1 or isinstance(first, FakeTensor) or not alike:
            known |= {key: fake(each, mode) for key, each in group.items()}
            continue
        whole = torch.empty(first.untyped_storage().nbytes() // first.element_size(), dtype=first.dtype, device="cpu")
        for key, each in group.items():
            known[key] = whole.as_strided(each.shape, each.stride(), each.storage_offset())
    for each in _tensors(batch):
        if each.requires_grad and not known[id(each)].requires_grad:
            known[id(each)] = known[id(each)].detach().requires_grad_()
    return mapped(batch, lambda each: known[id(each)])


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return [each for value in values for each in _tensors(value)]


def mapped(batch: Any, made: Callable[[Tensor], Tensor]) -> Any:
    """The same dicts, lists and tuples with what is ``made`` of each tensor in its place."""
    if isinstance(batch, Tensor):
        return made(batch)
    if isinstance(batch, Mapping):
        items = {name: mapped(each, made) for name, each in batch.items()}
        if type(batch) is dict or not isinstance(batch, dict):
            return items
        # A dict of a kind of its own
        same = copy(batch)
        same.update(items)
        return same
    if isinstance(batch, (list, tuple)):
        parts = [mapped(each, made) for each in batch]
        if isinstance(batch, list):
            return parts
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return batch


@contextmanager
def on_fake(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mode: FakeTensorMode) -> Iterator[None]:
    """Put fake tensors in the place of a model's parameters and buffers and its optimizers'; `restored` undoes it."""
    twins: dict[int, Tensor] = {}

    lazy = next((name for name, each in model.named_parameters() if is_lazy(each)), None)
    if lazy is not None:
        raise ValueError(f"{lazy} has no shape before a first forward: run the model once, then trace it")

    def twin(tensor: Tensor) -> Tensor:
        known = twins.get(id(tensor))
        if known is None:
            known = fake(tensor, mode)
            if isinstance(tensor, nn.Parameter):
                known = nn.Parameter(known, requires_grad=tensor.requires_grad)
            twins[id(tensor)] = known
        return known

    slots: list[dict[str, Any]] = [slot for each in model.modules() for slot in (each._parameters, each._buffers)]
    places = [(slot, name, value) for slot in slots for name, value in slot.items() if isinstance(value, Tensor)]
    fake_already = all(isinstance(value, FakeTensor) for _, _, value in places)
    before = mode.allow_non_fake_inputs
    with restored(model, optimizers):
        # A loss may refer to real targets
        mode.allow_non_fake_inputs = True
        try:
            if not fake_already:
                for slot, name, value in places:
                    slot[name] = twin(value)
                for group in (group for each in optimizers for group in each.param_groups):
                    # L-BFGS refers to the list itself
                    group["params"][:] = [twin(each) for each in group["params"]]
            for each in optimizers:
                state, each.state = each.state, defaultdict(dict)
                for parameter, values in state.items():
                    new = parameter if fake_already else twin(parameter)
                    each.state[new] = {key: fake_batch(value, mode) for key, value in values.items()}
            yield
        finally:
            mode.allow_non_fake_inputs = before


def make_states(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Let optimizers take a step on zero gradients, so that their state exists; real weights may decay by it."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    sparse = [each for each in optimizers if isinstance(each, torch.optim.SparseAdam)]
    for group in (group for one in sparse for group in one.param_groups):
        for parameter in group["params"]:
            rows = torch.zeros((1, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
            where = torch.zeros((1, 1), dtype=torch.int64, device=parameter.device)
            parameter.grad = torch.sparse_coo_tensor(where, rows, parameter.shape, check_invariants=False)
    for each in optimizers:
        if needs_closure(each):
            make_state(each)
        else:
            each.step()
        each.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)


@contextmanager
def restored(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Restore all attributes of a model's modules and of optimizers, and the contents of lists, dicts and sets in them.

    What a forward keeps for later (a table of angles, running statistics, its last output) would else be fake. So with
    loss scalers that are used meanwhile.
    """
    before: dict[int, tuple[Any, Any]] = {}  # containers and copies of their contents, by the container's identity
    for each in (*model.modules(), *optimizers):
        _remember(vars(each), before, 0)

    def used(method: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        _remember(vars(scaler), before, 0)
        return method(scaler, *args, **kwargs)

    uses = ("scale", "unscale_", "step", "update")
    try:
        with all_replaced(*((torch.amp.GradScaler, each, around(used)) for each in uses)):
            yield
    finally:
        for container, contents in before.values():
            if isinstance(container, list):
                container[:] = contents
            else:
                container.clear()
                container.update(contents)


def _remember(container: Any, before: dict[int, tuple[Any, Any]], depth: int) -> None:
    if not isinstance(container, (dict, list, set)) or id(container) in before or depth > _DEEPEST:
        return
    contents = (dict(container) if isinstance(container, dict) else list(container)) if container else ()
    before[id(container)] = container, contents
    for each in container.values() if isinstance(container, dict) else container:
        if isinstance(each, (dict, list, set)):
            _remember(each, before, depth + 1)
