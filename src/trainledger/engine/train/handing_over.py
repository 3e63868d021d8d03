"""A run in progress as it goes to another process: with a checkpoint, or straight to a replica that comes."""

from __future__ import annotations

import math
from typing import Any

import torch

from trainledger.engine.train.loading import take_from
from trainledger.engine.train.metrics import Lines
from trainledger.engine.train.observer import TrainingState
from trainledger.engine.train.preflight import facts_of
from trainledger.engine.train.saving import model_tensors, optimizer_tensors
from trainledger.engine.train.step import Feed
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.runfile import digest

_FIGURES = ("step", "loss", "validation_loss", "unigram_entropy", "seconds", "initial_weights")


def figures(state: TrainingState) -> dict[str, Any]:
    """The state of a run, as JSON stores it: what is not finite is null."""
    values = {name: getattr(state, name) for name in _FIGURES}
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return {**finite, "tokens": state.step * state.run.recipe.tokens_per_step}


def figures_to_go_on(state: TrainingState, feed: Feed) -> dict[str, Any]:
    """What a run goes on with, beside its tensors."""
    found = {**figures(state), "digest": digest(state.run), "data": feed.fingerprint}
    found |= {"threads": torch.get_num_threads(), "guard": state.guard.facts()}
    if state.scaler is not None:
        found["loss_scale"] = state.scaler.facts()
    return found


def give(state: TrainingState, feed: Feed, lines: Lines) -> dict[str, Any]:
    """All that another process needs to go on in the place of this one."""
    return {
        "model": model_tensors(state.model), "optimizer": optimizer_tensors(state.model, state.optimizer),
        "figures": figures_to_go_on(state, feed), "alike": _alike(state, feed), "lines": list(lines),
    }  # fmt: skip


def take(state: TrainingState, feed: Feed, lines: Lines, given: dict[str, Any]) -> None:
    """Go on in the place of another process; raises `InvalidInput` where that trains something else."""
    own, its = _alike(state, feed), given["alike"]
    problems = [
        Problem(
            name, None, f"is {own[name]} for this replica, and {its[name]} for those that train; it must be the same"
        )
        for name in own
        if own[name] != its[name]
    ]
    if problems:
        raise InvalidInput(problems)
    take_from(given["model"], given["optimizer"], given["figures"], state)
    lines.clear()
    lines.extend(given["lines"])


def _alike(state: TrainingState, feed: Feed) -> dict[str, str]:
    """What must be the same for all replicas, by the words for it."""
    facts = {**facts_of(state.run), "data": feed.fingerprint}
    del facts["host"]
    return facts
