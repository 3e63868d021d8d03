"""Precision as recipes: for each, the number format of every part of a training step.

A format is a name in `trainledger.dtypes`. Nothing is computed here; ledger, engine and layouts read these records.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from trainledger.frozen import frozen

COPIES = ("none", "autocast", "gathered")


@frozen
class Float8:
    """How the linear layers of the blocks multiply in 8 bits (Micikevicius et al. 2022, arXiv 2209.05433).

    ``scaling``: one scale per tensor, per row, or per block (1 x 128 of activations and gradients, 128 x 128 of
    weights: DeepSeek-AI 2024, DeepSeek-V3, section 3.3.2). ``forward`` is the format of inputs and weights,
    ``backward`` that of gradients. ``keeps`` says what backward gets of the input: the input itself, scaled again
    then (torchao's Float8Linear), or its 8-bit copy with the scales (DeepSeek-V3, section 3.3.3). ``caching``: weights
    are cast once a step, each into two copies that stay (rows of outputs for forward, of inputs for backward:
    Transformer Engine's ``is_first_microbatch``), instead of before each product.
    """

    scaling: str
    forward: str
    backward: str
    keeps: str
    caching: bool = False


@frozen(kw_only=True)
class Precision:
    """Which number format each part of a training step has.

    ``parameters``: as a device holds them (the shards, where they are sharded). ``compute``: what enters a matrix
    product. ``copies``: how parameters come into that format: ``none`` (they have it), ``autocast`` (a copy of each
    matrix, made at its first use and cached to the end of the forward; norms, embeddings and the residual stream
    stay as the parameters are), ``gathered`` (a copy of every parameter, made before its block and kept for the
    block's backward; all computation is in that format). ``gradients``: as they lie when the optimizer comes.
    ``gradient_buffers``: whether they are buffers that exist all the time and are added to. ``reduction``: in which
    gradients are summed over ranks. ``master``: format of the optimizer's own copy of the parameters, None without
    one. ``moments``: format of the optimizer's states. ``loss_scaling``: whether the loss is scaled up and gradients
    down again, with a step skipped where they overflow. ``float8``: how linear layers of the blocks use 8 bits.
    ``rate``: the matmul rate where it is not that of ``compute`` (tf32).
    """

    name: str
    title: str
    parameters: str
    compute: str
    gradients: str
    moments: str
    reduction: str
    copies: str = "none"
    gradient_buffers: bool = False
    master: str | None = None
    loss_scaling: bool = False
    float8: Float8 | None = None
    rate: str | None = None

    @property
    def low(self) -> bool:
        """Whether matrix products run in less than 32 bits."""
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
    def cached(self) -> Float8 | None:
        """How the weights are in 8 bits that are cast once a step; None where none are."""
        return self.float8 if self.float8 is not None and self.float8.caching else None

    @property
    def peak(self) -> str:
        """The dtype of most matrix products, in the catalog's words."""
        return self.float8.forward if self.float8 is not None else self.rate or self.compute


def _mixed(name: str, title: str, compute: str, float8: Float8 | None = None) -> Precision:
    """Autocast over fp32 parameters (Micikevicius et al. 2018, Mixed Precision Training, arXiv 1710.03740)."""
    return Precision(
        name=name, title=title, parameters="fp32", compute=compute, gradients="fp32", moments="fp32",
        reduction="fp32", copies="autocast", loss_scaling=compute == "fp16", float8=float8,
    )  # fmt: skip


def _throughout(name: str, title: str, format: str, **more: str) -> Precision:
    """One format for everything; torch.optim keeps its states in the parameters' format."""
    return Precision(
        name=name, title=title, parameters=format, compute=format, gradients=format, moments=format, reduction=format,
        loss_scaling=format == "fp16", rate=more.get("rate"),
    )  # fmt: skip


def _sharded(name: str, title: str, float8: Float8 | None = None) -> Precision:
    """FSDP2's MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32), as torchtitan has it by default.

    With ``float8`` the 8-bit products read the gathered copies (torchtitan's Float8Linear recipes).
    """
    return Precision(
        name=name, title=title, parameters="fp32", compute="bf16", gradients="fp32", moments="fp32", reduction="fp32",
        copies="gathered", float8=float8,
    )  # fmt: skip


_TENSORWISE = Float8("tensorwise", "e4m3", "e5m2", "input")
_ROWWISE = Float8("rowwise", "e4m3", "e4m3", "input")
_BLOCK = Float8("block", "e4m3", "e4m3", "copy")
RECIPES = {
    each.name: each
    for each in (
        _throughout("fp32", "fp32 throughout", "fp32"),
        _throughout("tf32", "fp32 with matrix products in tf32", "fp32", rate="tf32"),
        _throughout("bf16", "parameters, gradients and moments in bf16", "bf16"),
        _throughout("fp16", "parameters and gradients in fp16, loss scaled", "fp16"),
        _mixed("bf16-mixed", "bf16 autocast over fp32 parameters", "bf16"),
        _mixed("fp16-mixed", "fp16 autocast over fp32 parameters, loss scaled", "fp16"),
        _sharded("bf16-sharded", "fp32 shards gathered in bf16, gradients reduced in fp32"),
        _mixed("fp8-tensorwise", "fp8 linear layers with a scale per tensor, else bf16 autocast", "bf16", _TENSORWISE),
        _mixed("fp8-rowwise", "fp8 linear layers with a scale per row, else bf16 autocast", "bf16", _ROWWISE),
        _mixed("fp8-block", "fp8 linear layers with a scale per block, else bf16 autocast", "bf16", _BLOCK),
        _sharded("fp8-tensorwise-sharded", "bf16-sharded with fp8 linear layers, a scale per tensor", _TENSORWISE),
        _sharded("fp8-rowwise-sharded", "bf16-sharded with fp8 linear layers, a scale per row", _ROWWISE),
        _sharded("fp8-block-sharded", "bf16-sharded with fp8 linear layers, a scale per block", _BLOCK),
    )
}  # fmt: skip
PRECISIONS = tuple(RECIPES)
CACHING = tuple(each.name for each in RECIPES.values() if each.float8 is not None and each.copies != "gathered")
MASTER_OF = ("bf16", "fp16", "fp8-tensorwise", "fp8-rowwise", "fp8-block")


class Formats(Protocol):
    """The fields of a recipe that say its number formats."""

    @property
    def precision(self) -> str: ...
    @property
    def master_weights(self) -> bool: ...
    @property
    def gradient_dtype(self) -> str | None: ...
    @property
    def moment_dtype(self) -> str | None: ...
    @property
    def fp8_weight_caching(self) -> bool: ...


def precision_of(recipe: Formats) -> Precision:
    """The formats of a recipe.

    With ``master_weights`` the parameters are in the compute format and the optimizer steps an fp32 copy of them
    (Rajbhandari et al. 2020, ZeRO, section 3.1); ``gradient_dtype`` fp32 adds gradients up in fp32 buffers
    (Megatron-LM's main_grad); ``moment_dtype`` changes the optimizer's states alone.

    >>> from types import SimpleNamespace as R
    >>> megatron = precision_of(R(precision="bf16", master_weights=True, gradient_dtype="fp32", moment_dtype=None))
    >>> megatron.parameters, megatron.gradients, megatron.master, megatron.moments
    ('bf16', 'fp32', 'fp32', 'fp32')
    """
    precision = RECIPES[recipe.precision]
    if recipe.master_weights:
        held = precision.compute
        precision = replace(
            precision, parameters=held, gradients=held, reduction=held, copies="none", master="fp32", moments="fp32"
        )
    wide = recipe.gradient_dtype
    if wide is not None and wide != precision.gradients:
        precision = replace(precision, gradients=wide, reduction=wide, gradient_buffers=True)
    if precision.float8 is not None and recipe.fp8_weight_caching:
        precision = replace(precision, float8=replace(precision.float8, caching=True))
    return precision if recipe.moment_dtype is None else replace(precision, moments=recipe.moment_dtype)


TILE = 16  # what every dim of a product in 8 bits must be a multiple of (torch._scaled_mm)
