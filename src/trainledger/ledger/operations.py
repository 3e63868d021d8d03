"""Operations on a tape: for each, its cost forward, what it saves, and its cost backward.

They mirror what PyTorch's eager autograd runs for the same expression, operation by operation (torch 2.11 to
2.13; where a CPU and a CUDA build differ it is said). What each computes comes from `ledger.rules`.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.ledger import rules
from trainledger.ledger.array import Array, Leaf
from trainledger.ledger.entry import Int
from trainledger.ledger.tape import Gradients, Tape


def is_one(size: Int) -> bool:
    """Whether a size is known to be one; symbols, and arrays with another element, stand for the general case."""
    same = size == 1
    return bool(same.all()) if hasattr(same, "all") else bool(same)


# Formats


def cast(tape: Tape, x: Array, dtype: str) -> Array:
    """A copy in another format, or the array itself; the gradient is cast back."""
    if x.dtype == dtype:
        return x
    source_dtype = x.dtype
    (y,) = tape.emit("_to_copy", "copy", reads=[x], makes=[(x.elements, dtype)])

    def backward(g: Array) -> Gradients:
        return list(tape.emit("_to_copy", "copy", reads=[g], makes=[(g.elements, source_dtype)]))

    if x.node is not None:
        y.node = tape.node([x.node], (), backward)
    return y


def weight(tape: Tape, leaf: Leaf) -> Array:
    """A parameter as a matmul reads it: itself in fp32, its low-precision copy (made once) under autocast."""
    if tape.compute_dtype == "fp32":
        return leaf.array()
    known = tape.cast_of(leaf)
    if known is None:
        known = cast(tape, leaf.array(), tape.compute_dtype)
        tape.remember_cast(leaf, known)
    return known


# Matrix products


def linear(tape: Tape, x: Array, w: Leaf, b: Leaf | None, rows: Int, d_in: Int, d_out: Int) -> Array:
    """[rows, d_in] times a weight [d_out, d_in] plus a bias [d_out]."""
    bias = weight(tape, b) if b is not None else None
    matrix = weight(tape, w)
    x = cast(tape, x, tape.compute_dtype)
    flops = rules.matmul_flops(rows, d_out, d_in)
    dtype = x.dtype

    def input_gradient(g: Array, matrix: Array) -> Array:
        return tape.emit(
            "mm", "matmul", reads=[g, matrix], makes=[(rows * d_in, dtype)], flops=flops, model_flops=flops
        )[0]

    def weight_gradient(g: Array, x: Array) -> Array:
        return tape.emit("mm", "matmul", reads=[x, g], makes=[(d_in * d_out, dtype)], flops=flops, model_flops=flops)[0]

    def backward(g: Array, x: Array, matrix: Array) -> Gradients:
        # With a bias (addmm) autograd takes the input's gradient first and hands it on last; without (mm) the reverse.
        if bias_target is None:
            dw = weight_gradient(g, x)
            return [input_gradient(g, matrix), dw]
        dx = input_gradient(g, matrix)
        return [g, weight_gradient(g, x), dx]

    bias_target = bias.node if bias is not None else None
    if bias_target is None:
        node = tape.node([x.node, matrix.node], (x, matrix), backward)
    else:
        node = tape.node([bias_target, matrix.node, x.node], (x, matrix), backward, sums=[(0, d_out)])
    reads = [x, matrix] if bias is None else [bias, x, matrix]
    name = "mm" if bias is None else "addmm"
    (y,) = tape.emit(name, "matmul", reads=reads, makes=[(rows * d_out, dtype)], flops=flops, model_flops=flops)
    y.node = node
    return y


def batched_product(tape: Tape, a: Array, b: Array, batch: Int, m: Int, n: Int, k: Int) -> Array:
    """[batch, m, k] times [batch, k, n]."""
    flops = rules.matmul_flops(m, n, k, batch)

    def product(x: Array, y: Array, elements: Int) -> Array:
        makes = [(elements, x.dtype)]
        return tape.emit("bmm", "matmul", reads=[x, y], makes=makes, flops=flops, model_flops=flops)[0]

    def backward(g: Array, a: Array, b: Array) -> Gradients:
        db = product(a, g, b.elements)
        return [product(g, b, a.elements), db]

    node = tape.node([a.node, b.node], (a, b), backward)
    y = product(a, b, batch * m * n)
    y.node = node
    return y


# Elementwise


def add(tape: Tape, a: Array, b: Array) -> Array:
    """a + b in a's format; a gradient in b's format goes to b."""
    (y,) = tape.emit("add", "elementwise", reads=[a, b], makes=[(a.elements, a.dtype)], flops=a.elements)
    b_dtype, same = b.dtype, a.dtype == b.dtype

    def backward(g: Array) -> Gradients:
        if same:
            return [g, g]
        return [g, *tape.emit("_to_copy", "copy", reads=[g], makes=[(g.elements, b_dtype)])]

    y.node = tape.node([a.node, b.node], (), backward)
    return y


def subtract(tape: Tape, a: Array, b: Array) -> Array:
    """a - b."""
    (y,) = tape.emit("sub", "elementwise", reads=[a, b], makes=[(a.elements, a.dtype)], flops=a.elements)

    def backward(g: Array) -> Gradients:
        return [g, *tape.emit("neg", "elementwise", reads=[g], makes=[(g.elements, g.dtype)], flops=g.elements)]

    y.node = tape.node([a.node, b.node], (), backward)
    return y


def times_constant(tape: Tape, x: Array, constant: Array) -> Array:
    """x times an array without gradient, broadcast."""

    def product(x: Array, constant: Array) -> Array:
        return tape.emit("mul", "elementwise", reads=[x, constant], makes=[(x.elements, x.dtype)], flops=x.elements)[0]

    node = tape.node([x.node], (constant,), lambda g, constant: [product(g, constant)])
    y = product(x, constant)
    y.node = node
    return y


def times_number(tape: Tape, x: Array) -> Array:
    """x times a Python number."""

    def product(x: Array) -> Array:
        return tape.emit("mul", "elementwise", reads=[x], makes=[(x.elements, x.dtype)], flops=x.elements)[0]

    y = product(x)
    y.node = tape.node([x.node], (), lambda g: [product(g)])
    return y


def multiply(tape: Tape, a: Array, b: Array) -> Array:
    """a * b, both of one size."""

    def product(x: Array, y: Array) -> Array:
        return tape.emit("mul", "elementwise", reads=[x, y], makes=[(x.elements, x.dtype)], flops=x.elements)[0]

    def backward(g: Array, a: Array, b: Array) -> Gradients:
        db = product(g, a)
        return [product(g, b), db]

    node = tape.node([a.node, b.node], (a, b), backward)
    y = product(a, b)
    y.node = node
    return y


def activation(tape: Tape, x: Array, name: str) -> Array:
    """SiLU or GELU."""
    function = "silu" if name == "silu" else "gelu"

    def backward(g: Array, x: Array) -> Gradients:
        return list(
            tape.emit(
                f"{function}_backward", "elementwise", reads=[g, x], makes=[(x.elements, x.dtype)], flops=x.elements
            )
        )

    node = tape.node([x.node], (x,), backward)
    (y,) = tape.emit(function, "elementwise", reads=[x], makes=[(x.elements, x.dtype)], flops=x.elements)
    y.node = node
    return y


def dropout(tape: Tape, x: Array, probability: float) -> Array:
    """Dropout with a mask of one byte per element."""
    if probability == 0:
        return x
    y, mask = tape.emit("native_dropout", "random", reads=[x], makes=[(x.elements, x.dtype), (x.elements, "bool")])

    def backward(g: Array, mask: Array) -> Gradients:
        return list(
            tape.emit(
                "native_dropout_backward", "elementwise", reads=[g, mask], makes=[(g.elements, g.dtype)],
                flops=g.elements,
            )
        )  # fmt: skip

    y.node = tape.node([x.node], (mask,), backward)
    return y


# Moving data


def halves(tape: Tape, x: Array, half: Int) -> list[Array]:
    """Views of the two halves of ``half`` elements each; their gradients are copied together."""
    dtype = x.dtype

    def backward(*gradients: Array) -> Gradients:
        return list(tape.emit("cat", "copy", reads=gradients, makes=[(2 * half, dtype)]))

    return [x.view(half, port) for port in tape.fork([x.node], (), backward, 2)]


def concatenate(tape: Tape, parts: Sequence[Array]) -> Array:
    """A copy of the parts one after the other; their gradients are views."""
    sizes = [each.elements for each in parts]
    (y,) = tape.emit("cat", "copy", reads=parts, makes=[(sum(sizes), parts[0].dtype)])
    y.node = tape.node([each.node for each in parts], (), lambda g: [g.view(size) for size in sizes])
    return y


def contiguous(tape: Tape, x: Array, *, forward: bool, backward: bool) -> Array:
    """A reshape that must copy on the way there, on the way back, or on neither."""
    if not forward and not backward:
        return x
    y = tape.emit("clone", "copy", reads=[x], makes=[(x.elements, x.dtype)])[0] if forward else x.view()

    def back(g: Array) -> Gradients:
        return list(tape.emit("clone", "copy", reads=[g], makes=[(g.elements, g.dtype)])) if backward else [g]

    y.node = tape.node([x.node], (), back)
    return y


def repeat(tape: Tape, x: Array, repeats: Int) -> Array:
    """Each key-value head copied ``repeats`` times; the gradients of the copies are summed."""
    elements = x.elements
    (y,) = tape.emit("clone", "copy", reads=[x], makes=[(elements * repeats, x.dtype)])

    def backward(g: Array) -> Gradients:
        return [tape.sum(g, elements)]

    y.node = tape.node([x.node], (), backward)
    return y


def embedding(tape: Tape, ids: Array, table: Leaf, d_model: Int) -> Array:
    """Rows of a table; the gradient is a whole table, zero but for the rows that were read."""
    rows, size = ids.elements, table.elements

    def backward(g: Array, ids: Array) -> Gradients:
        return list(tape.emit("embedding_dense_backward", "embedding", reads=[g, ids], makes=[(size, "fp32")]))

    node = tape.node([table], (ids,), backward)
    read = Array(rows * d_model, "fp32", None)
    (y,) = tape.emit("embedding", "embedding", reads=[read, ids], makes=[(rows * d_model, "fp32")])
    y.node = node
    return y


def add_positions(tape: Tape, x: Array, table: Leaf, seq_len: Int, d_model: Int) -> Array:
    """x plus the first ``seq_len`` rows of a table, the same for each sequence."""
    size = table.elements

    def rows_to_table(g: Array) -> Gradients:
        return list(tape.emit("slice_backward", "embedding", reads=[g], makes=[(size, "fp32")]))

    rows = Array(seq_len * d_model, "fp32", None, tape.node([table], (), rows_to_table))
    (y,) = tape.emit("add", "elementwise", reads=[x, rows], makes=[(x.elements, "fp32")], flops=x.elements)

    rows_sum = [(1, seq_len * d_model)]
    y.node = tape.node([x.node, rows.node], (), lambda g: [g, g], sums=rows_sum)
    return y


# The loss


def negative_log_likelihood(tape: Tape, log_probabilities: Array, targets: Array) -> Array:
    """The mean of the targets' negated log-probabilities; its gradient is as large as the logits."""
    elements = log_probabilities.elements
    loss, weight_sum = tape.emit(
        "nll_loss_forward", "embedding", reads=[log_probabilities, targets], makes=[(1, "fp32"), (1, "fp32")]
    )

    def backward(g: Array, log_probabilities: Array, targets: Array, weight_sum: Array) -> Gradients:
        reads = [g, log_probabilities, targets, weight_sum]
        return list(tape.emit("nll_loss_backward", "embedding", reads=reads, makes=[(elements, "fp32")]))

    saved = (log_probabilities.view(), targets, weight_sum)
    loss.node = tape.node([log_probabilities.node], saved, backward)
    return loss


def divide_by_number(tape: Tape, x: Array) -> Array:
    """x over a Python number."""

    def quotient(x: Array) -> Array:
        return tape.emit("div", "elementwise", reads=[x], makes=[(x.elements, x.dtype)], flops=x.elements)[0]

    y = quotient(x)
    y.node = tape.node([x.node], (), lambda g: [quotient(g)])
    return y
