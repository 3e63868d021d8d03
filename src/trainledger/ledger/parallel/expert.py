"""Experts on several ranks on a tape: tokens go to the ranks of their experts, and back (Lepikhin et al. 2020, GShard).

Every rank is taken to get as many routes as it sends: the load of the experts is balanced (basis ``assumed``). What is
sent is told as a copy of a token for each of its experts. Where it goes to nodes (DeepEP; DeepSeek-AI 2024,
DeepSeek-V3, section 3.2.2) fewer of those bytes pass the network (`predict.collective`), the sender makes no copies,
and what comes back is already the sum over a token's experts.

Sizes: N tokens of this rank, K experts of a token, S = K N places of its routes, D d_model.
"""

from __future__ import annotations

from trainledger.ledger.core.graph import Array, Gradients
from trainledger.ledger.core.record import Group
from trainledger.ledger.core.sizes import Sizes, is_one
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ops.float8 import blocks, cast_by_block
from trainledger.ledger.parallel.context import exchanged


def to_ranks(tape: Tape, sizes: Sizes, x: Array) -> Array:
    """The rows of this rank's experts from all ranks; a copy brings those of one expert together."""
    if is_one(sizes.layout.expert):
        return x
    return _together(tape, exchanged(tape, _group(sizes), x))


def from_ranks(tape: Tape, sizes: Sizes, y: Array) -> Array:
    """What other ranks' experts made of this rank's rows."""
    if is_one(sizes.layout.expert):
        return y
    return exchanged(tape, _group(sizes), _together(tape, y))


def _group(sizes: Sizes) -> Group:
    return Group("expert", sizes.layout.expert)


def _together(tape: Tape, x: Array) -> Array:
    y = _moved(tape, x)
    y.node = tape.node([x.node], (), lambda g: [_moved(tape, g)])
    return y


def _moved(tape: Tape, x: Array, dtype: str = "") -> Array:
    """The same rows in another order; scales of 8 bits are multiplied in where the format is another."""
    return tape.make("index_select", "embedding", x, dtype=dtype)


# Once to each node


def to_nodes(tape: Tape, sizes: Sizes, x: Array) -> tuple[Array, Array | None]:
    """Tokens [N, D] to the rows [S, D] of this rank's experts, with their scales where they come in 8 bits."""
    size, dtype = x.elements, x.dtype

    def backward(g: Array) -> Gradients:
        return [_combined(tape, sizes, g, size)]

    node = tape.node([x.node], (), backward)
    rows, scales = _dispatched(tape, sizes, x)
    y = _moved(tape, rows)
    assert y.dtype == dtype or scales is not None
    y.node = node
    return y, scales


def from_nodes(tape: Tape, sizes: Sizes, y: Array) -> Array:
    """The sums [N, D] of what experts made of each token, from the rows [S, D] of this rank's experts."""
    dtype = y.dtype

    def backward(g: Array) -> Gradients:
        return [_moved(tape, _dispatched(tape, sizes, g)[0], dtype)]

    node = tape.node([y.node], (), backward)
    x = _combined(tape, sizes, y, sizes.rows * sizes.spec.d_model)
    x.node = node
    return x


def _dispatched(tape: Tape, sizes: Sizes, x: Array) -> tuple[Array, Array | None]:
    """A copy of each token for each of its experts, as they arrive; in 8 bits where products take 8 bits by block.

    So do gradients on their way to the experts in backward (DeepSeek-V3, section 3.3.3).
    """
    assert sizes.spec.experts is not None
    float8, K, group = tape.precision.float8, sizes.spec.experts.per_token, _group(sizes)
    if float8 is None or float8.scaling != "block":
        arriving = Array(x.elements * K, x.dtype, None)
        makes = [(arriving.elements, x.dtype)]
        found = tape.collective("all_to_all", group, arriving.nbytes, reads=[x], makes=makes, basis="assumed")
        return found[0], None
    count = sizes.rows * blocks(sizes.spec.d_model)
    format = float8.backward if tape.phase == "backward" else float8.forward
    x8, scales = cast_by_block(tape, x, count, format)
    payload = K * (x8.nbytes + scales.nbytes)
    makes = [(x8.elements * K, format), (scales.elements * K, "fp32")]
    rows, of_rows = tape.collective("all_to_all", group, payload, reads=[x8, scales], makes=makes, basis="assumed")
    return rows, of_rows


def _combined(tape: Tape, sizes: Sizes, y: Array, elements: Int) -> Array:
    """The sum over a token's experts of their rows, added up in each node before it is sent."""
    rows = _moved(tape, y)
    makes = [(elements, y.dtype)]
    return tape.collective("all_to_all", _group(sizes), rows.nbytes, reads=[rows], makes=makes, basis="assumed")[0]
