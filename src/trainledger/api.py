"""The face of the run file: where specs, catalog, calibration and Hugging Face configurations meet."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from trainledger import catalog
from trainledger.spec import runfile
from trainledger.spec.cluster import Device
from trainledger.spec.model import ModelSpec
from trainledger.spec.run import Run

THIS_MACHINE = "this-machine"


def load(
    source: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | Iterable[str] = (),
) -> Run:
    """The run in a TOML file or a dict of sections, after overrides (``{"recipe.micro_batch": 2}``).

    Raises `InvalidInput` with every problem found.

    >>> run = load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 1024, "global_batch": 8, "tokens": "1B"}})
    >>> run.model.n_layers, run.recipe.total_steps
    (12, 122070)
    """
    if isinstance(source, Mapping):
        return runfile.parse(source, overrides, presets=catalog.model, from_config=config_fields)
    return runfile.read(source, overrides, presets=catalog.model, from_config=config_fields)


def model(name: str, **fields: Any) -> ModelSpec:
    """A model of the catalog, with any fields changed; raises `InvalidInput`.

    >>> model("llama-3-8b", n_layers=2).n_layers
    2
    """
    recipe = {"seq_len": 1, "global_batch": 1, "steps": 1}
    return load({"model": {"preset": name, **fields}, "recipe": recipe}).model


def config_fields(path: str) -> dict[str, Any]:
    """The `ModelSpec` fields of a Hugging Face config.json; raises `InvalidInput`."""
    from pathlib import Path

    from trainledger.spec.huggingface import from_config, read_json

    return dict(vars(from_config(read_json(Path(path)), path)))


def device_of(run: Run) -> Device | None:
    """The device of a run: of the catalog, or this machine as its calibration measured it.

    None where this machine was not measured yet. Raises `InvalidInput` where the device is unknown.
    """
    if run.cluster.device != THIS_MACHINE:
        return catalog.device(run.cluster.device)
    from trainledger.spec.calibration import find_calibration, to_device

    calibration = find_calibration("cpu" if run.cluster.backend == "auto" else run.cluster.backend)
    return None if calibration is None else to_device(calibration)
