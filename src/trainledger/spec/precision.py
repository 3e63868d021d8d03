"""Precision as recipes: for each, the number format of every part of a training step.

A format is a name in `trainledger.dtypes`. Nothing is computed here; ledger, engine and layouts read these records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from trainledger.frozen import frozen
from trainledger.spec.problem import Problem

if TYPE_CHECKING:
    from trainledger.spec.recipe import Recipe
    from trainledger.spec.run import Run

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
_MASTER_OF = ("bf16", "fp16", "fp8-tensorwise", "fp8-rowwise", "fp8-block")


def precision_of(recipe: Recipe) -> Precision:
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


def size_problems(run: Run) -> Iterator[Problem]:
    """Sizes that no product in 8 bits takes."""
    spec, recipe = run.model, run.recipe
    if precision_of(recipe).float8 is None:
        return
    rule = f"products in 8 bits take multiples of {TILE}"
    widths = {"d_model": spec.d_model, "d_ff": spec.d_ff, "q_rank": spec.q_rank, "kv_rank": spec.kv_rank}
    for field, size in widths.items():
        if size is not None and size % TILE:
            yield Problem(f"model.{field}", size, rule, _tiled(size))
    for field, heads in (("n_heads", spec.n_heads), ("n_kv_heads", spec.kv_heads)):
        if heads * spec.head_size % TILE:
            found = f"{rule}, and {field} x head_dim is {heads * spec.head_size}"
            yield Problem("model.head_dim", spec.head_size, found, _tiled(spec.head_size))
            break
    tokens = run.device_batch * recipe.seq_len
    if tokens % TILE:
        found = f"{rule}, and a micro-batch has {tokens} tokens"
        step = TILE // gcd(run.device_batch, TILE)
        yield Problem("recipe.seq_len", recipe.seq_len, found, max(step, recipe.seq_len // step * step))


def _tiled(size: int) -> int:
    return -(-size // TILE) * TILE


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Everything that the fields of precision say against each other."""
    name = recipe.precision
    if recipe.master_weights and name not in _MASTER_OF:
        rule = f"an fp32 master copy belongs to 16-bit parameters; precision {name} keeps them in fp32"
        yield Problem("recipe.master_weights", True, rule, False)
    if name == "fp16" and not recipe.master_weights:
        rule = "fp16 parameters lose most updates to rounding; they need recipe.master_weights = true"
        yield Problem("recipe.precision", name, rule, "fp16-mixed")
    if recipe.fp8_weight_caching and RECIPES[name].float8 is None:
        rule = f"is for weights that are cast to 8 bits, and precision {name} casts none (fp8-tensorwise does)"
        yield Problem("recipe.fp8_weight_caching", True, rule, False)
    elif recipe.fp8_weight_caching and name not in CACHING:
        rule = f"keeps casts of whole weights, and precision {name} casts the copies that it gathers for each block"
        yield Problem("recipe.fp8_weight_caching", True, rule, False)
    wide, held = recipe.gradient_dtype, RECIPES[name].parameters
    if wide is not None and held != wide and not recipe.master_weights:
        rule = f"{wide} gradients of {held} parameters need {wide} weights to update: recipe.master_weights = true"
        yield Problem("recipe.gradient_dtype", wide, rule, "none")
