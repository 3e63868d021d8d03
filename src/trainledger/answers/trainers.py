"""A run from the file of a program that fine-tunes models: axolotl, LLaMA-Factory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainledger import catalog
from trainledger.answers.megatron import given_count
from trainledger.answers.source import Overrides, by_field, parsed
from trainledger.spec import runfile
from trainledger.spec.convert.trainers import TrainerRun, from_values, values_of
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Origin, Run

# Names of models that were trained further: their sizes are those of the model before.
_TRAINED_FURTHER = re.compile(r"-(instruct|it|chat|base)(-\d{4})?(?=-hf$|$)", re.IGNORECASE)


def read_trainer(named: str, overrides: Overrides) -> tuple[dict[str, Any], TrainerRun] | None:
    """The sections of a run and what else the file says; None for any other file. Raises `InvalidInput`.

    The model is that of the overrides, else of the catalog by its name or hub id.
    """
    values = values_of(Path(named))
    if values is None:
        return None
    given = by_field(overrides)
    found = from_values(values, devices=given_count(given.get("cluster.count")), where=named)
    if "model.preset" in given or "model.config" in given:
        return {"model": {}, **found.table}, found
    preset, notes = _preset(found.model, named)
    return {"model": {"preset": preset}, **found.table}, replace(found, remarks=(*notes, *found.remarks))


def run_of_trainer(named: str, overrides: Overrides) -> Run | None:
    """The run of a file after overrides, its notes what was assumed and not understood; None for any other file."""
    read = read_trainer(named, overrides)
    if read is None:
        return None
    table, found = read
    run = parsed(table, overrides, named)
    written = runfile.written(table, overrides)
    assumed = tuple(each for each in found.assumed if each not in by_field(overrides))
    origin = Origin(source=named, explicit=written.difference(assumed), assumed=assumed, notes=found.remarks)
    return replace(run, origin=origin)


def _preset(model: str, where: str) -> tuple[str, tuple[str, ...]]:
    """The catalog's name of a model, and a sentence where it is that of another with its sizes."""
    before = _TRAINED_FURTHER.sub("", model)
    for name in (model, before):
        try:
            found = catalog.known_as(name, catalog.model_names(), "model.preset")
        except InvalidInput:
            continue
        return found, () if name == model else (f"assuming the sizes of {found} for {model}",)
    rule = "is not in the catalog: give its config.json"
    raise InvalidInput([Problem("the model", model, rule, "--set model.config=PATH/config.json")], where)
