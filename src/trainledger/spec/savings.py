"""Savings of memory: recomputation, the loss in chunks, and adapters on frozen weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from trainledger.spec.frozen import frozen
from trainledger.spec.setting import setting

# What selective recomputation may keep: operations by PyTorch's names, all_to_all for what experts send, and two known
# choices. ``matmuls`` is torchtitan's policy: fused attention, and every second matmul, also of those in 8 bits
# (torchao's are mm to a policy). ``attention`` is the fused kernel alone.
KEEPABLE = (
    "matmuls", "attention", "mm", "addmm", "bmm", "_scaled_mm", "grouped_mm", "_scaled_grouped_mm", "all_to_all",
    "silu", "gelu", "_softmax", "native_layer_norm", "native_dropout",
)  # fmt: skip
MATMULS = ("mm", "addmm", "_scaled_mm")
ATTENTION_KERNELS = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_sparse_attention",
)


def keeper(keep: tuple[str, ...]) -> Callable[..., bool]:
    """Says of one operation after the other, by name and module path, whether recomputation keeps its output.

    It counts matmuls, so each run of a block needs its own.

    >>> kept = keeper(("matmuls",))
    >>> [kept(each) for each in ("mm", "silu", "mm", "mm")]
    [True, False, False, True]
    >>> eight_bits = keeper(("matmuls",))
    >>> [eight_bits("_scaled_mm") for _ in range(3)]
    [True, False, True]
    >>> keeper(("o_proj",))("mm", "layers.*.self_attn.o_proj")
    True
    """
    names = set(keep)
    if names & {"attention", "matmuls"}:
        names |= set(ATTENTION_KERNELS)
    matmuls = 0

    def kept(name: str, path: str = "") -> bool:
        nonlocal matmuls
        if "matmuls" in keep and name in MATMULS:
            matmuls += 1
            return matmuls % 2 == 1 or name in names
        return name in names or (name in MATMULS and path.rpartition(".")[2] in names)

    return kept


def _every() -> Any:
    return setting("every n-th block is recomputed, the others keep all", default=1, at_least=1, at_most=1000)


def _inputs() -> Any:
    return setting(
        "memory that keeps the blocks' inputs: device, or host, moved while others compute (MaxText's "
        "decoder_layer_input = offload)",
        "device",
        choices=("device", "host"),
    )


class Checkpointing:
    """Activation checkpointing: backward recomputes instead of keeping (Chen et al. 2016, arXiv 1604.06174)."""

    kind: ClassVar[str]
    every: int = 1
    inputs: str = "device"
    offload: tuple[str, ...] = ()

    @property
    def ends_apart(self) -> bool:
        """The first block's input and the last one's output live on, and what is between them does not."""
        return self.kind in ("offload", "from-start") or self.inputs == "host"


@frozen(kw_only=True)
class KeepAll(Checkpointing):
    """Nothing: all activations are kept."""

    kind = "none"


@frozen(kw_only=True)
class Full(Checkpointing):
    """Every block, from its input."""

    kind = "full"

    every: int = _every()
    inputs: str = _inputs()


@frozen(kw_only=True)
class Segments(Checkpointing):
    """Several blocks together."""

    kind = "segments"

    n_blocks: int | None = setting(
        "blocks in a segment; absent = about the root of n_layers", None, at_least=1, at_most=10**5
    )


@frozen(kw_only=True)
class FromStart(Checkpointing):
    """The input of each block, from the embedding on."""

    kind = "from-start"


@frozen(kw_only=True)
class Selective(Checkpointing):
    """Every block but for some operations, whose outputs are kept (torch's selective activation checkpointing)."""

    kind = "selective"

    every: int = _every()
    keep: tuple[str, ...] | None = setting(
        "operations whose outputs are kept, by PyTorch's name; matmuls = attention and every second matmul; attention "
        "= the fused kernel; in a step that XLA compiles also a linear layer's, such as q_proj",
        ("matmuls",),
    )
    offload: tuple[str, ...] = setting("such operations whose outputs go to host memory (framework jax)", ())
    inputs: str = _inputs()


@frozen(kw_only=True)
class AttentionOnly(Checkpointing):
    """Scores, softmax and mixture (Korthikanti et al. 2022, arXiv 2205.05198)."""

    kind = "attention"


@frozen(kw_only=True)
class Offload(Checkpointing):
    """Nothing, but what is kept goes to host memory."""

    kind = "offload"


CHECKPOINTING: dict[str, type[Checkpointing]] = {
    cls.kind: cls for cls in (KeepAll, Full, Segments, FromStart, Selective, AttentionOnly, Offload)
}


class _AllLogits:
    chunks: int | None = None  # kinds in which head and loss go through a part of the tokens at a time have this field


@frozen(kw_only=True)
class Loss(_AllLogits):
    """Fields of every kind of loss."""

    kind: ClassVar[str]

    upcast: bool = setting("the loss reads logits in fp32, whatever their format", True)


@frozen(kw_only=True)
class FullLoss(Loss):
    """All logits at once."""

    kind = "full"


@frozen(kw_only=True)
class ChunkedLoss(Loss):
    """A part of the tokens at a time; backward computes the logits again."""

    kind = "chunked"

    chunks: int = setting("chunks of the tokens of a micro-batch", 8, at_least=1, at_most=10**6)


@frozen(kw_only=True)
class FusedLoss(ChunkedLoss):
    """A part of the tokens at a time, with the gradients computed in forward."""

    kind = "fused"


@frozen(kw_only=True)
class CompiledLoss(Loss):
    """torch.compile of the loss of all logits."""

    kind = "compiled"


@frozen(kw_only=True)
class InPlaceLoss(Loss):
    """All logits at once, whose gradient takes their place in forward (Transformer Engine's cross entropy)."""

    kind = "in-place"


LOSSES: dict[str, type[Loss]] = {cls.kind: cls for cls in (FullLoss, ChunkedLoss, FusedLoss, CompiledLoss, InPlaceLoss)}


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
BESIDE_EXPERTS = ("shared_expert_gate", "latent_in", "latent_out")  # PEFT's all-linear takes them, and no router
LINEAR = (*ATTENTION, *MLP, *BESIDE_EXPERTS)
TARGETS = ("linear", "attention", "mlp", "experts", *LINEAR)  # what people name: all, a half, or one
WHOLE = ("embed_tokens", "lm_head")  # what is trained beside adapters
BASE_FORMATS = ("bf16", "int8", "nf4")
BLOCKS_OF = {"int8": "int8", "nf4": "nf4-double"}  # their names among the block formats of `dtypes`


@frozen(kw_only=True)
class Lora:
    """Adapters that are trained while the weights are frozen (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int = setting("rank of the adapters, such as 16", at_least=1, at_most=10**6)
    alpha: float = setting("the adapters' output is multiplied by alpha / rank", 16.0)
    targets: tuple[str, ...] = setting(
        "what gets adapters: linear (all in the blocks), attention, mlp, experts (stacks of "
        "weights), or names such as q_proj",
        ("linear",),
    )
    dropout: float = setting("probability on the input of an adapter", 0.0, at_least=0, at_most=0.99)
    dora: bool = setting(
        "each adapted weight, with what its adapter adds, is scaled to row norms that are trained too (DoRA; Liu et "
        "al. 2024, arXiv 2402.09353)",
        False,
    )
    base_format: str | None = setting(
        "format of the frozen linear layers: bf16, int8 or nf4 in blocks with scales; absent = as other parameters",
        None,
        choices=BASE_FORMATS,
    )
    experts: str = setting(
        "adapters on a mixture's stacks of experts (targets: experts): weights = B A is added to each expert's weight "
        "in each forward (target_parameters of PEFT), rows = each expert's rows go through A and B (LoRA on grouped "
        "linear layers, as Megatron-Bridge's); base_format is not theirs",
        "weights",
        choices=("weights", "rows"),
    )
    whole: tuple[str, ...] | None = setting(
        "matrices that are trained whole beside the adapters (modules_to_save of PEFT): embed_tokens, lm_head", None
    )

    @property
    def of_experts(self) -> str | None:
        """How experts are adapted; None where they are not."""
        return self.experts if "experts" in self.targets else None


def is_linear(name: str) -> bool:
    """A parameter of this name is one of a block's linear layers.

    >>> is_linear("self_attn.q_proj.weight"), is_linear("lm_head.weight"), is_linear("mlp.experts.down_proj")
    (True, False, False)
    """
    module, _, what = name.rpartition(".")
    return module.rpartition(".")[2] in LINEAR and what in ("weight", "bias")


def is_target(name: str, targets: tuple[str, ...]) -> bool:
    """The layer of this parameter gets an adapter, where these TARGETS do."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    named = {"linear": LINEAR, "attention": ATTENTION, "mlp": MLP}
    return any(module in named.get(target, (target,)) for target in targets)
