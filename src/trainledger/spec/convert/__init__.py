"""Readers and writers of what others write; here configuration files that are recognized by their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainledger.spec.problem import Problem

_DEEPSPEED = (
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "wall_clock_breakdown",
)
_TORCHTITAN = ("job", "training", "parallelism", "activation_checkpoint", "lr_scheduler")
_AXES = {
    "data_parallel_replicate_degree": "replicate",
    "data_parallel_shard_degree": "shard",
    "tensor_parallel_degree": "tensor",
    "pipeline_parallel_degree": "pipeline",
    "context_parallel_degree": "context",
    "expert_parallel_degree": "expert",
}


def foreign_problem(table: Mapping[str, Any]) -> Problem | None:
    """The problem of a file of DeepSpeed or torchtitan in place of ours; None for any other.

    >>> found = foreign_problem({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4})
    >>> found.rule, found.nearest
    ('is a config of DeepSpeed, not a run file', '--set layout.zero=2 --set recipe.micro_batch=4')
    """
    programs: tuple[tuple[str, tuple[str, ...], Callable[[Mapping[str, Any]], Iterator[str]]], ...] = (
        ("DeepSpeed", _DEEPSPEED, _deepspeed),
        ("torchtitan", _TORCHTITAN, _torchtitan),
    )
    for program, keys, meant in programs:
        if sum(key in table for key in keys) >= 2:
            sets = " ".join(f"--set {override}" for override in meant(table))
            return Problem("", None, f"is a config of {program}, not a run file", sets or "trainledger init")
    return None


def _deepspeed(table: Mapping[str, Any]) -> Iterator[str]:
    stage = _at(table, "zero_optimization", "stage")
    if stage in (1, 2, 3):
        yield f"layout.zero={stage}"
    micro, whole = table.get("train_micro_batch_size_per_gpu"), table.get("train_batch_size")
    if _is_count(micro):
        yield f"recipe.micro_batch={micro}"
    if _is_count(whole):
        yield f"recipe.global_batch={whole}"
    for name in ("bf16", "fp16"):
        if _at(table, name, "enabled") is True:
            # DeepSpeed keeps 16-bit parameters and an fp32 copy of them with the optimizer, as fp16 here always does.
            yield f"recipe.precision={name}"
            if name == "bf16":
                yield "recipe.precision.master_weights=true"


def _torchtitan(table: Mapping[str, Any]) -> Iterator[str]:
    for theirs, ours in (("seq_len", "seq_len"), ("local_batch_size", "micro_batch"), ("steps", "steps")):
        if _is_count(_at(table, "training", theirs)):
            yield f"recipe.{ours}={_at(table, 'training', theirs)}"
    for theirs, ours in _AXES.items():
        ranks = _at(table, "parallelism", theirs)
        if _is_count(ranks) and ranks > 1:
            yield f"layout.{ours}={ranks}"


def _at(table: Mapping[str, Any], section: str, name: str) -> Any:
    inner = table.get(section)
    return inner.get(name) if isinstance(inner, Mapping) else None


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0
