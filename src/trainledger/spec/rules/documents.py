"""What cannot yet be combined with attention that stops at the documents of a sequence."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.spec.problem import Problem
from trainledger.spec.run import Run


def document_problems(run: Run) -> Iterator[Problem]:
    """What masked documents exclude of model, kernel and layout."""
    if run.recipe.documents is None:
        return
    if run.recipe.attention == "flash":
        rule = "PyTorch's flash kernel has no mask here, which recipe.documents = masked needs"
        yield Problem("recipe.attention", "flash", rule, "sdpa")
    if run.model.n_mtp_layers:
        rule = "predict further tokens, which may be of the next document: recipe.documents = masked excludes them"
        yield Problem("model.n_mtp_layers", run.model.n_mtp_layers, rule, 0)
    if run.layout.auto:
        return
    if run.layout.context > 1:
        rule = "attends between ranks without a mask, which recipe.documents = masked needs"
        yield Problem("layout.context", run.layout.context, rule, 1)
    if run.layout.pipeline > 1:
        rule = "sends no token ids to later stages, which recipe.documents = masked needs for its mask"
        yield Problem("layout.pipeline", run.layout.pipeline, rule, 1)
