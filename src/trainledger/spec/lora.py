"""Which linear layers a recipe freezes and adapts (Hu et al. 2021, LoRA), and what its fields must obey."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainledger.spec.precision import precision_of
from trainledger.spec.problem import Problem

if TYPE_CHECKING:
    from trainledger.spec.model import ModelSpec
    from trainledger.spec.recipe import Recipe
    from trainledger.spec.run import Run

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS = ("linear", "attention", "mlp", *ATTENTION, *MLP)  # what people name: all, a half, or one
BASE_FORMATS = ("bf16", "int8", "nf4")
ONE_DEVICE = "adapters (recipe.lora_rank) are accounted for on one device only"
BLOCKS_OF = {"int8": "int8", "nf4": "nf4-double"}  # their names among the block formats of `dtypes`


def is_linear(name: str) -> bool:
    """Whether a parameter of this name is one of a block's linear layers.

    >>> is_linear("self_attn.q_proj.weight"), is_linear("lm_head.weight"), is_linear("mlp.experts.down_proj")
    (True, False, False)
    """
    module, _, what = name.rpartition(".")
    return module.rpartition(".")[2] in (*ATTENTION, *MLP) and what in ("weight", "bias")


def is_target(name: str, recipe: Recipe) -> bool:
    """Whether the layer of this parameter gets an adapter."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    named = {"linear": (*ATTENTION, *MLP), "attention": ATTENTION, "mlp": MLP}
    return any(module in named.get(each, (each,)) for each in recipe.lora_targets)


def problems(recipe: Recipe) -> Iterator[Problem]:
    """What the fields say against each other."""
    if recipe.lora_rank is None:
        for field, absent in (("lora_dropout", 0.0), ("base_format", None)):
            value = getattr(recipe, field)
            if value != absent:
                yield Problem(f"recipe.{field}", value, "needs lora_rank", "none" if absent is None else absent)
        return
    for each in recipe.lora_targets:
        if each not in TARGETS:
            from trainledger.spec.problem import nearest_text

            rule = f"must be of {', '.join(TARGETS)}"
            yield Problem("recipe.lora_targets", each, rule, nearest_text(each, TARGETS))
    precision = precision_of(recipe)
    if precision.copies == "gathered" or precision.float8 is not None or precision.loss_scaling or precision.master:
        rule = "is not accounted for with frozen weights"
        yield Problem("recipe.precision", precision.name, rule, "bf16-mixed" if precision.low else "fp32")
    if recipe.compile:
        yield Problem("recipe.compile", True, "is not built for adapters (lora_rank)", False)
    if recipe.activation_checkpointing == "from-start":
        rule = "is not accounted for with frozen weights"
        yield Problem("recipe.activation_checkpointing", "from-start", rule, "full")
    if recipe.optimizer == "muon":
        yield Problem("recipe.optimizer", "muon", "is for whole matrices, not for adapters", "adamw")


def model_problems(run: Run) -> Iterator[Problem]:
    """What they say against the model and the layout of a run."""
    recipe, spec = run.recipe, run.model
    if recipe.lora_rank is None:
        return
    if spec.n_experts is not None:
        yield Problem(
            "recipe.lora_rank", recipe.lora_rank, "there are no adapters for experts (model.n_experts)", "none"
        )
    elif not any(is_target(each, recipe) for each in _layers(spec)):
        rule = f"names no linear layer of this model: {', '.join(each.split('.')[1] for each in _layers(spec))}"
        yield Problem("recipe.lora_targets", list(recipe.lora_targets), rule, "linear")
    if spec.n_predict_ahead:
        yield Problem("recipe.lora_rank", recipe.lora_rank, "there are no adapters for prediction modules", "none")
    axes = ("replicate", "shard", "context", "tensor", "pipeline")
    if any(getattr(run.layout, each) != 1 for each in axes):
        rule = "is accounted for on one device only: leave [layout] out, or train all weights with none"
        yield Problem("recipe.lora_rank", recipe.lora_rank, rule, "none")


def _layers(spec: ModelSpec) -> list[str]:
    """The weights of a block's linear layers by name."""
    latent = (*(("q_a_proj", "q_b_proj") if spec.q_rank is not None else ("q_proj",)), *ATTENTION[-2:], "o_proj")
    attend = latent if spec.latent else ATTENTION[:4]
    feed = MLP if spec.gated else MLP[1:]
    return [f"self_attn.{each}.weight" for each in attend] + [f"mlp.{each}.weight" for each in feed]
