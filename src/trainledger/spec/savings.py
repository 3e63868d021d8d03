"""What a recipe does to save memory, and what its fields must obey: recomputation, the loss in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trainledger.spec import lora
from trainledger.spec.precision import precision_of
from trainledger.spec.problem import Problem, nearest_text

if TYPE_CHECKING:
    from trainledger.spec.recipe import Recipe
    from trainledger.spec.run import Run

LOSSES = ("full", "chunked", "fused", "compiled")
CHECKPOINTING = ("none", "full", "segments", "from-start", "selective", "attention", "offload")
# What selective recomputation may keep: operations by PyTorch's names, all_to_all for what experts send, and two known
# choices. ``matmuls`` is torchtitan's policy: fused attention, and every second matrix product, also of those in 8 bits
# (torchao's are mm to a policy). ``attention`` is the fused kernel alone.
KEEPABLE = (
    "matmuls", "attention", "mm", "addmm", "bmm", "_scaled_mm", "grouped_mm", "_scaled_grouped_mm", "all_to_all",
    "silu", "gelu", "_softmax", "native_layer_norm", "native_dropout",
)  # fmt: skip
ATTENTION_KERNELS = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip


def keeper(keep: tuple[str, ...]) -> Callable[[str], bool]:
    """Says of one operation after the other, by name, whether selective recomputation keeps its output.

    It counts matrix products, so each run of a block needs its own.

    >>> kept = keeper(("matmuls",))
    >>> [kept(each) for each in ("mm", "silu", "mm", "mm")]
    [True, False, False, True]
    >>> eight_bits = keeper(("matmuls",))
    >>> [eight_bits("_scaled_mm") for _ in range(3)]
    [True, False, True]
    """
    names = set(keep)
    if names & {"attention", "matmuls"}:
        names |= set(ATTENTION_KERNELS)
    products = 0

    def kept(name: str) -> bool:
        nonlocal products
        if "matmuls" in keep and name in ("mm", "addmm", "_scaled_mm"):
            products += 1
            return products % 2 == 1 or name in names
        return name in names

    return kept


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Everything that the fields of loss, recomputation and adapters say against each other."""
    yield from _recomputation(recipe)
    yield from lora.problems(recipe)


def run_problems(run: Run) -> Iterator[Problem]:
    """What they say against the model and the batch of a run."""
    yield from lora.model_problems(run)
    recipe = run.recipe
    tokens = run.device_batch * recipe.seq_len
    if recipe.loss_in_chunks and tokens % recipe.loss_chunks:
        rule = f"must divide the {tokens} tokens of a micro-batch"
        yield Problem("recipe.loss_chunks", recipe.loss_chunks, rule, _divisor_near(tokens, recipe.loss_chunks))


def _recomputation(recipe: Recipe) -> Iterator[Problem]:
    how = recipe.activation_checkpointing
    if recipe.recompute_every != 1 and how not in ("full", "selective"):
        rule = f"belongs to activation_checkpointing full or selective, not to {how}"
        yield Problem("recipe.recompute_every", recipe.recompute_every, rule, 1)
    if recipe.recompute_segment is not None and how != "segments":
        rule = f"belongs to activation_checkpointing segments, not to {how}"
        yield Problem("recipe.recompute_segment", recipe.recompute_segment, rule, "none")
    precision = precision_of(recipe)
    if how == "from-start" and precision.copies != "none":
        rule = f"every block before would leave its low-precision copies there (precision {precision.name})"
        yield Problem("recipe.activation_checkpointing", how, rule, "full")
    if recipe.loss == "fused" and (precision.copies == "gathered" or precision.loss_scaling):
        rule = f"takes gradients in forward, which precision {precision.name} scales or gathers afterwards"
        yield Problem("recipe.loss", "fused", rule, "chunked")
    for each in recipe.recompute_keep:
        if each not in KEEPABLE:
            rule = f"must be of {', '.join(KEEPABLE)}"
            yield Problem("recipe.recompute_keep", each, rule, nearest_text(each, KEEPABLE))


def _divisor_near(whole: int, wanted: int) -> int:
    """The divisor of ``whole`` nearest to ``wanted``, the smaller of two equally near; sought from there outwards."""
    for distance in range(wanted):
        for each in (wanted - distance, wanted + distance):
            if whole % each == 0:
                return each
    return 1
