"""Normalizations on a tape: one kernel each, but for RMSNorm on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.ledger import rules
from trainledger.ledger.array import Array, Leaf
from trainledger.ledger.entry import Int
from trainledger.ledger.tape import Gradients, Tape


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

    def op(
        name: str, reads: Sequence[Array], elements: Int, kind: str = "elementwise", flops: Int | None = None
    ) -> Array:
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
