"""Adafactor as torch.optim runs it: rows and columns of the second moment instead of all of it.

Shazeer and Stern 2018 (arXiv 1804.04235). The second moment itself is put together from its factors for each update,
a temporary of the parameter's size: of one tensor (loop) or of all (foreach, which also has it for the update).
"""

from __future__ import annotations

from collections.abc import Callable

from trainledger.ledger.core.graph import Array, Leaf
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.optimizers.groups import (
    Group,
    Lines,
    count_step,
    count_steps,
    read_number,
    read_steps,
    remains,
    weight_gradient_moment,
)
from trainledger.ledger.optimizers.states import columns_of, rows_of
from trainledger.ledger.rules import matmul_flops


def adafactor_loop(tape: Tape, group: Group) -> None:
    """Tensor by tensor; the names of the code of torch's, as each holds its array until the next tensor's takes it."""
    lines = Lines(tape)
    row_mean: Array | None = None
    col_mean: Array | None = None
    square: Array | None = None
    estimate: Array | None = None
    update: Array | None = None
    for leaf in tape.each_parameter(group):
        w, g, m = weight_gradient_moment(tape, leaf.elements)
        count_step(tape)
        read_number(tape)
        _norm_read(tape, w)
        if group.decay:
            lines.changed("mul", w)
        if len(leaf.shape) > 1:
            row_var, col_var = _factors(leaf, m)
            fresh = _norms(tape, g, row_var.elements)
            lines.changed("pow", fresh)
            lines.changed("div", fresh)
            row_mean = fresh
            lines.changed("lerp", row_var, row_mean)
            fresh = _norms(tape, g, col_var.elements)
            lines.changed("pow", fresh)
            lines.changed("div", fresh)
            col_mean = fresh
            lines.changed("lerp", col_var, col_mean)
            estimate = fresh = _product(tape, leaf, row_var, col_var)
            mean = _mean(tape, leaf, row_var)
            lines.changed("clamp", mean)
            lines.changed("div", estimate, mean)
            del mean
        else:
            square = fresh = lines.made("mul", g, g)
            lines.changed("lerp", m, square)
            estimate = fresh = _clone(tape, m)
        lines.changed("clamp", fresh)
        lines.changed("rsqrt", fresh)
        update = fresh
        del fresh
        lines.changed("mul", update, g)
        _norm_read(tape, update)
        lines.changed("add", w, update)
    del row_mean, col_mean, square, estimate, update


def adafactor_foreach(tape: Tape, group: Group) -> None:
    """Matrices and vectors apart, in the order in which the first of each comes; norms and products one by one."""
    parts = [group.among(lambda leaf: len(leaf.shape) > 1), group.among(lambda leaf: len(leaf.shape) < 2)]
    if len(group.first().shape) < 2:
        parts.reverse()
    lines = Lines(tape, foreach=True)
    squares: Array | None = None
    estimates: list[Array] = []
    updates: list[Array] = []
    for part in parts:
        if part.empty:
            continue
        w, g, m = weight_gradient_moment(tape, part.elements)
        count_steps(tape, part.tensors)
        read_steps(tape, 3 * part.tensors)
        for leaf in tape.each_parameter(part):
            _norm_read(tape, weight_gradient_moment(tape, leaf.elements)[0])
        if part.decay:
            lines.changed("mul", w)
        if len(part.first().shape) > 1:
            for count in (rows_of, columns_of):
                _lerp_means(tape, part, lines, count)
            fresh = []
            for leaf in tape.each_parameter(part):
                fresh.append(remains(_product(tape, leaf, *_factors(leaf, m))))
            estimates = fresh
            means = []
            for leaf in tape.each_parameter(part):
                means.append(remains(_mean(tape, leaf, _factors(leaf, m)[0])))
            all_means = Array(part.total(lambda leaf: _matrices(leaf)), m.dtype, None)
            lines.changed("clamp_min", all_means)
            lines.changed("div", Array(part.elements, m.dtype, None), all_means)
            del means
        else:
            squares = lines.made("mul", g, g)
            lines.changed("lerp", m, squares)
            squares = None
            fresh = []
            for leaf in tape.each_parameter(part):
                fresh.append(remains(_clone(tape, Array(leaf.elements, m.dtype, None))))
            estimates = fresh
        del fresh
        every = Array(part.elements, m.dtype, None)
        lines.changed("clamp_min", every)
        lines.changed("rsqrt", every)
        lines.changed("mul", every, g)
        updates = estimates
        for leaf in tape.each_parameter(part):
            _norm_read(tape, Array(leaf.elements, m.dtype, None))
        lines.changed("mul", every)
        lines.changed("add", w, every)
    del estimates, updates


def _lerp_means(tape: Tape, part: Group, lines: Lines, count: Callable[[tuple[Int, ...]], Int]) -> None:
    """Mean squares of all rows or columns, put into their factors."""
    means = []
    for leaf in tape.each_parameter(part):
        _, g, m = weight_gradient_moment(tape, leaf.elements)
        means.append(remains(_norms(tape, g, count(leaf.shape))))
    elements = part.total(lambda leaf: count(leaf.shape))
    squared, factor = Array(elements, tape.precision.updating, None), Array(elements, m.dtype, None)
    lines.changed("mul", squared, squared)
    lines.changed("div", squared)
    lines.changed("lerp", factor, squared)


def _factors(leaf: Leaf, moment: Array) -> tuple[Array, Array]:
    shape, dtype = leaf.shape, moment.dtype
    return Array(rows_of(shape), dtype, None), Array(columns_of(shape), dtype, None)


def _matrices(leaf: Leaf) -> Int:
    return rows_of(leaf.shape) // leaf.shape[-2]


def _norms(tape: Tape, g: Array, elements: Int) -> Array:
    made = tape.emit("linalg_vector_norm", "reduction", reads=[g], makes=[(elements, g.dtype)], flops=g.elements)
    return made[0]


def _norm_read(tape: Tape, x: Array) -> None:
    """The host reads the norm of one tensor."""
    norm = _norms(tape, x, 1)
    read_number(tape, norm.dtype)


def _product(tape: Tape, leaf: Leaf, rows: Array, columns: Array) -> Array:
    """The second moment from its factors: a column times a row for each matrix."""
    *stack, height, width = leaf.shape
    name = "bmm" if stack else "mm"
    shape = (_matrices(leaf), height, width, 1)
    flops = matmul_flops(height, width, 1, _matrices(leaf))
    makes = [(leaf.elements, rows.dtype)]
    return tape.emit(name, "matmul", reads=[rows, columns], makes=makes, flops=flops, shape=shape)[0]


def _mean(tape: Tape, leaf: Leaf, rows: Array) -> Array:
    makes = [(_matrices(leaf), rows.dtype)]
    return tape.emit("mean", "reduction", reads=[rows], makes=makes, flops=rows.elements)[0]


def _clone(tape: Tape, x: Array) -> Array:
    return tape.emit("clone", "copy", reads=[x], makes=[(x.elements, x.dtype)])[0]
