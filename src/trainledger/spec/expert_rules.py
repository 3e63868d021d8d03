"""What experts and multi-token prediction ask of a recipe, each rule with the nearest value that obeys it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainledger.spec.problem import Problem

if TYPE_CHECKING:
    from trainledger.spec.run import Run

DISPATCHES = ("dropless", "capacity")
CAPACITY_FACTOR = 1.25  # Fedus et al. 2021, Switch Transformers, table 1


def problems(run: Run) -> Iterator[Problem]:
    """Everything that the recipe's choices for experts and prediction ahead say against the model and each other."""
    spec, recipe = run.model, run.recipe
    if spec.n_experts is None:
        if recipe.expert_dispatch != "dropless":
            yield Problem("recipe.expert_dispatch", recipe.expert_dispatch, "the model has no experts", "dropless")
        if recipe.load_balance_loss:
            yield Problem("recipe.load_balance_loss", recipe.load_balance_loss, "the model has no experts", 0)
    if recipe.capacity_factor is not None and recipe.expert_dispatch != "capacity":
        rule = f"{recipe.expert_dispatch} experts take all tokens they are sent"
        yield Problem("recipe.capacity_factor", recipe.capacity_factor, rule, "none")
    if spec.n_predict_ahead and recipe.seq_len < spec.n_predict_ahead + 2:
        rule = f"must be at least n_predict_ahead + 2, so that the last of {spec.n_predict_ahead} modules has a token"
        yield Problem("recipe.seq_len", recipe.seq_len, rule, spec.n_predict_ahead + 2)
    for axis in ("tensor", "context"):
        ranks = getattr(run.layout, axis)
        if spec.n_predict_ahead and isinstance(ranks, int) and ranks > 1:
            rule = "multi-token prediction modules (model.n_predict_ahead) are not accounted for over such ranks"
            yield Problem(f"layout.{axis}", ranks, rule, 1)
    if spec.n_predict_ahead and run.layout.pipeline > 1 and (spec.positions == "learned" or spec.embedding_norm):
        rule = (
            "multi-token prediction modules (model.n_predict_ahead) are not accounted for on a last stage that has "
            "learned positions or a norm after the embedding"
        )
        yield Problem("layout.pipeline", run.layout.pipeline, rule, 1)
