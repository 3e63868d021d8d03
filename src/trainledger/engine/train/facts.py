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
    lacking = sorted({*range(1, done + 1)} - {line.get("step") for line in lines})
    first = f", the first of them step {lacking[0]}" if lacking else ""
    return f"lacks {len(lacking):,} of the {done:,} steps that were done{first}" if lacking else None


def wrong_in_state(state: object) -> str | None:
    """What in a state.json is not as it was written, or None."""
    if (wrong := wrong_fact(state)) is not None or not isinstance(state, dict):
        return wrong
    if state.get("state") not in STATES:
        return "no state that a run has" if state.get("state") is None else f"unknown state {shown(state['state'])}"
    of_engine = "loop" not in state  # a metered loop has no checkpoints of ours
    needed = _OF_A_RESULT if state["state"] == "finished" and of_engine else ("step",)
    return next((f"lacks {name}" for name in needed if name not in state), None)


def wrong_fact(facts: object) -> str | None:
    """The first fact that no run wrote, of a state.json or a training.json, or None."""
    if not isinstance(facts, dict):
        return "not a table"
    for name, (what, fits) in _FACTS.items():
        if name in facts and not fits(facts[name]):
            return f"{name} = {shown(facts[name])} is not {what}"
    return None


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and bool(0 <= value < math.inf)


def _is_loss(value: Any) -> bool:
    return value is None or _is_count(value) or (type(value) is float and math.isfinite(value))


def _or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _is_table(**fields: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a table of exactly these fields, each as it should be."""
    return lambda value: (
        isinstance(value, dict)
        and value.keys() == fields.keys()
        and all(fits(value[name]) for name, fits in fields.items())
    )


# What the result of a finished run is made of.
_OF_A_RESULT = ("step", "tokens", "seconds", "loss", "validation_loss", "unigram_entropy", "checkpoint")
_FACTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "step": ("a number of steps", _is_count),
    "tokens": ("a number of tokens", _is_count),
    "threads": ("a number of threads", lambda value: _is_count(value) and value > 0),
    "seconds": ("a time", _is_time),
    **dict.fromkeys(("loss", "validation_loss", "unigram_entropy"), ("a loss", _is_loss)),
    **dict.fromkeys(("why", "digest", "data"), ("a text", _is_text)),
    "tokenizer": ("a text", _or_none(_is_text)),
    "checkpoint": (
        "the name of a checkpoint",
        lambda value: bool(_is_text(value) and CHECKPOINT_NAME.fullmatch(value)),
    ),
    "initial_weights": ("a file and its sha256", _or_none(_is_table(file=_is_text, sha256=_is_text))),
    "guard": (
        "the table of a guard",
        _is_table(
            recent=lambda value: isinstance(value, list) and all(map(_is_count, value)),
            skipped_steps=_is_count,
            roll_backs=_is_count,
            batches_left_out=_is_count,
        ),
    ),
    "loss_scale": ("a scale and its steps", _is_table(scale=_is_time, good_steps=_is_count)),
}
