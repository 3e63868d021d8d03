"""Tensors by format and shape, and einsums of them: bytes, sizes, FLOPs, and the cheapest order of many operands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import mul

from trainledger.ledger.rules import FLOPS_PER_ELEMENT
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import NotAQuantity, counted, parse_count
from trainledger.tensors.number import known_format
from trainledger.tensors.strided import row_major

MOST_DIMS = 64  # of a torch tensor
LARGEST = 10**18
_FORM = re.compile(r"\s*([\w.\-]+)\s*[\[(](.*)[\])]\s*", re.ASCII)


@frozen
class Tensor:
    """A tensor in row-major order; ``strides`` are steps in elements, one for each dim.

    >>> tensor = Tensor("fp32", (4, 8))
    >>> tensor.nbytes, tensor.strides
    (128, (8, 1))
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return reduce(mul, self.shape, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements; in a format of blocks with their scales."""
        nbytes: int = nbytes_in(self.elements, self.dtype)
        return nbytes

    @property
    def strides(self) -> tuple[int, ...]:
        return row_major(self.shape)

    @property
    def elementwise_flops(self) -> int:
        """FLOPs of one operation on each element, such as ReLU or a square (`ledger.rules`: one per element)."""
        return FLOPS_PER_ELEMENT["elementwise"] * self.elements

    @property
    def elementwise_nbytes(self) -> int:
        """Bytes that such an operation moves: the tensor read, and a result of its size written."""
        return 2 * self.nbytes

    @property
    def elementwise_intensity(self) -> float:
        """FLOPs per byte of such an operation.

        >>> Tensor("bf16", (1024, 512)).elementwise_intensity
        0.25
        """
        return self.elementwise_flops / self.elementwise_nbytes if self.elements else 0.0


def read_tensor(text: str) -> Tensor:
    """A tensor from text such as ``float32[4,8]``; `InvalidInput` with a sentence otherwise.

    >>> read_tensor("float32[4,8]"), read_tensor("torch.bfloat16(4, 8)").nbytes
    (Tensor(dtype='fp32', shape=(4, 8)), 64)
    """
    match = _FORM.fullmatch(text[:1000])
    if match is None:
        rule = "must be a format and a shape in brackets"
        raise InvalidInput([Problem("tensor", text, rule, _nearest(text))])
    return Tensor(known_format(match[1], "tensor"), read_shape(match[2], "tensor"))


def read_shape(text: str, field: str = "shape") -> tuple[int, ...]:
    """Sizes from text such as ``4,8`` or ``4x8``; nothing is a single number's shape. `InvalidInput` otherwise.

    >>> read_shape("4,8"), read_shape("49152x12288"), read_shape("")
    ((4, 8), (49152, 12288), ())
    """
    if not text.strip():
        return ()
    words = [part.strip() for part in re.split(r"[,x×*]", text.strip().rstrip(","))]
    if len(words) > MOST_DIMS:
        raise InvalidInput([Problem(field, text, f"has {len(words)} dims; a tensor has at most {MOST_DIMS}")])
    sizes = [_size_of(word, text, field) for word in words]
    if reduce(mul, sizes, 1) > LARGEST:
        raise InvalidInput([Problem(field, text, f"has more than {LARGEST:.0e} elements".replace("+", ""))])
    return tuple(sizes)


def _size_of(word: str, text: str, field: str) -> int:
    rule = "has dims that are no whole numbers of elements; write it like 4,8"
    try:
        size = parse_count(word)
    except NotAQuantity as error:
        near = text.replace(word, str(error.nearest)) if word and error.nearest is not None else None
        raise InvalidInput([Problem(field, text, f"{rule} ({word!r} is none)", near)]) from None
    if size < 0:
        raise InvalidInput([Problem(field, text, "has a dim below 0", text.replace(word, str(-size)))])
    return size


def _nearest(text: str) -> str:
    """The text in the form that is read, where a format and sizes can be made out."""
    name = re.match(r"\s*([A-Za-z][\w.]*)", text)
    sizes = re.findall(r"\d+", text[name.end() :] if name else text)
    known = name[1] if name else "float32"
    try:
        known_format(known, "tensor")
    except InvalidInput:
        known = "float32"
    return f"{known}[{','.join(sizes[:MOST_DIMS]) or '4,8'}]"


MOST_OPERANDS = 10  # every order is tried: 3^operands pairs of groups
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
Indices = tuple[str, ...]


@frozen
class Step:
    """One product of two operands (or what one operand alone becomes): its equation, and what it costs.

    ``flops`` counts a multiplication and an addition for each term where indices are summed, else one operation for
    each element. ``matmul`` is the (batch, m, n, k) of the matmuls [m, k] @ [k, n] that it is: indices of both operands
    and the result, of one of them, and those that are summed. None where nothing is summed over two operands, or an
    index is summed of one alone.
    """

    equation: str
    shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    flops: int
    read_elements: int
    written_elements: int
    matmul: tuple[int, int, int, int] | None = None


@frozen
class Einsum:
    """An equation with its sizes; ``steps`` are in the order with the fewest FLOPs."""

    equation: str
    sizes: dict[str, int]
    dtype: str
    steps: tuple[Step, ...]
    at_once_flops: int
    operands: tuple[tuple[int, ...], ...] = ()

    @property
    def flops(self) -> int:
        return sum(step.flops for step in self.steps)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.steps[-1].shape

    @property
    def view(self) -> bool:
        """Whether torch only looks at its one operand in another order, without arithmetic and without a copy."""
        return len(self.steps) == 1 and len(self.steps[0].shapes) == 1 and not self.flops

    @property
    def nbytes(self) -> int:
        """Bytes read and written by all steps, what lies between them included."""
        return sum(nbytes_in(step.read_elements + step.written_elements, self.dtype) for step in self.steps)

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.nbytes if self.nbytes else 0.0


def einsum(equation: str, shapes: Sequence[Sequence[int]], dtype: str = "fp32") -> Einsum:
    """The account of ``numpy.einsum(equation, *operands)`` or, with words for indices, of ``einops.einsum``.

    Words are separated by spaces; an ellipsis is all dims without a name, which must agree in all operands.
    `InvalidInput` with a sentence where the equation and the shapes do not agree.

    >>> einsum("ij,jk->ik", [(1024, 512), (512, 256)]).flops
    268435456
    >>> [each.equation for each in einsum("ij,jk,kl->il", [(2, 1000), (1000, 1000), (1000, 2)]).steps]
    ['ij,jk->ik', 'ik,kl->il']
    >>> einsum("batch seq d_model, d_model d_ff -> batch seq d_ff", [(2, 8, 4), (4, 16)]).sizes
    {'batch': 2, 'seq': 8, 'd_model': 4, 'd_ff': 16}
    """
    inputs, output = _spread(equation, *_read(equation, shapes), shapes)
    _check(equation, inputs, output)
    sizes = _sizes(equation, inputs, shapes)
    whole = _step([*inputs], output, sizes)
    steps = (whole,) if len(inputs) == 1 else tuple(_best(inputs, output, sizes))
    at_once = _flops({index for indices in inputs for index in indices}, output, sizes, len(inputs))
    return Einsum(_said(inputs, output), sizes, dtype, steps, at_once, whole.shapes)


def _said(inputs: Sequence[Indices], output: Indices) -> str:
    """An equation as text: letters unchanged, words with spaces."""
    if all(len(index) == 1 for indices in (*inputs, output) for index in indices):
        return f"{','.join(map(''.join, inputs))}->{''.join(output)}"
    return f"{', '.join(map(' '.join, inputs))} -> {' '.join(output)}"


def _read(equation: str, shapes: Sequence[Sequence[int]]) -> tuple[list[Indices], Indices | None]:
    """The indices of each operand and of the result (None without an arrow): letters, or words that spaces part."""
    left, arrow, right = equation.replace("...", " ... ").partition("->")
    operands = [tuple(part.split()) for part in left.split(",")]
    result = tuple(right.split()) if arrow else None
    if not _in_words(operands, result, shapes):
        plain = [_letters(operand) for operand in operands]
        operands, result = plain, None if result is None else _letters(result)
    every = [*(index for indices in operands for index in indices), *(result or ())]
    strange = next((each for each in every if each != "..." and not _NAME.fullmatch(each)), None)
    if strange is not None or not equation.strip() or (arrow and "->" in right):
        rule = "is letters for indices, commas between operands and -> before the result"
        raise InvalidInput([Problem("equation", equation, rule, "ij,jk->ik")])
    if len(operands) > MOST_OPERANDS:
        rule = f"has {len(operands)} operands, more than {MOST_OPERANDS}"
        raise InvalidInput([Problem("equation", equation, rule)])
    return operands, result


def _letters(words: Indices) -> Indices:
    return tuple(letter for word in words for letter in ((word,) if word == "..." else word))


def _in_words(operands: Sequence[Indices], result: Indices | None, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether spaces separate indices: where words are side by side, are none of letters, or as shapes ask."""
    sides = [*operands, result or ()]
    names = [[each for each in side if each != "..."] for side in sides]
    long = [each for side in names for each in side if len(each) > 1]
    if any(len(side) > 1 and any(len(each) > 1 for each in side) for side in names):
        return True
    if any("_" in each for each in long):
        return True
    counts = [len(shape) for shape in shapes]
    fits = [len(operand) for operand in operands] == counts and [
        len(_letters(operand)) for operand in operands
    ] != counts
    return bool(long) and fits and not any("..." in operand for operand in operands)


def _spread(
    equation: str, inputs: Sequence[Indices], output: Indices | None, shapes: Sequence[Sequence[int]]
) -> tuple[list[Indices], Indices]:
    """Operands and result with a name for each dim of an ellipsis; without an arrow, the result that torch takes."""
    many = {len(shape) - len(each) + 1 for each, shape in zip(inputs, shapes, strict=False) if "..." in each}
    if any(each.count("...") > 1 for each in (*inputs, output or ())):
        raise InvalidInput([Problem("equation", equation, "has two ellipses in one operand")])
    if len(many) > 1 or min(many, default=0) < 0:
        rule = "has an ellipsis of different numbers of dims in its operands; name them"
        raise InvalidInput([Problem("equation", equation, rule)])
    names = tuple(f"...{at}" for at in range(max(many, default=0)))
    found = [tuple(name for each in side for name in (names if each == "..." else (each,))) for side in inputs]
    if output is None:
        every = [each for side in found for each in side if each not in names]
        return found, (*names, *sorted(each for each in set(every) if every.count(each) == 1))
    if "..." in output and not any("..." in tensor for tensor in inputs):
        raise InvalidInput([Problem("equation", equation, "has an ellipsis in the result and in no operand")])
    return found, tuple(name for each in output for name in (names if each == "..." else (each,)))


def _check(equation: str, inputs: Sequence[Indices], output: Indices) -> None:
    every = {each for indices in inputs for each in indices}
    for index in output:
        if index not in every:
            near = _said(inputs, tuple(each for each in output if each != index))
            rule = f"has {index} in the result but in no operand"
            raise InvalidInput([Problem("equation", equation, rule, near)])
        if output.count(index) > 1:
            near = _said(inputs, tuple(dict.fromkeys(output)))
            raise InvalidInput([Problem("equation", equation, f"has {index} twice in the result", near)])


def _sizes(equation: str, inputs: Sequence[Indices], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    if len(inputs) != len(shapes):
        rule = f"has {counted(len(inputs), 'operand')}, but {counted(len(shapes), 'shape')} given (as in 8,16 16,4)"
        raise InvalidInput([Problem("equation", equation, rule)])
    sizes: dict[str, int] = {}
    said: dict[str, str] = {}
    for number, (indices, shape) in enumerate(zip(inputs, shapes, strict=True), start=1):
        given = ",".join(map(str, shape))
        if len(indices) != len(shape):
            shown = _said([indices], ()).partition("->")[0].strip()
            rule = f"has {len(shape)} dims, and operand {number} of the equation has {len(indices)} ({shown})"
            raise InvalidInput([Problem(f"shape {number}", given, rule)])
        for index, size in zip(indices, shape, strict=True):
            if sizes.setdefault(index, size) != size:
                near = ",".join(str(sizes.get(each, shape[at])) for at, each in enumerate(indices))
                rule = f"has {index} = {size}, and {said[index]} has {index} = {sizes[index]}"
                raise InvalidInput([Problem(f"shape {number}", given, rule, near)])
            said.setdefault(index, f"shape {number}")
    return sizes


def _product(indices: Iterable[str], sizes: dict[str, int]) -> int:
    return reduce(mul, (sizes[index] for index in indices), 1)


def _flops(indices: set[str], output: Indices, sizes: dict[str, int], operands: int) -> int:
    """A product of all operands for each combination of indices, and an addition where some are summed."""
    summed = indices - set(output)
    return _product(indices, sizes) * (operands - 1 + bool(summed))


def _step(inputs: Sequence[Indices], output: Indices, sizes: dict[str, int]) -> Step:
    return Step(
        equation=_said(inputs, output),
        shapes=tuple(tuple(sizes[index] for index in indices) for indices in inputs),
        shape=tuple(sizes[each] for each in output),
        flops=_flops({index for indices in inputs for index in indices}, output, sizes, len(inputs)),
        read_elements=sum(_product(tensor, sizes) for tensor in inputs),
        written_elements=_product(output, sizes),
        matmul=_matmul(inputs, output, sizes),
    )


def _matmul(inputs: Sequence[Indices], output: Indices, sizes: dict[str, int]) -> tuple[int, int, int, int] | None:
    """The matmuls that a product of two operands is, by the role of each index.

    >>> einsum("bthd,bshd->bhts", [(2, 64, 8, 16), (2, 32, 8, 16)]).steps[0].matmul
    (16, 64, 32, 16)
    >>> einsum("ij,jk->k", [(4, 8), (8, 2)]).steps[0].matmul is None
    True
    """
    if len(inputs) != 2 or any(not size for size in sizes.values()):
        return None
    first, second, kept = (set(each) for each in (*inputs, output))
    summed = (first | second) - kept
    if not summed or summed != (first & second) - kept:
        return None
    groups = (first & second & kept, first - second, second - first, summed)
    batch, m, n, k = (_product(group, sizes) for group in groups)
    return batch, m, n, k


def _best(inputs: Sequence[Indices], output: Indices, sizes: dict[str, int]) -> Iterable[Step]:
    """The pairwise order with the fewest FLOPs, of equal ones that which writes least: every split is tried."""
    count = len(inputs)
    every = (1 << count) - 1

    def left_of(group: int) -> Indices:
        """The indices that a group's product keeps: those that others or the result still need."""
        inside = dict.fromkeys(each for at in range(count) if group >> at & 1 for each in inputs[at])
        needed = {*output, *(each for at in range(count) if not group >> at & 1 for each in inputs[at])}
        return output if group == every else tuple(each for each in inside if each in needed)

    kept = {1 << at: inputs[at] for at in range(count)}
    cost: dict[int, tuple[int, int]] = {1 << at: (0, 0) for at in range(count)}
    split: dict[int, tuple[int, int]] = {}
    for group in sorted(range(1, every + 1), key=int.bit_count):
        if group in cost:
            continue
        kept[group] = left_of(group)
        part = (group - 1) & group
        while part:
            rest = group ^ part
            if part > rest:  # each pair once
                flops = _flops({*kept[part], *kept[rest]}, kept[group], sizes, 2)
                written = _product(kept[group], sizes)
                total = (cost[part][0] + cost[rest][0] + flops, cost[part][1] + cost[rest][1] + written)
                if group not in cost or total <= cost[group]:  # of equal ones from the left
                    cost[group], split[group] = total, (min(part, rest), max(part, rest))
            part = (part - 1) & group

    def walk(group: int) -> Iterable[Step]:
        if group in split:
            first, second = sorted(split[group], key=lambda each: (each & -each).bit_length())
            yield from walk(first)
            yield from walk(second)
            yield _step([kept[first], kept[second]], kept[group], sizes)

    return walk(every)
