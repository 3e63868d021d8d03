"""The feed-forward part on a tape: the same expressions as in `nn.mlp`.

Sizes: D d_model, F d_ff.
"""

from __future__ import annotations

from trainledger.ledger import operations as op
from trainledger.ledger.array import Array
from trainledger.ledger.entry import Int
from trainledger.ledger.parameters import BlockLeaves
from trainledger.ledger.sizes import Sizes
from trainledger.ledger.tape import Tape


def mlp(tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array) -> Array:
    """The dense MLP, plain or gated."""
    D, F, rows = sizes.spec.d_model, sizes.spec.d_ff, sizes.rows

    def project(name: str, x: Array, d_in: Int, d_out: Int) -> Array:
        with tape.at(name):
            return op.linear(tape, x, leaves[f"mlp.{name}.weight"], leaves.get(f"mlp.{name}.bias"), rows, d_in, d_out)

    if sizes.spec.gated:
        h = op.multiply(
            tape,
            op.activation(tape, project("gate_proj", x, D, F), sizes.spec.activation),
            project("up_proj", x, D, F),
        )
    else:
        h = op.activation(tape, project("up_proj", x, D, F), sizes.spec.activation)
    return project("down_proj", h, F, D)
