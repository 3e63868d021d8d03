"""Operations of torch that write a new tensor, or over the old one: its strides and its bytes; as `tensors.views`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainledger.spec.dtypes import BLOCK_FORMATS, FORMATS, OTHER_NBYTES
from trainledger.spec.problem import InvalidInput
from trainledger.tensors.number import known_format
from trainledger.tensors.strided import (
    MEMORY_FORMATS,
    Strided,
    in_order,
    list_text,
    preserved,
    quickest_first,
    row_major,
)
from trainledger.tensors.views import (
    CannotApply,
    Operation,
    Outcome,
    dim_of,
    dims_of,
    flatten_sizes,
    has_dims,
    inferred,
    numbers,
    over,
    view,
    view_dtype,
    view_stride,
    whole,
    why_no_view,
)

_FORMAT_WORDS = {word: word for word in ("contiguous", "channels_last", "channels_last_3d")}
_FORMAT_WORDS |= {"contiguous_format": "contiguous", "preserve_format": "preserve"}
_DEVICES = ("cpu", "cuda", "mps", "xpu", "meta")
_METHODS = ("double", "float", "half", "bfloat16", "long", "int", "short", "byte", "bool")
# Elementwise operations: whether whole numbers stay whole, and whether a number is the other operand.
_STAYS_WHOLE, _TAKES_NUMBER = "relu neg abs square add sub mul", "add sub mul div"
ELEMENTWISE = {
    name: (name in _STAYS_WHOLE.split(), name in _TAKES_NUMBER.split())
    for name in f"{_STAYS_WHOLE} exp log sqrt rsqrt sin cos sigmoid tanh div".split()
}


def fresh(tensor: Strided, shape: Sequence[int], stride: Sequence[int], kind: str, why: str, **changed: Any) -> Outcome:
    """A new tensor in a storage of its own; ``changed`` are its dtype with the itemsize, and its device."""
    made = replace(tensor, shape=tuple(shape), stride=tuple(stride), offset=0, view_of="", **changed)
    return replace(made, storage=tensor.storage + 1, storage_nbytes=made.span[1] * made.itemsize), kind, why


def itemsize_of(dtype: str) -> int | None:
    """Whole bytes of one element that has an address; None in formats that pack or share scales."""
    if dtype in OTHER_NBYTES:
        return OTHER_NBYTES[dtype]
    if dtype in BLOCK_FORMATS or FORMATS[dtype].bits % 8:
        return None
    return FORMATS[dtype].nbytes


def _format(word: Any) -> tuple[str, int] | None:
    """A number format by a word, with its bytes; None where the word means none."""
    if not isinstance(word, str):
        return None
    try:
        name = known_format(word)
    except InvalidInput:
        return None
    itemsize = itemsize_of(name)
    if itemsize is None:
        raise CannotApply(f"an element of {name} has no address, and torch has no such dtype")
    return name, itemsize


def _memory_format(tensor: Strided, name: str) -> tuple[int, ...]:
    """Strides of a new tensor in a memory format."""
    if name == "preserve":
        return preserved(tensor)
    if name == "contiguous":
        return row_major(tensor.shape)
    order = MEMORY_FORMATS[name]
    if len(order) != len(tensor.shape):
        raise CannotApply(f"{name} is an order of {len(order)} dims, and {tensor.title} has {len(tensor.shape)}")
    return in_order(tensor.shape, order, least=0)


def suggested_format(tensor: Strided) -> str:
    """The memory format that torch reads from strides where ``to`` is asked for one: channels_last, or contiguous
    for whatever else, also where the tensor is not (`c10/core/MemoryFormat.h`).
    """
    for name, order in MEMORY_FORMATS.items():
        if len(order) == len(tensor.shape) and tensor.stride[1] and 0 not in tensor.shape:
            steps, least = [tensor.stride[dim] for dim in order], 0
            for dim, step in zip(order, steps, strict=True):
                if step < least or (dim == 0 and least == tensor.stride[1]):
                    break
                least = step * tensor.shape[dim]
            else:
                return name
    return "contiguous"


def _format_word(word: Any) -> str:
    found = _FORMAT_WORDS.get(word) if isinstance(word, str) else None
    if found is None:
        raise CannotApply(f"takes a memory format, not {word!r}", "channels_last")
    return found


def contiguous(tensor: Strided, memory_format: Any = "contiguous_format") -> Outcome:
    name = _format_word(memory_format)
    if name == "preserve":
        raise CannotApply("is for a memory format, and preserve_format is that of the tensor", "clone()")
    stride = _memory_format(tensor, name)
    if tensor.in_format(name):
        return tensor, "same", "already so"
    order = "one after the other in row-major order" if name == "contiguous" else f"in the order of {name}"
    return fresh(tensor, tensor.shape, stride, "copy", f"its elements are not {order}")


def clone(tensor: Strided, memory_format: Any = "preserve_format") -> Outcome:
    name = _format_word(memory_format)
    why = "requested" + (", dims in the same order" if name == "preserve" else f", {name}")
    return fresh(tensor, tensor.shape, _memory_format(tensor, name), "copy", why)


def to(tensor: Strided, *what: Any, dtype: Any = None, device: Any = None, memory_format: Any = None) -> Outcome:
    """``to`` with a dtype, a device, a memory format, or several of them."""
    words = [*what, *(each for each in (dtype, device, memory_format) if each is not None)]
    if not words:
        raise CannotApply("takes a dtype, a device or a memory format", "to(bfloat16)")
    return _to(tensor, words)


def _to(tensor: Strided, words: Sequence[Any]) -> Outcome:
    dtype, device, order = (tensor.dtype, tensor.itemsize), tensor.device, "preserve"
    for word in words:
        found = _format(word)
        if found is not None:
            dtype = found
        elif isinstance(word, str) and word.partition(":")[0] in _DEVICES:
            device = word
        elif isinstance(word, str) and word in _FORMAT_WORDS:
            order = _FORMAT_WORDS[word]
        else:
            raise CannotApply(f"takes a dtype, a device or a memory format, not {word!r}", "to(bfloat16)")
    reasons = []
    if dtype[0] != tensor.dtype:
        reasons.append(f"{tensor.dtype} becomes {dtype[0]}, another number of bits for each element")
    if device != (tensor.device or "cpu") and device != tensor.device:
        reasons.append(f"from {tensor.device or 'cpu'} to {device}")
    stride = _memory_format(tensor, order)
    if order not in ("preserve", suggested_format(tensor)):
        reasons.append(f"its strides are not those of {order}")
    if not reasons:
        late = order == "contiguous" and not tensor.contiguous
        return tensor, "same", "torch assumes it is; contiguous() copies" if late else "already so"
    changed = {"dtype": dtype[0], "itemsize": dtype[1], "device": device}
    return fresh(tensor, tensor.shape, stride, "copy", "; ".join(reasons), **changed)


def view_or_dtype(tensor: Strided, *what: Any) -> Outcome:
    """``view`` of sizes or of a dtype."""
    if len(what) == 1 and isinstance(what[0], str):
        found = _format(what[0])
        if found is None:
            raise CannotApply(f"takes sizes or a dtype, not {what[0]!r}", "view(float16)")
        return view_dtype(tensor, *found)
    return view(tensor, *what)


def reshape(tensor: Strided, *shape: Any) -> Outcome:
    return _reshaped(tensor, inferred(tensor, numbers(shape or (-1,), "takes sizes as whole numbers")))


def _reshaped(tensor: Strided, sizes: tuple[int, ...]) -> Outcome:
    stride = view_stride(tensor, sizes)
    if stride is not None:
        return over(tensor, sizes, stride, "another shape over the same elements in the same order")
    return fresh(tensor, sizes, row_major(sizes), "copy", why_no_view(tensor, sizes))


def flatten(tensor: Strided, start_dim: Any = 0, end_dim: Any = -1) -> Outcome:
    sizes = flatten_sizes(tensor, start_dim, end_dim)
    if sizes == tensor.shape:
        return tensor, "same", "already flat"
    return _reshaped(tensor, sizes)


def ravel(tensor: Strided) -> Outcome:
    if tensor.contiguous:
        return view(tensor, -1) if tensor.elements else view(tensor, 0)
    return fresh(tensor, (tensor.elements,), (1,), "copy", why_no_view(tensor, (tensor.elements,)))


def repeat(tensor: Strided, *times: Any) -> Outcome:
    many = numbers(times)
    if len(many) < len(tensor.shape):
        ones = (1,) * (len(tensor.shape) - len(many))
        rule = f"says how often for {len(many)} dims, and {tensor.title} has {len(tensor.shape)}"
        raise CannotApply(rule, list_text((*ones, *many)))
    if any(each < 0 for each in many):
        raise CannotApply("repeats a negative number of times", list_text([max(each, 0) for each in many]))
    have = ((1,) * (len(many) - len(tensor.shape)), tensor.shape)
    shape = tuple(size * often for size, often in zip((*have[0], *have[1]), many, strict=True))
    return fresh(tensor, shape, row_major(shape), "copy", "repeat always copies; expand uses stride 0")


def tile(tensor: Strided, *times: Any) -> Outcome:
    many = numbers(times)
    return repeat(tensor, (1,) * (len(tensor.shape) - len(many)) + many)


def repeat_interleave(tensor: Strided, repeats: Any, dim: Any = None) -> Outcome:
    often = whole(repeats)
    if often < 0:
        raise CannotApply("repeats a negative number of times", "0")
    if dim is None:
        shape: tuple[int, ...] = (tensor.elements * often,)
    else:
        at = dim_of(tensor, dim)
        has_dims(tensor)
        shape = (*tensor.shape[:at], tensor.shape[at] * often, *tensor.shape[at + 1 :])
    return fresh(tensor, shape, row_major(shape), "copy", "each element is written as often as it is repeated")


def flip(tensor: Strided, *dims: Any) -> Outcome:
    dims_of(tensor, numbers(dims))
    return fresh(tensor, tensor.shape, preserved(tensor), "copy", "torch has no negative strides, so it copies")


def index_select(tensor: Strided, dim: Any, *indices: Any) -> Outcome:
    at, wanted = dim_of(tensor, dim), numbers(indices)
    size = tensor.shape[at] if tensor.shape else 1
    wrong = next((each for each in wanted if not 0 <= each < size), None)
    if wrong is not None:
        near = str(min(max(wrong, 0), size - 1)) if size else None
        raise CannotApply(f"asks for index {wrong} of dim {at}, which has {size} (counted from 0)", near)
    if not tensor.shape:
        if len(wanted) != 1:
            raise CannotApply(f"picks {len(wanted)} elements of a scalar", "1")
        return fresh(tensor, (), (), "copy", "elements at indices of a list are copied")
    shape = (*tensor.shape[:at], len(wanted), *tensor.shape[at + 1 :])
    return fresh(tensor, shape, row_major(shape), "copy", "elements at indices of a list are copied")


def detach(tensor: Strided) -> Outcome:
    return over(tensor, tensor.shape, tensor.stride, "the same elements, outside the graph of gradients")


def elementwise_stride(tensor: Strided, alone: bool) -> tuple[int, ...]:
    """Strides of an elementwise result: the order of the dims stays; ``alone`` means without a number as an operand."""
    if alone and tensor.contiguous:
        return row_major(tensor.shape)
    if alone and tensor.memory_format:
        return _memory_format(tensor, tensor.memory_format)
    if alone and tensor.dense:
        return tensor.stride
    order = quickest_first(tensor)
    natural = order == [*reversed(range(len(order)))]
    return row_major(tensor.shape) if natural else in_order(tensor.shape, order, least=0)


def elementwise(name: str) -> Operation:
    """An operation on each element, or with ``_`` at the end of its name over the tensor itself."""
    plain = name.removesuffix("_")
    keeps_whole, takes_number = ELEMENTWISE[plain]

    def apply(tensor: Strided, number: Any = 1) -> Outcome:
        if not takes_number and number != 1:
            raise CannotApply("takes no number")
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise CannotApply(f"takes a number, not {number!r}")
        dtype = tensor.dtype
        if (dtype in FORMATS and FORMATS[dtype].nbytes == 1 and plain != "abs") or (
            dtype == "bool" and plain in ("relu", "neg", "abs", "sub")
        ):
            raise CannotApply(f"is not among torch's operations on {dtype}", "to(bfloat16) before it")
        if dtype not in FORMATS and not (keeps_whole and isinstance(number, int)):
            dtype = "fp32"
        dtype = "int64" if dtype == "bool" else dtype
        if name == plain:
            size = itemsize_of(dtype)
            # What has another format than the result is converted first, as `to` does it, and then worked on.
            worked_on = tensor if dtype == tensor.dtype else replace(tensor, stride=preserved(tensor))
            stride = elementwise_stride(worked_on, alone=not takes_number)
            changed = {"dtype": dtype, "itemsize": size or tensor.itemsize}
            return fresh(tensor, tensor.shape, stride, "result", "a new value of each element", **changed)
        if dtype != tensor.dtype:
            raise CannotApply(f"gives {dtype}, which has no room in {tensor.dtype}", plain)
        if tensor.overlaps and not tensor.dense:
            near = f"clone(), a copy of {tensor.nbytes:,} bytes"
            raise CannotApply("would write one element of the storage under several indices", near)
        return tensor, "in place", "new values in the old storage"

    return apply


def _method(word: str) -> Operation:
    return lambda tensor: to(tensor, word)


_NAMED = (reshape, flatten, ravel, contiguous, clone, to, repeat, tile, repeat_interleave, flip, index_select, detach)
COPIES: dict[str, Operation] = {
    **{operation.__name__: operation for operation in _NAMED},
    "view": view_or_dtype,
    "type": to,
    **{word: _method(word) for word in (*_METHODS, "cpu", "cuda")},
    **{f"{name}{end}": elementwise(f"{name}{end}") for name in ELEMENTWISE for end in ("", "_")},
}
