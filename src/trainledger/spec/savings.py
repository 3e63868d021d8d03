"""What a recipe does to save memory: recomputation, and the loss in chunks."""

from __future__ import annotations

from collections.abc import Callable

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
