"""What the fields of a recipe must obey together, each rule with the nearest value that obeys it."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.spec.lora import TARGETS
from trainledger.spec.optimizers import IMPLEMENTATIONS
from trainledger.spec.precision import CACHING, MASTER_OF, RECIPES, precision_of
from trainledger.spec.problem import Problem, nearest_text
from trainledger.spec.recipe import Recipe
from trainledger.spec.savings import KEEPABLE

_NAMES = {"rmsprop": "RMSProp", "adafactor": "Adafactor"}
_OF = {"amsgrad": ("adamw", "adam"), "rmsprop_momentum": ("rmsprop",), "rmsprop_centred": ("rmsprop",)}


def recipe_problems(recipe: Recipe) -> Iterator[Problem]:
    """Everything that the fields of a recipe say against each other."""
    if (recipe.tokens is None) == (recipe.steps is None):
        rule = "give either tokens or steps"
        if recipe.steps is not None:
            rule += ", not both (--set recipe.steps= takes one out)"
        yield Problem("recipe.tokens", recipe.tokens, rule)
    yield from _precision(recipe)
    yield from _optimizer(recipe)
    yield from _recomputation(recipe)
    yield from _adapters(recipe)
    if (recipe.tokens is None) != (recipe.steps is None) and recipe.warmup_steps > recipe.total_steps:
        rule = f"is longer than the run of {recipe.total_steps} steps"
        yield Problem("recipe.warmup_steps", recipe.warmup_steps, rule, recipe.total_steps)


def _precision(recipe: Recipe) -> Iterator[Problem]:
    """Everything that the fields of precision say against each other."""
    name = recipe.precision
    if recipe.master_weights and name not in MASTER_OF:
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


def _optimizer(recipe: Recipe) -> Iterator[Problem]:
    """Everything that the optimizer's fields say against each other."""
    name, loop = recipe.optimizer, recipe.optimizer_loop
    possible = IMPLEMENTATIONS[name]
    if loop is not None and loop not in possible:
        rule = f"torch has no {loop} {_NAMES[name]}" if name in _NAMES else f"there is no {loop} {name} here"
        yield Problem("recipe.optimizer_loop", loop, rule, possible[0])
    for field, optimizers in _OF.items():
        value = getattr(recipe, field)
        if value and name not in optimizers:
            rule = f"belongs to optimizer {' and '.join(optimizers)}, not to {name}"
            yield Problem(f"recipe.{field}", value, rule, type(value)())
    if name in ("momentum", "nesterov") and recipe.beta1 == 0:
        yield Problem("recipe.beta1", recipe.beta1, f"without it {name} is optimizer sgd", 0.9)


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


def _adapters(recipe: Recipe) -> Iterator[Problem]:
    """What the fields say against each other."""
    if recipe.lora_rank is None:
        for field, absent in (("lora_dropout", 0.0), ("base_format", None)):
            value = getattr(recipe, field)
            if value != absent:
                yield Problem(f"recipe.{field}", value, "needs lora_rank", "none" if absent is None else absent)
        return
    for each in recipe.lora_targets:
        if each not in TARGETS:
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
