"""Linear layers in 8 and 4 bits (`engine.nn.float8`; by block as others have them), on a tape.

Sizes: N rows of tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import mul
from typing import Any

from trainledger.ledger.core.graph import Array, Gradients, Leaf, ModelLeaves
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ops import operations as op
from trainledger.spec.dtypes import BLOCK_FORMATS
from trainledger.spec.precision import Float8
from trainledger.spec.units import ceil_div

BLOCK = 128  # DeepSeek-AI 2024, DeepSeek-V3, section 3.3.2

Scaled = tuple[Array, ...]  # elements in 8 bits and what they must be multiplied with, or a block format's


def float8_linear(tape: Tape, x: Array, w: Leaf, b: Leaf | None, rows: Int, d_in: Int, d_out: Int) -> Array:
    """A linear layer in 8 bits, of the stored weight (`Leaf.linear`); the bias is added to its output.

    Of a weight that ``keeps_copy`` backward gets the input's 8-bit copy, made in forward for all matmuls that read
    the input (Transformer Engine), and not the input itself (torchao).
    """
    float8 = tape.precision.float8
    assert float8 is not None
    x = op.cast(tape, x, tape.compute_dtype)
    x = x.view(node=tape.node([x.node], (), lambda g: [g]))  # as rows, whose gradient comes after the weight's
    y = matmuls(tape, float8, x, w, rows, d_in, d_out)
    del x
    if b is None:
        return y
    bias = op.cast(tape, b.array(), y.dtype)
    z = tape.pointwise("add", y, bias)
    z.node = tape.node([y.node, bias.node], (), lambda g: [g, g], sums=[(1, d_out)])
    return z


def matmuls(tape: Tape, float8: Float8, x: Array, leaf: Leaf, N: Int, I: Int, O: Int) -> Array:
    """[N, I] times a weight [O, I], and in backward both its gradients, each matmul in 8 bits."""
    if float8.blocked:
        dense = x.dtype
        by = by_blocks if float8.scaling == "block" else by_microblocks
        return by(tape, x, None, leaf, N, I, O, lambda a, b, _, *sizes: multiply(tape, a, b, sizes, dense))
    w, keeps_copy = leaf.array(), leaf.keeps_copy
    rowwise, dtype, w_dtype = float8.scaling == "rowwise", x.dtype, w.dtype

    def scaled(x: Array, rows: Int, format: str, *, turned: bool) -> Scaled:
        return cast(tape, x, rows if rowwise else 1, format, turned=turned)

    def weight(w: Sequence[Array], *, turned: bool) -> Scaled:
        """A copy that exists for the whole step, or one that is made now."""
        if not w:
            return copies(float8, leaf)[turned]
        return scaled(w[0], I if turned else O, float8.forward, turned=turned)

    def by_token(x: Sequence[Array]) -> Scaled:
        return (x[0], x[1]) if keeps_copy else scaled(x[0], I, float8.forward, turned=True)

    def backward(g: Array, *saved: Array) -> Gradients:
        x, w = saved[:kept], saved[kept:]
        dy = scaled(g, N, float8.backward, turned=False)
        dx = multiply(tape, dy, weight(w, turned=True), (N, I, O), dtype)
        del dy
        dy = scaled(g, O, float8.backward, turned=True)
        with tape.gradient_of(leaf):
            dw = multiply(tape, dy, by_token(x), (O, I, N), dtype)
        del dy
        return [dx, dw if w_dtype == dtype else tape.cast(dw, w_dtype)]

    read = () if float8.caching else (w,)
    if keeps_copy:
        both = (scaled(x, I if turn else N, float8.forward, turned=turn) for turn in (False, True))
        rows, turned = _shared_casts(x, lambda: tuple(both))
        keeps: tuple[Array, ...] = turned
    else:
        rows, keeps = scaled(x, N, float8.forward, turned=False), (x,)
    kept = len(keeps)
    y = multiply(tape, rows, weight(read, turned=False), (N, O, I), dtype)
    y.node = tape.node([x.node, w.node], (*keeps, *read), backward)
    return y


def _shared_casts(x: Array, both: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """x in 8 bits for forward, and transposed for the weight's gradient: made once for all matmuls that read x."""
    if x.memory is None:
        return both()
    if x.memory.casts is None:
        x.memory.casts = both()
    shared: tuple[Any, ...] = x.memory.casts
    return shared


def multiply(tape: Tape, a: Scaled, b: Scaled, sizes: tuple[Int, Int, Int], dtype: str) -> Array:
    """The matmul of two scaled factors [m, k] and [k, n]; ``sizes`` are m, n and k."""
    return op.matmul(tape, "_scaled_mm", scaled_pair(a, b), (1, *sizes), dtype)


def scaled_pair(a: Scaled, b: Scaled) -> list[Array]:
    """What a scaled matmul reads: both factors, then their scales where they are apart."""
    return [a[0], b[0], *a[1:], *b[1:]]


