"""The spec of a model beside weights that no run here has trained, or that are not as it left them: model.toml."""

from __future__ import annotations

from pathlib import Path

from trainledger.spec.model import ModelSpec
from trainledger.spec.runfile import parse, read_table, resolved

MODEL_FILE = "model.toml"
_ANY_RECIPE = {"seq_len": 1, "global_batch": 1, "steps": 1}  # a run file cannot do without


def write_spec(spec: ModelSpec, directory: Path) -> None:
    """Write a model's spec as the [model] of a run file."""
    import tomli_w

    run = parse({"model": spec, "recipe": _ANY_RECIPE})
    (directory / MODEL_FILE).write_text(tomli_w.dumps({"model": resolved(run)["model"]}), encoding="utf-8")


def read_spec(directory: Path) -> ModelSpec:
    """The spec in a directory's model.toml; raises InvalidInput where it is none."""
    path = directory / MODEL_FILE
    table = {"model": read_table(path).get("model", {}), "recipe": _ANY_RECIPE}
    return parse(table, where=str(path)).model
