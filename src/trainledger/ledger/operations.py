"""Operations on a tape: for each, its cost forward, what it saves, and its cost backward.

They mirror what PyTorch's eager autograd runs for the same expression, operation by operation (torch 2.11 to
2.13; where a CPU and a CUDA build differ it is said). What each computes comes from `ledger.rules`.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.ledger import rules
from trainledger.ledger.entry import Int
from trainledger.ledger.tape import Array, Gradients, Leaf, Tape


def is_one(size: Int) -> bool:
    """Whether a size is known to be one; symbols and arrays stand for the general case."""
    return isinstance(size, int) and size == 1


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


# Normalization


def layer_norm(tape: Tape, x: Array, w: Leaf, b: Leaf | None, rows: Int, width: Int) -> Array:
    """Layer normalization (Ba et al. 2016): keeps its input, and mean and deviation of each row."""
    elements = x.elements
    per_row = [(rows, "fp32"), (rows, "fp32")]
    forward_flops = rules.FLOPS_PER_ELEMENT["layernorm"] * elements
    reads = [x, w.array()] if b is None else [x, w.array(), b.array()]
    y, mean, deviation = tape.emit(
        "native_layer_norm", "norm", reads=reads, makes=[(elements, "fp32"), *per_row], flops=forward_flops,
        basis="assumed",
    )  # fmt: skip

    def backward(g: Array, x: Array, mean: Array, deviation: Array) -> Gradients:
        vectors = [(width, "fp32")] if b is None else [(width, "fp32")] * 2
        return list(
            tape.emit(
                "native_layer_norm_backward", "norm", reads=[g, x, mean, deviation, *reads_backward],
                makes=[(elements, "fp32"), *vectors], basis="assumed",
                flops=rules.FLOPS_PER_ELEMENT["norm backward"] * elements,
            )
        )  # fmt: skip

    reads_backward = reads[1:]
    del reads
    targets = [x.node, w] if b is None else [x.node, w, b]
    y.node = tape.node(targets, (x, mean, deviation), backward)
    return y


def rms_norm(tape: Tape, x: Array, w: Leaf, rows: Int, width: Int, *, fused: bool) -> Array:
    """RMS normalization (Zhang and Sennrich 2019): one kernel on CUDA, six operations on a CPU."""
    if fused:
        return _fused_rms_norm(tape, x, w, rows, width)
    size = x.elements

    def op(name: str, reads: Sequence[Array], elements: Int, kind: str = "elementwise", flops: Int | None = None) -> Array:
        makes = [(elements, "fp32")]
        return tape.emit(name, kind, reads=reads, makes=makes, flops=elements if flops is None else flops)[0]

    def square_backward(g: Array, x: Array) -> Gradients:
        power = op("pow", [x], size)
        doubled = op("mul", [power], size)
        return [op("mul", [g, doubled], size)]

    def mean_backward(g: Array) -> Gradients:
        return [op("div", [g], size)]

    def rsqrt_backward(g: Array, root: Array) -> Gradients:
        cubed = op("pow", [root], rows)
        halved = op("mul", [g], rows)
        return [op("mul", [halved, cubed], rows)]

    def scale_backward(g: Array, x: Array, root: Array) -> Gradients:
        by_root = op("mul", [g, x], size)
        return [op("mul", [g, root], size), by_root]

    def weight_backward(g: Array, normed: Array) -> Gradients:
        by_normed = op("mul", [g, normed], size)
        return [op("mul", [g, w.array()], size), by_normed]

    square_node = tape.node([x.node], (x,), square_backward)
    square = op("pow", [x], size)
    mean = op("mean", [square], rows, "reduction", size)
    mean_node = tape.node([square_node], (), mean_backward)
    tape.emit("add_", "elementwise", changes=[mean], flops=rows)
    root = op("rsqrt", [mean], rows)
    del square, mean
    root.node = tape.node([mean_node], (root,), rsqrt_backward)
    scale_node = tape.node([x.node, root.node], (x, root), scale_backward, sums=[(1, rows)])
    normed = op("mul", [x, root], size)
    weight_node = tape.node([scale_node, w], (normed,), weight_backward, sums=[(1, width)])
    y = op("mul", [normed, w.array()], size)
    y.node = weight_node
    return y


def _fused_rms_norm(tape: Tape, x: Array, w: Leaf, rows: Int, width: Int) -> Array:
    elements = x.elements
    y, root = tape.emit(
        "_fused_rms_norm", "norm", reads=[x, w.array()], makes=[(elements, "fp32"), (rows, "fp32")], basis="assumed",
        flops=rules.FLOPS_PER_ELEMENT["rmsnorm"] * elements,
    )  # fmt: skip

    def backward(g: Array, x: Array, root: Array) -> Gradients:
        return list(
            tape.emit(
                "_fused_rms_norm_backward", "norm", reads=[g, x, root, w.array()], basis="assumed",
                makes=[(elements, "fp32"), (width, "fp32")], flops=rules.FLOPS_PER_ELEMENT["norm backward"] * elements,
            )
        )  # fmt: skip

    y.node = tape.node([x.node, w], (x, root), backward)
    return y


# Attention


def fused_attention(
    tape: Tape, q: Array, k: Array, v: Array, batch: Int, heads: Int, tokens: Int, width: Int, *, kernel: str
) -> Array:
    """Attention in one kernel: keeps q, k, v, its output and a logsumexp per query in fp32 (Dao et al. 2022)."""
    sizes = (batch, heads, tokens, tokens, width, width)
    rows = batch * heads * tokens
    name = f"_scaled_dot_product_{kernel}"
    flops = rules.attention_flops(*sizes)
    y, logsumexp = tape.emit(
        name, "attention", reads=[q, k, v], makes=[(q.elements, q.dtype), (rows, "fp32")], flops=flops, model_flops=flops
    )

    def backward(g: Array, q: Array, k: Array, v: Array, y: Array, logsumexp: Array) -> Gradients:
        return list(
            tape.emit(
                f"{name}_backward", "attention", reads=[g, q, k, v, y, logsumexp],
                makes=[(each.elements, each.dtype) for each in (q, k, v)], flops=rules.attention_backward_flops(*sizes),
                model_flops=rules.attention_backward_model_flops(*sizes),
            )
        )  # fmt: skip

    y.node = tape.node([q.node, k.node, v.node], (q, k, v, y.view(), logsumexp), backward)
    return y


def causal_softmax(tape: Tape, scores: Array, mask: Array) -> Array:
    """Scores with the later keys masked, as probabilities; keeps the mask and the probabilities."""

    def fill(x: Array, mask: Array) -> Array:
        makes = [(x.elements, x.dtype)]
        return tape.emit("masked_fill", "elementwise", reads=[x, mask], makes=makes, flops=x.elements)[0]

    masked_node = tape.node([scores.node], (mask,), lambda g, mask: [fill(g, mask)])
    masked = fill(scores, mask)
    masked.node = masked_node
    return softmax(tape, masked, "_softmax")


def softmax(tape: Tape, x: Array, name: str) -> Array:
    """Softmax or log-softmax over the last dim; keeps its result."""
    makes = [(x.elements, x.dtype)]
    count = rules.FLOPS_PER_ELEMENT
    (y,) = tape.emit(name, "softmax", reads=[x], makes=makes, flops=count["softmax"] * x.elements, basis="assumed")

    def backward(g: Array, y: Array) -> Gradients:
        flops = count["softmax backward"] * y.elements
        return list(
            tape.emit(f"{name}_backward_data", "softmax", reads=[g, y], makes=makes, flops=flops, basis="assumed")
        )

    y.node = tape.node([x.node], (y.view(),), backward)
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
