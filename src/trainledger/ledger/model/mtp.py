"""Multi-token prediction on a tape: the same expressions as in `engine.nn.mtp`.

Sizes: B sequences, T tokens, S tokens of a module, D d_model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainledger.ledger.core.graph import Array
from trainledger.ledger.core.leaves import BlockLeaves, ModelLeaves
from trainledger.ledger.core.sizes import Sizes, is_one
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import Int
from trainledger.ledger.memory.checkpointing import checkpointed
from trainledger.ledger.model.attention import Shared
from trainledger.ledger.model.blocks import compose
from trainledger.ledger.ops import operations as op
from trainledger.ledger.ops.loss import cross_entropy
from trainledger.ledger.ops.norms import norm
from trainledger.spec.layers import LayerKind, last_kind
from trainledger.spec.recipe import Recipe

PATH = "mtp.*"


def mtp_loss(
    tape: Tape, sizes: Sizes, leaves: ModelLeaves, h: Array, e: Array, recipe: Recipe,
    head: Callable[[Array, Int], Array], shared: Callable[[Sizes, LayerKind], Shared],
) -> Array:  # fmt: skip
    """The sum of the modules' mean losses; h is the output of the last block, e the input of the first."""
    total: Array | None = None
    for ahead in range(1, sizes.spec.n_mtp_layers + 1):
        part = replace(sizes, T=sizes.T - 1 - ahead)
        size = part.rows * sizes.spec.d_model
        own = _own(sizes, leaves, ahead - 1)
        h = _module(tape, part, own, op.leading(tape, h, size), op.leading(tape, e, size), recipe, shared)
        loss = _loss(tape, part, own, h, recipe, head)
        total = loss if total is None else op.add(tape, total, loss)
    assert total is not None, "there is no module"
    return total


def _own(sizes: Sizes, leaves: ModelLeaves, index: int) -> BlockLeaves:
    prefix = f"mtp.{index}."
    named = {name.removeprefix(prefix): leaf for name, leaf in leaves.after.items() if name.startswith(prefix)}
    return BlockLeaves(last_kind(sizes.spec), named)


def _module(
    tape: Tape, sizes: Sizes, own: BlockLeaves, h: Array, e: Array, recipe: Recipe,
    shared: Callable[[Sizes, LayerKind], Shared],
) -> Array:  # fmt: skip
    D = sizes.spec.d_model
    inner = {name.removeprefix("block."): leaf for name, leaf in own.named.items() if name.startswith("block.")}
    block = BlockLeaves(own.kind, inner)

    def run(x: Array) -> Array:
        with tape.at(f"{PATH}.block"):
            return compose(tape, sizes, block, x, theirs)

    with tape.at(PATH):
        parts = [norm(tape, sizes, e, own.named, "enorm"), norm(tape, sizes, h, own.named, "hnorm")]
        wide = "fp32" if any(each.dtype == "fp32" for each in parts) else parts[0].dtype
        joined = op.concatenate(tape, [op.cast(tape, each, wide) for each in parts])
        del parts  # the call holds what it was given until it is over
        with tape.at("eh_proj"):
            x = op.linear(tape, joined, own["eh_proj.weight"], None, sizes.rows, 2 * D, D)
        del joined
    theirs = shared(sizes, own.kind)
    return checkpointed(tape, run, x) if recipe.activation_checkpointing.kind == "full" else run(x)


def _loss(
    tape: Tape, sizes: Sizes, own: BlockLeaves, h: Array, recipe: Recipe, head: Callable[[Array, Int], Array]
) -> Array:
    with tape.at(PATH):
        normed = norm(tape, sizes, h, own.named, "norm")
    targets = Array(sizes.rows, "int64", None)
    with tape.holding("logits and loss"):
        logits = head(normed, sizes.rows)
        with tape.at(f"{PATH}.loss"):
            if not is_one(sizes.B) and not is_one(sizes.T):  # else the slice of targets is a view of one dim
                (targets,) = tape.emit("clone", "copy", reads=[targets], makes=[(sizes.rows, "int64")])
            return cross_entropy(tape, logits, targets, upcast=recipe.loss.upcast)
