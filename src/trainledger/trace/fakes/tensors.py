"""Fake tensors in the place of real ones, and results of kernels that torch's rules for shapes do not give.

Such results have other dtypes or more memory, or are sparse gradients: [rows] indices and [rows, width] values. How
many rows are left where entries of a row are added up depends on values: all are assumed to stay, which is the most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.spec.units import round_up
from trainledger.trace.loss import make_state, needs_closure
from trainledger.trace.patches import Args, all_replaced, around

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
            for optimizer in optimizers:
                state, optimizer.state = optimizer.state, defaultdict(dict)
                for parameter, values in state.items():
                    new = parameter if fake_already else twin(parameter)
                    optimizer.state[new] = {key: fake_batch(value, mode) for key, value in values.items()}
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
    for optimizer in optimizers:
        if needs_closure(optimizer):
            make_state(optimizer)
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
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
        with all_replaced(*((torch.amp.GradScaler, use, around(used)) for use in uses)):
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


aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)
Correct = Callable[[Args, Any], Any]  # from an operator's arguments and fake result, the real one's form
NOTES = {
    "_coalesce": "a sparse gradient is assumed to keep all its rows where entries of the same row are added up, which "
    "is the most"
}
_BY_NUMBER = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar)
_BY_VALUE = (*_BY_NUMBER, aten.sqrt.default, aten.neg.default)


def _statistics_in_fp32(args: Args, out: Any) -> Any:
    # Mean and deviation are as exact as the sums they come from (ATen/native/cuda/layer_norm_kernel.cu).
    return (out[0], *(each.to(torch.float32) if each.dtype in _HALVES else each for each in out[1:]))


def _norm(args: Args, out: Any) -> Any:
    # Statistics of half-precision values by fp32 weights are fp32: under autocast on a CPU both occur.
    first = 2 if len(args) > 2 and isinstance(args[1], (list, tuple)) else 1  # layer_norm has the shape before weights
    weights = [argument for argument in args[first : first + 2] if argument is not None]
    mixed = args[0].dtype in _HALVES and any(weight.dtype == torch.float32 for weight in weights)
    return _statistics_in_fp32(args, out) if mixed else out


def _group_norm_backward(args: Args, out: Any) -> Any:
    # The gradient of half-precision values is in half precision, whatever the weights are in.
    x = args[1]
    if out[0] is None or out[0].dtype == x.dtype:
        return out
    return (out[0].to(x.dtype), *out[1:])


def _in_place_of_all(args: Args, out: Any) -> Any:
    # A reduced loss is a view of the memory that all its terms were allocated.
    elements = max(args[0].numel(), args[1].numel())
    if not isinstance(out, Tensor) or out.dim() or elements < 2:
        return out
    return out.new_empty(elements).as_strided((), ())


def _resized(args: Args, out: Any) -> Any:
    # A result is made as large as the input and then resized: memory never becomes less by that.
    if args[0].numel() <= out.numel():
        return out
    return out.new_empty(args[0].numel()).as_strided(out.shape, out.stride())


def _layer_norm(args: Args, out: Any) -> Any:
    # Results of the CPU's kernel are contiguous, whatever the input is; torch's rule for shapes keeps the input's
    # strides.
    first = out[0]
    if isinstance(first, Tensor) and not first.is_contiguous():
        out = (torch.empty(first.shape, dtype=first.dtype, device="cpu"), *out[1:])
    return _norm(args, out) if isinstance(args[1], (list, tuple)) else out


_PAGE, _CACHE_LINE = 4096, 64  # bytes


def _recurrent(args: Args, out: Any) -> Any:
    # oneDNN keeps gates and states of every step for the backward, in memory whose size the operator does not show.
    # The buffers are those of oneDNN's `rnn_utils.cpp`; their formats were found by the sizes that torch 2.13
    # allocates, which this gives to the byte.
    x, hidden, train = args[0], args[10], args[15]
    if not train:
        return out
    (steps, batch), wide, size = x.shape[:2], max(x.shape[-1], hidden), x.element_size()
    states = 2 * (steps + 1)  # of the layer and of its input, and those before the first step
    rows = (
        steps * _row(4 * hidden, size),  # gates
        steps * _row(hidden, size),  # outputs
        *(states * _row(wide, nbytes) for nbytes in (size, 4, 4)),  # layer states, two gradients
        *(states * hidden * nbytes for nbytes in (size, 4)),  # hidden states, cell states
    )
    nbytes = sum(round_up(batch * row, _PAGE) for row in rows)
    return (*out[:3], torch.empty(nbytes, dtype=torch.uint8, device="cpu"))


def _row(numbers: int, size: int) -> int:
    # Whole cache lines, and one more where rows would lie a multiple of 256 numbers apart, against 4K aliasing
    # (oneDNN's rnn_utils.cpp, get_good_ld).
    line = _CACHE_LINE // size
    whole = round_up(numbers, line)
    return (whole + (0 if whole % 256 else line)) * size


CPU_RESULTS: dict[OpOverload, Correct] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm,
    aten.native_group_norm.default: _norm,
    aten.native_batch_norm.default: _norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.mse_loss.default: _in_place_of_all,
    aten.smooth_l1_loss.default: _in_place_of_all,
    aten.binary_cross_entropy.default: _in_place_of_all,
    aten.mkldnn_rnn_layer.default: _recurrent,
    aten.im2col.default: _resized,
    aten.col2im.default: _resized,
    aten.soft_margin_loss.default: _in_place_of_all,
}
CUDA_RESULTS: dict[OpOverload, Correct] = {aten.native_layer_norm.default: _statistics_in_fp32}


def results_of(backend: str) -> Mapping[OpOverload, Correct]:
    """What to correct for the kernels of a backend (`spec.device.KERNELS`)."""
    return {**SPARSE_RESULTS, **(CPU_RESULTS if backend == "cpu" else CUDA_RESULTS)}


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def _made(indices: Tensor, values: Tensor, like: Tensor, *, coalesced: bool = False) -> Tensor:
    known = coalesced or None
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False, is_coalesced=known)


def _bags_backward(args: Args, out: Any) -> Any:
    """A row for each entry of the bags."""
    grad, entries = args[0], args[1]
    if not _is_sparse(out):
        return out
    rows = torch.empty((entries.numel(), grad.shape[-1]), dtype=grad.dtype, device=grad.device)
    return _made(entries.reshape(1, -1), rows, out)


def _clone(args: Args, out: Any) -> Any:
    # A gradient is not copied where it becomes a parameter's, whatever happens to fake ones.
    x = args[0]
    if not _is_sparse(x):
        return out
    node = torch._C._current_autograd_node()
    given = node is not None and "AccumulateGrad" in node.name()
    indices, values = (each if given else each.clone() for each in (x._indices(), x._values()))
    return _made(indices, values, x, coalesced=x.is_coalesced())


def _coalesce(args: Args, out: Any) -> Any:
    return _made(args[0]._indices().clone(), args[0]._values().clone(), args[0], coalesced=True)


def _mask(args: Args, out: Any) -> Any:
    """The rows of a dense tensor that a sparse one has."""
    x, mask = args[0], args[1]
    if not _is_sparse(out) or not _is_sparse(mask):
        return out
    rows = torch.empty(mask._values().shape, dtype=x.dtype, device=x.device)
    return _made(mask._indices().clone(), rows, out, coalesced=mask.is_coalesced())


def _each_value(args: Args, out: Any) -> Any:
    """The same rows with other values."""
    x = args[0]
    if not _is_sparse(out) or not _is_sparse(x) or out._values().shape[0]:
        return out
    return _made(x._indices(), torch.empty_like(x._values(), dtype=out.dtype), out, coalesced=x.is_coalesced())


def _sum(args: Args, out: Any) -> Any:
    # Equal rows of both may become one; how many are depends on values.
    x, y = args[0], args[1]
    if not _is_sparse(out) or not _is_sparse(x) or not _is_sparse(y):
        return out
    return _made(torch.cat([x._indices(), y._indices()], 1), torch.cat([x._values(), y._values()]), out)


def added_to_dense(func: OpOverload, args: Args) -> Tensor | None:
    """What becomes of a dense tensor that a sparse one is added to: torch's rule for shapes reads its values."""
    if func not in (aten.add_.Tensor, aten.add.Tensor, aten.sub.Tensor) or not _is_sparse(args[1]):
        return None
    into: Tensor = args[0]
    if into.layout is not torch.strided:
        return None
    return into if func is aten.add_.Tensor else torch.empty_like(into)


SPARSE_RESULTS: dict[OpOverload, Correct] = {
    aten._embedding_bag_backward.default: _bags_backward,
    aten.clone.default: _clone,
    aten._coalesce.default: _coalesce,
    aten.sparse_mask.default: _mask,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
    **dict.fromkeys(_BY_VALUE, _each_value),
}
