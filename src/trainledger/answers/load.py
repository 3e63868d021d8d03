"""A run from any name of it, with a record of what was given and what was assumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Unpack
from warnings import warn

from trainledger import catalog
from trainledger.answers import defaults
from trainledger.answers.megatron import has_arguments, run_of_arguments
from trainledger.answers.source import (
    OfCluster,
    by_field,
    config_notes,
    is_code,
    is_run_file,
    lengths_notes,
    listed,
    parsed,
    refuse_code,
    refuse_launch,
    with_cluster,
)
from trainledger.answers.trainers import run_of_trainer
from trainledger.spec import runfile
from trainledger.spec.convert.trainers import values_of
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import explicit
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import Overrides as AnyOverrides
from trainledger.spec.run import DataSpec, Origin, Run

Source = str | os.PathLike[str] | Mapping[str, Any] | ModelSpec | Run
Progress = Callable[[str, int, int], None]
_OF_TEXT = 2048  # tokens of a sequence


def load(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    search: bool = True,
    progress: Progress | None = None,
    **cluster: Unpack[OfCluster],
) -> Run:
    """The run in a TOML file, a dict of sections or another run, after overrides (``{"recipe.micro_batch": 2}``);
    ``device`` and ``count`` are short for those of the cluster.

    A file with Megatron-LM's arguments (a script, a YAML map, a log) or its launch line is a run on as many devices as
    it says, or ``cluster.count`` of the overrides. A model's name of the catalog, a Hugging Face config.json, or a
    `ModelSpec` is a run under a default recipe (`defaults`): a warning says which, and ``origin`` of the run keeps
    what was given and what was assumed. A layout that is to be found (``layout = "auto"``, or a model alone on several
    devices) is searched for, but for ``search=False``; ``progress`` hears of the search as in `questions.layouts`.
    Raises `InvalidInput` with every problem found.

    >>> run = load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 1024, "global_batch": 8, "tokens": "1B"}})
    >>> run.model.n_layers, run.recipe.total_steps
    (12, 122070)
    >>> load(run, {"recipe.seq_len": 512}).recipe.seq_len
    512
    """
    run = resolve(source, with_cluster(overrides, **cluster), search=search, progress=progress)
    if not isinstance(source, Run) and run.origin.assumed:
        lacks = "has no recipe" if "recipe.precision" in run.origin.assumed else "leaves some of the recipe open"
        warn(f"{run.origin.source} {lacks}; assuming {defaults.assumptions(run)}", stacklevel=2)
    return run


def resolve(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    purpose: str = defaults.PLAN,
    search: bool = True,
    progress: Progress | None = None,
) -> Run:
    """As `load`, without its warning; ``purpose`` is the question about a named model (`answers.defaults`)."""
    given = listed(overrides)
    if isinstance(source, ModelSpec):
        run = defaults.run_of_model(source, given, purpose)
        return _found(run, run.origin.explicit, search, progress)
    if isinstance(source, str | os.PathLike):
        named = os.fsdecode(source)
        trained = run_of_trainer(named, given)
        if trained is not None or has_arguments(named):
            run = trained or run_of_arguments(named, given)
            return _found(run, run.origin.explicit, search, progress)
        refuse_code(named)
        refuse_launch(named)
        if is_run_file(named):
            return load_file(named, given, search=search, progress=progress)
        run = defaults.run_of_model(named, given, purpose)
        return _found(run, run.origin.explicit, search, progress)
    if isinstance(source, Run):
        run, written = parsed(runfile.sections_of(source), given), runfile.written({}, given)
        old = source.origin
        assumed = tuple(each for each in old.assumed if each not in written)
        return _found(
            replace(run, origin=replace(old, explicit=old.explicit | written, assumed=assumed)),
            written,
            search,
            progress,
        )
    if isinstance(source, Mapping):
        written = runfile.written(source, given)
        return _found(replace(parsed(source, given), origin=Origin(explicit=written)), written, search, progress)
    rule = "must be a run file, a model of the catalog, a config.json, a ModelSpec, a dict of sections or a Run"
    rule = f"{rule}, not {type(source).__name__}"
    if type(source).__name__ == "Ledger":
        rule += "; trainledger.on_device says what the step of a ledger takes"
    raise InvalidInput([Problem("run", None, rule)])


def names_model(source: Source) -> bool:
    """A model is given alone, whose recipe `resolve` assumes."""
    if isinstance(source, str | os.PathLike):
        named = os.fsdecode(source)
        return values_of(named) is None and not (has_arguments(named) or is_code(named) or is_run_file(named))
    return isinstance(source, ModelSpec)


def load_file(
    path: str | os.PathLike[str], overrides: AnyOverrides = (), *, search: bool = True, progress: Progress | None = None
) -> Run:
    """As `load`, of a run file alone, whatever it is called."""
    if has_arguments(os.fspath(path)):
        rule = "may have arguments of Megatron-LM and is no run file; one is made of it"
        raise InvalidInput(
            [Problem("", None, rule, f"trainledger init run.toml --from {os.fspath(path)}")], os.fspath(path)
        )
    given, table, where = listed(overrides), runfile.read_table(path), os.fspath(path)
    run, written = parsed(table, given, where), runfile.written(table, given)
    config = by_field(given).get("model.config", table.get("model", {}).get("config"))
    notes = (*(config_notes(config) if config else ()), *lengths_notes(given, table.get("data")))
    origin = Origin(source=where, explicit=written, notes=notes)
    return _found(replace(run, origin=origin), written, search, progress)


def run_of_text(path: str, overrides: AnyOverrides, text_field_of: Callable[[DataSpec], str]) -> Run:
    """A run on a text that is named alone, in sequences of 2,048 tokens; its model stands for any vocabulary.

    ``text_field_of`` looks for the field with the text where overrides have none.
    """
    recipe = {"seq_len": _OF_TEXT, "global_batch": 1, "steps": 1}
    model = {"preset": "gpt2", "max_seq_len": "1M"}
    run = resolve({"model": model, "recipe": recipe, "data": {"path": path}}, overrides)
    field = run.data.text_field if "data.text_field" in run.origin.explicit else text_field_of(run.data)
    return replace(run, data=replace(run.data, text_field=field))


def assumed_of_text(run: Run) -> str:
    """What is assumed of a text that is named alone, and how to get another tokenizer."""
    said = f"Assuming data.text_field={run.data.text_field}, recipe.seq_len={run.recipe.seq_len}, data.tokenizer="
    more = "; --set data.tokenizer=bpe trains one, a path of a tokenizer.json takes it"
    return f"{said}{run.data.tokenizer}{more * (run.data.tokenizer == 'bytes')}"


def _found(run: Run, written: frozenset[str], search: bool, progress: Progress | None) -> Run:
    """The run with its layout searched for, where it asks for that."""
    if not (search and run.layout.auto):
        return run
    from trainledger.answers.layout import with_layout

    return with_layout(run, written=written, progress=progress)


def model(name: str, **fields: Any) -> ModelSpec:
    """A model of the catalog, with any fields changed; raises `InvalidInput`.

    >>> model("llama-3-8b", n_layers=2).n_layers
    2
    """
    mtp = {**catalog.model(name), **fields}.get("n_mtp_layers")
    return _model_of({"preset": name, **fields}, mtp)


def checked_model(spec: ModelSpec) -> ModelSpec:
    """A model made by hand as `load` would have it; raises `InvalidInput`."""
    return _model_of(explicit(spec), spec.n_mtp_layers)


def _model_of(section: Mapping[str, Any], mtp: object) -> ModelSpec:
    # Layers of multi-token prediction need a few tokens after each.
    recipe = {"seq_len": 128 if mtp else 1, "global_batch": 1, "steps": 1}
    return parsed({"model": section, "recipe": recipe}, ()).model
