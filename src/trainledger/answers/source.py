"""What names a run: a run file, a model of the catalog, a Hugging Face config.json, or sections in a dict."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

from trainledger import catalog
from trainledger.answers.machine import THIS_MACHINE
from trainledger.spec import runfile
from trainledger.spec.code import as_target, defined_in
from trainledger.spec.device import Device
from trainledger.spec.durable import content_of, parse_json
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import explicit, fields_of
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import Overrides as AnyOverrides
from trainledger.spec.run import Run
from trainledger.spec.run_text import as_override

Overrides = Mapping[str, Any] | Sequence[str]


def is_run_file(named: str) -> bool:
    """Whether a run file is named, even one that does not exist; a name alone may be a model's."""
    if named.endswith(".json"):
        return False
    if named.endswith(".toml") or os.path.isfile(named):
        return True
    if os.path.isdir(named):
        return named.lower() not in catalog.model_names()
    return os.sep in named and not catalog.is_hub_id(named)


def is_text(named: str) -> bool:
    """Whether text to train on is named: .jsonl, .parquet, a directory, a glob; a file of settings is none."""
    stem, _, suffix = os.path.basename(named).rpartition(".")
    there = os.path.isdir(named) or os.path.isfile(named) or any(sign in named for sign in "*?[")
    return there and (not os.path.isfile(named) or (bool(stem) and suffix not in ("toml", "yaml", "yml")))


def is_code(named: str) -> bool:
    """Whether code is named: a file of Python, or ``package.module:name``."""
    path, _, name = named.partition(":")
    return path.endswith(".py") or (name.isidentifier() and not is_run_file(named))


def refuse_code(named: str) -> None:
    """Raise `InvalidInput` where code is named, whose step `trace` accounts for."""
    if not is_code(named):
        return
    path, _, name = named.partition(":")
    rule = "is code, but a run file or a model is expected; trainledger trace accounts for a step of code and times it"
    if not name and path.endswith(".py") and defined_in(path) == []:
        near = f"trainledger annotate --fake {named}"
    else:
        near = f"trainledger trace {as_target(path, name)} --device h100-sxm"
    raise InvalidInput([Problem("RUN", named, rule, near)])


def refuse_launch(named: str) -> None:
    """Raise `InvalidInput` where a launch line is given that no reader of trainers knew."""
    words = named.split()
    if len(words) < 2 or os.path.exists(named) or not any(_OF_LAUNCH.search(word) for word in words):
        return
    model = next((word for word in words if catalog.is_hub_id(word) or word in catalog.model_names()), "llama-3-8b")
    rule = (
        "is a launch line of an unknown program; those of the trainers in docs/planning.md are read, a model of the "
        "catalog takes its recipe from --set, and trainledger trace module:builder accounts for a step of any code"
    )
    raise InvalidInput([Problem("RUN", named, rule, f"{model} --set recipe.seq_len=2048")])


_OF_LAUNCH = re.compile(r"^-|/|\.(py|sh)$")


def model_section(named: str | ModelSpec) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The ``[model]`` section of a model that is given alone, and its fields."""
    if isinstance(named, ModelSpec):
        return explicit(named), fields_of(named)
    if named.endswith(".json"):
        return {"config": named}, config_fields(named)
    return {"preset": named}, catalog.model(named)


def parsed(table: Mapping[str, Any], overrides: AnyOverrides, where: str = "") -> Run:
    """The run of a table of sections, its device by the catalog's name; raises `InvalidInput`."""
    if (method := by_field(listed(overrides)).get(METHOD)) is not None:
        rule = "is of a model that is named alone; a run says its recipe itself, such as --set recipe.lora.rank=16"
        raise InvalidInput([Problem(METHOD, method, rule)])
    try:
        run = _checked(table, overrides, where)
    except InvalidInput as error:
        section = table.get("model")
        named = section.get("preset") if isinstance(section, Mapping) else getattr(section, "name", None)
        preset = by_field(listed(overrides)).get("model.preset", named)
        raise _with_longer_models(error, preset) if preset in catalog.model_names() else error from None
    device = known_device(run.cluster.device)
    return run if device == run.cluster.device else replace(run, cluster=replace(run.cluster, device=device))


def _checked(table: Mapping[str, Any], overrides: AnyOverrides, where: str = "") -> Run:
    return runfile.parse(
        table,
        overrides,
        presets=catalog.model,
        from_config=config_fields,
        devices=known_device,
        networks=catalog.link,
        where=where,
    )


def _with_longer_models(error: InvalidInput, preset: str) -> InvalidInput:
    """The same problems; that of a sequence too long for a catalog model names a model of its family that takes it."""
    from trainledger.forecast.plan.other_layouts import longer_model

    def answered(each: Problem) -> Problem:
        if each.field != "recipe.seq_len" or "model.max_seq_len" not in each.rule or not isinstance(each.value, int):
            return each
        alone = {"model": {"preset": preset}, "recipe": {"seq_len": 128, "global_batch": 1, "steps": 1}}
        name = longer_model(_checked(alone, ()).model, each.value)
        return each if name is None else replace(each, rule=f"{each.rule} ({name} has more positions)")

    return InvalidInput([answered(problem) for problem in error.problems], error.where)


