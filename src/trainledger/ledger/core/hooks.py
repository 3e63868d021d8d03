"""Hooks that act on a step while a tape follows it; the tape does not depend on them.

Checkpointing, offloading, sharded parameters and compiled blocks are hooks. The first two are to a tape what
``torch.autograd.graph.saved_tensors_hooks`` are to autograd, sharding what hooks of modules are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainledger.ledger.core.graph import Array, Saved
from trainledger.ledger.core.leaves import BlockLeaves
from trainledger.ledger.core.record import BlockRun, Event


class Hook:
    """Each method does nothing unless a hook overrides it."""

    # Of what checkpointing unpacks nothing is left when a node's gradients are summed; other nodes hold it until then.
    frees_before_sums = False

    def recall(self, name: str) -> list[Array] | None:
        """The results of the operation that is about to run, where they are known: then it does not run."""
        return None

    def emitted(self, event: Event, reads: Sequence[Array], changes: Sequence[Array], made: Sequence[Array]) -> None:
        """An operation has run."""

    def saved(self, arrays: tuple[Array, ...]) -> Any:
        """What a node keeps instead of the arrays that it saves; None leaves them to other hooks."""
        return None

    def unpacked(self, packed: Any) -> Saved:
        """The arrays again, for the backward of the node that has kept what `saved` gave."""
        raise NotImplementedError

    def entering_block(self, run: BlockRun) -> BlockRun:
        """A block begins: its first run, or (what is returned) the one that is repeated."""
        return run

    def block_input(self, leaves: BlockLeaves, x: Array) -> Array:
        """The input of a block with these parameters."""
        return x

    def block_output(self, leaves: BlockLeaves, x: Array) -> Array:
        """The output of a block with these parameters."""
        return x

    def model_output(self, x: Array) -> Array:
        """The result of the forward of a chunk of layers, or of the whole model."""
        return x

    def finished(self, events: list[Event]) -> None:
        """The step is over; what its events say may still be changed."""
