"""Normalizations on a tape: the same expressions as in `engine.nn.norm`. One kernel each, but for RMSNorm on a CPU.

Sizes: rows of a last dim of ``width``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainledger.ledger import rules
from trainledger.ledger.core.graph import Array, Gradients, Leaf, Target
from trainledger.ledger.core.sizes import Sizes
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ops import operations as op


def norm(
    tape: Tape, sizes: Sizes, x: Array, leaves: Mapping[str, Leaf], name: str, *, rows: Int | None = None,
    width: Int | None = None,
) -> Array:  # fmt: skip
    """The spec's normalization with the weight and bias of this name, over rows of d_model unless said otherwise."""
    spec = sizes.spec
    rows = sizes.stream_rows if rows is None else rows
    width = spec.d_model if width is None else width
    w, b = leaves.get(f"{name}.weight"), leaves.get(f"{name}.bias")
    with tape.at(name.rpartition(".")[2]):
        if spec.norm.kind == "layernorm":
            return layer_norm(tape, widened(tape, x), w, b, rows, width)
        assert w is not None
        if spec.norm.plus_one:
            return plus_one_rms_norm(tape, x, w, rows, width)
        return rms_norm(tape, widened(tape, x), w, rows, width)


def widened(tape: Tape, x: Array) -> Array:
    """x in fp32 under autocast, else in its own format."""
    return op.cast(tape, x, "fp32") if tape.precision.copies == "autocast" else x


def layer_norm(tape: Tape, x: Array, w: Leaf | None, b: Leaf | None, rows: Int, width: Int) -> Array:
    """Layer normalization (Ba et al. 2016): keeps its input, and mean and deviation of each row."""
    vectors = [leaf.array() for leaf in (w, b) if leaf is not None]
    # torch/_refs (2.13), native_layer_norm: mean and deviation go back to the dtype of the input on a CPU only.
    per_row = [(rows, x.dtype if tape.backend == "cpu" else "fp32")] * 2
    return _kernel(tape, "native_layer_norm", "layernorm", x, vectors, per_row, width)


def rms_norm(tape: Tape, x: Array, w: Leaf | None, rows: Int, width: Int) -> Array:
    """RMS normalization (Zhang and Sennrich 2019): one kernel on CUDA, six operations in fp32 on a CPU."""
    if tape.backend != "cpu":
        return _kernel(tape, "_fused_rms_norm", "rmsnorm", x, [] if w is None else [w.array()], [(rows, "fp32")], width)
    wide = op.cast(tape, x, "fp32")
    square, mean, mean_node = _mean_square(tape, wide, rows)
    tape.emit("add_", "elementwise", changes=[mean], flops=rows)
    root = _rsqrt(tape, mean, mean_node)
    del square, mean
    normed = _scaled(tape, wide, root, rows)
    y = normed if w is None else _scaled(tape, normed, w.array(), width)
    del wide, normed
    return op.cast(tape, y, x.dtype)


def plus_one_rms_norm(tape: Tape, x: Array, w: Leaf, rows: Int, width: Int) -> Array:
    """RMS normalization times (1 + weight), in fp32 on every device."""
    wide = op.cast(tape, x, "fp32")
    square, mean, mean_node = _mean_square(tape, wide, rows)
    del square
    raised = tape.pointwise("add", mean)
    del mean
    root = _rsqrt(tape, raised, mean_node)
    del raised
    normed = _scaled(tape, wide, root, rows)
    del root
    factor = op.cast(tape, w.array(), "fp32")
    plus_one = op.plus_number(tape, factor)
    del factor
    y = _scaled(tape, normed, plus_one, width)
    del plus_one
    return op.cast(tape, y, x.dtype)


def _mean_square(tape: Tape, x: Array, rows: Int) -> tuple[Array, Array, Target]:
    """x squared, its mean over each row, and where the gradient of the mean goes."""
    size = x.elements

    def backward(g: Array, x: Array) -> Gradients:
        power = tape.pointwise("pow", x)
        doubled = tape.pointwise("mul", power)
        return [tape.pointwise("mul", g, doubled)]

    node = tape.node([x.node], (x,), backward)
    square = tape.pointwise("pow", x)
    mean = tape.make("mean", "reduction", square, elements=rows, flops=size)
    return square, mean, tape.node([node], (), lambda g: [tape.pointwise("div", g, elements=size)])


def _rsqrt(tape: Tape, x: Array, node: Target) -> Array:
    """1 / sqrt(x), of an x whose gradient goes to ``node``."""

    def backward(g: Array, root: Array) -> Gradients:
        cubed = tape.pointwise("pow", root)
        halved = tape.pointwise("mul", g)
        return [tape.pointwise("mul", halved, cubed)]

    root = tape.pointwise("rsqrt", x)
    root.node = tape.node([node], (root,), backward)
    return root


def _scaled(tape: Tape, x: Array, factor: Array, elements: Int) -> Array:
    """x times a factor of so many elements, broadcast."""

    def product(g: Array, other: Array) -> Array:
        return tape.pointwise("mul", g, other, dtype="fp32")

    node = op.pairwise(tape, x, factor, product, product, sums=[(1, elements)], formats=[x.dtype, factor.dtype])
    y = product(x, factor)
    y.node = node
    return y


def _kernel(
    tape: Tape, name: str, rule: str, x: Array, vectors: Sequence[Array], per_row: Sequence[tuple[Int, str]], width: Int
) -> Array:
    """A normalization in one kernel, which keeps its input and the statistics of each row."""
    elements, dtype, flops = x.elements, x.dtype, rules.FLOPS_PER_ELEMENT
    y, *arrays = tape.emit(
        name,
        "norm",
        reads=[x, *vectors],
        makes=[(elements, dtype), *per_row],
        flops=flops[rule] * elements,
        basis="assumed",
    )

    def backward(g: Array, x: Array, *saved: Array) -> Gradients:
        trained = [(width, array.dtype) for array in saved[len(per_row) :] if array.node is not None]
        return list(
            tape.emit(
                f"{name}_backward",
                "norm",
                reads=[g, x, *saved],
                makes=[(elements, dtype), *trained],
                flops=flops["norm backward"] * elements,
                basis="assumed",
            )
        )

    y.node = tape.node([x.node, *(vector.node for vector in vectors)], (x, *arrays, *vectors), backward)
    return y
