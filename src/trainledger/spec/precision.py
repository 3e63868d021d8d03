"""Precision: for each kind, the number format of every part of a training step.

A format is a name in `spec.dtypes`. Nothing is computed here; ledger, engine and layouts read these records.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from trainledger.spec.frozen import frozen
from trainledger.spec.setting import setting

# Linear layers of blocks that multiply in 16 bits where others do in 8: too thin to gain, sensitive, or frozen.
IN_16_BITS = ("router", "shared_expert_gate", "latent_in", "latent_out", "wq_b", "wk", "weights_proj")
TILE = 16  # what every dim of a matmul in 8 bits must be a multiple of (torch._scaled_mm)


@frozen
class Float8:
    """The 8-bit or 4-bit matmuls of the blocks' linear layers (Micikevicius et al. 2022, arXiv 2209.05433).

    ``scaling``: one scale per tensor, per row, per block (1 x 128 of activations and gradients, 128 x 128 of
    weights: DeepSeek-AI 2024, DeepSeek-V3, section 3.3.2), or ``micro``: of a block format of `spec.dtypes`, whose
    elements along the summed dim share a scale, so that a transposed copy is quantized apart (Transformer Engine's
    MXFP8BlockScaling and NVFP4BlockScaling). ``forward`` is the format of inputs and weights,
    ``backward`` that of gradients. ``keeps`` says what backward gets of the input: the input itself, scaled again
    then (torchao's Float8Linear), or its 8-bit copy with the scales (DeepSeek-V3, section 3.3.3). ``caching``: weights
    are cast once a step, each into two copies that stay (rows of outputs for forward, of inputs for backward:
    Transformer Engine's ``is_first_microbatch``), instead of before each matmul.
    """

    scaling: str
    forward: str
    backward: str
    keeps: str
    caching: bool = False

    @property
    def blocked(self) -> bool:
        """A scale is of a block of elements: then the matmuls of experts are in this format too."""
        return self.scaling in ("block", "micro")


_TENSORWISE = Float8("tensorwise", "e4m3", "e5m2", "input")
_ROWWISE = Float8("rowwise", "e4m3", "e4m3", "input")
_BLOCK = Float8("block", "e4m3", "e4m3", "copy")
_MXFP8 = Float8("micro", "mxfp8", "mxfp8", "input")
_NVFP4 = Float8("micro", "nvfp4", "nvfp4", "input")


class Precision:
    """The number format of each part of a training step.

    ``weights``: the parameters' where the optimizer has no master copy. ``compute``: what enters a matmul;
    ``rate`` is the matmul rate where it is another (tf32). ``copied``: how weights come into the format of a matmul:
    ``none`` (they have it), ``autocast`` (a copy of each matrix, made at its first use and cached to the end of the
    forward; norms, embeddings and the residual stream stay as the parameters are), ``gathered`` (a copy of every
    parameter, made before its block and kept for the block's backward; all computation is in that format).
    ``scaled``: how linear layers of the blocks use 8 bits.
    """

    kind: ClassVar[str]
    compute: ClassVar[str]
    weights: ClassVar[str] = "fp32"
    copied: ClassVar[str] = "none"
    rate: ClassVar[str | None] = None
    scaled: ClassVar[Float8 | None] = None

    # Fields of the kinds that have the choice.
    moment_dtype: str | None = None
    gradient_dtype: str | None = None
    master_weights: bool = False
    weight_caching: bool = False
    first_in_16_bits: int = 0
    last_in_16_bits: int = 0

    @property
    def parameters(self) -> str:
        """Format of the parameters as a device has them (of the shards, where they are sharded)."""
        return self.compute if self.master_weights else self.weights

    @property
    def copies(self) -> str:
        """The conversion of parameters to the dtype of a matmul: none, autocast or gathered."""
        return "none" if self.master_weights else self.copied

    @property
    def gradients(self) -> str:
        """Format of the gradients when the optimizer reads them, in which ranks add them up too."""
        return self.gradient_dtype or self.parameters

    @property
    def gradient_buffers(self) -> bool:
        """Gradients are added to buffers that exist all the time (Megatron-LM's main_grad)."""
        return self.gradients != self.parameters

    @property
    def master(self) -> str | None:
        """Dtype of the optimizer's master copy of the parameters; None without one."""
        return "fp32" if self.master_weights else None

    @property
    def moments(self) -> str:
        """Format of the optimizer's states, which torch.optim keeps in that of the weights that it updates."""
        return self.moment_dtype or self.updated

    @property
    def loss_scaling(self) -> bool:
        """The loss is scaled up and gradients down again, with a step skipped where they overflow."""
        return self.compute == "fp16"

    @property
    def low(self) -> bool:
        """Matmuls run in less than 32 bits."""
        return self.compute != "fp32"

    @property
    def stream(self) -> str:
        """Format of the residual stream and of what norms read."""
        return self.parameters if self.copies == "autocast" else self.compute

    @property
    def arriving(self) -> str:
        """Format in which backward delivers the gradient of a whole parameter, before ranks or buffers add it up."""
        return self.compute if self.copies == "gathered" else self.parameters

    @property
    def updated(self) -> str:
        """Format of the numbers that the optimizer changes: the master copy's, else the parameters'."""
        return self.master or self.parameters

    @property
    def updating(self) -> str:
        """Format of the gradients that the optimizer reads."""
        return self.master or self.gradients

    @property
    def float8(self) -> Float8 | None:
        """The 8-bit matmuls of the blocks' linear layers; None where they do not."""
        return replace(self.scaled, caching=True) if self.scaled and self.weight_caching else self.scaled

    @property
    def cached(self) -> Float8 | None:
        """The formats of weights in 8 bits that are cast once a step; None where none are."""
        return self.float8 if self.weight_caching else None

    @property
    def untrained(self) -> Precision:
        """That of a model beside the trained one, whose weights are never updated: all in the format of matmuls."""
        return PRECISIONS[self.compute]() if self.low else self

    @property
    def peak(self) -> str:
        """The dtype of most matmuls, in the catalog's words."""
        return self.scaled.forward if self.scaled is not None else self.rate or self.compute


@frozen(kw_only=True)
class _Weights(Precision):
    """Fields of every kind."""

    moment_dtype: str | None = setting(
        "dtype of the optimizer's moments; absent = that of the weights it updates", None, choices=("fp32", "bf16")
    )


@frozen(kw_only=True)
class _Half(_Weights):
    """Fields of parameters in 16 bits."""

    gradient_dtype: str | None = setting(
        "fp32 = gradients of 16-bit parameters are added up in fp32 buffers; absent = in the parameters' dtype",
        None,
        choices=("fp32",),
    )


@frozen(kw_only=True)
class _Master(_Half):
    """Parameters in 16 bits, or those that may be."""

    master_weights: bool = setting(
        "parameters in 16 bits, an fp32 copy of them with the optimizer (Rajbhandari et al. 2020, ZeRO, section 3.1)",
        False,
    )


@frozen(kw_only=True)
class FP32(_Weights):
    """fp32 throughout."""

    kind = compute = "fp32"


@frozen(kw_only=True)
class TF32(_Weights):
    """fp32 with matmuls in tf32."""

    kind = rate = "tf32"
    compute = "fp32"


@frozen(kw_only=True)
class BF16(_Master):
    """Parameters, gradients and moments in bf16.

    >>> megatron = BF16(master_weights=True, gradient_dtype="fp32")
    >>> megatron.parameters, megatron.gradients, megatron.master, megatron.moments
    ('bf16', 'fp32', 'fp32', 'fp32')
    """

    kind = compute = weights = "bf16"


@frozen(kw_only=True)
class FP16(_Half):
    """Parameters and gradients in fp16, loss scaled; most updates would be lost to rounding but for the fp32 copy."""

    kind = compute = weights = "fp16"
    master_weights = True


@frozen(kw_only=True)
class BF16Mixed(_Weights):
    """bf16 autocast over fp32 parameters (Micikevicius et al. 2018, Mixed Precision Training, arXiv 1710.03740)."""

    kind, compute, copied = "bf16-mixed", "bf16", "autocast"


@frozen(kw_only=True)
class FP16Mixed(_Weights):
    """fp16 autocast over fp32 parameters, loss scaled."""

    kind, compute, copied = "fp16-mixed", "fp16", "autocast"


@frozen(kw_only=True)
class BF16Sharded(_Weights):
    """fp32 shards gathered in bf16, gradients reduced in fp32.

    FSDP2's MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32), as torchtitan has it by default.
    """

    kind, compute, copied = "bf16-sharded", "bf16", "gathered"


@frozen(kw_only=True)
class FP8Tensorwise(_Master):
    """fp8 linear layers with a scale per tensor, else bf16 autocast."""

    kind, compute, copied, scaled = "fp8-tensorwise", "bf16", "autocast", _TENSORWISE

    weight_caching: bool = setting(
        "weights are cast once a step and kept in 8 bits, plain and transposed, for all its micro-batches (Transformer "
        "Engine's is_first_microbatch), instead of before each matmul",
        False,
    )
    first_in_16_bits: int = setting("first layers whose matmuls stay in 16 bits", 0, at_least=0)
    last_in_16_bits: int = setting("last layers whose matmuls stay in 16 bits", 0, at_least=0)


@frozen(kw_only=True)
class FP8Rowwise(FP8Tensorwise):
    """fp8 linear layers with a scale per row, else bf16 autocast."""

    kind, scaled = "fp8-rowwise", _ROWWISE


@frozen(kw_only=True)
class FP8Block(FP8Tensorwise):
    """fp8 linear layers with a scale per block, else bf16 autocast."""

    kind, scaled = "fp8-block", _BLOCK


@frozen(kw_only=True)
class MXFP8(FP8Tensorwise):
    """Linear layers in 8 bits with a power of two for each 32 elements (OCP Microscaling v1.0), else bf16 autocast."""

    kind, scaled = "mxfp8", _MXFP8


@frozen(kw_only=True)
class NVFP4(MXFP8):
    """Linear layers in 4 bits with an e4m3 scale for each 16 elements and an fp32 one per tensor, else bf16 autocast.

    NVIDIA 2025, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149), section 4: the last layers stay in
    16 bits there (of 62 layers the first 2 and the last 8).
    """

    kind, scaled = "nvfp4", _NVFP4


@frozen(kw_only=True)
class FP8TensorwiseSharded(BF16Sharded):
    """bf16-sharded whose gathered copies linear layers read in fp8, a scale per tensor (torchtitan's Float8Linear)."""

    kind, scaled = "fp8-tensorwise-sharded", _TENSORWISE


@frozen(kw_only=True)
class FP8RowwiseSharded(BF16Sharded):
    """bf16-sharded with fp8 linear layers, a scale per row."""

    kind, scaled = "fp8-rowwise-sharded", _ROWWISE


@frozen(kw_only=True)
class FP8BlockSharded(BF16Sharded):
    """bf16-sharded with fp8 linear layers, a scale per block."""

    kind, scaled = "fp8-block-sharded", _BLOCK


@frozen(kw_only=True)
class MXFP8Sharded(BF16Sharded):
    """bf16-sharded with linear layers in MXFP8 (torchao's MXLinear)."""

    kind, scaled = "mxfp8-sharded", _MXFP8


PRECISIONS: dict[str, type[Precision]] = {
    cls.kind: cls
    for cls in (
        FP32, TF32, BF16, FP16, BF16Mixed, FP16Mixed, BF16Sharded, FP8Tensorwise, FP8Rowwise, FP8Block,
        FP8TensorwiseSharded, FP8RowwiseSharded, FP8BlockSharded, MXFP8, MXFP8Sharded, NVFP4,
    )
}  # fmt: skip
