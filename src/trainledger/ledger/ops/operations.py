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

COMPARED = ("ge", "le")  # how a clamp's backward compares with its bounds; since torch 2.14 "gt" and "lt"

# Formats


def cast(tape: Tape, x: Array, dtype: str) -> Array:
    """A copy in another format, or the array itself; the gradient is cast back."""
    if x.dtype == dtype:
        return x
    y = tape.cast(x, dtype)
    if x.node is not None:
        y.node = tape.node([x.node], (), back_to(tape, x.dtype))
    return y


def back_to(tape: Tape, dtype: str) -> Callable[[Array], Gradients]:
    """The backward of a cast from this format."""
    return lambda g: [tape.cast(g, dtype)]


def weight(tape: Tape, leaf: Leaf) -> Array:
    """A parameter as a matmul reads it: itself, or under autocast its low-precision copy (made once)."""
    if tape.precision.copies != "autocast" or leaf.dtype == tape.compute_dtype:
        return leaf.array()
    known = tape.cast_of(leaf)
    if known is None:
        known = cast(tape, leaf.array(), tape.compute_dtype)
        if leaf.trained and tape.graph:  # autocast keeps no copies of what gets no gradient
            tape.remember_cast(leaf, known)
    return known


def gather(tape: Tape, leaves: Iterable[Leaf]) -> None:
    """From here operations read low-precision copies of these parameters, where the precision has them gathered."""
    if tape.precision.copies == "gathered":
        # FSDP2 casts what it gathers; parameters that it ignores are cast where a matmul reads them.
        for leaf in (leaf for leaf in leaves if not leaf.alone):
            leaf.copy = cast(tape, leaf.held(), tape.compute_dtype)
            if leaf.copy.memory is not None:
                leaf.copy.memory.record.of_parameter = True


def drop_copies(leaves: Iterable[Leaf]) -> None:
    """Operations read the parameters themselves again; what backward needs of the copies is saved."""
    for leaf in leaves:
        leaf.copy = None


@contextmanager
def gathered(tape: Tape, leaves: Sequence[Leaf]) -> Iterator[None]:
    """Inside, operations read copies, as after `gather`."""
    gather(tape, leaves)
    try:
        yield
    finally:
        drop_copies(leaves)


# Matmuls


def matmul(tape: Tape, name: str, reads: Sequence[Array], sizes: tuple[Int, Int, Int, Int], dtype: str) -> Array:
    """A matmul of ``sizes`` (batch, m, n, k) in one kernel."""
    batch, m, n, k = sizes
    flops = rules.matmul_flops(m, n, k, batch)
    return tape.make(
        name, "matmul", *reads, elements=batch * m * n, dtype=dtype, flops=flops, model_flops=flops, shape=sizes
    )


def linear(tape: Tape, x: Array, w: Leaf, b: Leaf | None, rows: Int, d_in: Int, d_out: Int) -> Array:
    """[rows, d_in] times a weight [d_out, d_in] plus a bias [d_out]."""
    if w.linear is not None:
        return w.linear(tape, x, w, b, rows, d_in, d_out)
    bias = weight(tape, b) if b is not None else None
    matrix = weight(tape, w)
    x = cast(tape, x, tape.compute_dtype)
    dtype = x.dtype

    def input_gradient(g: Array, saved: Sequence[Array]) -> Array | None:
        return matmul(tape, "mm", [g, saved[-1]], (1, rows, d_in, d_out), dtype) if for_input else None

    def weight_gradient(g: Array, saved: Sequence[Array]) -> Array | None:
        if not for_weight:
            return None
        with tape.gradient_of(w):
            return matmul(tape, "mm", [saved[0], g], (1, d_out, d_in, rows), dtype)

    def backward(g: Array, *saved: Array) -> Gradients:
        # With a bias (addmm) autograd takes the input's gradient first and hands it on last; without (mm) the reverse.
        if not has_bias:
            dw = weight_gradient(g, saved)
            return [input_gradient(g, saved), dw]
        dx = input_gradient(g, saved)
        return [g if for_bias else None, weight_gradient(g, saved), dx]

    for_input, for_weight, has_bias = x.node is not None, matrix.node is not None, bias is not None
    for_bias = bias is not None and bias.node is not None
    saved = (*((x,) if for_weight else ()), *((matrix,) if for_input else ()))
    if bias is None:
        node = tape.node([x.node, matrix.node], saved, backward)
    else:
        node = tape.node([bias.node, matrix.node, x.node], saved, backward, sums=[(0, d_out)])
    del saved
    reads = [x, matrix] if bias is None else [bias, x, matrix]
    y = matmul(tape, "mm" if bias is None else "addmm", reads, (1, rows, d_out, d_in), dtype)
    y.node = node
    return y


