"""Normalizations on a tape: the same expressions as in `nn.norm`. One kernel each, but for RMSNorm on a CPU.

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
    tape: Tape,
    sizes: Sizes,
    x: Array,
    leaves: Mapping[str, Leaf],
    name: str,
    *,
    rows: Int | None = None,
    width: Int | None = None,
) -> Array:
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
        return rms_norm(tape, widened(tape, x), w, rows, width, fused=sizes.fused_kernels)


def widened(tape: Tape, x: Array) -> Array:
    """x in fp32 under autocast, else in its own format."""
    return op.cast(tape, x, "fp32") if tape.precision.copies == "autocast" else x


def layer_norm(tape: Tape, x: Array, w: Leaf | None, b: Leaf | None, rows: Int, width: Int) -> Array:
    """Layer normalization (Ba et al. 2016): keeps its input, and mean and deviation of each row."""
    elements, dtype = x.elements, x.dtype
    per_row = [(rows, dtype if tape.backend == "cpu" else "fp32")] * 2
    forward_flops = rules.FLOPS_PER_ELEMENT["layernorm"] * elements
    vectors = [each.array() for each in (w, b) if each is not None]
    y, mean, deviation = tape.emit(
        "native_layer_norm", "norm", reads=[x, *vectors], makes=[(elements, dtype), *per_row], flops=forward_flops,
        basis="assumed",
    )  # fmt: skip

    def backward(g: Array, x: Array, mean: Array, deviation: Array, *vectors: Array) -> Gradients:
        return list(
            tape.emit(
                "native_layer_norm_backward", "norm", reads=[g, x, mean, deviation, *vectors],
                makes=[(elements, dtype), *((width, each.dtype) for each in vectors if each.node is not None)],
                basis="assumed",
                flops=rules.FLOPS_PER_ELEMENT["norm backward"] * elements,
            )
        )  # fmt: skip

    y.node = tape.node([x.node, *(each.node for each in vectors)], (x, mean, deviation, *vectors), backward)
    return y


def rms_norm(tape: Tape, x: Array, w: Leaf, rows: Int, width: Int, *, fused: bool) -> Array:
    """RMS normalization (Zhang and Sennrich 2019): one kernel on CUDA, six operations in fp32 on a CPU."""
    if fused:
        return _fused_rms_norm(tape, x, w, rows, width)
    wide = op.cast(tape, x, "fp32")
    elements = wide.elements
    square, square_node = _square(tape, wide)
    mean = _op(tape, "mean", [square], rows, "reduction", elements)
    mean_node = tape.node([square_node], (), lambda g: [_op(tape, "div", [g], elements)])
    tape.emit("add_", "elementwise", changes=[mean], flops=rows)
    root = _rsqrt(tape, mean, mean_node)
    del square, mean
    normed = _scaled(tape, wide, root, rows)
    y = _scaled(tape, normed, w.array(), width)
    del wide, normed
    return op.cast(tape, y, x.dtype)


def plus_one_rms_norm(tape: Tape, x: Array, w: Leaf, rows: Int, width: Int) -> Array:
    """RMS normalization times (1 + weight), in fp32 on every device."""
    wide = op.cast(tape, x, "fp32")
    elements = wide.elements
    square, square_node = _square(tape, wide)
    mean = _op(tape, "mean", [square], rows, "reduction", elements)
    del square
    mean_node = tape.node([square_node], (), lambda g: [_op(tape, "div", [g], elements)])
    raised = _op(tape, "add", [mean], rows)
    del mean
    root = _rsqrt(tape, raised, mean_node)
    del raised
    normed = _scaled(tape, wide, root, rows)
    del root
    factor = op.cast(tape, w.array(), "fp32")
    plus_one = _op(tape, "add", [factor], width)
    plus_one.node = tape.node([factor.node], (), lambda g: [g])
    del factor
    y = _scaled(tape, normed, plus_one, width)
    del plus_one
    return op.cast(tape, y, x.dtype)


def _op(
    tape: Tape, name: str, reads: Sequence[Array], elements: Int, kind: str = "elementwise", flops: Int | None = None
) -> Array:
    makes = [(elements, "fp32")]
    return tape.emit(name, kind, reads=reads, makes=makes, flops=elements if flops is None else flops)[0]


def _square(tape: Tape, x: Array) -> tuple[Array, Target]:
    """x squared, and where its gradient goes."""
    size = x.elements

    def backward(g: Array, x: Array) -> Gradients:
        power = _op(tape, "pow", [x], size)
        doubled = _op(tape, "mul", [power], size)
        return [_op(tape, "mul", [g, doubled], size)]

    node = tape.node([x.node], (x,), backward)
    return _op(tape, "pow", [x], size), node


def _rsqrt(tape: Tape, x: Array, node: Target) -> Array:
    """1 / sqrt(x), of an x whose gradient goes to ``node``."""
    rows = x.elements

    def backward(g: Array, root: Array) -> Gradients:
        cubed = _op(tape, "pow", [root], rows)
        halved = _op(tape, "mul", [g], rows)
        return [_op(tape, "mul", [halved, cubed], rows)]

    root = _op(tape, "rsqrt", [x], rows)
    root.node = tape.node([node], (root,), backward)
    return root


def _scaled(tape: Tape, x: Array, factor: Array, elements: Int) -> Array:
    """x times a factor of so many elements, broadcast."""
    size = x.elements

    def product(g: Array, other: Array) -> Array:
        return _op(tape, "mul", [g, other], size)

    node = op.pairwise(tape, x, factor, product, product, sums=[(1, elements)], formats=[x.dtype, factor.dtype])
    y = _op(tape, "mul", [x, factor], size)
    y.node = node
    return y


def _fused_rms_norm(tape: Tape, x: Array, w: Leaf, rows: Int, width: Int) -> Array:
    elements, dtype = x.elements, x.dtype
    weight = w.array()
    y, root = tape.emit(
        "_fused_rms_norm", "norm", reads=[x, weight], makes=[(elements, dtype), (rows, "fp32")], basis="assumed",
        flops=rules.FLOPS_PER_ELEMENT["rmsnorm"] * elements,
    )  # fmt: skip

    def backward(g: Array, x: Array, root: Array, weight: Array) -> Gradients:
        return list(
            tape.emit(
                "_fused_rms_norm_backward", "norm", reads=[g, x, root, weight], basis="assumed",
                makes=[(elements, dtype), *([(width, weight.dtype)] if weight.node is not None else [])],
                flops=rules.FLOPS_PER_ELEMENT["norm backward"] * elements,
            )
        )  # fmt: skip

    y.node = tape.node([x.node, weight.node], (x, root, weight), backward)
    return y
