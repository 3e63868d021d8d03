"""The feed-forward part on a tape: the same expressions as in `nn.mlp`.

Sizes: D d_model, F inner width.
"""

from __future__ import annotations

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.leaves import BlockLeaves
from trainledger.ledger.core.sizes import Sizes
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.activations import activate, gated


def mlp(
    tape: Tape, sizes: Sizes, leaves: BlockLeaves, x: Array, *, name: str = "mlp", width: Int | None = None
) -> Array:
    """The dense MLP of this name and inner width (absent: d_ff), plain or gated."""
    spec, rows = sizes.spec, sizes.rows
    D, F = spec.d_model, spec.feed_forward.d_ff if width is None else width

    def project(part: str, x: Array, d_in: Int, d_out: Int) -> Array:
        w, b = leaves[f"{name}.{part}.weight"], leaves.get(f"{name}.{part}.bias")
        with tape.at(part):
            return op.linear(tape, x, w, b, rows, d_in, d_out)

    if spec.feed_forward.gated:
        h = gated(tape, project("gate_proj", x, D, F), project("up_proj", x, D, F), spec.feed_forward.activation)
    else:
        h = activate(tape, project("up_proj", x, D, F), spec.feed_forward.activation)
    return project("down_proj", h, F, D)
