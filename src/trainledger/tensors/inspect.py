"""Where the elements of a torch tensor lie: real, fake or on meta, and of tensors that are made of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, shown
from trainledger.tensors.number import ALIASES
from trainledger.tensors.strided import Chain, ChainStep, Strided


@frozen
class Composite:
    """A tensor without strides of its own: what it is, its shape, and the tensors that hold its numbers, by name.

    A size that differs from one part to the next is a text, such as that of a ragged dim.
    """

    what: str
    dtype: str
    shape: tuple[int | str, ...]
    device: str
    parts: tuple[tuple[str, Strided | Composite], ...]
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the elements of its parts."""
        return sum(each.nbytes for _, each in self.parts)

    @property
    def title(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def __repr__(self) -> str:
        lines = [f"{self.title}, {self.what}: no strides of its own, {self.nbytes:,} bytes in its parts"]
        lines += [f"  {note}" for note in self.notes]
        for name, part in self.parts:
            first, *rest = repr(part).splitlines()
            lines += [f"{name}: {first}", *rest]
        return "\n".join(lines)


@overload
def inspect(tensor: torch.Tensor, /) -> Strided | Composite: ...
@overload
def inspect(tensor: torch.Tensor, second: torch.Tensor, /, *more: torch.Tensor) -> Chain: ...
def inspect(tensor: torch.Tensor, /, *more: torch.Tensor) -> Strided | Composite | Chain:
    """Shape, strides and storage of a tensor; of several tensors, also which are views of an earlier one.

    A `Strided` has shape, dtype, strides and offset (elements), storage and addresses (bytes), contiguity, device,
    what autograd knows of it (requires_grad, is_leaf, grad, grad_fn), and what it is a view of. Sparse, nested and
    distributed tensors are a `Composite` of the tensors that hold their numbers. Nothing is read or computed.
    `InvalidInput` with a sentence for what is no tensor, or has neither strides nor parts that can be had.

    >>> x = torch.zeros(4, 8)
    >>> inspect(x.t()).stride, inspect(x.t()).contiguous, inspect(x[1:]).offset
    ((1, 8), False, 8)
    >>> [(step.kind, step.written_nbytes) for step in inspect(x, x.t(), x.t().contiguous()).steps]
    [('view', 0), ('copy', 128)]
    >>> w = torch.ones(3, requires_grad=True)
    >>> (2 * w).sum().backward()
    >>> inspect(w).is_leaf, inspect(w).grad, inspect(2 * w).is_leaf, inspect(2 * w).grad, inspect(2 * w).grad_fn
    (True, 'fp32[3]', False, None, 'MulBackward0')
    """
    if not more:
        return _inspected(tensor)
    tensors = (tensor, *more)
    storages: dict[int, int] = {}
    strideds: list[Strided] = []
    for number, each in enumerate(tensors, start=1):
        one = _inspected(each)
        if isinstance(one, Composite):
            rule = f"is {one.what} and lies in several storages; inspect its parts ({_names(one)}) one by one"
            raise InvalidInput([Problem(f"tensor {number}", None, rule)])
        storage = storages.setdefault(each.untyped_storage()._cdata, len(storages))
        strideds.append(_changed(one, storage=storage))
    steps = [_step(tensors, strideds, at) for at in range(1, len(strideds))]
    return Chain(strideds[0], tuple(steps))


def _names(one: Composite) -> str:
    return ", ".join(name for name, _ in one.parts)


def _changed(one: Strided, **fields: Any) -> Strided:
    return Strided(**{**vars(one), **fields})


def _step(tensors: Sequence[torch.Tensor], strideds: Sequence[Strided], at: int) -> ChainStep:
    """What a tensor is to those before it: the same as the last, a view over the storage of one, or neither."""
    word, other = f"tensor {at + 1}", strideds[at]
    if tensors[at] is tensors[at - 1]:
        return ChainStep(word, other, "same", 0, "the same tensor")
    before = next((index for index in reversed(range(at)) if strideds[index].storage == other.storage), None)
    if before is not None:
        where = "over the same storage" if before == at - 1 else f"over the storage of tensor {before + 1}"
        return ChainStep(word, other, "view", 0, f"{where}, {_overlap(strideds[before], other)}")
    made = _made_by(tensors[at])
    kind = "copy" if strideds[at - 1].elements == other.elements else "result"
    why = f"a storage of its own, of {other.storage_nbytes:,} bytes" + (f", written by {made}" if made else "")
    return ChainStep(word, other, kind, other.storage_nbytes, why)


def _overlap(one: Strided, other: Strided) -> str:
    """Whether two tensors over one storage reach the same bytes of it."""
    (start, end), (begin, stop) = (tuple(each * t.itemsize for each in t.span) for t in (one, other))
    shared = max(0, min(end, stop) - max(start, begin))
    if not shared:
        return "in another part of it"
    return (
        "in the same part of it" if (start, end) == (begin, stop) else f"in a part that meets it over {shared:,} bytes"
    )


def _made_by(tensor: torch.Tensor) -> str:
    """The operation that made a tensor, where autograd has recorded it."""
    node = tensor.grad_fn
    return "" if node is None else node.name().removesuffix("0").removesuffix("Backward")


def _inspected(tensor: Any) -> Strided | Composite:
    if not isinstance(tensor, torch.Tensor):
        near = "torch.from_numpy(x)" if type(tensor).__module__ == "numpy" else "torch.as_tensor(x)"
        near = "one of its parameters" if isinstance(tensor, torch.nn.Module) else near
        raise InvalidInput([Problem("tensor", shown(tensor), "must be a tensor of torch", near)])
    if torch.nn.parameter.is_lazy(tensor):
        rule = f"a {type(tensor).__name__} has no shape before the first forward of its module"
        raise InvalidInput([Problem("tensor", None, f"{rule}; inspect it after that")])
    try:
        return _composite(tensor) or _strided(tensor)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        what = f"{type(tensor).__name__} of layout {tensor.layout}"
        reason = str(error).partition("\n")[0][:160]
        rule = f"a {what} whose strides and storage are unknown: {reason}"
        raise InvalidInput([Problem("tensor", None, rule)]) from None


def _composite(tensor: torch.Tensor) -> Composite | None:
    """What a tensor is made of, where it has no strides and storage of its own."""
    parts: list[tuple[str, torch.Tensor]] = []
    what, notes = type(tensor).__name__, []
    layout = str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested and tensor.layout == torch.strided:
        what, parts = "nested", [(f"tensor {at}", each) for at, each in enumerate(tensor.unbind())]
    elif layout == "sparse_coo":
        what, parts = "sparse (COO)", [("indices", tensor._indices()), ("values", tensor._values())]
        notes.append(f"{tensor._nnz():,} of {tensor.numel():,} elements are held")
    elif layout in ("sparse_csr", "sparse_bsr", "sparse_csc", "sparse_bsc"):
        axes = ("crow", "col") if layout in ("sparse_csr", "sparse_bsr") else ("ccol", "row")
        what = f"sparse ({layout[-3:].upper()})"
        parts = [(f"{axis}_indices", getattr(tensor, f"{axis}_indices")()) for axis in axes]
        parts.append(("values", tensor.values()))
    elif callable(getattr(tensor, "__tensor_flatten__", None)):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        held = [(name, getattr(tensor, name)) for name in names if "_seqlen" not in name]  # those say lengths by shape
        parts = [(name, each) for name, each in held if isinstance(each, torch.Tensor)]
        placements = getattr(tensor, "placements", None)
        if placements is not None:
            mesh = tensor.device_mesh  # type: ignore[attr-defined]
            notes.append(f"placed {', '.join(map(str, placements))} on a mesh of {mesh.size()}; what this rank holds:")
        if tensor.is_nested:
            what = "nested (jagged)"
    if not parts:
        return None
    held_by = tuple((name, _inspected(part)) for name, part in parts)
    return Composite(what, dtype_name(tensor.dtype), _sizes(tensor), str(tensor.device), held_by, tuple(notes))


def _sizes(tensor: torch.Tensor) -> tuple[int | str, ...]:
    """Sizes of a tensor of parts; those of a ragged dim by torch's name of it."""
    if tensor.is_nested and tensor.layout == torch.strided:
        each = [part.shape for part in tensor.unbind()]
        alike = [len({part[dim] for part in each}) == 1 for dim in range(len(each[0]) if each else 0)]
        return (len(each), *(each[0][dim] if same else "ragged" for dim, same in enumerate(alike)))
    return tuple(
        size if isinstance(size, int) else "ragged" if tensor.is_nested else str(size) for size in tensor.shape
    )


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype by the name that the account has for it, else by torch's.

    >>> dtype_name(torch.float32), dtype_name(torch.int64), dtype_name(torch.complex64)
    ('fp32', 'int64', 'complex64')
    """
    plain = str(dtype).removeprefix("torch.")
    return ALIASES.get(plain, plain)


def _strided(tensor: torch.Tensor) -> Strided:
    """A tensor with strides over a storage of its own or of another."""
    storage = tensor.untyped_storage()
    notes: list[str] = []
    shape, stride = _numbers(tensor.shape, notes), _numbers(tensor.stride(), notes)
    (offset,) = _numbers((tensor.storage_offset(),), notes)
    (storage_nbytes,) = _numbers((storage.nbytes(),), notes)
    address = None
    if _is_fake(tensor):
        notes.append("fake: sizes and strides without memory, so no address")
    elif tensor.device.type == "meta":
        notes.append("on meta: sizes and strides without memory, so no address")
    else:
        address = storage.data_ptr() or None
    base = tensor._base
    of = "" if base is None else f"{dtype_name(base.dtype)}[{', '.join(map(str, _sizes(base)))}]"
    one = Strided(dtype_name(tensor.dtype), tensor.element_size(), shape, stride, offset, storage_nbytes)
    place: dict[str, Any] = {"device": str(tensor.device), "address": address}
    grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None  # torch warns where another is asked for it
    place |= {"grad": None if grad is None else f"{dtype_name(grad.dtype)}[{', '.join(map(str, _sizes(grad)))}]"}
    place |= {"is_leaf": tensor.is_leaf, "grad_fn": None if tensor.grad_fn is None else tensor.grad_fn.name()}
    one = _changed(one, **place, requires_grad=tensor.requires_grad, view_of=of)
    if one.span[1] * one.itemsize > storage_nbytes:
        notes.append("the storage is shorter than the tensor reaches: its memory was released, as FSDP does")
    if type(tensor) is not torch.Tensor and not _is_fake(tensor):
        notes.append(f"a {type(tensor).__name__}")
    if tensor.is_conj() or tensor.is_neg():
        notes.append("read with another sign: conjugated or negated only when used")
    return _changed(one, notes=tuple(dict.fromkeys(notes)))


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def _numbers(values: Any, notes: list[str]) -> tuple[int, ...]:
    """Sizes as integers; of symbolic ones the value that they were traced with, without a guard on it."""
    found = []
    for value in values:
        hint = value if isinstance(value, int) else getattr(value.node, "hint", None)
        if not isinstance(hint, int):
            rule = f"has the symbolic size {value}; inspect a tensor whose sizes are known"
            raise InvalidInput([Problem("tensor", None, rule)])
        if hint is not value:
            notes.append(f"sizes are symbolic: {value} is {hint} here")
        found.append(hint)
    return tuple(found)
