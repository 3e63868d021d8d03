"""Sizes: those of one forward on a device, and arithmetic on ints (one run), arrays (many) and symbols (a formula)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from trainledger.ledger.entry import Int
from trainledger.spec.device import attention_run
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.run import Run
from trainledger.spec.units import ceil_div

Key = TypeVar("Key")


def summed(amounts: Iterable[Int]) -> Int:
    """The sum of amounts, those that are known to be zero left out: of large arrays each addition takes time."""
    total: Int = 0
    for amount in amounts:
        if isinstance(amount, int):
            total = total + amount if amount else total
        else:
            total = amount if isinstance(total, int) and total == 0 else total + amount
    return total


def added(amounts: Iterable[tuple[Key, Int]]) -> dict[Key, Int]:
    """Amounts by label, those of one label added.

    >>> added([("a", 1), ("b", 2), ("a", 3)])
    {'a': 4, 'b': 2}
    """
    split: dict[Key, Int] = {}
    for label, amount in amounts:
        split[label] = split.get(label, 0) + amount
    return split


def is_one(size: Int) -> bool:
    """Whether a size is known to be one; symbols, and arrays with another element, are the general case."""
    same = size == 1
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def is_zero(size: Int) -> bool:
    """Whether a size is known to be zero; arrays are the general case.

    >>> is_zero(0), is_zero(3)
    (True, False)
    """
    return size == 0 if isinstance(size, int) else bool(getattr(size, "is_zero", False))


def same(a: Int, b: Int) -> bool:
    """Whether two sizes are one, all of them where there are many."""
    equal = a == b
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def several(ranks: Int) -> Int:
    """1 where a group has more than one rank, else 0; a symbol means more than one.

    >>> several(1), several(8)
    (0, 1)
    """
    if isinstance(ranks, int):
        return int(ranks > 1)
    return (ranks > 1) * 1 if hasattr(ranks, "shape") else 1


def share(whole: Int, ranks: Int) -> Int:
    """The largest part of something split over ranks in whole pieces: FSDP2's chunk of dim 0, or a padded flat part.

    >>> share(10, 4)
    3
    """
    return ceil_div(whole, ranks)


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two amounts, element by element of arrays, as a formula of symbols.

    >>> smaller(3, 5), smaller(0.5, 2)
    (3, 0.5)
    """
    if isinstance(a, int | float) and isinstance(b, int | float):
        return min(a, b)
    if hasattr(a, "free_symbols") or hasattr(b, "free_symbols"):
        from sympy import Min

        return Min(a, b)
    import numpy as np

    return np.minimum(a, b)


def greater(a: Any, b: Any) -> Any:
    """The larger of two amounts, as `smaller` has the smaller one."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        return max(a, b)
    return -smaller(-a, -b)


def between(size: Int, least: Int, most: Int) -> Int:
    """A size, or the bound that it passes."""
    return smaller(greater(size, least), most)


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
    attention_again: bool = False  # whether scores and mixtures are recomputed in backward
    cache: str | None = None  # the format of keys and values that are remembered; None = nothing is
    documents: bool = False  # whether attention stops at the documents of a sequence
    framework: str = "torch"
    deterministic: bool = False
    cached_tokens: Int | None = None  # decoding: tokens of each sequence in the cache, the new one included

    @property
    def of_megatron(self) -> bool:
        """As `Recipe.of_megatron`."""
        return self.framework in ("megatron-core", "megatron-local")

    @property
    def by_masks(self) -> bool:
        """Tokens go to places of experts and back as matmuls with masks (MaxText, src/maxtext/layers/moe.py)."""
        return self.framework == "jax" and self.capacity_factor is not None

    @property
    def routes_own(self) -> bool:
        """Tensor ranks route their own tokens to experts (Megatron-LM's sequence parallelism), and not all of them."""
        # core/transformer/moe/moe_layer.py refuses to train tensor ranks without sequence parallelism.
        return self.of_megatron and self.layout.sequence_parallel

    @property
    def rows(self) -> Int:
        return self.B * self.T

    @property
    def stream_rows(self) -> Int:
        """Rows of the residual stream: with sequence parallelism, this tensor rank's tokens."""
        return self.rows // self.layout.tensor if self.layout.sequence_parallel else self.rows


def sizes_of(run: Run, backend: str) -> Sizes:
    """The sizes of one micro-batch of a run."""
    recipe = run.recipe
    same = ("attention", "dropout", "attention_dropout", "framework", "deterministic")
    facts: dict[str, Any] = {name: getattr(recipe, name) for name in same}
    facts |= {"capacity_factor": recipe.expert_dispatch.factor, "balance": recipe.load_balance_loss > 0}
    facts |= {"attention_again": recipe.activation_checkpointing.kind == "attention"}
    facts |= {"documents": recipe.documents is not None, "layout": run.layout, "backend": backend}
    if not run.model.attention.custom_scores:  # with those the recipe's own kernel is refused
        dtype = recipe.precision.compute
        facts["attention"] = attention_run(recipe.attention, backend, dtype, of_megatron=recipe.of_megatron)
    return Sizes(run.model, run.device_batch, recipe.seq_len, **facts)
