"""The kinds of layers of a recipe whose attention has a backward, and those of which backward recomputes something."""

from __future__ import annotations

from trainledger.spec.layers import LayerKind, first_adapted, layer_runs, layers_between
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe
from trainledger.spec.savings import ATTENTION, is_target


def kinds_that_learn(spec: ModelSpec, recipe: Recipe) -> set[LayerKind]:
    """The kinds of layers whose attention has a backward, or is recomputed for one.

    These are all, except frozen blocks up to the first with adapters, which may come after its attention.
    """
    runs = layer_runs(spec, recipe)
    kinds = [kind for run in runs for kind in run.kinds]
    whole_again = recipe.activation_checkpointing.kind in ("full", "segments", "selective") and runs[0].groups[0].again
    if recipe.lora is None or whole_again or "embed_tokens" in (recipe.lora.whole or ()):
        return set(kinds)
    targets, first = recipe.lora.targets, first_adapted(spec, recipe.lora)
    before = any(is_target(f"self_attn.{name}.weight", targets) for name in ATTENTION if name != "o_proj")
    if first:
        runs = tuple(layers_between(runs, first + (not before), spec.n_layers))
        return {kind for run in runs for kind in run.kinds}
    return set(kinds if before else kinds[1:])


def kinds_again(spec: ModelSpec, recipe: Recipe) -> set[LayerKind]:
    """The kinds of layers of which backward recomputes something."""
    runs = layer_runs(spec, recipe)
    if recipe.activation_checkpointing.kind in ("attention", "from-start"):
        return {kind for run in runs for kind in run.kinds}
    layer_kinds: set[LayerKind] = set()
    for run in runs:
        first = 0
        for group in run.groups:
            layer_kinds |= set(run.kinds[first : first + group.size] if group.again else ())
            first += group.size
    return layer_kinds
