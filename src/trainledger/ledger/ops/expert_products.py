"""Matrix products of many experts at once on a tape: the same expressions as in `nn.expert_products`.

Sizes: E experts, R rows sorted by expert, C places of each expert, D width in, M width out.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.frozen import frozen
from trainledger.ledger import rules
from trainledger.ledger.core.graph import Array, Gradients, Leaf
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.float8 import blocks, cast_by_block, weight_by_block

Scaled = tuple[Array, Array]  # elements in 8 bits, and what they must be multiplied with


@frozen
class Places:
    """The rows that experts work on: how many there are, how many hold a token, and who knows whose they are.

    ``ends`` and ``expert`` are the arrays that say where each expert's rows end and whose each row is; both are
    None where every expert has the same number of places.
    """

    count: Int
    routed: Int
    n_experts: int
    expert: Array | None
    ends: Array | None


def linear(
    tape: Tape, x: Array, w: Leaf, b: Leaf | None, d_in: Int, d_out: Int, places: Places, scales: Array | None = None
) -> Array:
    """Rows of d_in times each expert's weight [E, d_out, d_in] plus its bias [E, d_out].

    Rows that came in 8 bits have their ``scales``.
    """
    if tape.precision.float8 is not None and tape.precision.float8.scaling == "block":
        return _in_8_bits(tape, x, w, b, d_in, d_out, places, scales)
    dtype = x.dtype
    matrix = op.cast(tape, w.array(), dtype)
    bias = None if b is None else op.cast(tape, b.array(), dtype)
    rows, n_experts, sizes = places.count, places.n_experts, (w.elements, places.n_experts * d_out)
    grouped = places.ends is not None
    each = -(-rows // places.n_experts)  # rows of an expert, where they are spread evenly
    flops = rules.matmul_flops(rows, d_out, d_in)
    model_flops = rules.matmul_flops(places.routed, d_out, d_in)

    def product(reads: Sequence[Array], elements: Int, *sizes: Int) -> Array:
        return tape.make(
            "grouped_mm" if grouped else "padded_mm", "matmul", *reads, elements=elements, dtype=dtype, flops=flops,
            model_flops=model_flops, shape=(n_experts, *sizes),
        )  # fmt: skip

    x_wanted, w_wanted, b_wanted = (it is not None and it.node is not None for it in (x, matrix, bias))

    def backward(g: Array, *saved: Array) -> Gradients:
        others = list(saved)
        x = others.pop(0) if w_wanted else None
        matrix = others.pop(0) if x_wanted else None
        dx = product([g, matrix, *others], rows * d_in, each, d_in, d_out) if matrix is not None else None
        dw = product([g, x, *others], sizes[0], d_out, d_in, each) if x is not None else None
        return [dx, dw, _bias_gradient(tape, g, others, sizes[1])] if b_wanted else [dx, dw]

    ends = [places.ends] if places.ends is not None else []
    y = product([x, matrix, *ends], rows * d_out, each, d_out, d_in)
    targets = [x.node, matrix.node]
    if bias is not None:
        _add_bias(tape, y, bias, places)
        targets.append(bias.node)
    saved = [*([x] if w_wanted else []), *([matrix] if x_wanted else []), *ends]
    y.node = tape.node(targets, tuple(saved), backward)
    return y


def _in_8_bits(
    tape: Tape, x: Array, w: Leaf, b: Leaf | None, d_in: Int, d_out: Int, places: Places, scales: Array | None
) -> Array:
    """The same in 8 bits by block, as linear layers have it (`ledger.ops.float8`): DeepSeek-V3's grouped products."""
    float8 = tape.precision.float8
    assert float8 is not None
    rows, n_experts, dtype = places.count, places.n_experts, tape.compute_dtype
    each = -(-rows // n_experts)  # rows of an expert, where they are spread evenly
    flops = rules.matmul_flops(rows, d_out, d_in)
    model_flops = rules.matmul_flops(places.routed, d_out, d_in)

    def product(a: Scaled, b: Scaled, elements: Int, *sizes: Int) -> Array:
        return tape.make(
            "_scaled_grouped_mm", "matmul", a[0], b[0], a[1], b[1], elements=elements, dtype=dtype, flops=flops,
            model_flops=model_flops, shape=(n_experts, *sizes), basis="assumed",
        )  # fmt: skip

    def backward(g: Array, x8: Array, x_scales: Array, matrix: Array) -> Gradients:
        by_output = cast_by_block(tape, g, rows * blocks(d_out), float8.backward)
        weight = weight_by_block(tape, float8, w, matrix, turned=True)
        dx = product(by_output, weight, rows * d_in, each, d_in, d_out)
        del by_output, weight
        by_token = cast_by_block(tape, g, d_out * blocks(rows), float8.backward)
        anew = cast_by_block(tape, x8, d_in * blocks(rows), float8.forward)
        dw = product(by_token, anew, matrix.elements, d_out, d_in, each)
        del by_token, anew
        return [dx, dw if matrix.dtype == dtype else tape.cast(dw, matrix.dtype)]

    matrix = w.array()
    a = cast_by_block(tape, x, rows * blocks(d_in), float8.forward) if scales is None else (x, scales)
    y = product(a, weight_by_block(tape, float8, w, matrix, turned=False), rows * d_out, each, d_out, d_in)
    y.node = tape.node([x.node, matrix.node], (*a, matrix), backward)
    if b is None:
        return y
    bias = op.cast(tape, b.array(), dtype)
    _add_bias(tape, y, bias, places)
    ends = () if places.ends is None else (places.ends,)

    def with_bias(g: Array, *ends: Array) -> Gradients:
        return [g, _bias_gradient(tape, g, ends, n_experts * d_out)]

    return y.view(node=tape.node([y.node, bias.node], ends, with_bias))


def _bias_gradient(tape: Tape, g: Array, ends: Sequence[Array], elements: Int) -> Array:
    return tape.make("group_sums" if ends else "sum", "reduction", g, *ends, elements=elements, flops=g.elements)


def _add_bias(tape: Tape, y: Array, bias: Array, places: Places) -> None:
    tape.change("add_", y, bias if places.expert is None else rows_of(tape, y.elements, y.dtype, places.expert))


def rows_of(tape: Tape, elements: Int, dtype: str, index: Array) -> Array:
    """Rows of a table by an index, ``elements`` in all: of the table only those are read."""
    return tape.make("index_select", "embedding", Array(elements, dtype, None), index)
