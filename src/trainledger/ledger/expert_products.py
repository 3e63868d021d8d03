"""Matrix products of many experts at once on a tape: the same expressions as in `nn.expert_products`.

Sizes: E experts, R rows sorted by expert, C places of each expert, D width in, M width out.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.frozen import frozen
from trainledger.ledger import operations as op
from trainledger.ledger import rules
from trainledger.ledger.array import Array, Leaf
from trainledger.ledger.entry import Int
from trainledger.ledger.node import Gradients
from trainledger.ledger.tape import Tape


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


def linear(tape: Tape, x: Array, w: Leaf, b: Leaf | None, d_in: Int, d_out: Int, places: Places) -> Array:
    """Rows of d_in times each expert's weight [E, d_out, d_in] plus its bias [E, d_out]."""
    dtype = x.dtype
    matrix = op.cast(tape, w.array(), dtype)
    bias = None if b is None else op.cast(tape, b.array(), dtype)
    rows, n_experts, sizes = places.count, places.n_experts, (w.elements, places.n_experts * d_out)
    grouped = places.ends is not None
    each = -(-rows // places.n_experts)  # rows of an expert, where they are spread evenly
    flops = rules.matmul_flops(rows, d_out, d_in)
    model_flops = rules.matmul_flops(places.routed, d_out, d_in)

    def product(reads: Sequence[Array], elements: Int, *sizes: Int) -> Array:
        return tape.emit(
            "grouped_mm" if grouped else "padded_mm", "matmul", reads=reads, makes=[(elements, dtype)], flops=flops,
            model_flops=model_flops, shape=(n_experts, *sizes),
        )[0]  # fmt: skip

    def bias_gradient(g: Array, ends: Sequence[Array]) -> Array:
        name = "group_sums" if grouped else "sum"
        makes = [(sizes[1], dtype)]
        return tape.emit(name, "reduction", reads=[g, *ends], makes=makes, flops=g.elements)[0]

    x_wanted, w_wanted, b_wanted = (it is not None and it.node is not None for it in (x, matrix, bias))

    def backward(g: Array, *saved: Array) -> Gradients:
        others = list(saved)
        x = others.pop(0) if w_wanted else None
        matrix = others.pop(0) if x_wanted else None
        dx = product([g, matrix, *others], rows * d_in, each, d_in, d_out) if matrix is not None else None
        dw = product([g, x, *others], sizes[0], d_out, d_in, each) if x is not None else None
        return [dx, dw, bias_gradient(g, others)] if b_wanted else [dx, dw]

    ends = [places.ends] if places.ends is not None else []
    y = product([x, matrix, *ends], rows * d_out, each, d_out, d_in)
    targets = [x.node, matrix.node]
    if bias is not None:
        _add_bias(tape, y, bias, places)
        targets.append(bias.node)
    saved = [*([x] if w_wanted else []), *([matrix] if x_wanted else []), *ends]
    y.node = tape.node(targets, tuple(saved), backward)
    return y


def _add_bias(tape: Tape, y: Array, bias: Array, places: Places) -> None:
    if places.expert is None:
        tape.emit("add_", "elementwise", reads=[bias], changes=[y], flops=y.elements)
        return
    spread = rows_of(tape, y.elements, y.dtype, places.expert)
    tape.emit("add_", "elementwise", reads=[spread], changes=[y], flops=y.elements)


def rows_of(tape: Tape, elements: Int, dtype: str, index: Array) -> Array:
    """Rows of a table by an index, ``elements`` in all: of the table only those are read."""
    reads = [Array(elements, dtype, None), index]
    return tape.emit("index_select", "embedding", reads=reads, makes=[(elements, dtype)])[0]