def batched_matmul(tape: Tape, a: Array, b: Array, batch: Int, m: Int, n: Int, k: Int) -> Array:
    """[batch, m, k] times [batch, k, n]."""

    def matmul_of(x: Array, y: Array, m: Int, n: Int, k: Int) -> Array:
        return matmul(tape, "bmm", [x, y], (batch, m, n, k), x.dtype)

    node = pairwise(tape, a, b, lambda g, b: matmul_of(g, b, m, k, n), lambda g, a: matmul_of(a, g, k, n, m))
    y = matmul_of(a, b, m, n, k)
    y.node = node
    return y


def pairwise(
    tape: Tape, a: Array, b: Array, to_a: Callable[[Array, Array], Array], to_b: Callable[[Array, Array], Array], *,
    sums: Sums = (), formats: Sequence[str] = (),
) -> Target:  # fmt: skip
    """The step of a matmul of a and b: ``to_a(gradient, b)`` and ``to_b(gradient, a)``, b's first.

    What only an unused gradient needs is not saved.
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
    y = tape.pointwise("add", a, b, dtype="fp32" if "fp32" in (a.dtype, b.dtype) else a.dtype)
    y.node = tape.node([a.node, b.node], (), lambda g: [g, g], formats=(a.dtype, b.dtype))
    return y


def subtract(tape: Tape, a: Array, b: Array) -> Array:
    """a - b."""
    y = tape.pointwise("sub", a, b)
    y.node = tape.node([a.node, b.node], (), lambda g: [g, tape.pointwise("neg", g)])
    return y


def multiply(tape: Tape, a: Array, b: Array) -> Array:
    """a * b, both of one size."""

    def product(x: Array, y: Array) -> Array:
        return tape.pointwise("mul", x, y)

    node = pairwise(tape, a, b, product, product)
    y = product(a, b)
    y.node = node
    return y


def times_constant(tape: Tape, x: Array, constant: Array) -> Array:
    """x times an array without gradient, broadcast."""
    node = tape.node([x.node], (constant,), lambda g, constant: [tape.pointwise("mul", g, constant)])
    y = tape.pointwise("mul", x, constant)
    y.node = node
    return y


def times_number(tape: Tape, x: Array, name: str = "mul") -> Array:
    """x times a Python number."""
    y = tape.pointwise(name, x)
    y.node = tape.node([x.node], (), lambda g: [tape.pointwise(name, g)])
    return y


def divide_by_number(tape: Tape, x: Array) -> Array:
    """x over a Python number."""
    return times_number(tape, x, "div")


def plus_number(tape: Tape, x: Array, name: str = "add") -> Array:
    """x plus a Python number."""
    y = tape.pointwise(name, x)
    y.node = tape.node([x.node], (), lambda g: [g])
    return y


def activate(tape: Tape, x: Array, name: str) -> Array:
    """SiLU, GELU (exact or in its tanh form), ReLU, or the square of ReLU."""
    if name in ("relu", "relu2"):
        y = _by_result(tape, x, "relu", "threshold_backward")
        return y if name == "relu" else multiply(tape, y, y)
    function = "silu" if name == "silu" else "gelu"
    node = tape.node([x.node], (x,), lambda g, x: [tape.pointwise(f"{function}_backward", g, x, dtype=x.dtype)])
    y = tape.pointwise(function, x)
    y.node = node
    return y


def softplus(tape: Tape, x: Array) -> Array:
    """log(1 + exp(x)): keeps its input."""
    node = tape.node([x.node], (x,), lambda g, x: [tape.pointwise("softplus_backward", g, x)])
    y = tape.pointwise("softplus", x)
    y.node = node
    return y


def gated(tape: Tape, gate: Array, up: Array, name: str) -> Array:
    """act(gate) * up, or gpt-oss's (up + 1) * gate * sigmoid(1.702 gate) of a gate and an up that are cut off."""
    if name != "clamped_swish":
        return multiply(tape, activate(tape, gate, name), up)
    gate = clamp(tape, gate, sides=1)
    up = clamp(tape, up, sides=2)
    shifted = plus_number(tape, up)
    return multiply(tape, shifted, multiply(tape, gate, sigmoid(tape, times_number(tape, gate))))


