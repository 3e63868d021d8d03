"""Where a run's weights come from at step 0, when not from its seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from trainledger.durable import sha256
from trainledger.nn.transformer import Transformer
from trainledger.nn.weights import faults, held, refuse, shapes, stored_in
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import fields_of
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.train.trained import find_weights

# What may be longer or named otherwise without being another function of the weights.
_FREE = {"name", "max_seq_len"}


def start_from(run: Run, model: Transformer, say: Callable[[str], None]) -> dict[str, str]:
    """Fill a model with the run's ``recipe.initial_weights`` and give their file and its SHA-256.

    Raises `InvalidInput` that names each tensor which does not fit. ``say`` is told where the weights were made with
    other settings than the run's, which no shape shows.
    """
    spec, file = _found(run, say)
    if not file.is_file():
        rule = f"holds no {file.name}"
        raise InvalidInput([Problem("recipe.initial_weights", run.recipe.initial_weights, rule)])
    stored = stored_in([file])
    refuse(faults(shapes(run.model), stored), f"recipe.initial_weights: {file} does not fit the run's model")
    for each in _other_settings(spec, run.model):
        say(f"{file}: {each}")
    with torch.no_grad():
        for name, tensor in held(model).items():
            tensor.copy_(stored[name].read())
    return {"file": str(file.resolve()), "sha256": sha256(file)}


def refuse_other_weights(run_dir: Path, begun_with: Mapping[str, str] | None) -> None:
    """Raise `InvalidInput` where the file of weights that a run began with holds others by now; it may be gone."""
    if begun_with is None or not Path(begun_with["file"]).is_file():
        return
    if sha256(Path(begun_with["file"])) != begun_with["sha256"]:
        rule = f"holds other weights than {run_dir} was begun with; put them back or give the new ones another name"
        raise InvalidInput([Problem("recipe.initial_weights", begun_with["file"], rule)])


def _found(run: Run, say: Callable[[str], None]) -> tuple[ModelSpec, Path]:
    assert run.recipe.initial_weights is not None
    try:
        return find_weights(Path(run.recipe.initial_weights).expanduser(), say)
    except InvalidInput as error:
        raise InvalidInput(list(error.problems), "recipe.initial_weights") from error


def _other_settings(made_with: ModelSpec, used_with: ModelSpec) -> Iterator[str]:
    before, now = fields_of(made_with), fields_of(used_with)
    for path in dict.fromkeys([*before, *now]):
        if before.get(path) != now.get(path) and path not in _FREE:
            yield f"made with model.{path} = {before.get(path)}, goes on with {now.get(path)}"
