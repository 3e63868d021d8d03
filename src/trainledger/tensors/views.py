"""Operations of torch that make another tensor over the same storage: what they do to shape, strides and offset.

Each takes a `Strided` and arguments as torch does, and gives the result, its kind and a sentence; `CannotApply` where
torch raises. The rules are those of torch's documentation ("Tensor Views") and are tested against torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import mul
from typing import Any

from trainledger.tensors.strided import Strided, list_text, row_major

Outcome = tuple[Strided, str, str]
Operation = Callable[..., Outcome]


class CannotApply(Exception):  # noqa: N818
    """Why an operation has no result on a tensor, and what works in its place where that is known."""

    def __init__(self, rule: str, nearest: str | None = None) -> None:
        super().__init__(rule)
        self.rule = rule
        self.nearest = nearest


def over(tensor: Strided, shape: Sequence[int], stride: Sequence[int], why: str, offset: int | None = None) -> Outcome:
    """Another tensor over the same storage."""
    at = tensor.offset if offset is None else offset
    return replace(tensor, shape=tuple(shape), stride=tuple(stride), offset=at), "view", why


def whole(value: Any, what: str = "takes whole numbers") -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CannotApply(f"{what}, not {value!r}")
    return int(value)


def numbers(args: Sequence[Any], what: str = "takes whole numbers") -> tuple[int, ...]:
    """Whole numbers given one by one or in one tuple."""
    if len(args) == 1 and isinstance(args[0], tuple):
        args = args[0]
    return tuple(whole(argument, what) for argument in args)


def dim_of(tensor: Strided, dim: Any, more: int = 0) -> int:
    """A dim counted from the front; a tensor without dims counts as one of a single dim, as torch does."""
    wanted, count = whole(dim, "takes a dim as a whole number"), max(len(tensor.shape) + more, 1)
    if not -count <= wanted < count:
        have = f"0 to {count - 1}, or {-count} to -1 from the end" if count > 1 else "0, or -1 from the end"
        near = min(max(wanted, -count), count - 1)
        raise CannotApply(f"has no dim {wanted}: of {tensor.title} they are {have}", str(near))
    return wanted % count


def dims_of(tensor: Strided, dims: Sequence[int]) -> tuple[int, ...]:
    """Several dims counted from the front, none of them twice."""
    found = tuple(dim_of(tensor, dim) for dim in dims)
    twice = next((each for each in found if found.count(each) > 1), None)
    if twice is not None:
        raise CannotApply(f"names dim {twice} twice", list_text(tuple(dict.fromkeys(found))))
    return found


def has_dims(tensor: Strided) -> None:
    if not tensor.shape:
        raise CannotApply("needs a dim, and a scalar has none", "unsqueeze(0) before it")


def inferred(tensor: Strided, sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes with a single -1 worked out; the elements must stay as many."""
    unknown = [at for at, size in enumerate(sizes) if size == -1]
    wrong = next((size for size in sizes if size < -1), None)
    if wrong is not None:
        raise CannotApply(f"has a size of {wrong}", list_text([abs(size) for size in sizes]))
    if len(unknown) > 1:
        raise CannotApply("can infer only one size, and two are -1")
    known = reduce(mul, (size for size in sizes if size != -1), 1)
    if not unknown:
        if known != tensor.elements:
            rule = f"asks for {known:,} elements, and {tensor.title} has {tensor.elements:,}"
            raise CannotApply(rule, _nearest_shape(tensor.elements, sizes))
        return tuple(sizes)
    if known == 0 and tensor.elements == 0:
        raise CannotApply("has a -1 that could be any size: the tensor has no elements, and another size is 0")
    if known == 0 or tensor.elements % known:
        rule = f"cannot split {tensor.elements:,} elements into pieces of {known:,}"
        raise CannotApply(rule, _nearest_shape(tensor.elements, sizes))
    return tuple(tensor.elements // known if size == -1 else size for size in sizes)


def _nearest_shape(elements: int, sizes: Sequence[int]) -> str | None:
    """The sizes with the last free one changed so that the elements fit, where one can."""
    for at in reversed(range(len(sizes))):
        rest = reduce(mul, (size for other, size in enumerate(sizes) if other != at and size != -1), 1)
        if rest > 0 and elements and elements % rest == 0 and -1 not in (*sizes[:at], *sizes[at + 1 :]):
            return list_text((*sizes[:at], elements // rest, *sizes[at + 1 :]))
    return list_text((elements,)) if elements else None


def view_stride(tensor: Strided, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Strides that give a tensor another shape over the same storage, or None where there are none.

    Dims that can be walked with one stride are a piece; each piece must hold whole dims of the new shape.

    >>> view_stride(Strided("fp32", 4, (4, 8), (8, 1), 0, 128), (2, 16)), view_stride(
    ...     Strided("fp32", 4, (8, 4), (1, 8), 0, 128), (32,))
    ((16, 1), None)
    """
    if not tensor.elements:
        return tensor.stride if tuple(shape) == tensor.shape else row_major(shape)
    stride, at = [0] * len(shape), len(shape) - 1
    for count, step, _ in _pieces(tensor):
        taken = 1
        while at >= 0 and (taken < count or shape[at] == 1):
            stride[at] = taken * step
            taken *= shape[at]
            at -= 1
        if taken != count:
            return None
    return tuple(stride)


def _pieces(tensor: Strided) -> list[tuple[int, int, int]]:
    """Runs of dims that one stride walks, from the end: elements, the stride, and the run's first dim."""
    if not tensor.shape:
        return [(1, 1, 0)]
    found, count, step = [], 1, tensor.stride[-1]
    for dim in reversed(range(len(tensor.shape))):
        count *= tensor.shape[dim]
        before = dim - 1
        if dim == 0 or (tensor.shape[before] != 1 and tensor.stride[before] != count * step):
            found.append((count, step, dim))
            count, step = 1, tensor.stride[before]
    return found


def why_no_view(tensor: Strided, shape: Sequence[int]) -> str:
    """Which two dims the shape would make one, and which strides forbid it."""
    inside = {reduce(mul, shape[at:], 1) for at in range(len(shape) + 1)}  # elements behind each end of a new dim
    behind = 1
    for count, step, dim in _pieces(tensor):
        run, behind = behind, behind * count
        if dim and behind not in inside:
            before = next(index for index in reversed(range(dim)) if tensor.shape[index] != 1)
            still = dim if step == 0 else before if tensor.stride[before] == 0 else None
            if still is not None:
                return (
                    f"dim {still} of {tensor.title} has stride 0, so that each element of it is the same one; as "
                    f"{list_text(shape)} it would be merged with dim {before if still == dim else dim}, for "
                    "which its elements would have to be copied"
                )
            needed = step * (behind // run)
            return (
                f"{tensor.title} with strides {list_text(tensor.stride)} cannot be viewed as {list_text(shape)}: dims "
                f"{before} and {dim} would be merged into one, for which dim {before} would need stride {needed:,}, "
                f"and it has stride {tensor.stride[before]:,}"
            )
    return f"{tensor.title} with strides {list_text(tensor.stride)} cannot be viewed as {list_text(shape)}"


def copy_instead(tensor: Strided, shape: Sequence[int]) -> str:
    return f"reshape({', '.join(map(str, shape))}), a copy of {tensor.nbytes:,} bytes"


def view(tensor: Strided, *shape: Any) -> Outcome:
    sizes = inferred(tensor, numbers(shape or (-1,), "takes sizes as whole numbers, or one number format"))
    stride = view_stride(tensor, sizes)
    if stride is None:
        raise CannotApply(why_no_view(tensor, sizes), copy_instead(tensor, sizes))
    return over(tensor, sizes, stride, "another shape over the same elements in the same order")


def view_dtype(tensor: Strided, dtype: str, itemsize: int) -> Outcome:
    """The bytes read as another format; sizes change where its elements are longer or shorter."""
    old = tensor.itemsize
    same = replace(tensor, dtype=dtype, itemsize=itemsize)
    if old == itemsize:
        return same, "view", "the same bytes read as another format"
    if not tensor.shape:
        rule = f"cannot change the size of an element of a scalar: {old} to {itemsize} bytes"
        raise CannotApply(rule, "unsqueeze(0) before it")
    if tensor.stride[-1] != 1:
        last = f"and it has stride {tensor.stride[-1]}"
        rule = f"needs a last dim of stride 1 to read elements of {old} bytes as {itemsize}, {last}"
        raise CannotApply(rule, f"contiguous() before it, a copy of {tensor.nbytes:,} bytes")
    if itemsize < old:
        ratio = old // itemsize
        shape = (*tensor.shape[:-1], tensor.shape[-1] * ratio)
        stride = (*(step * ratio for step in tensor.stride[:-1]), 1)
        made = replace(same, shape=shape, stride=stride, offset=tensor.offset * ratio)
        return made, "view", f"the same bytes read as {ratio} elements each"
    ratio = itemsize // old
    strides = ((f"a stride of dim {dim}", step) for dim, step in enumerate(tensor.stride[:-1]))
    for what, value in (("a last dim", tensor.shape[-1]), ("an offset", tensor.offset), *strides):
        if value % ratio:
            raise CannotApply(f"needs {what} that {ratio} divides to read {ratio} elements as one, and it is {value}")
    shape = (*tensor.shape[:-1], tensor.shape[-1] // ratio)
    stride = (*(step // ratio for step in tensor.stride[:-1]), 1)
    made = replace(same, shape=shape, stride=stride, offset=tensor.offset // ratio)
    return made, "view", f"the bytes of {ratio} elements read as one"


def _picked(tensor: Strided, order: Sequence[int], why: str) -> Outcome:
    return over(tensor, [tensor.shape[each] for each in order], [tensor.stride[each] for each in order], why)


def transpose(tensor: Strided, dim0: Any = None, dim1: Any = None) -> Outcome:
    if dim0 is None and len(tensor.shape) == 2:
        dim0, dim1 = 0, 1
    if dim0 is None or dim1 is None:
        raise CannotApply("needs the two dims to swap, unless there are exactly two", "transpose(-2, -1)")
    first, second = dim_of(tensor, dim0), dim_of(tensor, dim1)
    order = [*range(len(tensor.shape))]
    if order:
        order[first], order[second] = order[second], order[first]
    return _picked(tensor, order, f"dims {first} and {second} are swapped; the elements stay in place")


def t(tensor: Strided) -> Outcome:
    if len(tensor.shape) > 2:
        raise CannotApply(f"transposes at most two dims, and {tensor.title} has {len(tensor.shape)}", "mT, or permute")
    return _picked(tensor, [*reversed(range(len(tensor.shape)))], "the dims are swapped; the elements stay in place")


def T(tensor: Strided) -> Outcome:  # noqa: N802
    said = "all dims reversed; the elements stay in place"
    if len(tensor.shape) not in (0, 2):
        said += "; torch deprecates it for other than 2 dims: use mT or permute"
    return _picked(tensor, [*reversed(range(len(tensor.shape)))], said)


def mT(tensor: Strided) -> Outcome:  # noqa: N802
    if not tensor.shape:
        return over(tensor, (), (), "a scalar has no dims to transpose")
    if len(tensor.shape) == 1:
        raise CannotApply(f"transposes the last two dims, and {tensor.title} has one", "t")
    return transpose(tensor, -2, -1)


def permute(tensor: Strided, *dims: Any) -> Outcome:
    order = dims_of(tensor, numbers(dims))
    if len(order) != len(tensor.shape):
        missing = [index for index in range(len(tensor.shape)) if index not in order]
        rule = f"names {len(order)} dims, and {tensor.title} has {len(tensor.shape)}"
        raise CannotApply(rule, list_text([*order, *missing][: len(tensor.shape)]))
    return _picked(tensor, order, "dims reordered; the elements stay in place")


def movedim(tensor: Strided, source: Any, destination: Any) -> Outcome:
    sources, targets = (dims_of(tensor, numbers((each,))) for each in (source, destination))
    if len(sources) != len(targets):
        raise CannotApply(f"moves {len(sources)} dims to {len(targets)} places")
    if not tensor.shape:
        return over(tensor, (), (), "a scalar has no dims to move")
    order: list[int | None] = [None] * len(tensor.shape)
    for dim, place in zip(sources, targets, strict=True):
        order[place] = dim
    rest = iter([index for index in range(len(order)) if index not in sources])
    moved = [next(rest) if each is None else each for each in order]
    return _picked(tensor, moved, "dims reordered; the elements stay in place")


def squeeze(tensor: Strided, *dims: Any) -> Outcome:
    gone = set(dims_of(tensor, numbers(dims))) if dims else set(range(len(tensor.shape)))
    order = [index for index in range(len(tensor.shape)) if index not in gone or tensor.shape[index] != 1]
    left = len(tensor.shape) - len(order)
    return _picked(tensor, order, f"removes {left} dims of size 1" if left != 1 else "removes a dim of size 1")


def unsqueeze(tensor: Strided, dim: Any) -> Outcome:
    at = dim_of(tensor, dim, 1)
    step = tensor.shape[at] * tensor.stride[at] if at < len(tensor.shape) else 1
    shape, stride = (*tensor.shape[:at], 1, *tensor.shape[at:]), (*tensor.stride[:at], step, *tensor.stride[at:])
    return over(tensor, shape, stride, "inserts a dim of size 1")


def expand(tensor: Strided, *sizes: Any) -> Outcome:
    wanted, have = numbers(sizes), tensor.shape
    new = len(wanted) - len(have)
    if new < 0:
        near = list_text((*(-1 for _ in range(-new)), *wanted))
        raise CannotApply(f"names {len(wanted)} sizes, and {tensor.title} has {len(have)} dims", near)
    shape, stride = list(wanted), [0] * len(wanted)
    for at in reversed(range(len(wanted))):
        dim, size = at - new, wanted[at]
        if size < -1 or (size == -1 and dim < 0):
            raise CannotApply(f"has a size of {size} where a dim is new" if dim < 0 else f"has a size of {size}")
        old = have[dim] if dim >= 0 else 1
        shape[at] = old if size == -1 else size
        if shape[at] != old and old != 1:
            works = [have[i - new] if i >= new and have[i - new] != 1 else size for i, size in enumerate(wanted)]
            rule = f"expands only dims of size 1, and dim {dim} of {tensor.title} has {old}"
            raise CannotApply(rule, list_text(works))
        if shape[at] == old and dim >= 0:
            stride[at] = tensor.stride[dim]
        elif shape[at] == old and have:
            stride[at] = shape[at + 1] * stride[at + 1]
    still = [index for index in range(len(shape)) if shape[index] > 1 and stride[index] == 0]
    which = f"dim {still[0]} has" if len(still) == 1 else f"dims {', '.join(map(str, still))} have"
    said = f"{which} stride 0: each index is the same element" if still else "nothing repeats"
    return over(tensor, shape, stride, said)


def flatten_sizes(tensor: Strided, start: Any, end: Any) -> tuple[int, ...]:
    first, last = dim_of(tensor, start), dim_of(tensor, end)
    if first > last:
        raise CannotApply(f"begins at dim {first}, after its end at dim {last}", f"flatten({last}, {first})")
    if not tensor.shape:
        return (1,)
    return (*tensor.shape[:first], reduce(mul, tensor.shape[first : last + 1], 1), *tensor.shape[last + 1 :])


def unflatten(tensor: Strided, dim: Any, *sizes: Any) -> Outcome:
    has_dims(tensor)
    at, wanted = dim_of(tensor, dim), numbers(sizes)
    if not wanted:
        raise CannotApply("needs the sizes to split the dim into", f"unflatten({at}, (1, {tensor.shape[at]}))")
    piece = replace(tensor, shape=(tensor.shape[at],), stride=(1,), storage_nbytes=tensor.shape[at] * tensor.itemsize)
    parted = inferred(piece, wanted)
    shape = (*tensor.shape[:at], *parted, *tensor.shape[at + 1 :])
    stride = view_stride(tensor, shape)
    assert stride is not None  # one dim is always walked with one stride
    return over(tensor, shape, stride, f"dim {at} split into {len(parted)}")


_SHAPES = (transpose, t, T, mT, permute, movedim, squeeze, unsqueeze, expand, unflatten)
SHAPES: dict[str, Operation] = {operation.__name__: operation for operation in _SHAPES}
SHAPES |= {"swapaxes": transpose, "swapdims": transpose, "moveaxis": movedim, "broadcast_to": expand}
