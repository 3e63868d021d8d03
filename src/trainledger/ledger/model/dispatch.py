"""Tokens on their way to the experts and back on a tape: the same expressions as in `nn.dispatch`.

Sizes: N tokens, K experts of a token, R = K N routes, E experts, C places of an expert, S places of all experts.
"""

from __future__ import annotations

from trainledger.frozen import frozen
from trainledger.ledger.core.arithmetic import is_one
from trainledger.ledger.core.graph import Array, Gradients
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.expert_products import rows_of


@frozen
class Dispatch:
    """The maps between routes and places, and what of them is not to be used."""

    route: Array
    place: Array
    starts: Array
    ends: Array
    expert: Array | None = None
    empty: Array | None = None
    dropped: Array | None = None


def dispatch(tape: Tape, chosen: Array, n_tokens: Int, per_token: int, n_experts: int, places: Int | None) -> Dispatch:
    """Where R routes go; ``places`` of each expert, or None for as many as it is sent."""
    R = chosen.elements
    flat = op.contiguous(tape, chosen, forward=not is_one(per_token) and not is_one(n_tokens), backward=False)
    expert, route = _sorted(tape, flat)
    del flat
    place = _sorted(tape, route)[1]
    experts = _counted(tape, n_experts)
    starts, ends = _found(tape, expert, experts), _found(tape, expert, experts)
    if places is None:
        return Dispatch(route, place, starts, ends, expert=expert)

    def number(name: str, reads: list[Array], elements: Int, dtype: str = "int64") -> Array:
        return tape.emit(name, "elementwise", reads=reads, makes=[(elements, dtype)], flops=elements)[0]

    S = n_experts * places
    behind = number("sub", [_counted(tape, R), rows_of(tape, R, "int64", expert)], R)
    kept = number("add", [number("mul", [expert], R), number("clamp", [behind], R)], R)
    route_of = number("add", [starts, _counted(tape, places)], S)
    first = rows_of(tape, S, "int64", number("clamp", [route_of], S))
    second = rows_of(tape, R, "int64", place)
    empty = number("ge", [route_of, ends], S, "bool")
    dropped = _dropped(tape, number("ge", [behind], R, "bool"), place)
    del kept
    return Dispatch(first, second, starts, ends, empty=empty, dropped=dropped)


def _dropped(tape: Tape, beyond: Array, place: Array) -> Array:
    return rows_of(tape, beyond.elements, "bool", place)


def _sorted(tape: Tape, x: Array) -> list[Array]:
    return tape.emit("sort", "embedding", reads=[x], makes=[(x.elements, "int64"), (x.elements, "int64")])


def _counted(tape: Tape, count: Int) -> Array:
    return tape.emit("arange", "copy", makes=[(count, "int64")])[0]


def _found(tape: Tape, ascending: Array, wanted: Array) -> Array:
    makes = [(wanted.elements, "int64")]
    return tape.emit("searchsorted", "embedding", reads=[ascending, wanted], makes=makes)[0]


def to_experts(tape: Tape, x: Array, where: Dispatch, per_token: int) -> Array:
    """The token of each place."""
    makes = [(where.route.elements, "int64")]
    token = tape.emit("remainder", "elementwise", reads=[where.route], makes=makes, flops=where.route.elements)[0]
    return _moved(tape, x, token, where.empty, where.place, where.dropped, copies=per_token)


def from_experts(tape: Tape, y: Array, where: Dispatch) -> Array:
    """What the experts made of each route."""
    return _moved(tape, y, where.place, where.dropped, where.route, where.empty, copies=1)


def _moved(
    tape: Tape, x: Array, index: Array, blank: Array | None, back: Array, blank_back: Array | None, *, copies: int
) -> Array:
    """Rows by an index; backward by the index the other way, and the sum over the ``copies`` of each row."""
    size = x.elements
    width = size * copies // back.elements  # x has a row for each ``copies`` of the way back

    def backward(g: Array, back: Array, *blank_back: Array) -> Gradients:
        rows = _rows(tape, size * copies, g.dtype, back, blank_back[0] if blank_back else None)
        return [rows if copies == 1 else tape.sum(rows, size)]

    y = _rows(tape, index.elements * width, x.dtype, index, blank)
    y.node = tape.node([x.node], (back,) if blank_back is None else (back, blank_back), backward)
    return y


def _rows(tape: Tape, elements: Int, dtype: str, index: Array, blank: Array | None) -> Array:
    rows = rows_of(tape, elements, dtype, index)
    if blank is not None:
        tape.emit("masked_fill_", "elementwise", reads=[blank], changes=[rows], flops=elements)
    return rows