def cast(tape: Tape, x: Array, scales: Int, format: str, *, turned: bool) -> Scaled:
    """x scaled by its largest values and cast; ``turned`` says that the result must be copied into other rows."""
    low, high = tape.emit("aminmax", "reduction", reads=[x], makes=[(scales, x.dtype)] * 2, flops=x.elements)

    negated = tape.pointwise("neg", low)
    largest = tape.pointwise("maximum", high, negated)
    del negated
    if x.dtype != "fp32":
        largest = tape.cast(largest, "fp32")
    tape.change("clamp_", largest)
    inverse = tape.pointwise("reciprocal", largest)
    scale = tape.pointwise("mul", inverse)
    del inverse
    wide = tape.pointwise("mul", x, scale, dtype="fp32")
    tape.change("clamp_", wide)
    x8 = tape.cast(wide, format)
    del wide
    return tape.make("clone", "copy", x8) if turned else x8, tape.pointwise("div", largest)


def by_blocks(
    tape: Tape, x: Array, scales: Array | None, leaf: Leaf, rows: Int, d_in: Int, d_out: Int,
    matmul: Callable[..., Array], each: Int | None = None,
) -> Array:  # fmt: skip
    """Rows times a weight, or each expert's, in 8 bits by block; ``scales`` where the rows came in 8 bits.

    ``matmul(a, b, elements, m, n, k)`` multiplies; of several experts ``each`` has so many of the rows. Each cast is
    one kernel; backward gets the input's 8-bit copy, which is laid out and scaled anew for it.
    """
    float8, w = tape.precision.float8, leaf.array()
    assert float8 is not None
    dtype, w_dtype = tape.compute_dtype, w.dtype
    each = rows if each is None else each

    def backward(g: Array, x8: Array, x_scales: Array, w: Array) -> Gradients:
        by_output = cast_by_block(tape, g, rows * blocks(d_out), float8.backward)
        weight = weight_by_block(tape, float8, leaf, w, turned=True)
        dx = matmul(by_output, weight, rows * d_in, each, d_in, d_out)
        del by_output, weight
        by_token = cast_by_block(tape, g, d_out * blocks(rows), float8.backward)
        anew = cast_by_block(tape, x8, d_in * blocks(rows), float8.forward)
        with tape.gradient_of(leaf):
            dw = matmul(by_token, anew, leaf.elements, d_out, d_in, each)
        del by_token, anew
        return [dx, dw if w_dtype == dtype else tape.cast(dw, w_dtype)]

    a = cast_by_block(tape, x, rows * blocks(d_in), float8.forward) if scales is None else (x, scales)
    b = weight_by_block(tape, float8, leaf, w, turned=False)
    y = matmul(a, b, rows * d_out, each, d_out, d_in)
    y.node = tape.node([x.node, w.node], (*a, w), backward)
    return y


def by_microblocks(
    tape: Tape, x: Array, _: Array | None, leaf: Leaf, rows: Int, d_in: Int, d_out: Int,
    matmul: Callable[..., Array], each: Int | None = None,
) -> Array:  # fmt: skip
    """`by_blocks` in a block format, whose rows and columns are quantized apart, both from the 16-bit tensor.

    Transformer Engine (``keeps_copy``) makes both at once, keeps the columns of input and weight for backward and
    frees the rows after the matmul (module/linear.py); torchao keeps 16 bits and quantizes for each matmul. Scales
    are counted; that kernels pad them to tiles of 128 x 4 is left out.
    """
    float8, w, keeps_copy = tape.precision.float8, leaf.array(), leaf.keeps_copy
    assert float8 is not None
    dtype, w_dtype, form = tape.compute_dtype, w.dtype, float8.forward
    each = rows if each is None else each

    # A scale serves elements in a row of the summed dim, so no copy can be transposed: the gradient too comes both by
    # outputs (for the input's gradient) and by tokens (for the weight's), as MXFP8BlockScaling and NVFP4BlockScaling
    # of transformer_engine/common/recipe say ("both versions are computed from the high precision input").
    def backward(g: Array, x: Array, *w: Array) -> Gradients:
        by_output, *turned = quantized(tape, g, float8.backward, 1 + keeps_copy)
        weight = copies(float8, leaf)[1] if not w else w if keeps_copy else quantized(tape, w[0], form, 1)
        dx = matmul((by_output,), weight, rows * d_in, each, d_in, d_out)
        del by_output, weight
        by_token = tuple(turned) or quantized(tape, g, float8.backward, 1)
        columns = (x,) if keeps_copy else quantized(tape, x, form, 1)
        with tape.gradient_of(leaf):
            dw = matmul(by_token, columns, leaf.elements, d_out, d_in, each)
        del by_token, columns, turned
        return [dx, dw if w_dtype == dtype else tape.cast(dw, w_dtype)]

    if keeps_copy:
        a, *columns = _shared_casts(x, lambda: _rows_and_columns(tape, x, form))
        kept = columns[0] if columns else x
        del columns
    else:
        (a,), kept = quantized(tape, x, form, 1), x
    w_kept: Scaled = ()
    if float8.caching:
        b = copies(float8, leaf)[0][0]
    else:
        b, *turned = quantized(tape, w, form, 1 + keeps_copy)
        w_kept = tuple(turned) or (w,)
        del turned
    y = matmul((a,), (b,), rows * d_out, each, d_out, d_in)
    y.node = tape.node([x.node, w.node], (kept, *w_kept), backward)
    return y


