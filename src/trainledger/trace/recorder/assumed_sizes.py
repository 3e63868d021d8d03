"""Which operations rest on a size that was assumed, as how many elements a mask finds (`fakes.counts`).

Such a size is a dim of a result; whatever is computed of that result rests on it too, and has it as a dim again, or
others that are made of it. A result whose dims are all those of other inputs, as a weight's gradient, does not: its own
size is known, though the operation that made it rests on the assumption. Sizes are compared by their numbers, so that a
size which happens to equal an assumed one, in a tensor computed of such, is taken to rest on it as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainledger.ledger.core.record import Storage
from trainledger.trace.recorder.storages import Storages
from trainledger.trace.recorder.tensor_facts import tensors_in

EXACT, BOUND, ASSUMED = "exact", "bound", "assumed"
_ORDER = (EXACT, BOUND, ASSUMED)
# Results have the size of the first argument, whatever is put into it.
_INTO = (
    "index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce", "masked_scatter",
    "select_scatter", "slice_scatter",
)  # fmt: skip
_OF_GIVEN_SIZE = ("new_zeros", "new_empty", "new_ones", "new_full", "new_empty_strided")


class AssumedSizes:
    """Sizes that rest on an assumption, and what follows from them for each operation."""

    def __init__(self) -> None:
        self._sizes: dict[int, str] = {}
        self._given: set[int] = set()  # those that are no size of what was looked at
        self._found: dict[int, str] = {}  # by the operation that runs now

    def found(self, number: int, elements: int, basis: str) -> None:
        """The operation that runs now has found ``number`` of so many elements, as assumed."""
        self._found[number] = basis
        if number != elements:
            self._given.add(number)

    def clear(self) -> None:
        """Forget all sizes."""
        self._sizes, self._given, self._found = {}, set(), {}

    def basis(self, func: OpOverload, args: Any, kwargs: Any, out: Any, made: list[Storage], known: Storages) -> str:
        """The basis of what an operation does; the records of what it ``made`` get theirs."""
        found, self._found = self._found, {}
        if not found and not self._sizes:
            return EXACT
        inputs, outputs = tensors_in(args) + tensors_in(kwargs), tensors_in(out)
        resting = [each for each in inputs if _basis(known.of(each)) != EXACT]
        name = func._schema.name.partition("::")[2].rstrip("_")
        dims = {dim for each in outputs for dim in each.shape}
        self._sizes |= {number: basis for number, basis in found.items() if number in dims}
        basis = _worst(
            (*(each for number, each in found.items() if number in dims), *(_basis(known.of(each)) for each in resting))
        )
        if name == "index_put" and len(args) > 2 and any(each.dtype == torch.bool for each in tensors_in(args[1])):
            basis = _worst((basis, *(self._sizes.get(dim, EXACT) for dim in args[2].shape)))
        of_given_size = name in _OF_GIVEN_SIZE or not inputs  # which the program knows as a plain number
        if of_given_size:
            sizes = {each: self._sizes[each] for each in dims & self._given if each in self._sizes}
            basis = _worst((basis, *sizes.values()))
        else:
            sizes = self._sizes
            if basis != EXACT:
                self._learn(dims, inputs, () if func.is_view else args, basis)
        if basis == EXACT:
            return EXACT
        first = inputs[0] if inputs else None
        if name in _INTO and first is not None and all(each is not first for each in resting):
            return basis
        by_storage = {id(record): each for each in outputs if (record := known.of(each)) is not None}
        for record in made:
            tensor = by_storage.get(id(record))
            if tensor is not None:
                record.basis = _worst(sizes.get(dim, EXACT) for dim in tensor.shape)
        return basis

    def of_records(self, arguments: Iterable[Storage | None], made: Iterable[Storage] = ()) -> str:
        """The basis of what is computed of these pieces of memory by no operator, as by a compiled kernel.

        What it ``made`` gets a basis by the size that it was made in.
        """
        basis = _worst(_basis(each) for each in arguments)
        for record in made if basis != EXACT else ():
            if record.origin is not None:
                record.basis = _worst(self._sizes.get(dim, EXACT) for dim in record.origin.shape)
        return basis

    def _learn(self, dims: set[int], inputs: list[Tensor], args: Any, basis: str) -> None:
        """What is no size of an input and was not given as a number is made of assumed sizes, as by ``cat``."""
        explained = {1, 0} | {dim for each in inputs for dim in each.shape} | set(_numbers(args))
        for each in dims - explained:
            self._sizes[each] = _worst((self._sizes.get(each, EXACT), basis))


def _basis(record: Storage | None) -> str:
    return EXACT if record is None else record.basis


def _worst(bases: Iterable[str]) -> str:
    return max(bases, key=_ORDER.index, default=EXACT)


def _numbers(args: Any) -> Iterator[int]:
    if isinstance(args, (list, tuple)):
        for each in args:
            yield from _numbers(each)
    elif isinstance(args, int):
        yield int(args)
