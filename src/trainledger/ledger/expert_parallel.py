"""Experts on several ranks on a tape: tokens go to the ranks of their experts, and back (Lepikhin et al. 2020, GShard).

Every rank is taken to get as many routes as it sends: the load of the experts is balanced (basis ``assumed``).

Sizes: S places of this rank's routes, E experts of the model.
"""

from __future__ import annotations

from trainledger.ledger.array import Array
from trainledger.ledger.collectives import Group
from trainledger.ledger.context_parallel import exchanged
from trainledger.ledger.operations import is_one
from trainledger.ledger.sizes import Sizes
from trainledger.ledger.tape import Tape


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
    def moved(x: Array) -> Array:
        return tape.emit("index_select", "embedding", reads=[x], makes=[(x.elements, x.dtype)])[0]

    y = moved(x)
    y.node = tape.node([x.node], (), lambda g: [moved(g)])
    return y
