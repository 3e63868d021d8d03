"""Operations on a tape: for each, its cost forward, what it saves, and its cost backward.

They mirror what PyTorch's eager autograd runs for the same expression, operation by operation (torch 2.11 to
2.13; where a CPU and a CUDA build differ it is said). What each computes comes from `ledger.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from trainledger.ledger import rules
from trainledger.ledger.core.graph import Array, Gradients, Leaf, Sums, Target
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int

# Formats


def cast(tape: Tape, x: Array, dtype: str) -> Array:
    """A copy in another format, or the array itself; the gradient is cast back."""
    if x.dtype == dtype:
        return x
    (y,) = tape.emit("_to_copy", "copy", reads=[x], makes=[(x.elements, dtype)])
    if x.node is not None:
        y.node = tape.node([x.node], (), back_to(tape, x.dtype))
    return y


def back_to(tape: Tape, dtype: str) -> Callable[[Array], Gradients]:
    """The backward of a cast from this format."""
    return lambda g: list(tape.emit("_to_copy", "copy", reads=[g], makes=[(g.elements, dtype)]))


def weight(tape: Tape, leaf: Leaf) -> Array:
    """A parameter as a matmul reads it: itself, or under autocast its low-precision copy (made once)."""
    if tape.precision.copies != "autocast" or leaf.dtype == tape.compute_dtype:
        return leaf.array()
    known = tape.cast_of(leaf)
    if known is None:
        known = cast(tape, leaf.array(), tape.compute_dtype)
        if leaf.trained:  # autocast keeps no copies of what gets no gradient
            tape.remember_cast(leaf, known)
    return known


def gather(tape: Tape, leaves: Iterable[Leaf]) -> None:
    """From here on operations read low-precision copies of these parameters, where the precision has them gathered."""
    if tape.precision.copies == "gathered":
        for each in leaves:
            each.copy = cast(tape, each.held(), tape.compute_dtype)
            if each.copy.memory is not None:
                each.copy.memory.record.of_parameter = True


def let_copies_go(leaves: Iterable[Leaf]) -> None:
    """Operations read the parameters themselves again; what backward needs of the copies is saved."""
    for each in leaves:
        each.copy = None


@contextmanager
def gathered(tape: Tape, leaves: Sequence[Leaf]) -> Iterator[None]:
    """Inside, operations read copies, as after `gather`."""
    gather(tape, leaves)
    try:
        yield
    finally:
        let_copies_go(leaves)


# Matrix products


def linear(tape: Tape, x: Array, w: Leaf, b: Leaf | None, rows: Int, d_in: Int, d_out: Int) -> Array:
    """[rows, d_in] times a weight [d_out, d_in] plus a bias [d_out]."""
    if w.linear is not None:
        return w.linear(tape, x, w, b, rows, d_in, d_out)
    bias = weight(tape, b) if b is not None else None
    matrix = weight(tape, w)
    x = cast(tape, x, tape.compute_dtype)
    flops = rules.matmul_flops(rows, d_out, d_in)
    dtype = x.dtype

    def input_gradient(g: Array, matrix: Array) -> Array:
        return tape.emit(
            "mm", "matmul", reads=[g, matrix], makes=[(rows * d_in, dtype)], flops=flops, model_flops=flops,
            shape=(1, rows, d_in, d_out),
        )[0]  # fmt: skip

    def weight_gradient(g: Array, x: Array) -> Array:
        return tape.emit(
            "mm", "matmul", reads=[x, g], makes=[(d_in * d_out, dtype)], flops=flops, model_flops=flops,
            shape=(1, d_out, d_in, rows),
        )[0]  # fmt: skip

    def backward(g: Array, *saved: Array) -> Gradients:
        # With a bias (addmm) autograd takes the input's gradient first and hands it on last; without (mm) the reverse.
        if not has_bias:
            dw = weight_gradient(g, saved[0]) if for_weight else None
            return [input_gradient(g, saved[-1]) if for_input else None, dw]
        dx = input_gradient(g, saved[-1]) if for_input else None
        return [g if for_bias else None, weight_gradient(g, saved[0]) if for_weight else None, dx]

    for_input, for_weight, has_bias = x.node is not None, matrix.node is not None, bias is not None
    for_bias = bias is not None and bias.node is not None
    saved = (*((x,) if for_weight else ()), *((matrix,) if for_input else ()))
    if bias is None:
        node = tape.node([x.node, matrix.node], saved, backward)
    else:
        node = tape.node([bias.node, matrix.node, x.node], saved, backward, sums=[(0, d_out)])
    del saved
    reads = [x, matrix] if bias is None else [bias, x, matrix]
    name = "mm" if bias is None else "addmm"
    (y,) = tape.emit(
        name, "matmul", reads=reads, makes=[(rows * d_out, dtype)], flops=flops, model_flops=flops,
        shape=(1, rows, d_out, d_in),
    )  # fmt: skip
    y.node = node
    return y


def batched_product(tape: Tape, a: Array, b: Array, batch: Int, m: Int, n: Int, k: Int) -> Array:
    """[batch, m, k] times [batch, k, n]."""
    flops = rules.matmul_flops(m, n, k, batch)

    def product(x: Array, y: Array, m: Int, n: Int, k: Int) -> Array:
        return tape.emit(
            "bmm", "matmul", reads=[x, y], makes=[(batch * m * n, x.dtype)], flops=flops, model_flops=flops,
            shape=(batch, m, n, k),
        )[0]  # fmt: skip

    node = pairwise(tape, a, b, lambda g, b: product(g, b, m, k, n), lambda g, a: product(a, g, k, n, m))
    y = product(a, b, m, n, k)
    y.node = node
    return y


def pairwise(
    tape: Tape,
    a: Array,
    b: Array,
    to_a: Callable[[Array, Array], Array],
    to_b: Callable[[Array, Array], Array],
    *,
    sums: Sums = (),
    formats: Sequence[str] = (),
) -> Target:
    """The step of a product of a and b: ``to_a(gradient, b)`` and ``to_b(gradient, a)``, b's first.

    What only a gradient needs that nobody wants is not saved.
    """
    for_a, for_b = a.node is not None, b.node is not None
    saved = (*((a,) if for_b else ()), *((b,) if for_a else ()))

    def backward(g: Array, *saved: Array) -> Gradients:
        db = to_b(g, saved[0]) if for_b else None
        return [to_a(g, saved[-1]) if for_a else None, db]

    return tape.node([a.node, b.node], saved, backward, sums=sums, formats=formats)


# Elementwise


def add(tape: Tape, a: Array, b: Array) -> Array:
    """a + b in the wider of their formats; each gets a gradient in its own."""
    wide = "fp32" if "fp32" in (a.dtype, b.dtype) else a.dtype
    (y,) = tape.emit("add", "elementwise", reads=[a, b], makes=[(a.elements, wide)], flops=a.elements)
    formats = (a.dtype, b.dtype)

    def backward(g: Array) -> Gradients:
        def of(dtype: str) -> Array:
            return g if dtype == g.dtype else tape.emit("_to_copy", "copy", reads=[g], makes=[(g.elements, dtype)])[0]

        return [of(dtype) for dtype in formats]

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

    node = pairwise(tape, a, b, product, product)
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


def parts(tape: Tape, x: Array, sizes: Sequence[Int], *, name: str = "cat") -> list[Array]:
    """Views of x of the given sizes, or x itself where it is one; their gradients are copied together by ``name``."""
    whole, dtype = x.elements, x.dtype
    if len(sizes) == 1:
        return [x]

    def backward(*gradients: Array) -> Gradients:
        return list(tape.emit(name, "copy", reads=gradients, makes=[(whole, dtype)]))

    ports = tape.fork([x.node], (), backward, len(sizes))
    return [x.view(size, port) for size, port in zip(sizes, ports, strict=True)]


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
    whole = table.array()
    dtype = whole.dtype

    def backward(g: Array, ids: Array) -> Gradients:
        return list(tape.emit("embedding_dense_backward", "embedding", reads=[g, ids], makes=[(size, dtype)]))

    node = tape.node([whole.node], (ids,), backward)
    read = Array(rows * d_model, dtype, None)
    (y,) = tape.emit("embedding", "embedding", reads=[read, ids], makes=[(rows * d_model, dtype)])
    y.node = node
    return y


def add_positions(tape: Tape, x: Array, table: Leaf, seq_len: Int, d_model: Int) -> Array:
    """x plus the first ``seq_len`` rows of a table, the same for each sequence."""
    size, whole = table.elements, table.array()
    dtype = whole.dtype

    def rows_to_table(g: Array) -> Gradients:
        return list(tape.emit("slice_backward", "embedding", reads=[g], makes=[(size, dtype)]))

    rows = whole.view(seq_len * d_model, tape.node([whole.node], (), rows_to_table))
    (y,) = tape.emit("add", "elementwise", reads=[x, rows], makes=[(x.elements, x.dtype)], flops=x.elements)

    rows_sum = [(1, seq_len * d_model)]
    y.node = tape.node([x.node, rows.node], (), lambda g: [g, g], sums=rows_sum)
    return y


def divide_by_number(tape: Tape, x: Array) -> Array:
    """x over a Python number."""

    def quotient(x: Array) -> Array:
        return tape.emit("div", "elementwise", reads=[x], makes=[(x.elements, x.dtype)], flops=x.elements)[0]

    y = quotient(x)
    y.node = tape.node([x.node], (), lambda g: [quotient(g)])
    return y
