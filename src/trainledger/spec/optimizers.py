"""Which optimizers there are, how each may run, and what their fields must obey together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainledger.spec.problem import Problem

if TYPE_CHECKING:
    from trainledger.spec.recipe import Recipe

# How each may run, the default first: one kernel for everything (fused), a kernel per line of the rule over lists
# of tensors (foreach), or tensor by tensor (loop). Torch has no fused RMSProp and no fused Adafactor, whose default
# there is the loop; Lion and 8-bit Adam are the engine's own. Muon goes tensor by tensor in any case: what is said
# here is how its AdamW for the rest runs.
IMPLEMENTATIONS = {
    "adamw": ("fused", "foreach", "loop"),
    "adam": ("fused", "foreach", "loop"),
    "sgd": ("fused", "foreach", "loop"),
    "momentum": ("fused", "foreach", "loop"),
    "nesterov": ("fused", "foreach", "loop"),
    "adagrad": ("fused", "foreach", "loop"),
    "rmsprop": ("foreach", "loop"),
    "adafactor": ("loop", "foreach"),
    "lion": ("foreach", "loop"),
    "muon": ("fused", "foreach", "loop"),
    "adamw-8bit": ("loop", "fused"),
    "adam-8bit": ("loop", "fused"),
}
# Accounted for as bitsandbytes runs it, whose kernel this engine does not have.
ACCOUNTED_ONLY = (("adamw-8bit", "fused"), ("adam-8bit", "fused"))
OPTIMIZERS = tuple(IMPLEMENTATIONS)
OPTIMIZER_LOOPS = ("fused", "foreach", "loop")

_NAMES = {"rmsprop": "RMSProp", "adafactor": "Adafactor"}
_OF = {"amsgrad": ("adamw", "adam"), "rmsprop_momentum": ("rmsprop",), "rmsprop_centred": ("rmsprop",)}


def problems(recipe: Recipe) -> Iterator[Problem]:
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