def _rows_and_columns(tape: Tape, x: Array, form: str) -> Scaled:
    """The rows of x and its columns; where tensor ranks gather x again for backward, a rank's own are x's then."""
    if x.memory is None or x.memory.again is None:
        return quantized(tape, x, form, 2)
    # Of Megatron-LM's sequence-parallel ranks Transformer Engine saves the part that was not gathered, in its columns.
    (part,) = quantized(tape, x.memory.again.part, form, 1)
    x.memory.again = x.memory.again.with_part(part)
    return quantized(tape, x, form, 1)


def quantized(tape: Tape, x: Array, format: str, ways: int) -> Scaled:
    """x in a block format, by rows or by columns or (two ``ways``) both, in one pass over it.

    NVFP4's scale of the whole tensor takes a pass before (arXiv 2509.25149, appendix C); the Hadamard transforms of
    what a weight's gradient reads run in the pass that quantizes, on matrix units, and are not counted.
    """
    reads = [x]
    if BLOCK_FORMATS[format].tensor_nbytes:
        reads += tape.emit("amax", "reduction", reads=[x], makes=[(1, "fp32")], flops=x.elements, basis="assumed")
    makes, flops = [(x.elements, format)] * ways, 2 * ways * x.elements
    return tuple(tape.emit("quantize", "elementwise", reads=reads, makes=makes, flops=flops, basis="assumed"))


def cast_by_block(tape: Tape, x: Array, scales: Int, format: str) -> Scaled:
    """x in 8 bits with so many scales, one for each block of it."""
    made, flops = [(x.elements, format), (scales, "fp32")], 2 * x.elements
    x8, array = tape.emit("cast_by_block", "elementwise", reads=[x], makes=made, flops=flops, basis="assumed")
    return x8, array


def weight_by_block(tape: Tape, float8: Float8, leaf: Leaf, w: Array, *, turned: bool) -> Scaled:
    """A weight in 8 bits, of experts all of theirs: the copy that exists all step, or one that is made now."""
    if float8.caching:
        return copies(float8, leaf)[turned]
    return cast_by_block(tape, w, _scales(float8, leaf, turned=turned), float8.forward)


# Weights that are cast once a step


def copies(float8: Float8, leaf: Leaf) -> tuple[Scaled, Scaled]:
    """The 8-bit copies of a weight: plain for forward, transposed for backward. One scale serves both."""
    if float8.scaling == "micro":
        plain, columns = ((Array(leaf.elements, float8.forward, None),) for _ in range(2))
        return plain, columns
    one, other = (Array(_scales(float8, leaf, turned=each), "fp32", None) for each in (False, True))
    whole, turned = (Array(leaf.elements, float8.forward, None) for _ in range(2))
    return (whole, one), (turned, one if float8.scaling == "tensorwise" else other)


def _scales(float8: Float8, leaf: Leaf, *, turned: bool) -> Int:
    *experts, rows, columns = leaf.shape
    if float8.scaling == "block":
        return reduce(mul, experts, blocks(rows) * blocks(columns))
    if float8.scaling == "tensorwise":
        return 1
    return columns if turned else rows


def copies_nbytes(leaves: ModelLeaves, float8: Float8) -> Int:
    """Bytes of all weights that stay in 8 bits, their scales included."""

    def nbytes(leaf: Leaf) -> Int:
        found = {id(array): array.nbytes for scaled in copies(float8, leaf) for array in scaled}
        return sum(found.values())

    return leaves.trained().among(lambda leaf: leaf.float8).total(nbytes)


def cast_weights(tape: Tape, leaves: ModelLeaves, float8: Float8) -> None:
    """Every weight into its copies, before the first micro-batch of a step."""
    with tape.during("optimizer"):
        for leaf in tape.each_parameter(leaves.trained().among(lambda leaf: leaf.float8)):
            _cast_weight(tape, float8, leaf)


def _cast_weight(tape: Tape, float8: Float8, leaf: Leaf) -> None:
    w, (whole, turned) = leaf.array(), copies(float8, leaf)
    if float8.blocked:
        tape.emit(
            "cast_by_block" if float8.scaling == "block" else "quantize",
            "elementwise",
            reads=[w],
            changes=[*whole, *turned],
            flops=2 * w.elements,
            basis="assumed",
        )
        return
    made = cast(tape, w, whole[1].elements, float8.forward, turned=False)
    _put(tape, made, whole)
    if float8.scaling == "tensorwise":
        _put(tape, made[:1], turned[:1])
        return
    del made
    _put(tape, cast(tape, w, turned[1].elements, float8.forward, turned=True), turned)


def _put(tape: Tape, made: Sequence[Array], into: Sequence[Array]) -> None:
    for source, target in zip(made, into, strict=True):
        tape.emit("copy_", "copy", reads=[source], changes=[target])


def blocks(size: Int) -> Int:
    """Blocks of 128 that a dim has, the last padded."""
    return ceil_div(size, BLOCK)
