"""Joint clipping, and the updates: by lines of `update_rules`, and the code of Muon, 8-bit Adam and Adafactor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainledger.ledger.core.graph import Array, Leaf, ModelLeaves
from trainledger.ledger.core.sizes import share
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Group as Ranks
from trainledger.ledger.entry import Int
from trainledger.ledger.optimizers.states import BLOCK, blocks_of, columns_of, is_small, rows_of, state_nbytes_of
from trainledger.ledger.optimizers.update_rules import (
    RULES,
    Group,
    count_step,
    count_steps,
    foreach,
    fused,
    groups_of,
    loop,
    norms,
    read_number,
    read_steps,
    run_lines,
    weight_gradient_moment,
    widest,
)
from trainledger.ledger.rules import matmul_flops
from trainledger.spec.recipe import Recipe


def update(tape: Tape, leaves: ModelLeaves, recipe: Recipe, sharing: Ranks | None = None) -> None:
    """The optimizer's step over all its groups, and the average of the weights after it; ``sharing`` are the ranks that
    have rows of each parameter."""
    for group in groups_of(leaves, recipe):
        _update(tape, group, recipe, sharing)
    if recipe.ema is not None:
        average, weights = (Array(leaves.trained().elements, tape.precision.updated, None) for _ in range(2))
        tape.change("_foreach_lerp_", average, weights)


def _update(tape: Tape, group: Group, recipe: Recipe, sharing: Ranks | None) -> None:
    """By the rule's lines, or by the code of an optimizer without lines."""
    way = recipe.optimizer.implementation
    if group.rule == "muon":
        muon(tape, group, sharing)
    elif group.rule in ("adam-8bit", "adamw-8bit"):
        (adam_8bit_fused if way == "fused" else adam_8bit_loop)(tape, group, recipe)
    elif group.rule == "adafactor":
        (adafactor_foreach if way == "foreach" else adafactor_loop)(tape, group)
    else:
        {"fused": fused, "foreach": foreach, "loop": loop}[way](tape, group, recipe)


def clip(tape: Tape, leaves: ModelLeaves, *, foreach: bool) -> list[Array]:
    """The joint L2 norm of all gradients, and all gradients scaled by it (Pascanu et al. 2013)."""
    group = leaves.trained()
    dtype = tape.precision.updating
    elements, tensors = group.elements, group.tensors
    everything = Array(elements, dtype, None)
    arrays: list[Array] = []
    if foreach:
        arrays += tape.emit("_foreach_norm", "reduction", reads=[everything], makes=[(tensors, dtype)], flops=elements)
    else:
        arrays += [norms(tape, gradient, 1).of_each_round() for gradient in _gradients(tape, leaves, dtype)]
    stacked = tape.make("stack", "copy", Array(tensors, dtype, None))
    total = norms(tape, stacked, 1)
    arrays.clear()
    del stacked
    # torch/nn/utils/clip_grad.py (2.13): max_norm / (total_norm + 1e-6), clamped and always multiplied in, as a
    # condition would make the host wait for the norm.
    shifted = tape.pointwise("add", total)
    inverse = tape.pointwise("reciprocal", shifted)
    scale = tape.pointwise("mul", inverse)
    del shifted, inverse
    clamped = tape.pointwise("clamp", scale)
    if foreach:
        tape.change("_foreach_mul_", everything, clamped)
    else:
        for gradient in _gradients(tape, leaves, dtype):
            tape.change("mul_", gradient, clamped)
    return [total]


def _gradients(tape: Tape, leaves: ModelLeaves, dtype: str) -> Iterator[Array]:
    return (Array(leaf.elements, dtype, None) for leaf in tape.each_parameter(leaves.trained()))


COPIES_BF16 = False  # whether an update that is in bf16 already is copied first: torch does so since 2.15
ITERATIONS = 5  # torch.optim.Muon's ns_steps (Jordan et al. 2024, Muon: An optimizer for hidden layers)


