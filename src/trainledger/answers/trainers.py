"""A run from the file or launch line of a program that trains models: axolotl, TRL, torchtitan and others."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainledger import catalog
from trainledger.answers.defaults import TRAINED_LENGTH
from trainledger.answers.megatron import given_count
from trainledger.answers.source import Overrides, as_texts, by_field, model_section, parsed
from trainledger.spec import runfile
from trainledger.spec.convert.trainers import TrainerRun, from_launch, values_of
from trainledger.spec.convert.trainers.files import Launched
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Origin, Run

# Names of models that were trained further: their sizes are those of the model before.
_TRAINED_FURTHER = re.compile(r"-((instruct|it|chat|base|thinking)(-\d{4})?|\d{4})(?=-hf$|$)", re.IGNORECASE)
_IN_4_BITS = re.compile(r"-(unsloth-)?bnb-4bit$", re.IGNORECASE)


def read_trainer(named: str, overrides: Overrides, launch: Launched) -> tuple[dict[str, Any], TrainerRun]:
    """The sections of a run and what else a file's values say (`values_of`). Raises `InvalidInput`.

    The model is that of the overrides, else of the file, or of the catalog by its name or hub id. A file without a
    length of sequences has that which a model alone is planned with.
    """
    given, where = by_field(overrides), _source(named)
    trainer_run = from_launch(launch, devices=given_count(given.get("cluster.count")), where=where)
    own = {name: section for name, section in trainer_run.table.items() if name != "model"}
    notes: tuple[str, ...] = ()
    model = trainer_run.table.get("model", {})
    if asked := next((given[field] for field in ("model.config", "model.preset") if field in given), None):
        model = {}
    elif not model.keys() & {"d_model", "preset"}:
        preset, notes = _preset(trainer_run, where)
        model = {"preset": preset} | model
    _, fields = model_section(asked or model["preset"]) if asked or "preset" in model else ({}, model)
    length, attention, feed_forward = (fields.get(name) for name in ("max_seq_len", "attention", "feed_forward"))
    if not (isinstance(feed_forward, Mapping) and feed_forward.get("kind") == "experts"):
        own["layout"] = {name: value for name, value in own["layout"].items() if name != "expert_tensor"}
    open_fields: dict[str, Any] = {"seq_len": min(length, TRAINED_LENGTH)} if isinstance(length, int) else {}
    if isinstance(attention, Mapping) and attention.keys() & {"softcap", "sinks"}:
        open_fields["attention"] = "math"  # as PyTorch's own fused attention does not compute them
    said, positions = own["recipe"].get("seq_len"), fields.get("positions", {})
    rotary = isinstance(positions, Mapping) and positions.get("kind", "rope") == "rope" and not asked
    if rotary and isinstance(said, int) and isinstance(length, int) and said > length:
        model = model | {"max_seq_len": said}  # rotary positions have no table, and no number changes
        notes += (f"sequences of {said:,} tokens are longer than the {length:,} that the model was trained on",)
    assumed = tuple(f"recipe.{name}" for name in open_fields if name not in own["recipe"])
    if not given.keys() & {"cluster.device", "cluster.backend"}:  # which trains on no CPU
        own["cluster"] = {"backend": "cuda"} | own["cluster"]
        assumed += ("cluster.backend",)
    own["recipe"] = open_fields | own["recipe"]
    trainer_run = replace(trainer_run, assumed=(*assumed, *trainer_run.assumed))
    return {"model": model, **own}, replace(trainer_run, remarks=(*notes, *trainer_run.remarks))


def run_of_trainer(named: str, overrides: Overrides) -> Run | None:
    """The run of a file after overrides, its notes what was assumed and not understood; None for any other file."""
    launch = values_of(named)
    return None if launch is None else run_of_launch(named, overrides, launch)


def run_of_launch(named: str, overrides: Overrides, launch: Launched) -> Run:
    """As `run_of_trainer`, of values that were read before, or of others in place of the file's."""
    return run_of_read(named, overrides, *read_trainer(named, overrides, launch))


def run_of_read(named: str, overrides: Overrides, table: Mapping[str, Any], trainer_run: TrainerRun) -> Run:
    """The run of what `read_trainer` read."""
    try:
        run = parsed(table, overrides, _source(named))
    except InvalidInput as error:
        own = {field: key for field, key in trainer_run.said_by.items() if field not in by_field(overrides)}
        problems = [
            replace(problem, field=f"{own[problem.field]} ({problem.field})") if problem.field in own else problem
            for problem in error.problems
        ]
        raise InvalidInput(problems, error.where) from None
    written = runfile.written(table, overrides)
    assumed = tuple(each for each in trainer_run.assumed if each not in by_field(overrides))
    origin = Origin(
        source=_source(named),
        explicit=written.difference(assumed),
        assumed=assumed,
        notes=trainer_run.remarks,
        trainer=(named, as_texts(overrides)),
    )
    return replace(run, origin=origin)


def _source(named: str) -> str:
    return named if os.path.isfile(named) else "the launch line"


def _preset(trainer_run: TrainerRun, where: str) -> tuple[str, tuple[str, ...]]:
    """The catalog's name of a file's model, and a sentence where it is that of another with its sizes."""
    model = trainer_run.model
    if not model:
        rule = f"is not named in a file of {trainer_run.program}: give a name of the catalog, or model.config="
        raise InvalidInput([Problem("the model", None, rule, "--set model.preset=llama-3-8b")], where)
    key = trainer_run.said_by.get("run.model", "the model")
    base_format = trainer_run.table.get("recipe", {}).get("lora", {}).get("base_format")
    # Without the file's word for it the weights would be counted in 16 bits.
    before = _TRAINED_FURTHER.sub("", _IN_4_BITS.sub("", model) if base_format == "nf4" else model)
    for name in (model, before):
        try:
            known = catalog.known_as(name, catalog.model_names(), "model.preset")
        except InvalidInput:
            continue
        return known, () if name == model else (f"assuming the sizes of {known} for {model}",)
    rule = "is not in the catalog: give its config.json"
    raise InvalidInput([Problem(key, model, rule, "--set model.config=PATH/config.json")], where)
