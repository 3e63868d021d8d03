"""Linear layers with adapters over frozen weights, on a tape, as in `engine.nn.lora`.

LoRA (Hu et al. 2021, section 4.1), QLoRA (Dettmers et al. 2023, section 3): a frozen weight has no gradient and its
matmul none of its own, about 4 N FLOPs per token instead of 6 N. R is the rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from trainledger.ledger.core.graph import Array, Gradients, Leaf, ModelLeaves
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.linear import float8_linear
from trainledger.spec.dtypes import BLOCK_FORMATS, nbytes_in
from trainledger.spec.savings import BLOCKS_OF, Lora, is_linear, is_target
from trainledger.spec.units import ceil_div

# The format that a weight's codes are held in, and 8-bit scales.
CODES = {"bf16": "bf16", "int8": "int8", "nf4": "uint8", "fp8": "e4m3"}


def adapt(named: dict[str, Leaf], lora: Lora) -> dict[str, Leaf]:
    """The parameters of a block or of those around the blocks: frozen, with adapters on the targets."""
    leaves: dict[str, Leaf] = {}
    whole = {f"{module}.{what}" for module in lora.whole or () for what in ("weight", "bias")}
    stacks = {name: leaf for name, leaf in named.items() if ".experts." in name} if lora.of_experts else {}
    for name, leaf in named.items():
        leaf.trained = name in whole
        leaves[name] = leaf
        module, _, what = name.rpartition(".")
        if stacks and name == next(reversed(stacks)):
            leaves |= {factor.path: factor for factor in _of_experts(stacks, lora)}
        if not is_linear(name):
            continue
        last = what == "bias" or f"{module}.bias" not in named
        weight = named[f"{module}.weight"]
        a = b = magnitude = None
        if last and is_target(name, lora.targets):
            d_out, d_in = weight.shape
            a = leaves[f"{module}.lora_a"] = Leaf(f"{module}.lora_a", (lora.rank, d_in))
            b = leaves[f"{module}.lora_b"] = Leaf(f"{module}.lora_b", (d_out, lora.rank))
            if lora.dora:
                magnitude = leaves[f"{module}.lora_magnitude"] = Leaf(f"{module}.lora_magnitude", (d_out,))
        if last:
            weight.linear = partial(linear, lora=lora, a=a, b=b, magnitude=magnitude)
    return leaves


def _of_experts(stacks: dict[str, Leaf], lora: Lora) -> Iterator[Leaf]:
    """The adapters of all stacks of experts of a layer, which come after them; none for their biases."""
    for name, leaf in stacks.items():
        if len(leaf.shape) == 3:
            E, d_out, d_in = leaf.shape
            module, _, what = name.rpartition(".")
            a = Leaf(f"{module}.lora_a_{what}", (E, lora.rank, d_in))
            b = Leaf(f"{module}.lora_b_{what}", (E, d_out, lora.rank))
            leaf.linear = partial(experts, lora=lora, a=a, b=b)
            yield from (a, b)


def linear(
    tape: Tape, x: Array, w: Leaf, bias: Leaf | None, rows: Int, d_in: Int, d_out: Int, *,
    lora: Lora, a: Leaf | None, b: Leaf | None, magnitude: Leaf | None,
) -> Array:  # fmt: skip
    """A frozen linear layer, plus what its adapter adds: dropout(x) A B times alpha / R, or with a magnitude DoRA's."""
    x = op.cast(tape, x, tape.compute_dtype)
    y = _frozen(tape, x, w, bias, rows, d_in, d_out, lora.base_format)
    if a is None or b is None:
        return y
    z = op.dropout(tape, x, lora.dropout)
    if magnitude is not None:
        more = _magnified(tape, z, y, w, bias, (rows, d_in, d_out), lora, a, b, magnitude)
        total = op.add(tape, y, more)
        del more
        return op.cast(tape, total, y.dtype)
    low = op.linear(tape, z, a, None, rows, d_in, lora.rank)
    whole = op.linear(tape, low, b, None, rows, lora.rank, d_out)
    del low
    added = op.times_number(tape, whole)
    del whole
    return op.add(tape, y, added)


def experts(
    tape: Tape,
    multiply: Callable[..., Array],
    x: Array,
    w: Leaf,
    sizes: tuple[Int, Int],
    *,
    lora: Lora,
    a: Leaf | None,
    b: Leaf | None,
) -> Array:
    """Each expert's rows times its frozen weight with an adapter: ``multiply(rows, stack, d_in, d_out, of)`` is the
    matmul, with a bias where it is not of another leaf."""
    d_in, d_out = sizes
    if a is None or b is None:
        return multiply(x, w.array(), d_in, d_out)
    if lora.experts == "weights":
        return multiply(x, _folded(tape, w, a, b), d_in, d_out)
    z = op.dropout(tape, x, lora.dropout)
    y = multiply(x, w.array(), d_in, d_out)
    low = multiply(z, a.array(), d_in, lora.rank, a)
    whole = multiply(low, b.array(), lora.rank, d_out, b)
    del low
    added = op.times_number(tape, whole)
    del whole
    return op.add(tape, y, added)


