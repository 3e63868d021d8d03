"""Tensors in arguments, the life of their memory from birth to last reference, and sizes that rest on an assumption.

An assumed size (how many elements a mask finds, `fakes.rules`) is a dim of a result; whatever is computed of that
result rests on it too, and has it as a dim again, or others that are made of it. A result whose dims are all those of
other inputs, as a weight's gradient, does not: its own size is known. Sizes are compared by their numbers, so that a
size which happens to equal an assumed one, in a tensor computed of such, is taken to rest on it as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from trainledger.ledger.entry import Event, Origin, Storage, TensorLife
from trainledger.trace.patches import Args, Kwargs, names

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
DTYPE_NAMES |= {torch.int64: "int64", torch.int32: "int32", torch.uint8: "uint8", torch.int8: "int8"}
DTYPE_NAMES |= {torch.bool: "bool"}
DTYPE_NAMES |= {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an argument or a result, looking into lists, tuples and dicts; of a sparse one, its parts."""
    if isinstance(value, Tensor):
        return [value] if value.layout is torch.strided else _parts(value)
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_in(each)]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors_in(each)]
    return []


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with the memory of one that has none of its own; none of an opaque one."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is torch.jagged:
        return [tensor._values, tensor._offsets]  # type: ignore[attr-defined, list-item]
    return []


def is_followed(tensor: Tensor) -> bool:
    """Whether the parts of a sparse tensor are known: of a fake one, torch may not know how many there are."""
    return tensor.layout is torch.sparse_coo and tensor._values().shape[0] > 0


def has_no_memory(value: Any) -> bool:
    """Whether a tensor is on the meta device, as models are built there, or a lazy module's that has none yet."""
    if isinstance(value, FakeTensor):
        return value.fake_device.type == "meta"
    return isinstance(value, Tensor) and (value.is_meta or is_lazy(value))


def dtype_name(dtype: torch.dtype) -> str:
    """The field's name of a torch dtype (``fp32``); torch's own where it has none."""
    return DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def arithmetic_dtype(first: Tensor, kind: str) -> str:
    """The format in which an operation computes, by its first operand (empty: one without a name).

    fp32 matmuls of a GPU are in TF32 where ``torch.set_float32_matmul_precision`` allows it.
    """
    if first.dtype == torch.float32 and kind in ("matmul", "attention") and first.is_cuda:
        return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return DTYPE_NAMES.get(first.dtype, "")


def is_gpu(device: Any) -> bool:
    """Whether what a program names as a device is a GPU.

    >>> is_gpu("cuda:1"), is_gpu(0), is_gpu("cpu"), is_gpu(torch.device("cuda"))
    (True, True, False, True)
    """
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def touched_nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, those of a broadcast dim counted once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            elements *= size
    return elements * tensor.element_size()


