"""Hugging Face's config.json to and from a `ModelSpec`: the model types llama and gpt2.

A key that changes what a model computes is either understood or refused by name; keys that change
nothing stand in an explicit list. Field names and defaults are those of transformers 5.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

from trainledger.spec.huggingface_keys import (
    ACTIVATIONS,
    DROPOUTS,
    FAMILIES,
    GPT2,
    LLAMA,
    LLAMA3_KEYS,
    ROPE_KEYS,
    ROPE_TYPE_KEYS,
    Family,
)  # fmt: skip
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem, shown
from trainledger.spec.setting import Broken, read_value, rule_of
from trainledger.units import MEGA, format_nbytes

LARGEST_NBYTES = 10 * MEGA  # real ones have a few kB
_MOST_PROBLEMS = 20
_FIELDS = {each.name: each for each in fields(ModelSpec)}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 10 MB; `InvalidInput` says what is wrong with any other."""
    name = path.name
    if not path.is_file():
        raise InvalidInput([Problem(name, None, f"is not a file of {path.parent}")])
    nbytes = path.stat().st_size
    if nbytes > LARGEST_NBYTES:
        rule = f"has {format_nbytes(nbytes)}; more than {format_nbytes(LARGEST_NBYTES)} is no {name}"
        raise InvalidInput([Problem(name, None, rule)], str(path.parent))
    try:
        value = json.loads(path.read_bytes())
    except RecursionError:
        raise InvalidInput([Problem(name, None, "is nested too deeply to be read")], str(path.parent)) from None
    except ValueError as error:  # json, encoding, or an integer of thousands of digits
        raise InvalidInput([Problem(name, None, f"is not JSON: {error}")], str(path.parent)) from None
    if not isinstance(value, dict):
        raise InvalidInput([Problem(name, value, "must be a JSON object, { ... }")], str(path.parent))
    return value


def from_config(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """The spec of a config.json; `InvalidInput` names every key that stands in the way."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        rule = "must be one of the model types that are built here: " + ", ".join(FAMILIES)
        raise InvalidInput([Problem("model_type", model_type, rule, LLAMA.model_type)], where)
    found = list(_strangers(config, family))
    values: dict[str, Any] = dict(family.always)
    for name, key in family.keys.items():
        values[name] = _taken(config, family, name, key, found)
    if family is LLAMA:
        values.update(_rope(config, found))
    if found:
        _refuse(found, where)
    if family is GPT2 and values["d_ff"] is None:
        values["d_ff"] = 4 * values["d_model"]
    spec = _canonical(ModelSpec(name=_name(config, family), **values))
    found = [replace(each, field=_key(each.field, family)) for each in spec.problems()]
    if found:
        _refuse(found, where)
    return spec


def to_config(spec: ModelSpec, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of a spec, as transformers 5 writes it; `InvalidInput` where no model type can express it."""
    family = family_of(spec)
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type, "dtype": dtype}
    for name, key in family.keys.items():
        config[key] = getattr(spec, name)
    config[family.keys["activation"]] = family.activations[spec.activation]
    if family is LLAMA:
        config |= {"num_key_value_heads": spec.kv_heads, "head_dim": spec.head_size, "attention_dropout": 0.0}
        config["rope_parameters"] = _rope_parameters(spec)
    else:
        config |= dict.fromkeys(sorted(DROPOUTS - {"attention_dropout"}), 0.0)
    # Absent ones default to ids of the Llama 2 and GPT-2 vocabularies, at which generation would stop.
    return config | {"bos_token_id": None, "eos_token_id": None}


def left_out(config: Mapping[str, Any]) -> list[str]:
    """Sentences on what a config says that its spec does not hold: dropout, which belongs to the recipe here."""
    return [
        f"{key} = {shown(config[key])} is left out: dropout is recipe.dropout here"
        for key in sorted(DROPOUTS)
        if config.get(key)
    ]


def family_of(spec: ModelSpec) -> Family:
    """The family that expresses a spec, or `InvalidInput` with what keeps the nearest one from it."""
    obstacles = {family.model_type: list(_obstacles(spec, family)) for family in FAMILIES.values()}
    nearest = min(
        obstacles, key=lambda each: (len(obstacles[each]), FAMILIES[each].always["positions"] != spec.positions)
    )
    if obstacles[nearest]:
        _refuse(obstacles[nearest], f"neither llama nor gpt2 of transformers is such a model; nearest is {nearest}")
    return FAMILIES[nearest]


