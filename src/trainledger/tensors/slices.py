"""Operations of torch that pick a part of a tensor over the same storage; as `tensors.views`, on which they build."""

from __future__ import annotations

from typing import Any

from trainledger.spec.units import ceil_div
from trainledger.tensors.strided import Strided, list_text
from trainledger.tensors.views import CannotApply, Operation, Outcome, dim_of, has_dims, numbers, over, unsqueeze, whole

LARGEST_COUNT = 10**6  # of pieces


def cut(tensor: Strided, dim: int, start: int | None, stop: int | None, step: int, why: str) -> Outcome:
    """A slice of one dim as Python means it; steps forward only, as in torch."""
    size = tensor.shape[dim]
    if step <= 0:
        near = f"flip({dim}), a copy of {tensor.nbytes:,} bytes"
        raise CannotApply(f"has a step of {step}, and torch's slices step forward", near)
    first, last, _ = slice(start, stop, step).indices(size)
    count = max(0, ceil_div(last - first, step))
    shape = (*tensor.shape[:dim], count, *tensor.shape[dim + 1 :])
    stride = (*tensor.stride[:dim], tensor.stride[dim] * step, *tensor.stride[dim + 1 :])
    return over(tensor, shape, stride, why, tensor.offset + first * tensor.stride[dim])


def slice_(tensor: Strided, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1) -> Outcome:
    has_dims(tensor)
    at = dim_of(tensor, dim)
    ends = [None if each is None else whole(each) for each in (start, end)]
    return cut(tensor, at, ends[0], ends[1], whole(step), f"a part of dim {at}: another offset, the same storage")


def select(tensor: Strided, dim: Any, index: Any) -> Outcome:
    has_dims(tensor)
    at, wanted = dim_of(tensor, dim), whole(index)
    size = tensor.shape[at]
    if not -size <= wanted < size:
        near = str(min(max(wanted, -size), size - 1)) if size else None
        raise CannotApply(f"asks for index {wanted} of dim {at}, which has {size}", near)
    place = tensor.offset + (wanted % size) * tensor.stride[at]
    shape, stride = ((*sizes[:at], *sizes[at + 1 :]) for sizes in (tensor.shape, tensor.stride))
    why = f"index {wanted} of dim {at}, which goes: another offset, the same storage"
    return over(tensor, shape, stride, why, place)


def narrow(tensor: Strided, dim: Any, start: Any, length: Any) -> Outcome:
    has_dims(tensor)
    at, first, count = dim_of(tensor, dim), whole(start), whole(length)
    size = tensor.shape[at]
    if not -size <= first <= size:
        raise CannotApply(f"begins at {first} of dim {at}, which has {size}", str(min(max(first, -size), size)))
    first = first + size if first < 0 else first
    if count < 0 or first + count > size:
        near = f"narrow({at}, {first}, {size - first})"
        raise CannotApply(f"asks for {count} from {first} on of dim {at}, which has {size}", near)
    return cut(tensor, at, first, first + count, 1, f"a part of dim {at}: another offset, the same storage")


def indexed(tensor: Strided, items: tuple[Any, ...]) -> Outcome:
    """``tensor[items]`` with whole numbers, slices, None and an ellipsis."""
    used = sum(each is not None and each is not Ellipsis for each in items)
    if used > len(tensor.shape):
        raise CannotApply(f"has {used} indices, and {tensor.title} has {len(tensor.shape)} dims")
    if items.count(Ellipsis) > 1:
        raise CannotApply("has two ellipses, so that their dims are ambiguous")
    if Ellipsis not in items:
        items = (*items, Ellipsis)
    at, result = 0, tensor
    for item in items:
        if item is Ellipsis:
            at += len(tensor.shape) - used
        elif item is None:
            result = unsqueeze(result, at)[0]
            at += 1
        elif isinstance(item, slice):
            result = slice_(result, at, item.start, item.stop, 1 if item.step is None else item.step)[0]
            at += 1
        elif isinstance(item, tuple):
            near = f"index_select({at}, {', '.join(map(str, item))})"
            raise CannotApply("has a list of indices, whose elements are copied", near)
        else:
            result = select(result, at, item)[0]
    return result, "view", "a part of the tensor: another offset, the same storage"


def _piece(tensor: Strided, dim: int, sizes: tuple[int, ...], piece: Any) -> Outcome:
    """One of the pieces that a dim is cut into."""
    number = whole(piece)
    if not 0 <= number < len(sizes):
        raise CannotApply(f"makes {len(sizes)} pieces, and piece {number} is none of them", str(len(sizes) - 1))
    start = sum(sizes[:number])
    said = f"piece {number} of {len(sizes)}" + (", another one with piece=1 and so on" if len(sizes) > 1 else "")
    return cut(tensor, dim, start, start + sizes[number], 1, said)