def written_arguments(func: OpOverload, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """The tensors that an operator writes in place, by its schema."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        # Fused optimizers write gradients only where a loss scale is removed
        if argument.name == "grads":
            continue
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written.extend(tensors_in(value))
    return written


class Storages:
    """Storages that are live, by their address, and records of all that ever were.

    What dies is noted as freed by the last of ``events``; before the first it was never there. ``local`` gives the
    part of a tensor that lives here, ``freed`` is called with what dies.
    """

    def __init__(
        self, events: list[Event], local: Callable[[Tensor], Tensor], freed: Callable[[Storage], None] | None = None
    ) -> None:
        self.live: dict[int, Storage] = {}
        self.there_before: list[Storage] = []
        self._replaced: dict[int, Tensor] = {}
        self._events = events
        self._local = local
        self._freed = freed
        self._guards: dict[int, weakref.ref[Any]] = {}
        self._every: list[Storage] = []

    def resident(self, tensors: Iterable[Tensor], category: str, names: Iterable[str] = ()) -> None:
        """Follow tensors that were there before; a storage is counted once."""
        for whole, name in zip_longest(tensors, names, fillvalue=category):
            assert isinstance(whole, Tensor)
            for tensor in tensors_in(self._local(whole)):
                if has_no_memory(tensor):
                    continue
                storage = tensor.untyped_storage()
                if storage._cdata not in self.live and storage._cdata not in self._replaced:
                    record = Storage(storage.nbytes(), "resident", category)
                    record.origin = Origin(str(name), tuple(tensor.shape), dtype_name(tensor.dtype), "", "", -1)
                    self.watch(storage, record)
                    self.there_before.append(record)

    def replaced_by_fake(self, tensors: Iterable[Tensor]) -> None:
        """Count no memory for these real tensors, which fake ones replace: a loss may still refer to them."""
        self._replaced |= {tensor.untyped_storage()._cdata: tensor for tensor in tensors}

    def never_there(self, tensors: Iterable[Tensor]) -> None:
        """Count no memory for what was taken to be there before and, as it turned out, was not."""
        for record in map(self.of, tensors):
            if record is not None:
                record.nbytes = 0

    def born(self, tensor: Tensor, name: str, phase: str, line: str = "") -> Storage:
        """Follow memory that has just been made; the caller puts it into the event that it is for."""
        storage = tensor.untyped_storage()
        record = Storage(storage.nbytes(), phase)
        record.origin = Origin(name, tuple(tensor.shape), dtype_name(tensor.dtype), "", line, len(self._events))
        self.watch(storage, record)
        return record

    def watch(self, storage: Any, record: Storage) -> None:
        """Let a record live as long as a storage."""
        key = storage._cdata
        self.live[key] = record
        self._every.append(record)
        self._guards[key] = weakref.ref(storage, self._died(key))

    def move(self, before: int, storage: Any) -> None:
        """Memory that was known as one storage is another from now on."""
        record = self.live.pop(before, None)
        if record is not None:
            del self._guards[before]
            self.live[storage._cdata] = record
            self._guards[storage._cdata] = weakref.ref(storage, self._died(storage._cdata))

    def free(self, key: int) -> None:
        """Count a storage as freed though references to it remain: its memory was released."""
        self._died(key)(None)

    def _died(self, key: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            record = self.live.pop(key)
            del self._guards[key]
            if record.origin is not None:
                record.origin.died = len(self._events) - 1
            if self._events:
                self._events[-1].freed.append((record, 1))
            else:
                self.there_before.remove(record)
            if self._freed is not None:
                self._freed(record)

        return gone

    def of(self, tensor: Tensor) -> Storage | None:
        """The record of a tensor's memory, where it is followed; None of what torch.func wraps."""
        try:
            return self.live.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:
            return None

    def categorize(self, tensors: Iterable[Tensor], category: str) -> None:
        """Say what live storages turned out to be, back to their birth."""
        for tensor in tensors_in([self._local(each) for each in tensors]):
            record = self.of(tensor)
            if record is not None:
                record.category = category

    def forget_freed(self) -> None:
        """Drop records of freed memory."""
        self._every.clear()

    def lives(self) -> Iterator[TensorLife]:
        """Every piece of memory of the step, in the order of their births."""
        for storage in self._every:
            origin = storage.origin
            if origin is None or not storage.nbytes or (origin.born < 0 and origin.died == -1):
                continue
            facts: Kwargs = {"name": origin.name, "shape": origin.shape, "dtype": origin.dtype}
            facts |= {"path": origin.path, "line": origin.line, "born": origin.born, "died": origin.died}
            phase = "" if origin.born < 0 else storage.phase
            yield TensorLife(nbytes=storage.nbytes, category=storage.category, phase=phase, **facts)


EXACT, BOUND, ASSUMED = "exact", "bound", "assumed"
_ORDER = (EXACT, BOUND, ASSUMED)
# Results have the size of the first argument, whatever is put into it.
_INTO = names("""
    index_add index_copy index_put scatter scatter_add scatter_reduce masked_scatter select_scatter slice_scatter
""")
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
        dims = {dim for output in outputs for dim in output.shape}
        self._sizes |= {number: basis for number, basis in found.items() if number in dims}
        basis = _worst(
            (*(each for number, each in found.items() if number in dims), *(_basis(known.of(each)) for each in resting))
        )
        if name == "index_put" and len(args) > 2 and any(each.dtype == torch.bool for each in tensors_in(args[1])):
            basis = _worst((basis, *(self._sizes.get(dim, EXACT) for dim in args[2].shape)))
        of_given_size = name in _OF_GIVEN_SIZE or not inputs  # which the program knows as a plain number
        if of_given_size:
            sizes = {dim: self._sizes[dim] for dim in dims & self._given if dim in self._sizes}
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
        by_storage = {id(record): output for output in outputs if (record := known.of(output)) is not None}
        for record in made:
            tensor = by_storage.get(id(record))
            if tensor is not None:
                record.basis = _worst(sizes.get(dim, EXACT) for dim in tensor.shape)
        return basis

    def of_records(self, arguments: Iterable[Storage | None], made: Iterable[Storage] = ()) -> str:
        """The basis of what is computed of these pieces of memory by no operator, as by a compiled kernel.

        What it ``made`` gets a basis by the size that it was made in.
        """
        basis = _worst(_basis(argument) for argument in arguments)
        for record in made if basis != EXACT else ():
            if record.origin is not None:
                record.basis = _worst(self._sizes.get(dim, EXACT) for dim in record.origin.shape)
        return basis

    def _learn(self, dims: set[int], inputs: list[Tensor], args: Any, basis: str) -> None:
        """What is no size of an input and was not given as a number is made of assumed sizes, as by ``cat``."""
        explained = {1, 0} | {dim for tensor in inputs for dim in tensor.shape} | set(_numbers(args))
        for dim in dims - explained:
            self._sizes[dim] = _worst((self._sizes.get(dim, EXACT), basis))


def _basis(record: Storage | None) -> str:
    return EXACT if record is None else record.basis


def _worst(bases: Iterable[str]) -> str:
    return max(bases, key=_ORDER.index, default=EXACT)


def _numbers(args: Any) -> Iterator[int]:
    if isinstance(args, (list, tuple)):
        for argument in args:
            yield from _numbers(argument)
    elif isinstance(args, int):
        yield int(args)
