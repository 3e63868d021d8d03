"""Fake tensors in the place of real ones, optimizers' states, and which parameters get a gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.spec.units import counted
from trainledger.trace.loss import make_state, needs_closure
from trainledger.trace.patches import all_replaced, around, replaced
from trainledger.trace.recorder.source_lines import plain_name

_MOST_NAMED = 4  # parameters in a sentence
_DEEPEST = 4  # containers in containers whose contents are put back


def mode_of(model: nn.Module) -> FakeTensorMode | None:
    """The mode of a model that was built of fake tensors; None for any other."""
    return next((parameter.fake_mode for parameter in model.parameters() if isinstance(parameter, FakeTensor)), None)


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
    for tensor in _tensors(batch):
        seen.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    known: dict[int, Tensor] = {}
    for group in seen.values():
        first = next(iter(group.values()))
        alike = all(tensor.dtype == first.dtype for tensor in group.values())
        if len(group) == 1 or isinstance(first, FakeTensor) or not alike:
            known |= {key: fake(tensor, mode) for key, tensor in group.items()}
            continue
        whole = torch.empty(first.untyped_storage().nbytes() // first.element_size(), dtype=first.dtype, device="cpu")
        for key, tensor in group.items():
            known[key] = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    for tensor in _tensors(batch):
        if tensor.requires_grad and not known[id(tensor)].requires_grad:
            known[id(tensor)] = known[id(tensor)].detach().requires_grad_()
    return mapped(batch, lambda tensor: known[id(tensor)])


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return [tensor for value in values for tensor in _tensors(value)]


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
    """Let a model's parameters and buffers and its optimizers' be fake tensors; `restored` undoes what changes them."""
    lazy = next((name for name, each in model.named_parameters() if is_lazy(each)), None)
    if lazy is not None:
        raise ValueError(f"{lazy} has no shape before a first forward: run the model once, then trace it")
    slots: list[dict[str, Any]] = [slot for module in model.modules() for slot in (module._parameters, module._buffers)]
    tensors = {id(value): value for slot in slots for value in slot.values() if isinstance(value, Tensor)}
    if not all(isinstance(value, FakeTensor) for value in tensors.values()):
        groups = (group["params"] for each in optimizers for group in each.param_groups)
        tensors |= {id(value): value for parameters in groups for value in parameters}
    before = mode.allow_non_fake_inputs
    with restored(model, optimizers), ExitStack() as stack:
        # A loss may refer to real targets
        mode.allow_non_fake_inputs = True
        nodes: dict[Any, Any] = {}
        will_run: Any = lambda before, node: before(nodes.get(node, node))  # noqa: E731  hooks of several gradients ask
        stack.enter_context(replaced(torch._C, "_will_engine_execute_node", around(will_run)))
        try:
            for tensor in tensors.values():
                if not isinstance(tensor, FakeTensor):
                    stack.enter_context(_as_fake(tensor, mode, nodes))
            for optimizer in optimizers:
                state, optimizer.state = optimizer.state, defaultdict(dict)
                for parameter, values in state.items():
                    optimizer.state[parameter] = {key: fake_batch(value, mode) for key, value in values.items()}
            yield
        finally:
            mode.allow_non_fake_inputs = before


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def _as_fake(tensor: Tensor, mode: FakeTensorMode, nodes: dict[Any, Any]) -> Iterator[None]:
    """Let a tensor be a fake one itself, so that whoever refers to it has that: a hook, a dict of optimizers by it.

    A leaf's node of autograd is another meanwhile, which has its hooks: ``nodes`` get it.
    """
    twin = fake(tensor, mode)
    of_node: list[tuple[str, list[Any]]] = []
    hooks: dict[str, Any] = dict.fromkeys(_HOOKS)
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
    if tensor.requires_grad and tensor.is_leaf:
        hooks = {name: getattr(tensor, name) for name in _HOOKS}
        with _disable_current_modes():
            node: Any = get_gradient_edge(tensor).node
            of_node = [(name, _hooks_of(getattr(node, name))) for name in ("register_prehook", "register_hook")]
    contents = {name: dict(value or ()) for name, value in hooks.items()}
    twin.__dict__.update({name: value for name, value in vars(tensor).items() if name not in vars(twin)})
    _swap(tensor, twin)
    try:
        if any(contents.values()) or any(registered for _, registered in of_node):
            for name, value in hooks.items():
                setattr(tensor, name, value)  # which registers them with the tensor's new autograd meta data
            nodes[node] = get_gradient_edge(tensor).node  # held: a tensor does not hold its node itself
            for name, registered in of_node:
                for hook in registered:
                    getattr(nodes[node], name)(hook)
        yield
    finally:
        _swap(tensor, twin)
        for name, value in hooks.items():
            if value is not None:
                value.clear()
                value.update(contents[name])
            if getattr(tensor, name) is not value:
                setattr(tensor, name, value)


def _hooks_of(register: Callable[..., Any]) -> list[Any]:
    # A node's hooks are asked of the dict into which it puts one more (torch/csrc/autograd/python_cpp_function.cpp).
    handle = register(lambda *gradients: None)
    hooks = [hook for number, hook in handle.hooks_dict_ref().items() if number != handle.id]
    handle.remove()
    return hooks


def _swap(tensor: Tensor, other: Tensor) -> None:
    # As torch.utils.swap_tensors, which refuses tensors with a weak reference, as a compiler has them.
    tensor.__class__, other.__class__ = type(other), type(tensor)
    tensor.__dict__, other.__dict__ = other.__dict__, tensor.__dict__
    torch._C._swap_tensor_impl(tensor, other)


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
    for optimizer in optimizers:
        if needs_closure(optimizer):
            make_state(optimizer)
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)


class Gradients:
    """Which trained parameters get a gradient in a step; state of optimizers is kept of those and of ``stateful``."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], stateful: Iterable[Tensor]
    ) -> None:
        self._named = {
            id(parameter): plain_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        self._parameters = {
            id(parameter): parameter for parameter in chain(model.parameters(), *groups) if parameter.requires_grad
        }
        self._optimizers = [optimizer for optimizer in optimizers if not needs_closure(optimizer)]
        self._stateful = set(map(id, stateful))
        self._given: set[int] = set()

    def _taken(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        self._given |= {id(parameter) for parameter in parameters if parameter.grad is not None}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, gradients are noticed: those that autograd accumulates, and those that an optimizer takes."""
        self._given.clear()
        given = lambda parameter: self._given.add(id(parameter))  # noqa: E731
        leaves = (parameter for parameter in self._parameters.values() if parameter.is_leaf)
        hooks = [leaf.register_post_accumulate_grad_hook(given) for leaf in leaves]
        hooks.append(register_optimizer_step_pre_hook(self._taken))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def unused_states(self) -> Iterator[Tensor]:
        """Tensors of states that were made for parameters which got no gradient."""
        kept = self._given | self._stateful
        for optimizer in self._optimizers if self._given else ():
            for parameter, state in optimizer.state.items():
                if id(parameter) not in kept:
                    yield from _tensors(state)

    def note(self) -> str:
        """A sentence that names the trained parameters without a gradient; "" where all or none got one."""
        missing = [name for number, name in self._named.items() if number not in self._given]
        if not missing or not self._given:
            return ""
        names = ", ".join([*missing[:_MOST_NAMED], *(["..."] if len(missing) > _MOST_NAMED else [])])
        state = "; no optimizer state is counted for them" if self._optimizers else ""
        return f"{counted(len(missing), 'trained parameter')} got no gradient in this step: {names}{state}"


@contextmanager
def restored(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Restore all attributes of a model's modules and of optimizers, and the contents of lists, dicts and sets in them.

    What a forward keeps for later (a table of angles, running statistics, its last output) would else be fake. So with
    loss scalers and other optimizers that are used meanwhile.
    """
    before: dict[int, tuple[Any, Any]] = {}  # containers and copies of their contents, by the container's identity
    for module in (*model.modules(), *optimizers):
        _remember(vars(module), before, 0)

    def used(method: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        _remember(vars(scaler), before, 0)
        return method(scaler, *args, **kwargs)

    uses = ("scale", "unscale_", "step", "update")
    steps = register_optimizer_step_pre_hook(lambda optimizer, *_: _remember(vars(optimizer), before, 0))
    try:
        with all_replaced(*((torch.amp.GradScaler, use, around(used)) for use in uses)):
            yield
    finally:
        steps.remove()
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