def _folded(tape: Tape, w: Leaf, a: Leaf, b: Leaf) -> Array:
    """Every expert's weight plus alpha / R times B A: as large as the frozen weights, and so is its gradient."""
    (E, d_out, d_in), rank, dtype = w.shape, a.shape[1], w.array().dtype

    # The first factor's gradient is taken first (torch 2.13, baddbmm in derivatives.yaml), and alpha scales it, not
    # the far larger product.
    def backward(g: Array, b: Array, a: Array) -> Gradients:
        db = tape.pointwise("mul", op.matmul(tape, "bmm", [g, a], (E, d_out, rank, d_in), dtype))
        return [db, tape.pointwise("mul", op.matmul(tape, "bmm", [b, g], (E, rank, d_in, d_out), dtype))]

    node = tape.node([b.array().node, a.array().node], (b.array(), a.array()), backward)
    y = op.matmul(tape, "baddbmm", [w.array(), b.array(), a.array()], (E, d_out, d_in, rank), dtype)
    y.node = node
    return y


def _magnified(
    tape: Tape, z: Array, y: Array, w: Leaf, bias: Leaf | None, sizes: tuple[Int, ...], lora: Lora, *parts: Leaf
) -> Array:
    """What DoRA adds to a frozen layer's output y of an input z, as `engine.nn.lora` and PEFT compute it."""
    (rows, d_in, d_out), (a, b, magnitude) = sizes, parts
    dtype = a.array().dtype
    # The norm gets no gradient (Liu et al. 2024, section 4.3), so that of B A nothing is kept. PEFT 0.21 makes it of an
    # identity that goes through both factors (tuners/lora/dora.py, ``get_lora_weight``: a product of the two alone
    # fails under FSDP), and holds both, as well as a wide copy of the weight, until the output is there.
    eye = tape.make("eye", "copy", elements=d_in * d_in, dtype=dtype)
    low = _detached(tape, eye, a, d_in, d_in, lora.rank)
    added = _detached(tape, low, b, d_in, lora.rank, d_out)
    delta = added if added.dtype == dtype else tape.cast(added, dtype)
    del added
    matrix = _wide(tape, w, d_out * d_in, lora.base_format, dtype)
    scaled = tape.pointwise("mul", delta)
    joint = tape.pointwise("add", matrix, scaled)
    del scaled
    norm = tape.make("linalg_vector_norm", "reduction", joint, elements=d_out, flops=joint.elements)
    del joint
    # Of a layer that is cut by its inputs each rank has a part of every row. Squares are summed in fp32: in bf16 a sum
    # of two ranks' would keep eight bits.
    if magnitude.over is not None:
        squares = tape.pointwise("pow", norm, dtype="fp32")
        del norm
        tape.all_reduce(magnitude.over, squares)
        norm = op.cast(tape, tape.pointwise("sqrt", squares), dtype)
        del squares
    factor = tape.pointwise("div", magnitude.array(), norm)
    factor.node = tape.node([magnitude.array().node], (norm,), lambda g, norm: [tape.pointwise("div", g, norm)])
    del norm
    result = op.linear(tape, z, a, None, rows, d_in, lora.rank)
    result = op.linear(tape, result, b, None, rows, lora.rank, d_out)
    # With dropout the frozen layer runs once more, on what dropout left, without its bias.
    if lora.dropout:
        y = _of_matrix(tape, z, matrix, rows, d_in, d_out)
    elif bias is not None:
        y = _less_bias(tape, y, bias)
    plain = _scaled(tape, op.plus_number(tape, factor, "sub"), y)
    more = _scaled(tape, factor, result)
    more = op.times_number(tape, more)
    return op.add(tape, plain, more)


def _detached(tape: Tape, x: Array, w: Leaf, rows: Int, d_in: Int, d_out: Int) -> Array:
    """x times a parameter, to which no gradient goes."""
    dtype = tape.compute_dtype
    matrix, x = (array if array.dtype == dtype else tape.cast(array, dtype) for array in (w.array(), x))
    return op.matmul(tape, "mm", [x, matrix], (1, rows, d_out, d_in), dtype)


def _scaled(tape: Tape, factor: Array, x: Array) -> Array:
    """A factor for each column times x."""
    dtype = "fp32" if "fp32" in (factor.dtype, x.dtype) else x.dtype
    size, formats = x.elements, [factor.dtype, x.dtype]

    def product(g: Array, other: Array) -> Array:
        return tape.pointwise("mul", g, other, elements=size, dtype=dtype)

    node = op.pairwise(tape, factor, x, product, product, sums=[(0, factor.elements)], formats=formats)
    y = product(factor, x)
    y.node = node
    return y


def _less_bias(tape: Tape, y: Array, bias: Leaf) -> Array:
    """y without the bias that is in it."""
    vector, formats = bias.array(), [y.dtype]
    x = tape.pointwise("sub", y, vector, dtype="fp32" if vector.dtype == "fp32" else y.dtype)
    x.node = tape.node([y.node], (), lambda g: [g], formats=formats)
    return x


