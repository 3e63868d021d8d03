"""Rules of adapters, each with the nearest value that obeys it."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.spec.layers import first_adapted, linear_layers, segments
from trainledger.spec.problem import Problem, nearest_text
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.savings import TARGETS, WHOLE, is_target


def adapter_problems(run: Run) -> Iterator[Problem]:
    """Contradictions between adapters and the model and layout of a run."""
    lora, spec = run.recipe.lora, run.model
    if lora is None:
        return
    kinds, experts = [kind for part in segments(spec) for kind in part.kinds], "experts" in lora.targets
    layers = list(dict.fromkeys(name for kind in kinds for name in linear_layers(spec, kind)))
    if experts and spec.experts is None:
        yield Problem(
            "recipe.lora.targets", list(lora.targets), "the model has no experts (model.feed_forward)", "linear"
        )
    elif {*lora.targets} <= {*TARGETS} and not (experts or any(is_target(layer, lora.targets) for layer in layers)):
        rule = f"names no linear layer of this model: {', '.join(name.split('.')[1] for name in layers)}"
        nearest = "linear" if spec.experts is None else "experts"
        yield Problem("recipe.lora.targets", list(lora.targets), rule, nearest)
    if run.recipe.activation_checkpointing.kind == "segments" and first_adapted(spec, lora):
        rule = "recomputes layers together, of which the first have no adapters (recipe.lora.targets)"
        yield Problem("recipe.activation_checkpointing", "segments", rule, "full")
    if experts and lora.dora:
        yield Problem("recipe.lora.dora", True, "is not for adapters on experts (recipe.lora.targets)", False)
    if lora.of_experts == "weights" and lora.dropout:
        rule = "is of an adapter's input, which what is added to weights has not (but recipe.lora.experts = rows)"
        yield Problem("recipe.lora.dropout", lora.dropout, rule, 0.0)
    if spec.n_mtp_layers:
        rule = "have no adapters (recipe.lora): fine-tuning leaves them out"
        yield Problem("model.n_mtp_layers", spec.n_mtp_layers, rule, 0)
    if lora.whole and spec.tie_embeddings:
        rule = "names one of two tied matrices, which PEFT would train apart: adapters alone are accounted for"
        yield Problem("recipe.lora.whole", list(lora.whole), rule, "none")
    if lora.whole and run.recipe.objective.answers and run.recipe.objective.reference is not None:
        rule = "would change the reference, which is the model with adapters off (recipe.objective)"
        yield Problem("recipe.lora.whole", list(lora.whole), rule, "none")
    layout, precision = run.layout, run.recipe.precision
    for axis in ("context", "pipeline"):
        if getattr(layout, axis) != 1:
            rule = "is not accounted for with adapters (recipe.lora), which replicate, shard, tensor and expert spread"
            yield Problem(f"layout.{axis}", getattr(layout, axis), rule, 1)
    if layout.tensor != 1:
        if lora.base_format is not None:
            rule = "is not accounted for over tensor ranks: layout.shard and replicate spread such weights"
            yield Problem("recipe.lora.base_format", lora.base_format, rule, "none")
        if spec.latent or spec.mixer or spec.experts:
            parts = "a mixture of experts" if spec.experts else "latent attention or mixers"
            rule = f"is not accounted for with adapters (recipe.lora) beside {parts}, which layout.shard"
            rule += " and layout.expert spread" if spec.experts else " and replicate spread"
            yield Problem("layout.tensor", layout.tensor, rule, 1)
    coded = lora.base_format in ("int8", "nf4")
    if precision.copies == "gathered" and (coded or not (layout.auto or (layout.shard > 1 and layout.zero == 3))):
        rule = "is not accounted for with frozen weights, but gathered by FSDP (layout.shard above 1, zero = 3)"
        if coded:
            rule = f"would gather the scales of {lora.base_format} weights in another format"
        yield Problem("recipe.precision", precision.kind, rule, "bf16-mixed" if precision.low else "fp32")


def adapter_recipe_problems(recipe: Recipe) -> Iterator[Problem]:
    """The fields that exclude adapters."""
    if recipe.lora is None:
        return
    for target in recipe.lora.targets:
        if target not in TARGETS:
            rule, layer = f"must be of {', '.join(TARGETS)}", f"{target}_proj"
            nearest = layer if layer in TARGETS else nearest_text(target, TARGETS)
            yield Problem("recipe.lora.targets", target, rule, nearest)
    for name in recipe.lora.whole or ():
        if name not in WHOLE:
            yield Problem("recipe.lora.whole", name, f"must be of {', '.join(WHOLE)}", nearest_text(name, WHOLE))
    precision = recipe.precision
    if precision.float8 is not None or precision.master:
        rule = "is not accounted for with frozen weights"
        nearest = "fp16-mixed" if precision.loss_scaling else "bf16-mixed" if precision.low else "fp32"
        yield Problem("recipe.precision", precision.kind, rule, nearest)
    if recipe.compile:
        yield Problem("recipe.compile", True, "is not built for adapters (recipe.lora)", False)
    if recipe.activation_checkpointing.kind == "from-start":
        rule = "is not accounted for with frozen weights"
        yield Problem("recipe.activation_checkpointing", "from-start", rule, "full")
    if recipe.optimizer.kind == "muon":
        yield Problem("recipe.optimizer", "muon", "is for whole matrices, not for adapters", "adamw")
