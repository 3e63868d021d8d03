"""The facts of a run in JSON: what `state.json` and a checkpoint's `training.json` must say, and how many steps a curve
lacks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainledger.spec.problem import shown

CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")
STATES = ("running", "finished", "interrupted", "failed")


def steps_without_line(lines: Iterable[Mapping[str, Any]], done: int) -> str | None:
    """How many of the steps that were done a curve lacks, as the rest of a sentence.

    >>> steps_without_line([{"step": 1}, {"step": 4}], 4)
    'lacks 2 of the 4 steps that were done, the first of them step 2'
    """
    lacking = sorted({*range(1, done + 1)} - {each.get("step") for each in lines})
    first = f", the first of them step {lacking[0]}" if lacking else ""
    return f"lacks {len(lacking):,} of the {done:,} steps that were done{first}" if lacking else None


def wrong_in_state(state: object) -> str | None:
    """What in a state.json is not as it was written, or None."""
    if not isinstance(state, dict):
        return "not a table"
    if state.get("state") not in STATES:
        return "no state that a run has" if state.get("state") is None else f"unknown state {shown(state['state'])}"
    of_engine = "loop" not in state  # a metered loop has no checkpoints of ours
    for name in _OF_A_RESULT if state["state"] == "finished" and of_engine else ("step",):
        if name not in state:
            return f"lacks {name}"
    for name, (what, fits) in _STATE_FACTS.items():
        if name in state and not fits(state[name]):
            return f"{name} = {shown(state[name])} is not {what}"
    return None


def _is_amount(value: Any, *types: type) -> bool:
    return type(value) in types and bool(0 <= value < math.inf)


def _is_loss(value: Any) -> bool:
    return value is None or _is_amount(value, int, float) or (type(value) is float and math.isfinite(value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return _is_amount(value, int)


def _is_seconds(value: Any) -> bool:
    return _is_amount(value, int, float)


def _is_table(**fields: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a table of exactly these fields, each as it should be."""
    return lambda value: (
        isinstance(value, dict)
        and value.keys() == fields.keys()
        and all(fits(value[name]) for name, fits in fields.items())
    )


def _is_weights(value: object) -> bool:
    return value is None or (isinstance(value, dict) and all(isinstance(value.get(k), str) for k in ("file", "sha256")))


# What the result of a finished run is made of.
_OF_A_RESULT = ("step", "tokens", "seconds", "loss", "validation_loss", "unigram_entropy", "checkpoint")
_STATE_FACTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "step": ("a number of steps", _is_count),
    "tokens": ("a number of tokens", _is_count),
    "seconds": ("a time", _is_seconds),
    "loss": ("a loss", _is_loss),
    "validation_loss": ("a loss", _is_loss),
    "unigram_entropy": ("a loss", _is_loss),
    "checkpoint": (
        "the name of a checkpoint",
        lambda value: isinstance(value, str) and CHECKPOINT_NAME.fullmatch(value) is not None,
    ),
    "initial_weights": ("a file and its sha256", _is_weights),
    "why": ("a text", _is_text),
}
# What a run goes on with of training.json.
_TRAINING_FACTS: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "digest": _is_text,
    "data": _is_text,
    "tokenizer": lambda value: value is None or _is_text(value),
    "threads": lambda value: _is_count(value) and value > 0,
    "seconds": _is_seconds,
    "loss": _is_loss,
    "validation_loss": _is_loss,
    "initial_weights": _is_weights,
    "guard": _is_table(
        recent=lambda value: isinstance(value, list) and all(map(_is_count, value)),
        skipped_steps=_is_count,
        roll_backs=_is_count,
        batches_left_out=_is_count,
    ),
    "loss_scale": _is_table(scale=_is_seconds, good_steps=_is_count),
}


def wrong_in_training(facts: object) -> str | None:
    """What a training.json says that no run wrote, as the rest of a sentence, or None."""
    if not isinstance(facts, dict):
        return "that is no table"
    for name, fits in _TRAINING_FACTS.items():
        if name in facts and not fits(facts[name]):
            return f"in which {name} is {shown(facts[name])}"
    return None