def softcap(tape: Tape, x: Array) -> Array:
    """cap tanh(x / cap): keeps the tanh."""
    return times_number(tape, tanh(tape, divide_by_number(tape, x)))


def sigmoid(tape: Tape, x: Array) -> Array:
    """1 / (1 + exp(-x)): keeps its result."""
    return _by_result(tape, x, "sigmoid", "sigmoid_backward")


def tanh(tape: Tape, x: Array) -> Array:
    """The hyperbolic tangent: keeps its result."""
    return _by_result(tape, x, "tanh", "tanh_backward")


def _by_result(tape: Tape, x: Array, name: str, name_backward: str) -> Array:
    """A function whose derivative follows from its result."""
    y = tape.pointwise(name, x)
    y.node = tape.node([x.node], (y.view(),), lambda g, y: [tape.pointwise(name_backward, g, y, dtype=y.dtype)])
    return y


def clamp(tape: Tape, x: Array, *, sides: int) -> Array:
    """x cut off above, or (``sides`` 2) below and above: keeps its input, which backward compares again."""

    def backward(g: Array, x: Array) -> Gradients:
        zero = tape.emit("scalar_tensor", "copy", makes=[(1, g.dtype)])
        from_below, from_above = COMPARED
        inside = tape.pointwise(from_below if sides == 2 else from_above, x, dtype="bool")
        if sides == 2:
            below = tape.pointwise(from_above, x, dtype="bool")
            tape.change("logical_and_", inside, below)
        return [tape.pointwise("where", inside, g, *zero, dtype=g.dtype)]

    node = tape.node([x.node], (x,), backward)
    y = tape.pointwise("clamp", x)
    y.node = node
    return y


def softmax(tape: Tape, x: Array, name: str, *, wide: bool = False) -> Array:
    """Softmax or log-softmax over the last dim; keeps its result, which is fp32 where it is ``wide``."""

    def run(name: str, rule: str, dtype: str, *reads: Array) -> Array:
        flops = rules.FLOPS_PER_ELEMENT[rule] * size
        return tape.make(name, "softmax", *reads, elements=size, dtype=dtype, flops=flops, basis="assumed")

    size, dtype = x.elements, x.dtype
    y = run(name, "softmax", "fp32" if wide else dtype, x)
    back = f"{name}_backward_data"
    y.node = tape.node([x.node], (y.view(),), lambda g, y: [run(back, "softmax backward", dtype, g, y)])
    return y


def dropout(tape: Tape, x: Array, probability: float) -> Array:
    """Dropout with a mask of one byte per element."""
    if probability == 0:
        return x
    y, mask = tape.emit("native_dropout", "random", reads=[x], makes=[(x.elements, x.dtype), (x.elements, "bool")])
    y.node = tape.node([x.node], (mask,), lambda g, mask: [tape.pointwise("native_dropout_backward", g, mask)])
    return y


# Moving data