def known_device(name: str) -> str:
    """The catalog's name of a device; raises `InvalidInput`."""
    if name == THIS_MACHINE:
        return name
    return catalog.known_as(name, catalog.device_names(), "cluster.device")


def listed(overrides: AnyOverrides) -> Overrides:
    """Overrides that can be read more than once."""
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):  # the reader says what is wrong with them
        return [overrides]
    return overrides if isinstance(overrides, Mapping) else list(overrides)


def also(overrides: AnyOverrides, more: Mapping[str, Any]) -> Overrides:
    """Overrides with further ones after them, those that are None left out."""
    more, given = {name: each for name, each in more.items() if each is not None}, listed(overrides)
    if isinstance(given, Mapping):
        return {**given, **more}
    return [*given, *(f"{name}={str(each).lower() if isinstance(each, bool) else each}" for name, each in more.items())]


def as_texts(overrides: Overrides) -> tuple[str, ...]:
    """Overrides as ``--set`` takes them, those that are no texts left out."""
    pairs = overrides.items() if isinstance(overrides, Mapping) else ()
    texts = (override for override in overrides if isinstance(override, str)) if not pairs else ()
    return (*(as_override(str(name), value) for name, value in pairs), *texts)


METHOD = "method"


class OfCluster(TypedDict, total=False):
    """The cluster in the words of the command line: short for overrides of its fields. ``method`` is the recipe of a
    model that is named alone (`defaults.METHODS`), ``teacher`` that of distillation."""

    device: str | Device | None
    count: int | str | None
    price: float | str | None
    method: str | None
    teacher: str | None


def with_cluster(overrides: AnyOverrides, **cluster: Unpack[OfCluster]) -> Overrides:
    """Overrides with those of the cluster after them; raises `InvalidInput` for a device that no run can name.

    A device in place of overrides is one, as the second argument of `fits` is.

    >>> with_cluster({"recipe.seq_len": 512}, device=catalog.device("h100-sxm"), count=8)
    {'recipe.seq_len': 512, 'cluster.device': 'h100-sxm', 'cluster.count': 8}
    """
    device = cluster.get("device")
    if device is None and (isinstance(overrides, Device) or (isinstance(overrides, str) and "=" not in overrides)):
        device, overrides = overrides, ()
    if isinstance(device, Device):
        if device.name not in catalog.device_names() or device != catalog.device(device.name):
            rule = "is not as in the catalog, and a run names a device of it; trainledger.on_device takes any Device"
            raise InvalidInput([Problem("device", device.name, rule)])
        device = device.name
    more: dict[str, Any] = {"cluster.device": device, "cluster.count": cluster.get("count")}
    more |= {"cluster.price_per_device_hour": cluster.get("price"), METHOD: cluster.get("method")}
    more |= {"teacher.preset": cluster.get("teacher")}
    return also(overrides, more)


def by_field(overrides: Overrides) -> dict[str, Any]:
    """Overrides by the field that each names: values, or their text."""
    if isinstance(overrides, Mapping):
        return {str(name): value for name, value in overrides.items()}
    pairs = (override.partition("=") for override in overrides if isinstance(override, str))
    return {name.strip(): text.strip() for name, _, text in pairs}


def config_fields(path: str) -> dict[str, Any]:
    """The `ModelSpec` fields of a Hugging Face config.json; raises `InvalidInput`."""
    from pathlib import Path

    from trainledger.spec.convert.huggingface import from_config, read_json

    return explicit(from_config(read_json(Path(path)), path))


def config_notes(path: str) -> tuple[str, ...]:
    """Sentences on what a Hugging Face config.json says that an account does not hold; raises `InvalidInput`."""
    from pathlib import Path

    from trainledger.spec.convert.huggingface import left_out, read_json

    return tuple(left_out(read_json(Path(path))))


def lengths_notes(overrides: Overrides, data: object = None) -> tuple[str, ...]:
    """A sentence on rows of ``data.lengths`` whose file counts bytes, which a plan takes for tokens."""
    said = data.get("lengths") if isinstance(data, Mapping) else None
    named = by_field(overrides).get("data.lengths", said)
    counted = parse_json(content_of(named)) if isinstance(named, str) and os.path.isfile(named) else None
    if not isinstance(counted, Mapping) or counted.get("tokenizer") != "bytes":
        return ()
    rule = "trainledger data TEXT --set data.tokenizer=TOKENIZER.json --lengths FILE counts a model's tokens"
    return (f"data.lengths counts bytes ({named}), each taken for a token: a text has about a quarter as many; {rule}",)
