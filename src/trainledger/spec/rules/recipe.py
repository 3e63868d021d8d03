"""What the fields of a recipe must obey together, each rule with the nearest value that obeys it."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.spec.lora import TARGETS
from trainledger.spec.optimizers import STEPS_OF_OWN_SIZE
from trainledger.spec.problem import Problem, nearest_text
from trainledger.spec.recipe import Recipe
from trainledger.spec.savings import KEEPABLE, Selective


def recipe_problems(recipe: Recipe) -> Iterator[Problem]:
    """Every contradiction between the fields of a recipe."""
    if (recipe.tokens is None) == (recipe.steps is None):
        rule = "give either tokens or steps"
        if recipe.steps is not None:
            rule += ", not both (--set recipe.steps= removes one)"
        yield Problem("recipe.tokens", recipe.tokens, rule)
    elif recipe.schedule.warmup_steps > recipe.total_steps:
        rule = f"is longer than the run of {recipe.total_steps} steps"
        yield Problem("recipe.schedule.warmup_steps", recipe.schedule.warmup_steps, rule, recipe.total_steps)
    if recipe.precision.gradient_dtype is not None and not recipe.precision.master_weights:
        rule = "belongs to 16-bit parameters with an fp32 copy: recipe.precision.master_weights = true"
        yield Problem("recipe.precision.gradient_dtype", recipe.precision.gradient_dtype, rule, "none")
    yield from _framework(recipe)
    yield from _guard(recipe)
    yield from _average(recipe)
    yield from _maximal_update(recipe)
    yield from _recomputation(recipe)
    yield from _adapters(recipe)


def _framework(recipe: Recipe) -> Iterator[Problem]:
    if recipe.loss.kind == "in-place" and recipe.framework != "megatron-core":
        rule = "is a kernel of Transformer Engine, for recipe.framework = megatron-core only"
        yield Problem("recipe.loss", "in-place", rule, "fused")
    if recipe.of_megatron and recipe.loss.kind in ("chunked", "fused"):
        yield Problem("recipe.loss", recipe.loss.kind, "is not available in Megatron-LM (recipe.framework)", "compiled")
    if recipe.of_megatron and recipe.lora is not None:
        rule = "is not accounted for in Megatron-LM (recipe.framework)"
        yield Problem("recipe.lora.rank", recipe.lora.rank, rule, "recipe.framework = torch")


def _guard(recipe: Recipe) -> Iterator[Problem]:
    guard = recipe.guard
    if guard.skips >= guard.window:
        rule = f"must be below recipe.guard.window = {guard.window}, or the limit is never exceeded"
        yield Problem("recipe.guard.skips", guard.skips, rule, guard.window - 1)
    if guard.beyond.kind == "roll-back" and recipe.checkpoints.every is None:
        rule = "needs checkpoints to return to, and recipe.checkpoints.every is absent"
        yield Problem("recipe.guard.beyond", "roll-back", rule, "stop")


def _average(recipe: Recipe) -> Iterator[Problem]:
    if recipe.ema is not None and recipe.precision.updated != "fp32":
        rule = f"would not change in {recipe.precision.updated}, whose rounding is larger than a step of the average"
        yield Problem("recipe.ema", recipe.ema.decay, rule, "none, or recipe.precision.master_weights = true")


def _maximal_update(recipe: Recipe) -> Iterator[Problem]:
    if recipe.mup is None:
        return
    width, kind = recipe.mup.base_width, recipe.optimizer.kind
    if kind not in STEPS_OF_OWN_SIZE:
        rule = f"scales learning rates for optimizers with normalized steps, and recipe.optimizer is {kind}"
        yield Problem("recipe.mup.base_width", width, rule, "recipe.optimizer = adamw")
    if recipe.lora is not None:
        yield Problem(
            "recipe.mup.base_width", width, "has no rule here for adapters (recipe.lora)", "recipe.mup = none"
        )


def _recomputation(recipe: Recipe) -> Iterator[Problem]:
    again, precision = recipe.activation_checkpointing, recipe.precision
    if again.kind == "from-start" and precision.copies != "none":
        rule = f"recomputation of the blocks before would leave low-precision copies (precision {precision.kind})"
        yield Problem("recipe.activation_checkpointing", again.kind, rule, "full")
    if recipe.loss.kind == "fused" and (precision.copies == "gathered" or precision.loss_scaling):
        rule = f"computes gradients in forward, which precision {precision.kind} scales or gathers afterwards"
        yield Problem("recipe.loss", "fused", rule, "chunked")
    for each in again.keep if isinstance(again, Selective) else ():
        if each not in KEEPABLE:
            rule = f"must be of {', '.join(KEEPABLE)}"
            yield Problem("recipe.activation_checkpointing.keep", each, rule, nearest_text(each, KEEPABLE))


def _adapters(recipe: Recipe) -> Iterator[Problem]:
    """The fields that exclude adapters."""
    if recipe.lora is None:
        return
    for each in recipe.lora.targets:
        if each not in TARGETS:
            rule = f"must be of {', '.join(TARGETS)}"
            yield Problem("recipe.lora.targets", each, rule, nearest_text(each, TARGETS))
    precision = recipe.precision
    if precision.copies == "gathered" or precision.float8 is not None or precision.loss_scaling or precision.master:
        rule = "is not accounted for with frozen weights"
        yield Problem("recipe.precision", precision.kind, rule, "bf16-mixed" if precision.low else "fp32")
    if recipe.compile:
        yield Problem("recipe.compile", True, "is not built for adapters (recipe.lora)", False)
    if recipe.activation_checkpointing.kind == "from-start":
        rule = "is not accounted for with frozen weights"
        yield Problem("recipe.activation_checkpointing", "from-start", rule, "full")
    if recipe.optimizer.kind == "muon":
        yield Problem("recipe.optimizer", "muon", "is for whole matrices, not for adapters", "adamw")