def gather_elements(tape: Tape, x: Array, index: Array) -> Array:
    """One element of x for each of the index; keeps x for its size, and the gradient is as large."""
    size = x.elements

    def backward(g: Array, x: Array, index: Array) -> Gradients:
        zeros = tape.make("new_zeros", "copy", g, elements=size)
        return [tape.make("scatter_add", "embedding", zeros, index, g)]

    node = tape.node([x.node], (x.view(), index), backward)
    y = tape.make("gather", "embedding", Array(index.elements, x.dtype, None), index)
    y.node = node
    return y


def parts(tape: Tape, x: Array, sizes: Sequence[Int], *, name: str = "cat") -> list[Array]:
    """Views of x of the given sizes, or x itself where it is one; their gradients are copied together by ``name``."""
    whole, dtype = x.elements, x.dtype
    if len(sizes) == 1:
        return [x]

    def backward(*gradients: Array) -> Gradients:
        return [tape.make(name, "copy", *gradients, elements=whole, dtype=dtype)]

    ports = tape.fork([x.node], (), backward, len(sizes))
    return [x.view(size, port) for size, port in zip(sizes, ports, strict=True)]


def concatenate(tape: Tape, parts: Sequence[Array]) -> Array:
    """A copy of the parts one after the other; their gradients are views."""
    sizes = [part.elements for part in parts]
    y = tape.make("cat", "copy", *parts, elements=sum(sizes))
    y.node = tape.node([part.node for part in parts], (), lambda g: [g.view(size) for size in sizes])
    return y


def contiguous(tape: Tape, x: Array, *, forward: bool, backward: bool) -> Array:
    """A reshape that must copy on the way there, on the way back, or on neither."""
    if not forward and not backward:
        return x
    y = tape.make("clone", "copy", x) if forward else x.view()
    y.node = tape.node([x.node], (), lambda g: [tape.make("clone", "copy", g) if backward else g])
    return y


def repeat(tape: Tape, x: Array, repeats: Int) -> Array:
    """Each key-value head copied ``repeats`` times; the gradients of the copies are summed."""
    elements = x.elements
    y = tape.make("clone", "copy", x, elements=elements * repeats)
    y.node = tape.node([x.node], (), lambda g: [tape.sum(g, elements)])
    return y


def leading(tape: Tape, x: Array, elements: Int, *, name: str = "slice_backward") -> Array:
    """A view of the leading part of each row, so many elements in all; the gradient is as large as x, with zeros."""
    whole, dtype = x.elements, x.dtype

    def backward(g: Array) -> Gradients:
        return [tape.make(name, "embedding", g, elements=whole, dtype=dtype)]

    return x.view(elements, tape.node([x.node], (), backward))


def rows(tape: Tape, elements: Int, dtype: str, index: Array) -> Array:
    """Rows of a table by an index, ``elements`` in all: of the table only those are read."""
    return tape.make("index_select", "embedding", Array(elements, dtype, None), index)


def embedding(tape: Tape, ids: Array, table: Leaf, d_model: Int) -> Array:
    """Rows of a table; the gradient is a whole table, zero but for the rows that were read."""
    size, whole, elements = table.elements, table.array(), ids.elements * d_model
    dtype = whole.dtype

    def backward(g: Array, ids: Array) -> Gradients:
        return [tape.make("embedding_dense_backward", "embedding", g, ids, elements=size, dtype=dtype)]

    node = tape.node([whole.node], (ids,), backward)
    y = tape.make("embedding", "embedding", Array(elements, dtype, None), ids)
    y.node = node
    return y


def add_positions(tape: Tape, x: Array, table: Leaf, seq_len: Int, d_model: Int) -> Array:
    """x plus the first ``seq_len`` rows of a table, the same for each sequence."""
    rows = leading(tape, table.array(), seq_len * d_model)
    y = tape.pointwise("add", x, rows)
    y.node = tape.node([x.node, rows.node], (), lambda g: [g, g], sums=[(1, rows.elements)])
    return y
