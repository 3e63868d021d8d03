"""Adafactor as torch.optim runs it: rows and columns of the second moment instead of all of it.

Shazeer and Stern 2018 (arXiv 1804.04235). The second moment itself is put together from its factors for each update,
a temporary of the parameter's size: of one tensor (loop) or of all (foreach, which also has it for the update).
"""

from __future__ import annotations

from collections.abc import Callable

from trainledger.ledger.core.graph import Array, Leaf
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.optimizers.states import columns_of, rows_of
from trainledger.ledger.optimizers.update_rules import (
    Group,
    count_step,
    count_steps,
    norms,
    read_number,
    read_steps,
    weight_gradient_moment,
)
from trainledger.ledger.rules import matmul_flops


def adafactor_loop(tape: Tape, group: Group) -> None:
    """Tensor by tensor; the names of the code of torch's, as each holds its array until the next tensor's takes it."""
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
            tape.change("mul_", w)
        if len(leaf.shape) > 1:
            row_var, col_var = _factors(leaf, m)
            fresh = norms(tape, g, row_var.elements)
            tape.change("pow_", fresh)
            tape.change("div_", fresh)
            row_mean = fresh
            tape.change("lerp_", row_var, row_mean)
            fresh = norms(tape, g, col_var.elements)
            tape.change("pow_", fresh)
            tape.change("div_", fresh)
            col_mean = fresh
            tape.change("lerp_", col_var, col_mean)
            estimate = fresh = _product(tape, leaf, row_var, col_var)
            mean = _mean(tape, leaf, row_var)
            tape.change("clamp_", mean)
            tape.change("div_", estimate, mean)
            del mean
        else:
            square = fresh = tape.pointwise("mul", g, g)
            tape.change("lerp_", m, square)
            estimate = fresh = tape.make("clone", "copy", m)
        tape.change("clamp_", fresh)
        tape.change("rsqrt_", fresh)
        update = fresh
        del fresh
        tape.change("mul_", update, g)
        _norm_read(tape, update)
        tape.change("add_", w, update)
    del row_mean, col_mean, square, estimate, update


def adafactor_foreach(tape: Tape, group: Group) -> None:
    """Matrices and vectors apart, in the order in which the first of each comes; norms and products one by one."""
    parts = [group.among(lambda leaf: len(leaf.shape) > 1), group.among(lambda leaf: len(leaf.shape) < 2)]
    if len(group.first().shape) < 2:
        parts.reverse()
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
            tape.change("_foreach_mul_", w)
        if len(part.first().shape) > 1:
            for count in (rows_of, columns_of):
                _lerp_means(tape, part, count)
            fresh = []
            for leaf in tape.each_parameter(part):
                fresh.append(_product(tape, leaf, *_factors(leaf, m)).of_each_round())
            estimates = fresh
            means = []
            for leaf in tape.each_parameter(part):
                means.append(_mean(tape, leaf, _factors(leaf, m)[0]).of_each_round())
            all_means = Array(part.total(_matrices), m.dtype, None)
            tape.change("_foreach_clamp_min_", all_means)
            tape.change("_foreach_div_", Array(part.elements, m.dtype, None), all_means)
            del means
        else:
            squares = tape.pointwise("_foreach_mul", g, g)
            tape.change("_foreach_lerp_", m, squares)
            squares = None
            fresh = []
            for leaf in tape.each_parameter(part):
                fresh.append(tape.make("clone", "copy", Array(leaf.elements, m.dtype, None)).of_each_round())
            estimates = fresh
        del fresh
        every = Array(part.elements, m.dtype, None)
        tape.change("_foreach_clamp_min_", every)
        tape.change("_foreach_rsqrt_", every)
        tape.change("_foreach_mul_", every, g)
        updates = estimates
        for leaf in tape.each_parameter(part):
            _norm_read(tape, Array(leaf.elements, m.dtype, None))
        tape.change("_foreach_mul_", every)
        tape.change("_foreach_add_", w, every)
    del estimates, updates


def _lerp_means(tape: Tape, part: Group, count: Callable[[tuple[Int, ...]], Int]) -> None:
    """Mean squares of all rows or columns, put into their factors."""
    means = []
    for leaf in tape.each_parameter(part):
        _, g, m = weight_gradient_moment(tape, leaf.elements)
        means.append(norms(tape, g, count(leaf.shape)).of_each_round())
    elements = part.total(lambda leaf: count(leaf.shape))
    squared, factor = Array(elements, tape.precision.updating, None), Array(elements, m.dtype, None)
    tape.change("_foreach_mul_", squared, squared)
    tape.change("_foreach_div_", squared)
    tape.change("_foreach_lerp_", factor, squared)


def _factors(leaf: Leaf, moment: Array) -> tuple[Array, Array]:
    shape, dtype = leaf.shape, moment.dtype
    return Array(rows_of(shape), dtype, None), Array(columns_of(shape), dtype, None)


def _matrices(leaf: Leaf) -> Int:
    return rows_of(leaf.shape) // leaf.shape[-2]


def _norm_read(tape: Tape, x: Array) -> None:
    """The host reads the norm of one tensor."""
    norm = norms(tape, x, 1)
    read_number(tape, norm.dtype)


def _product(tape: Tape, leaf: Leaf, rows: Array, columns: Array) -> Array:
    """The second moment from its factors: a column times a row for each matrix."""
    *stack, height, width = leaf.shape
    shape = (_matrices(leaf), height, width, 1)
    flops = matmul_flops(height, width, 1, _matrices(leaf))
    return tape.make(
        "bmm" if stack else "mm", "matmul", rows, columns, elements=leaf.elements, flops=flops, shape=shape
    )


def _mean(tape: Tape, leaf: Leaf, rows: Array) -> Array:
    return tape.make("mean", "reduction", rows, elements=_matrices(leaf), flops=rows.elements)
