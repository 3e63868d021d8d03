"""The sizes of one forward on a device, and which kernels run it."""

from __future__ import annotations

from trainledger.frozen import frozen
from trainledger.ledger.entry import Int
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.run import Run


@frozen
class Sizes:
    """The sizes of one forward, and which kernels run it."""

    spec: ModelSpec
    B: Int
    T: Int
    attention: str
    dropout: float
    attention_dropout: float
    backend: str
    capacity_factor: float | None = None  # of experts; None = dropless
    balance: bool = False  # whether there is a load-balance loss
    layout: Layout = Layout()
    attention_again: bool = False  # whether scores and mixtures are made again in backward
    cache: str | None = None  # the format of keys and values that are remembered; None = nothing is
    context: Int | None = None  # decoding: tokens of each sequence in the cache, the new one included

    @property
    def rows(self) -> Int:
        return self.B * self.T

    @property
    def stream_rows(self) -> Int:
        """Rows of the residual stream: with sequence parallelism, this tensor rank's tokens."""
        return self.rows // self.layout.tensor if self.layout.sequence_parallel else self.rows

    @property
    def fused_kernels(self) -> bool:
        """Whether norms are one kernel: so on accelerators, while a CPU runs RMSNorm as six operations."""
        return self.backend != "cpu"


def sizes_of(run: Run, backend: str) -> Sizes:
    """The sizes of one micro-batch of a run."""
    recipe = run.recipe
    return Sizes(
        run.model, run.device_batch, recipe.seq_len, recipe.attention, recipe.dropout, recipe.attention_dropout,
        backend, recipe.expert_capacity, recipe.load_balance_loss > 0, run.layout,
        recipe.activation_checkpointing == "attention",
    )  # fmt: skip
