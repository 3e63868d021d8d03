"""Rules of a run's data, each with the nearest value that obeys it."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.spec.problem import Problem
from trainledger.spec.run import BLOCK_ROWS, STANDARD_LIBRARY, DataSpec, Run, dealt
from trainledger.spec.units import ceil_div


def data_problems(data: DataSpec) -> Iterator[Problem]:
    """Every contradiction between the fields of the data."""
    if not data.mixture:
        return
    if data.path != (STANDARD_LIBRARY,):  # the default, which a run file may spell out
        rule = "give either path, or mixture with a path for each of its sources, not both"
        yield Problem("data.path", list(data.path), rule)
    total = sum(data.weights)
    for (name, source), rows in zip(data.mixture, dealt(BLOCK_ROWS, data.weights), strict=True):
        if not rows:
            rule = f"gives it none of {BLOCK_ROWS:,} sequences, since all weights together are {total:g}"
            least = float(f"{(total - source.weight) / (BLOCK_ROWS - 100):.2g}")
            yield Problem(f"data.mixture.{name}.weight", source.weight, rule, least)


def document_problems(run: Run) -> Iterator[Problem]:
    """Models, kernels and layouts that masked documents exclude."""
    if run.recipe.documents is None:
        return
    if run.recipe.attention == "flash":
        rule = "PyTorch's flash kernel has no mask here, which recipe.documents = masked needs"
        yield Problem("recipe.attention", "flash", rule, "sdpa")
    if run.model.indexer is not None:
        rule = "masks scores, and chosen keys (model.attention.indexer) have no mask"
        yield Problem("recipe.documents", run.recipe.documents, rule, "none")
    if run.model.mixer is not None:
        rule = "masks attention alone: the state of a mixer (model.mixer) goes on into the next document"
        yield Problem("recipe.documents", run.recipe.documents, rule, "none")
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


def length_problems(run: Run) -> Iterator[Problem]:
    """Contradictions between padded rows of uneven length and the recipe of a run."""
    recipe, rows = run.recipe, run.data.lengths
    if rows is None:
        return
    if recipe.seq_len > rows[-1][0]:
        rule = f"is longer than the longest row of data.lengths, {rows[-1][0]:,} tokens"
        yield Problem("recipe.seq_len", recipe.seq_len, rule, rows[-1][0])
    if recipe.tokens is not None:
        epoch = ceil_div(sum(count for _, count in rows), recipe.global_batch)
        rule = f"counts full rows, and data.lengths has uneven ones: give recipe.steps, of which an epoch has {epoch:,}"
        yield Problem("recipe.tokens", recipe.tokens, rule)
    if recipe.documents is not None:
        yield Problem("recipe.documents", recipe.documents, "is for packed rows, and data.lengths has padded", "none")
    if recipe.objective.answers:
        rule = "has rows in pairs or with prompts in common, which data.lengths draws one by one"
        yield Problem("recipe.objective", recipe.objective.kind, rule, "next-token")