def muon(tape: Tape, group: Group, sharing: Ranks | None = None) -> None:
    """Momentum with Nesterov's look ahead, orthogonalized in bf16; the decay's matmul runs even where it is 1.

    A matrix whose rows are on several ranks is gathered whole in bf16 on each, and orthogonalized.
    """
    update: Array | None = None
    for leaf in tape.each_parameter(group):
        w, g, m = weight_gradient_moment(tape, leaf.elements)
        tape.change("lerp_", m, g)
        update = tape.pointwise("lerp", g, m, dtype=widest(g, m))
        rows, columns = leaf.shape if leaf.whole is None else leaf.whole
        if sharing is not None:
            update = _gathered(tape, update, sharing, rows, columns)
        update = _orthogonal(tape, update, (rows + columns - abs(rows - columns)) // 2)
        tape.change("mul_", w)
        tape.change("add_", w, update.view(w.elements))
    del update


def _gathered(tape: Tape, update: Array, sharing: Ranks, rows: Int, columns: Int) -> Array:
    """A whole matrix from the ranks' rows, padded to as many on each."""
    part = tape.cast(update, "bf16")
    elements = share(rows, sharing.ranks) * columns
    payload = Array(elements * sharing.ranks, "bf16", None).nbytes
    makes = [(elements * sharing.ranks, "bf16")]
    (whole,) = tape.collective("all_gather", sharing, payload, reads=[part], makes=makes)
    return whole.view(rows * columns)


def _orthogonal(tape: Tape, g: Array, short: Int) -> Array:
    """Five times X -> a X + (b A + c A A) X with A = X X^T, of the matrix or its transpose, whichever is wide."""
    n = g.elements
    long = n // short
    as_it_is = g.dtype == "bf16" and not COPIES_BF16
    x = g if as_it_is else tape.cast(g, "bf16")
    norm = norms(tape, x, 1)
    norm = tape.pointwise("clamp", norm)
    tape.change("div_", x, norm)
    del norm
    # torch/optim/_muon.py (2.13), _zeropower_via_newtonschulz: bf16, the wide one of the matrix and its transpose,
    # ns_steps of a matmul and two addmm.
    square = short * short
    gram: Array | None = None
    polynomial: Array | None = None
    for _ in range(ITERATIONS):
        gram = _matmul(tape, "mm", (short, short, long), [x, x], square)
        polynomial = _matmul(tape, "addmm", (short, short, short), [gram, gram, gram], square)
        x = _matmul(tape, "addmm", (short, long, short), [x, polynomial, x], n)
    return x


def _matmul(tape: Tape, name: str, sizes: tuple[Int, Int, Int], reads: list[Array], elements: Int) -> Array:
    return tape.make(name, "matmul", *reads, elements=elements, flops=matmul_flops(*sizes), shape=(1, *sizes))


# Adam and AdamW with 8-bit moments: `engine.train.adam_8bit` has the moments of a tensor in fp32 while it updates it,
# bitsandbytes' kernel (Dettmers et al. 2022, section 2.2) updates element by element, without scratch.


VALUES = 256  # of a byte


def adam_8bit_loop(tape: Tape, group: Group, recipe: Recipe) -> None:
    """Small tensors as Adam does them, the others between reading and storing their moments.

    Arrays of sizes with a large one among them, and symbols, mean large tensors.
    """
    tables: list[Array] = []
    for leaf in tape.each_parameter(group):
        n = leaf.elements
        count_step(tape)
        if is_small(n):
            _rule(tape, group, recipe, n)
            continue
        if not tables:
            tables = _tables(tape)
        moments = [_read(tape, blocks_of(n)) for _ in range(2)]
        _rule(tape, group, recipe, n)
        for _ in range(2):
            _store(tape, moments.pop(0), blocks_of(n))


def adam_8bit_fused(tape: Tape, group: Group, recipe: Recipe) -> None:
    """One kernel over codes and scales, and over the fp32 moments of small tensors."""
    n = group.elements
    w, g, _ = weight_gradient_moment(tape, n)
    states = Array(group.total(lambda leaf: state_nbytes_of(leaf, recipe) - 4), "uint8", None)  # not the step counter
    flops = RULES[group.rule].flops * n
    name = f"_fused_{group.rule.replace('-', '_')}_"
    tape.emit(name, "update", reads=[g], changes=[w, states], flops=flops, basis="assumed")


def _tables(tape: Tape) -> list[Array]:
    """For either moment the values of a byte, and the bounds between them."""
    tables = []
    for _ in range(2):
        values = tape.make("lift_fresh", "copy", elements=VALUES, dtype="fp32")
        part = values.view(VALUES - 1)
        bounds = tape.pointwise("add", part, part)
        tape.change("div_", bounds)
        tables += [values, bounds]
    return tables


def _read(tape: Tape, blocks: Int) -> Array:
    """A stored moment in fp32, its last block padded."""
    n = blocks * BLOCK
    places = tape.cast(Array(n, "uint8", None), "int32")
    moment = tape.make("index_select", "embedding", Array(n, "fp32", None), places)
    del places
    tape.change("mul_", moment, Array(blocks, "fp32", None))
    return moment


def _store(tape: Tape, moment: Array, blocks: Int) -> None:
    """A moment's largest magnitude by block, and the place of each element's share of it."""
    n, scales = blocks * BLOCK, Array(blocks, "fp32", None)
    largest = norms(tape, moment, blocks)
    tape.emit("copy_", "copy", reads=[largest], changes=[scales])
    del largest
    above_zero = tape.pointwise("clamp", scales)
    tape.change("div_", moment, above_zero)
    del above_zero
    places = tape.make("bucketize", "embedding", moment, Array(VALUES - 1, "fp32", None), dtype="int32")
    tape.emit("copy_", "copy", reads=[places], changes=[Array(n, "uint8", None)])


def _rule(tape: Tape, group: Group, recipe: Recipe, n: Int) -> None:
    """Adam's rule on moments in fp32."""
    w, g, _ = weight_gradient_moment(tape, n)
    # No name but that in the dict holds the wide gradient, which is freed once decay has made another.
    arrays = {"w": w, "g": g, "m": Array(n, "fp32", None)}
    read_number(tape)
    if g.dtype != "fp32":
        arrays["g"] = tape.cast(g, "fp32")
    run_lines(tape, group, recipe, "8-bit", arrays)


# Adafactor (Shazeer and Stern 2018, arXiv 1804.04235) keeps rows and columns of the second moment instead of all of it.
# torch.optim puts the second moment together from its factors for each update, a temporary of the parameter's size: of
# one tensor (loop) or of all (foreach, which also has it for the update).


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
            # torch/optim/_adafactor.py (2.13): norms along a dim, squared and divided, are "the same as (g *
            # g).mean(dim=-1) w/o materializing an intermediate size g".
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
