"""A product of tensors in Einstein's notation: sizes, FLOPs, and the cheapest order of many operands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import mul

from trainledger.dtypes import nbytes_in
from trainledger.frozen import frozen
from trainledger.predict.roofline import Machine, peak_rate
from trainledger.spec.problem import InvalidInput, Problem

MOST_OPERANDS = 10  # every order is tried: 3^operands pairs of groups


@frozen
class Step:
    """One product of two operands (or what one operand alone becomes): its equation, and what it costs.

    ``flops`` counts a multiplication and an addition for each term where indices are summed, else one operation for
    each element.
    """

    equation: str
    shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    flops: int
    read_elements: int
    written_elements: int


@frozen
class Einsum:
    """An equation with its sizes; ``steps`` are in the order with the fewest FLOPs."""

    equation: str
    sizes: dict[str, int]
    dtype: str
    steps: tuple[Step, ...]
    at_once_flops: int

    @property
    def flops(self) -> int:
        return sum(each.flops for each in self.steps)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.steps[-1].shape

    @property
    def nbytes(self) -> int:
        """Bytes read and written by all steps, what lies between them included."""
        return sum(nbytes_in(each.read_elements + each.written_elements, self.dtype) for each in self.steps)

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.nbytes if self.nbytes else 0.0

    def seconds(self, machine: Machine) -> tuple[float, float]:
        """Least seconds to compute and to move, from the machine's peaks; NoRate where one is not known."""
        from trainledger.predict.roofline import NoRate

        bandwidth = machine.memory_bytes_per_second
        if bandwidth is None:
            raise NoRate(f"{machine.title} has no memory bandwidth on record")
        return self.flops / peak_rate(machine, self.dtype), self.nbytes / bandwidth


def einsum(equation: str, shapes: Sequence[Sequence[int]], dtype: str = "fp32") -> Einsum:
    """The account of ``numpy.einsum(equation, *operands)``; `InvalidInput` with a sentence where it has none.

    >>> einsum("ij,jk->ik", [(1024, 512), (512, 256)]).flops
    268435456
    >>> [each.equation for each in einsum("ij,jk,kl->il", [(2, 1000), (1000, 1000), (1000, 2)]).steps]
    ['ij,jk->ik', 'ik,kl->il']
    """
    inputs, output = _read(equation)
    sizes = _sizes(equation, inputs, shapes)
    whole = _step([*inputs], output, sizes)
    if len(inputs) == 1:
        steps: tuple[Step, ...] = (whole,)
    else:
        steps = tuple(_best(inputs, output, sizes))
    return Einsum(f"{','.join(inputs)}->{output}", sizes, dtype, steps, _flops(set("".join(inputs)), output, sizes,
                                                                              len(inputs)))  # fmt: skip


def _read(equation: str) -> tuple[list[str], str]:
    """The indices of each operand and of the result; without an arrow those that come once, in order."""
    plain = equation.replace(" ", "")
    left, arrow, output = plain.partition("->")
    inputs = left.split(",")
    if "..." in plain:
        rule = "names all its indices here, an ellipsis is not read"
        raise InvalidInput([Problem("equation", equation, rule, "bij,bjk->bik")])
    strange = next((each for each in "".join((*inputs, output)) if not (each.isascii() and each.isalpha())), None)
    if strange is not None or not plain:
        rule = "is letters for indices, commas between operands and -> before the result"
        raise InvalidInput([Problem("equation", equation, rule, "ij,jk->ik")])
    if len(inputs) > MOST_OPERANDS:
        raise InvalidInput([Problem("equation", equation, f"has {len(inputs)} operands, more than {MOST_OPERANDS}")])
    every = "".join(inputs)
    if not arrow:
        return inputs, "".join(sorted(each for each in set(every) if every.count(each) == 1))
    for index in output:
        if index not in every:
            near = f"{left}->{output.replace(index, '')}"
            raise InvalidInput([Problem("equation", equation, f"has {index} in the result but in no operand", near)])
        if output.count(index) > 1:
            near = f"{left}->{''.join(dict.fromkeys(output))}"
            raise InvalidInput([Problem("equation", equation, f"has {index} twice in the result", near)])
    return inputs, output


def _sizes(equation: str, inputs: Sequence[str], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    if len(inputs) != len(shapes):
        rule = f"has {len(inputs)} operands, and {len(shapes)} shapes are given"
        raise InvalidInput([Problem("equation", equation, rule)])
    sizes: dict[str, int] = {}
    said: dict[str, str] = {}
    for number, (indices, shape) in enumerate(zip(inputs, shapes, strict=True), start=1):
        given = ",".join(map(str, shape))
        if len(indices) != len(shape):
            rule = f"has {len(shape)} dims, and operand {number} of the equation has {len(indices)} ({indices})"
            raise InvalidInput([Problem(f"shape {number}", given, rule)])
        for index, size in zip(indices, shape, strict=True):
            if sizes.setdefault(index, size) != size:
                near = ",".join(str(sizes.get(each, shape[at])) for at, each in enumerate(indices))
                rule = f"has {index} = {size}, and {said[index]} has {index} = {sizes[index]}"
                raise InvalidInput([Problem(f"shape {number}", given, rule, near)])
            said.setdefault(index, f"shape {number}")
    return sizes


def _product(indices: Iterable[str], sizes: dict[str, int]) -> int:
    return reduce(mul, (sizes[each] for each in indices), 1)


def _flops(indices: set[str], output: str, sizes: dict[str, int], operands: int) -> int:
    """A product of all operands for each combination of indices, and an addition where some are summed."""
    summed = indices - set(output)
    return _product(indices, sizes) * (operands - 1 + bool(summed))


def _step(inputs: Sequence[str], output: str, sizes: dict[str, int]) -> Step:
    return Step(
        equation=f"{','.join(inputs)}->{output}",
        shapes=tuple(tuple(sizes[each] for each in indices) for indices in inputs),
        shape=tuple(sizes[each] for each in output),
        flops=_flops(set("".join(inputs)), output, sizes, len(inputs)),
        read_elements=sum(_product(each, sizes) for each in inputs),
        written_elements=_product(output, sizes),
    )


def _best(inputs: list[str], output: str, sizes: dict[str, int]) -> Iterable[Step]:
    """The pairwise order with the fewest FLOPs, of equal ones that which writes least: every split is tried."""
    count = len(inputs)
    every = (1 << count) - 1

    def left_of(group: int) -> str:
        """The indices that a group's product keeps: those that others or the result still need."""
        inside = dict.fromkeys("".join(inputs[at] for at in range(count) if group >> at & 1))
        needed = {*output, *"".join(inputs[at] for at in range(count) if not group >> at & 1)}
        return output if group == every else "".join(each for each in inside if each in needed)

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
