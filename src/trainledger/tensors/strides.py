"""Strides that torch gives to a new tensor."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.tensors.strided import Strided


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a new tensor: dims of no element step as those of one.

    >>> row_major((4, 8)), row_major((2, 0, 3)), row_major(())
    ((8, 1), (3, 3, 1), ())
    """
    steps = [1]
    for size in reversed(shape[1:]):
        steps.insert(0, steps[0] * max(size, 1))
    return tuple(steps[: len(shape)])


def in_order(shape: Sequence[int], dims: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """Strides without gaps where ``dims`` lists the dims, the quickest first; a dim of no element steps as ``least``.

    >>> in_order((2, 3, 4, 5), (1, 3, 2, 0))
    (60, 1, 15, 3)
    """
    stride, step = [0] * len(shape), 1
    for dim in dims:
        stride[dim] = step
        step *= max(shape[dim], least)
    return tuple(stride)


def preserved(tensor: Strided) -> tuple[int, ...]:
    """Strides of a new tensor that keeps the order of another's dims (torch.preserve_format).

    >>> preserved(Strided("fp32", 4, (4, 3), (1, 8), 0, 96)), preserved(Strided("fp32", 4, (8, 4), (1, 0), 0, 32))
    ((1, 4), (4, 1))
    """
    return tensor.stride if tensor.dense else in_order(tensor.shape, quickest_first(tensor))


def quickest_first(tensor: Strided) -> list[int]:
    """The dims of a tensor in the order in which torch's TensorIterator walks them.

    It sorts by insertion, and a dim of stride 0 compares with none and is passed over, so that the result depends
    on the way of sorting.
    """
    order = [*reversed(range(len(tensor.shape)))]
    for start in range(1, len(order)):
        here = start
        for before in reversed(range(start)):
            compared = _compared(tensor, order[before], order[here])
            if compared < 0:
                break
            if compared > 0:
                order[before], order[here] = order[here], order[before]
                here = before
    return order


def _compared(tensor: Strided, first: int, second: int) -> int:
    """Below 0 where the first dim is the quicker one, above where it is the slower, 0 where neither."""
    steps = tensor.stride[first], tensor.stride[second]
    if 0 in steps:
        return 0
    if steps[0] != steps[1]:
        return -1 if steps[0] < steps[1] else 1
    return 1 if tensor.shape[first] > tensor.shape[second] else 0