def _of_matrix(tape: Tape, z: Array, matrix: Array, rows: Int, d_in: Int, d_out: Int) -> Array:
    """z times a frozen matrix, which backward reads again."""
    dtype = tape.compute_dtype
    matrix = matrix if matrix.dtype == dtype else tape.cast(matrix, dtype)

    def backward(g: Array, matrix: Array) -> Gradients:
        return [op.matmul(tape, "mm", [g, matrix], (1, rows, d_in, d_out), dtype)]

    node = tape.node([z.node], (matrix,), backward)
    y = op.matmul(tape, "mm", [z, matrix], (1, rows, d_out, d_in), dtype)
    y.node = node
    return y


@contextmanager
def adapters_off(leaves: ModelLeaves) -> Iterator[None]:
    """Inside, linear layers with adapters are the frozen ones alone."""
    ways = [(leaf, leaf.linear) for leaf in leaves.every() if leaf.linear is not None]
    for leaf, way in ways:
        leaf.linear = partial(way, a=None, b=None)
    try:
        yield
    finally:
        for leaf, way in ways:
            leaf.linear = way


def _frozen(
    tape: Tape, x: Array, w: Leaf, bias: Leaf | None, rows: Int, d_in: Int, d_out: Int, base_format: str | None
) -> Array:
    """The matmul with a weight that gets no gradient, made wide for each use where it is stored otherwise."""
    if base_format is None:
        way, w.linear = w.linear, float8_linear if w.float8 else None
        try:
            return op.linear(tape, x, w, bias, rows, d_in, d_out)
        finally:
            w.linear = way
    dtype = tape.compute_dtype

    def wide() -> Array:
        return _wide(tape, w, d_out * d_in, base_format, dtype)

    node = tape.node([x.node], (), lambda g: [op.matmul(tape, "mm", [g, wide()], (1, rows, d_in, d_out), dtype)])
    matrix = wide()
    vector = [] if bias is None else [op.cast(tape, bias.array(), dtype)]
    y = op.matmul(tape, "addmm" if vector else "mm", [*vector, x, matrix], (1, rows, d_out, d_in), dtype)
    del matrix, vector
    y.node = node
    return y


def _wide(tape: Tape, w: Leaf, elements: Int, base_format: str | None, dtype: str) -> Array:
    """A frozen weight in a format: itself, a copy of it, or what its codes stand for."""
    if base_format is None:
        whole = w.array()
        return whole if whole.dtype == dtype else tape.cast(whole, dtype)
    # The codes and their scales, read as so many elements of the codes' format.
    codes = CODES[base_format]
    stored = Array(base_nbytes(w.elements, base_format) // nbytes_in(1, codes), codes, None)
    return tape.pointwise("dequantize", stored, elements=elements, dtype=dtype)


def base_nbytes(elements: Int, base_format: str) -> Int:
    """Bytes of a frozen weight in a format, its scales included.

    >>> base_nbytes(4096 * 4096, "nf4") / 4096**2 * 8
    4.126953125
    """
    if base_format == "bf16":
        return 2 * elements
    return BLOCK_FORMATS[BLOCKS_OF[base_format]].nbytes_for(elements)


def stored(leaf: Leaf, base_format: str | None, dtype: str) -> Iterator[tuple[Leaf, str]]:
    """The tensors that a parameter is stored in, with their formats: itself, or codes and scales in rows.

    >>> leaf = Leaf("mlp.up_proj.weight", (64, 65), trained=False)
    >>> leaf.linear = linear
    >>> [(part.shape, dtype) for part, dtype in stored(leaf, "nf4", "bf16")]
    [((2080,), 'uint8'), ((65,), 'e4m3'), ((1,), 'fp32')]
    """
    own = leaf.trained or leaf.linear is None or len(leaf.shape) > 2  # experts' stacks are in no other format
    if own or base_format in (None, "bf16"):
        yield leaf, dtype if own else base_format or dtype
        return
    assert base_format is not None
    form = BLOCK_FORMATS[BLOCKS_OF[base_format]]
    scales = ceil_div(leaf.elements, form.block)
    rows = [(ceil_div(leaf.elements * form.bits, 8), CODES[base_format]), (scales, CODES.get(form.scale, form.scale))]
    if form.scale_block is not None:
        rows.append((ceil_div(scales, form.scale_block), "fp32"))
    for elements, format in rows:
        yield Leaf(leaf.path, (elements,), trained=False), format


def frozen_nbytes(leaves: ModelLeaves, base_format: str | None, dtype: str) -> Int:
    """Bytes of all frozen parameters: linear layers in ``base_format`` where it is given, the rest in ``dtype``."""

    def nbytes(leaf: Leaf) -> Int:
        return sum(nbytes_in(part.elements, format) for part, format in stored(leaf, base_format, dtype))

    return sum(
        count * sum(nbytes(leaf) for leaf in pattern if not leaf.trained) for pattern, count in leaves.in_order()
    )
