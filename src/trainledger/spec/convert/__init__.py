"""Readers and writers of what others write; here configuration files of other programs, recognized by their keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainledger.spec.plain import table_beside
from trainledger.spec.problem import Problem

_WRITTEN = table_beside(__file__, "programs.toml")
_MARKS: dict[str, list[str]] = _WRITTEN["marks"]
_MEANT: dict[str, list[str]] = _WRITTEN["meant"]
_DEEPEST = 4  # maps in one another


def foreign_problem(table: Mapping[Any, Any]) -> Problem | None:
    """The problem of a file of another program in place of ours; None for any other.

    >>> found = foreign_problem({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4})
    >>> found.rule, found.nearest
    ('is a config of DeepSpeed, not a run file', '--set layout.zero=2 --set recipe.micro_batch=4')
    """
    program = foreign_program(table)
    if program is None:
        return None
    sets = " ".join(f"--set {override}" for override in _meant(table))
    if program not in ("DeepSpeed", "torchtitan"):  # whose files say nothing of the model
        sets = f"trainledger plan MODEL {sets}".strip()
    aside = ", ".join(sorted(set(offloaded(table))))
    rule = f"is a config of {program}, not a run file"
    if aside:
        rule += f"; its offloading ({aside}) is recipe.offload here"
    return Problem("", None, rule, sets or "trainledger init")


def foreign_program(table: Mapping[Any, Any]) -> str | None:
    """The other program whose file a map is; None for our own files and a model's config.json."""
    if "model_type" in table and "base_model" not in table:
        return None
    found = (name for name, keys in _MARKS.items() if sum(_at(table, key) is not None for key in keys) >= 2)
    return next(found, None)


def _meant(table: Mapping[Any, Any]) -> Iterator[str]:
    for field, keys in _MEANT.items():
        value = next((value for key in keys if type(value := _at(table, key)) is int and value > 0), 0)
        if value > field.startswith("layout") - (field == "layout.zero"):
            yield f"{field}={value}"
    for name in ("bf16", "fp16"):
        own = table.get(name)
        if own is True or (isinstance(own, Mapping) and own.get("enabled") is True):
            # DeepSpeed keeps 16-bit parameters and an fp32 copy of them with the optimizer, as fp16 here always does.
            yield f"recipe.precision={name if isinstance(own, Mapping) else f'{name}-mixed'}"
            if name == "bf16" and isinstance(own, Mapping):
                yield "recipe.precision.master_weights=true"


def offloaded(table: Mapping[Any, Any], depth: int = 0) -> Iterator[str]:
    """Keys that move a part of the memory to the host."""
    for key, value in table.items():
        off = value in (None, False, 0, "", "none", "false")
        if isinstance(value, Mapping) and depth < _DEEPEST:
            off = str(value.get("device", "none")).lower() == "none"
            yield from offloaded(value, depth + 1)
        if "offload" in str(key).lower() and not off:
            yield str(key)


def _at(table: Any, path: str) -> Any:
    """What stands at a path, a dash of a key being as good as an underscore; None where nothing does."""
    for part in path.split("."):
        if not isinstance(table, Mapping):
            return None
        table = table.get(part, table.get(part.replace("_", "-")))
    return table