def _obstacles(spec: ModelSpec, family: Family) -> Iterator[Problem]:
    for name, value in family.always.items():
        if getattr(spec, name) != value:
            yield Problem(f"model.{name}", getattr(spec, name), f"every {family.model_type} has {shown(value)}", value)
    if spec.d_model % spec.n_heads:
        rule = f"transformers wants a divisor of d_model = {spec.d_model}, whatever head_dim is"
        yield Problem("model.n_heads", spec.n_heads, rule)
    elif family is GPT2 and spec.head_size != spec.d_model // spec.n_heads:
        yield Problem("model.head_dim", spec.head_dim, "gpt2 has d_model / n_heads", spec.d_model // spec.n_heads)
    if family is GPT2 and spec.kv_heads != spec.n_heads:
        yield Problem("model.n_kv_heads", spec.kv_heads, "gpt2 has as many as query heads", spec.n_heads)


def _strangers(config: Mapping[str, Any], family: Family) -> Iterator[Problem]:
    """A problem for each key that is not understood or has a value that is not built here."""
    read = {*family.keys.values(), *family.aliases.values(), *(ROPE_KEYS if family is LLAMA else ())}
    for key, value in config.items():
        if key in family.allowed:
            allowed = family.allowed[key]
            if not any(type(value) is type(each) and value == each for each in allowed):
                rule = "changes what the model computes, and that is not built here"
                yield Problem(key, value, rule, allowed[0] if allowed[0] is not None else "leave it out")
        elif key not in read and key not in family.ignored:
            yield Problem(key, value, f"is no key that is known here for {family.model_type}; it may change the model")


def _taken(config: Mapping[str, Any], family: Family, name: str, key: str, found: list[Problem]) -> Any:
    """The value of one field from its key (or the key's other name), checked; None after a problem."""
    given = [each for each in (key, family.aliases.get(key)) if each is not None and config.get(each) is not None]
    if not given:
        if name in family.defaults:
            return family.defaults[name]
        found.append(Problem(key, None, f"is missing ({_doc(name)})"))
        return None
    value = config[given[0]]
    if len(given) == 2 and config[given[1]] != value:
        found.append(Problem(given[1], config[given[1]], f"is {given[0]} by another name, which is {shown(value)}"))
    if name == "activation":
        if not isinstance(value, str) or value not in ACTIVATIONS:
            found.append(Problem(key, value, f"must be one of {', '.join(ACTIVATIONS)}"))
            return None
        return ACTIVATIONS[value]
    return _checked(name, given[0], value, found)


def _checked(name: str, key: str, value: Any, found: list[Problem]) -> Any:
    """``value`` if it obeys what the ModelSpec field says of itself, else None and a problem."""
    each = _FIELDS[name]
    try:
        if isinstance(value, str) or value is None:  # JSON numbers are no text with units
            raise Broken("must be a number" if rule_of(each)["quantity"] != "flag" else "must be true or false")
        return read_value(each, value)
    except Broken as broken:
        found.append(Problem(key, value, f"{broken.rule} ({rule_of(each)['doc']})", broken.nearest))
        return None


def _rope(config: Mapping[str, Any], found: list[Problem]) -> dict[str, Any]:
    """The rotary fields, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    layer_types = config.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list) or any(each != "full_attention" for each in layer_types)
    ):
        found.append(Problem("layer_types", layer_types, "only full_attention is built here"))
    forms = [key for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    if len(forms) == 2 and config[forms[0]] != config[forms[1]]:
        found.append(Problem(forms[1], config[forms[1]], f"contradicts {forms[0]}; only one of them may be given"))
    if forms and not isinstance(config[forms[0]], dict):
        found.append(Problem(forms[0], config[forms[0]], "must be a JSON object, { ... }"))
        return {}
    at = forms[0] if forms else "rope_parameters"
    rope = {key: value for key, value in (config[at] if forms else {}).items() if value is not None}
    values: dict[str, Any] = {}

    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is not None:
        values["rope_theta"] = _checked("rope_theta", "rope_theta", theta, found)
    if config.get("rope_theta") not in (None, theta):
        found.append(Problem("rope_theta", config["rope_theta"], f"contradicts {at}.rope_theta = {shown(theta)}"))
    for holder, name in ((config, "partial_rotary_factor"), (rope, f"{at}.partial_rotary_factor")):
        share = holder.get("partial_rotary_factor")
        if share not in (None, 1) or isinstance(share, bool):
            found.append(Problem(name, share, "only whole heads are turned here", 1.0))

    kind = rope.get("rope_type", rope.get("type", "default"))
    known: tuple[str, ...] = ROPE_TYPE_KEYS
    if kind == "llama3":
        known += tuple(LLAMA3_KEYS.values())
        rope.setdefault(LLAMA3_KEYS["rope_original_seq_len"], config.get("max_position_embeddings"))
        for name, key in LLAMA3_KEYS.items():
            values[name] = _checked(name, f"{at}.{key}", rope.get(key), found)
    elif kind != "default":
        found.append(Problem(f"{at}.rope_type", kind, "only default and llama3 are built here", "default"))
        return values
    for key in rope:
        if key not in known:
            found.append(Problem(f"{at}.{key}", rope[key], f"is no key of the rope type {kind}"))
    return values


def _rope_parameters(spec: ModelSpec) -> dict[str, Any]:
    if spec.rope_factor is None:
        return {"rope_type": "default", "rope_theta": spec.rope_theta}
    scaling = {key: getattr(spec, name) for name, key in LLAMA3_KEYS.items()}
    return {"rope_type": "llama3", "rope_theta": spec.rope_theta, **scaling}


def _canonical(spec: ModelSpec) -> ModelSpec:
    """The same spec with what follows from other fields left absent."""
    if spec.n_kv_heads == spec.n_heads:
        spec = replace(spec, n_kv_heads=None)
    if spec.head_dim is not None and spec.head_dim * spec.n_heads == spec.d_model:
        spec = replace(spec, head_dim=None)
    return spec


def _name(config: Mapping[str, Any], family: Family) -> str:
    origin = config.get("_name_or_path")
    name = origin.rstrip("/").rsplit("/", 1)[-1] if isinstance(origin, str) else ""
    return name if name.isprintable() and 0 < len(name) <= 100 else family.model_type


def _key(name: str, family: Family) -> str:
    """The config's name of a field ``model.d_model``."""
    bare = name.removeprefix("model.")
    return family.keys.get(bare, bare)


def _doc(name: str) -> str:
    return str(rule_of(_FIELDS[name])["doc"])


def _refuse(found: list[Problem], where: str) -> NoReturn:
    rest = len(found) - _MOST_PROBLEMS
    if rest > 0:
        found = [*found[:_MOST_PROBLEMS], Problem("and more", None, f"{rest} further keys have problems of their own")]
    raise InvalidInput(found, where)
