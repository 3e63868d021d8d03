"""The run that a query is about: a model of the catalog, a pasted config.json, or a pasted run file; never a path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainledger import catalog
from trainledger.answers.load import Source, resolve
from trainledger.spec.convert.huggingface import model_from_hf
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import field_at
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.spec.run_text import as_override
from trainledger.spec.runfile import parse_toml, to_toml
from trainledger.spec.units import NotAQuantity, parse_count
from trainledger.web.field import CONFIG, FILE, RUN, Query, size_of

_PATHS = ("model.config", "data.path", "data.cache")


def source_of(query: Query) -> Source:
    """What `trainledger.load` takes for this query; raises `InvalidInput`."""
    refuse_paths(query.overrides)
    if text := query[FILE]:
        table = parse_toml(text, "run file")
        model = table.get("model")
        refuse_paths({f"model.{each}": "" for each in model} if isinstance(model, Mapping) else {})
        return table
    if text := query[CONFIG]:
        return model_from_hf(_config(text))
    return catalog.known_as(query[RUN], catalog.model_names(), RUN)


def of_pasted(query: Query) -> dict[str, str]:
    """The fields that name a model and do not count, as a file is pasted: each with that reason."""
    found = {}
    if query[FILE]:
        found = {RUN: "the pasted run file has the model", CONFIG: "the pasted run file has the model"}
    elif query[CONFIG]:
        found = {RUN: "the pasted config.json is the model"}
    return found


def spread_of(run: Run) -> str:
    """The layout and the batch of a run that is spread over its devices without a search."""
    layout, recipe = run.layout, run.recipe
    axes = {
        "sharded over": layout.shard,
        "replicated": layout.replicate,
        "tensor ranks": layout.tensor,
        "pipeline stages": layout.pipeline,
        "context ranks": layout.context,
    }
    parts = [f"{name} {size:,}" for name, size in axes.items() if size > 1] or ["alone on one device"]
    batch = f"{recipe.global_batch:,} sequences of {recipe.seq_len:,} tokens in a step"
    return f"No layout is searched for: {', '.join(parts)}; {batch}, {recipe.precision.kind}."


def _config(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        said = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {error}"
        raise InvalidInput([Problem(CONFIG, None, said)]) from None
    if not isinstance(found, dict):
        raise InvalidInput([Problem(CONFIG, None, "must be an object, such as that in a model's config.json")])
    return found


def refuse_paths(overrides: Mapping[str, str]) -> None:
    """A query comes from anywhere: no file is opened for it."""
    rule = "is a path, and no file is read for a query; paste the file"
    if named := [path for path in _PATHS if path in overrides]:
        raise InvalidInput([Problem(each, None, rule) for each in named])


def sequence_of(query: Query) -> dict[str, str]:
    """The length of a sequence where there is no run file, and as many positions where the model has fewer.

    What nobody gives is the default, or all that the model takes where that is less.
    """
    source = source_of(query)
    own = source.max_seq_len if isinstance(source, ModelSpec) else catalog.model(str(source))["max_seq_len"]
    longest, text = size_of(query.overrides.get("model.max_seq_len"), own), query["recipe.seq_len"]
    if "recipe.seq_len" not in query.given:
        return {"recipe.seq_len": str(min(size_of(text), longest))}
    if size_of(text) > longest and "model.max_seq_len" not in query.given:
        return {"model.max_seq_len": text}
    return {}


def more_positions(asked: Query, query: Query) -> tuple[str, ...]:
    """The note that a model has more positions than it was made for; empty where it has not."""
    name = "model.max_seq_len"
    if name not in asked.given or name in query.given:
        return ()
    return (f"The model was made for fewer tokens; here it has {size_of(asked.given[name]):,} positions.",)


def settings_of(query: Query) -> tuple[str, ...]:
    """The overrides of a query as ``--set`` takes them, which reads flags and lists from text."""
    return tuple(f"{name}={text}" for name, text in query.overrides.items())


def without_search(query: Query) -> Run:
    """The run of a query, whose layout is given; raises `InvalidInput` where it would have to be searched for."""
    run = resolve(source_of(query), settings_of(query), search=False)
    refuse_search(run)
    return run


def refuse_search(run: Run) -> None:
    """Raises `InvalidInput` for a run whose layout would have to be searched for."""
    if run.layout.auto:
        rule = "is searched for, which takes seconds: give its axes here, or ask the calculator of layouts"
        raise InvalidInput([Problem("layout.auto", "true", rule)])


def words_of(verb: str, query: Query, *more: str) -> tuple[str, ...]:
    """The command line that asks the same of a run; a pasted file is named as the file that it would be."""
    named = "run.toml" if query[FILE] else "config.json" if query[CONFIG] else query[RUN]
    settings = [word for setting in settings_of(query) for word in ("--set", setting)]
    return (*verb.split(), named, *more, *settings)


def python_of(function: str, query: Query, **options: str) -> str:
    """The lines of Python that ask the same of a run."""
    named = '"run.toml"' if query[FILE] else '"config.json"' if query[CONFIG] else repr(query[RUN])
    more = "".join(f", {name}={text!r}" for name, text in options.items())
    return f"import trainledger as tl\n\nprint(tl.{function}({named}, {list(settings_of(query))}{more}))"


def run_file_of(run: Run) -> str:
    """The whole run as TOML, every field written out."""
    return to_toml(run)


def texts_of(run: Run, query: Query) -> dict[str, str]:
    """What the run has in the fields of the query that are a run's, as texts; those that are absent are empty.

    A quantity that the query writes in another way (300B) stays as it is written.
    """
    found = {name: _text_of(run, name) for name in query.fields if "." in name}
    return {name: query[name] if _count(query[name]) == _count(text) != 0 else text for name, text in found.items()}


def _count(text: str) -> int:
    """The count that a text is; 0 where it is none."""
    try:
        return parse_count(text)
    except NotAQuantity:
        return 0


def _text_of(run: Run, name: str) -> str:
    section, _, path = name.partition(".")
    value = field_at(getattr(run, section), path)
    return "" if value is None else as_override("", value).removeprefix("=")