def _pieces(length: int, size: int) -> tuple[int, ...]:
    """Sizes of the pieces of a dim, the last one smaller where they do not fill it."""
    return (size,) * (length // size) + ((length % size,) if length % size else ())


def chunk(tensor: Strided, chunks: Any, dim: Any = 0, piece: Any = 0) -> Outcome:
    has_dims(tensor)
    at, count = dim_of(tensor, dim), whole(chunks)
    if not 1 <= count <= LARGEST_COUNT:
        near = 1 if count < 1 else LARGEST_COUNT
        raise CannotApply(f"makes {count} pieces, and must make 1 to {LARGEST_COUNT:,}", str(near))
    length = tensor.shape[at]
    return _piece(tensor, at, _pieces(length, ceil_div(length, count)) if length else (0,) * count, piece)


def split(tensor: Strided, size: Any, dim: Any = 0, piece: Any = 0) -> Outcome:
    has_dims(tensor)
    at = dim_of(tensor, dim)
    length = tensor.shape[at]
    if isinstance(size, tuple):
        sizes = numbers(size)
        if sum(sizes) != length or any(each < 0 for each in sizes):
            raise CannotApply(f"has pieces of {list_text(sizes)}, and they must add up to {length}")
        return _piece(tensor, at, sizes, piece)
    if whole(size) < 0 or (size == 0 and length):
        raise CannotApply(f"has pieces of {size} elements, and they must have one at least", "1")
    if size and length // size > LARGEST_COUNT:
        raise CannotApply(f"makes more than {LARGEST_COUNT:,} pieces", str(ceil_div(length, LARGEST_COUNT)))
    return _piece(tensor, at, _pieces(length, size) if length else (0,), piece)


def unfold(tensor: Strided, dimension: Any, size: Any, step: Any) -> Outcome:
    at, length, move = dim_of(tensor, dimension), whole(size), whole(step)
    have, stride = (tensor.shape[at], tensor.stride[at]) if tensor.shape else (1, 1)
    if not 0 <= length <= have:
        raise CannotApply(f"has windows of {length}, and dim {at} has {have}", str(min(max(length, 0), have)))
    if move <= 0:
        raise CannotApply(f"moves its windows by {move}, and must move them forward", "1")
    if not tensor.shape:
        return over(tensor, (length,), (1,), "one window")
    shape = (*tensor.shape[:at], (have - length) // move + 1, *tensor.shape[at + 1 :], length)
    steps = (*tensor.stride[:at], stride * move, *tensor.stride[at + 1 :], stride)
    return over(tensor, shape, steps, "windows over a dim" + (", which share elements" if move < length else ""))


def diagonal(tensor: Strided, offset: Any = 0, dim1: Any = 0, dim2: Any = 1) -> Outcome:
    first, second, shift = dim_of(tensor, dim1), dim_of(tensor, dim2), whole(offset)
    if first == second:
        raise CannotApply(f"needs two dims, and both are dim {first}")
    down, right = max(-shift, 0), max(shift, 0)
    count = max(min(tensor.shape[first] - down, tensor.shape[second] - right), 0)
    start = down * tensor.stride[first] + right * tensor.stride[second] if count else 0
    rest = [index for index in range(len(tensor.shape)) if index not in (first, second)]
    shape = (*(tensor.shape[dim] for dim in rest), count)
    stride = (*(tensor.stride[dim] for dim in rest), tensor.stride[first] + tensor.stride[second])
    return over(tensor, shape, stride, "the step of a diagonal is the sum of two strides", tensor.offset + start)


def as_strided(tensor: Strided, size: Any, stride: Any, storage_offset: Any = None) -> Outcome:
    shape, steps = numbers((size,)), numbers((stride,))
    at = tensor.offset if storage_offset is None else whole(storage_offset)
    if len(shape) != len(steps):
        raise CannotApply(f"has {len(shape)} sizes and {len(steps)} strides")
    if any(step < 0 for step in (*shape, *steps, at)):
        raise CannotApply("has a size, a stride or an offset below 0, and torch's tensors have none")
    made = over(tensor, shape, steps, "sizes, strides and offset as requested", at)
    end, holds = made[0].span[1], tensor.storage_nbytes // tensor.itemsize
    if made[0].elements and end > holds:
        raise CannotApply(f"would reach element {end - 1:,} of a storage that holds {holds:,}")
    return made


_SLICES = (select, narrow, chunk, split, unfold, diagonal, as_strided)
SLICES: dict[str, Operation] = {"slice": slice_} | {operation.__name__: operation for operation in _SLICES}
