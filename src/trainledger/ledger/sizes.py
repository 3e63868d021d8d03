"""The sizes of one forward on a device, and which kernels run it."""

from __future__ import annotations

from trainledger.frozen import frozen
from trainledger.ledger.entry import Int
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe


@frozen
class Sizes:
    """The sizes of one forward, and which kernels run it."""

    spec: ModelSpec
    B: Int
    T: Int
    attention: str
    dropout: float
    backend: str

    @property
    def rows(self) -> Int:
        return self.B * self.T

    @property
    def fused_kernels(self) -> bool:
        """Whether norms are one kernel: so on accelerators, while a CPU runs RMSNorm as six operations."""
        return self.backend != "cpu"


def sizes_of(spec: ModelSpec, recipe: Recipe, backend: str) -> Sizes:
    """The sizes of one micro-batch of a recipe."""
    return Sizes(spec, recipe.device_batch, recipe.seq_len, recipe.attention, recipe.dropout, backend)
