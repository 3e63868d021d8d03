"""Hugging Face's config.json to and from a `ModelSpec`; the families that express a model read back what they wrote.

A key that changes what a model costs is either understood or refused by name; an explicit list has the keys that change
nothing. Keys, other names and defaults are those of transformers 5; the forms of version 4 are read too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from trainledger.spec.convert import foreign_problem
from trainledger.spec.convert.huggingface.families import FAMILIES as FAMILIES
from trainledger.spec.convert.huggingface.family import Family
from trainledger.spec.convert.huggingface.reading import Reading, layer_types, read_windows
from trainledger.spec.convert.huggingface.rope import read_rope, rope_of_each_kind, rope_parameters
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import field_at, fields_of, from_fields, with_fields
from trainledger.spec.problem import InvalidInput, Problem, nearest_text, shown
from trainledger.spec.rules.model import model_problems
from trainledger.spec.units import MEGA, format_nbytes

# Models of several senses, of which the language model is read: their model type -> that of their text_config.
_TEXT_OF = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "kimi_k2",
    "llama4": "llama4_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_MOST_PROBLEMS = 20
LARGEST_NBYTES = 10 * MEGA  # of a JSON file; real ones have a few kB


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 10 MB; `InvalidInput` says what is wrong with any other."""
    name = path.name
    if not path.is_file():
        raise InvalidInput([Problem(name, None, f"is not a file of {path.parent.absolute()}")])
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


def model_from_hf(config: str | os.PathLike[str] | dict[str, Any]) -> ModelSpec:
    """The spec of a Hugging Face config.json (its path or its contents); raises `InvalidInput`."""
    if isinstance(config, dict):
        return from_config(config)
    return from_config(read_json(Path(config)), os.fspath(config))


def from_config(config: Mapping[str, Any], where: str = "config.json", *, for_weights: bool = False) -> ModelSpec:
    """The spec of a config.json; `InvalidInput` names every key that is refused.

    ``for_weights`` also refuses what changes the values computed and has no place in a spec, though not the cost;
    and the spec is the served model, as the models of transformers are.
    """
    reading, spec = read(config, where)
    if for_weights and reading.weight_problems:
        refuse_all(reading.weight_problems, where)
    return spec.served if for_weights else spec


def left_out(config: Mapping[str, Any], *, for_weights: bool = False) -> list[str]:
    """Sentences on what a config says that its spec does not hold; `InvalidInput` as `from_config`."""
    reading, spec = read(config)
    unserved = [f"{spec.unserved}, as transformers leaves them out"] if for_weights and spec.unserved else []
    return [*reading.notes, *unserved, *(f"left out: {problem}" for problem in reading.weight_problems)]


def family_named(model_type: object, where: str = "config.json") -> Family:
    """The family of a model type; `InvalidInput` names those that it may have meant."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    near = nearest_text(model_type, FAMILIES) if isinstance(model_type, str) else None
    rule = f"must be one of the model types that are known here: {', '.join(FAMILIES)}"
    rule += ". `trainledger trace --hf FILE` traces a class of transformers, `trace module:build` any other model"
    raise InvalidInput([Problem("model_type", model_type, rule, near)], where)


def no_model_type(config: Mapping[str, Any]) -> Problem | None:
    """What a JSON file of another kind than a config.json of transformers is, and what works instead of it.

    >>> print(no_model_type({"_class_name": "EulerDiscreteScheduler"}))
    _class_name = 'EulerDiscreteScheduler': is a scheduler of diffusers, which has no weights and is not trained
    """
    field = next((name for name in _OTHERS if isinstance(config.get(name), str)), None)
    if field is None or "model_type" in config:
        return None
    named = str(config[field])[:100]
    if field == "_class_name" and named.endswith("Scheduler"):
        return Problem(field, named, "is a scheduler of diffusers, which has no weights and is not trained")
    if field == "_class_name" and "Pipeline" in named:
        parts = [f"{name}/config.json" for name in ("transformer", "unet", "prior") if name in config]
        return Problem(
            field,
            named,
            f"is a pipeline of diffusers: trace the part that is trained ({' or '.join(parts) or 'one of its models'})",
        )
    base = config.get("base_model_name_or_path")
    rank = config.get("r") if type(config.get("r")) is int else 16
    near = {"peft_type": f"trainledger plan {base or 'MODEL'} --set recipe.lora.rank={rank}", "tokenizer_class": None}
    traced = "trainledger trace file:build --device h100-sxm"
    return Problem(field, named, _OTHERS[field].format(named), near.get(field, traced))


_TRACED = "; no closed form is known of it: trace its step, from a file.py with build() that returns "
_OTHERS = {  # keys that are in files of no model of transformers, and what the file is
    "_class_name": "is a model of diffusers"
    + _TRACED
    + "{0}.from_config({0}.load_config(FOLDER)), and --input of its forward",
    "architecture": "is a model of timm" + _TRACED + "timm.create_model({0!r}), and --input fp32[32,3,224,224]",
    "peft_type": "is an adapter of PEFT, not a model: name the model that it is for",
    "tokenizer_class": "is the setting of a tokenizer: the config.json beside it has the model",
}


def refuse_all(problems: list[Problem], where: str) -> NoReturn:
    """Raise the first twenty problems."""
    rest = len(problems) - _MOST_PROBLEMS
    if rest > 0:
        problems = [*problems[:_MOST_PROBLEMS], Problem("and more", None, f"{rest} further keys also have problems")]
    raise InvalidInput(problems, where)


def read(config: Mapping[str, Any], where: str = "config.json") -> tuple[Reading, ModelSpec]:
    """The spec of a config.json, and the reading with what the spec does not hold."""
    if (foreign := foreign_problem(config)) is not None:
        raise InvalidInput([replace(foreign, field="model.config")], where)
    if (other := no_model_type(config)) is not None:
        raise InvalidInput([other], where)
    kind = config.get("model_type")
    text_kind = _TEXT_OF.get(kind) if isinstance(kind, str) else None
    if text_kind is not None:
        config = _text_config(config, text_kind, where)
    family = family_named(config.get("model_type"), where)
    reading = Reading(config, family)
    if family.reads_only:
        rule = "its weights are not read or written here: their names are not known"
        reading.refuse_weights("model_type", family.model_type, rule)
    if text_kind is not None:
        reading.notes.append(f"text_config alone is read: other inputs of a {kind} than text are left out")
        reading.refuse_weights("model_type", kind, f"only its language model ({text_kind}) has weights here")
    reading.read_tables()
    read_windows(reading)
    if family.read is not None:
        family.read(reading)
    if reading.fields.get("feed_forward.d_ff") is None and reading.has("d_model"):
        reading.fields["feed_forward.d_ff"] = 4 * reading.fields["d_model"]
    if family.theta is not None and reading.fields.get("positions") == "rope":
        read_rope(reading)
    if reading.problems:
        refuse_all(reading.problems, where)
    spec = canonical(from_fields(ModelSpec, {"name": _name(config), **reading.fields}))
    if problems := [replace(problem, field=_key(problem.field, family)) for problem in model_problems(spec)]:
        refuse_all(problems, where)
    return reading, spec


def canonical(spec: ModelSpec) -> ModelSpec:
    """The same spec with what follows from other fields left absent."""
    heads, rope, experts = spec.attention, spec.rope, spec.experts
    follows = {
        "attention.n_kv_heads": heads.n_kv_heads == heads.n_heads,
        "attention.head_dim": heads.in_global is None
        and heads.head_dim is not None
        and heads.head_dim * heads.n_heads == spec.d_model,
        "attention.output_bias": heads.output_bias == heads.bias,
        "attention.scale": heads.scale is not None and abs(heads.scale * spec.head_size**0.5 - 1) < 1e-12,
        "positions.dim": rope is not None and rope.dim == spec.head_size,
        "feed_forward.expert_d_ff": experts is not None and experts.expert_d_ff == experts.d_ff,
    }
    return with_fields(spec, {path: None for path, absent in follows.items() if absent})


def _text_config(config: Mapping[str, Any], text_kind: str, where: str) -> Mapping[str, Any]:
    """The config of the language model of a model of several senses."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        rule = f"must be the JSON object of a {config['model_type']}'s language model"
        raise InvalidInput([Problem("text_config", text, rule)], where)
    shared = {key: config[key] for key in ("_name_or_path", "tie_word_embeddings") if config.get(key) is not None}
    return {"model_type": text_kind} | shared | text


def _name(config: Mapping[str, Any]) -> str:
    origin = config.get("_name_or_path")
    name = origin.rstrip("/").rsplit("/", 1)[-1] if isinstance(origin, str) else ""
    return name if name.isprintable() and 0 < len(name) <= 100 else str(config["model_type"])


def _key(name: str, family: Family) -> str:
    """The config's name of a field ``model.d_model``."""
    bare = name.removeprefix("model.")
    return family.keys.get(bare, bare)


# Fields that follow from others, or that a flag of the config sets as well.
_NOT_ALONE = ("positions", "block", "norm_place", "attention.output_bias")


def to_config(spec: ModelSpec, dtype: str = "float32", model_type: str | None = None) -> dict[str, Any]:
    """The config.json of a spec, as transformers 5 writes it; `InvalidInput` where no model type can express it.

    ``model_type`` chooses among several that can; the first of the list of families is taken otherwise. Padded
    rows of the vocabulary are tokens like the others there.
    """
    family = family_of(spec, model_type)
    config = {"architectures": [family.architectures[0]], "model_type": family.model_type, "dtype": dtype}
    # Absent ones default to ids of other vocabularies, at which generation would stop.
    return config | _written(_plain(spec), family) | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def family_of(spec: ModelSpec, model_type: str | None = None) -> Family:
    """The family that expresses a spec, or `InvalidInput` with what keeps the nearest one from it."""
    if model_type is not None and model_type not in FAMILIES:
        raise InvalidInput([Problem("model type", model_type, f"must be one of {', '.join(FAMILIES)}")])
    spec = _plain(spec)
    found: dict[str, list[Problem]] = {}
    written = [name for name, family in FAMILIES.items() if not family.reads_only]
    for name in written if model_type is None else (model_type,):
        found[name] = list(_obstacles(spec, FAMILIES[name]))
        if not found[name]:
            return FAMILIES[name]
    nearest = min(found, key=lambda each: len(found[each]))
    where = f"no model type of transformers is known here to be such a model; nearest is {nearest}"
    return refuse_all(found[nearest], where if model_type is None else f"{model_type} is no such model")


def _plain(spec: ModelSpec) -> ModelSpec:
    return canonical(replace(spec, vocab_size=spec.padded_vocab, vocab_multiple=1))


def _written(spec: ModelSpec, family: Family) -> dict[str, Any]:
    config = {key: field_at(spec, path) for path, key in family.keys.items()}
    derived: dict[str, Any] = {
        "attention.n_kv_heads": spec.kv_heads,
        "attention.head_dim": spec.head_size,
        "feed_forward.expert_d_ff": spec.experts.width if spec.experts is not None else spec.feed_forward.d_ff,
        "feed_forward.activation": family.written.get(spec.feed_forward.activation),
        "attention.output_bias": spec.output_bias,
        "positions.dim": spec.rotary_size,
    }
    config |= {family.keys[path]: value for path, value in derived.items() if path in family.keys}
    if family.theta is not None:
        config["attention_dropout"] = 0.0
        if family.local_theta is not None:
            config["rope_parameters"] = rope_of_each_kind(spec)
        else:
            config["rope_parameters"] = rope_parameters(spec, share=family.rotated is not None)
    if family.windows != "none":
        config["sliding_window"] = spec.attention.window
        if family.windows != "all":
            config["layer_types"] = layer_types(spec)
        if family.flagged:
            config["use_sliding_window"] = spec.attention.window is not None
    config |= {key: switch.of(spec) for key, switch in family.switches.items()} | dict(family.constants)
    return config | (family.write(spec) if family.write is not None else {})


def _obstacles(spec: ModelSpec, family: Family) -> Iterator[Problem]:
    """Differences between a spec and itself written as a config of the family and read back."""
    if family.divides and spec.d_model % spec.attention.n_heads:
        rule = f"transformers requires a divisor of d_model = {spec.d_model}, for any head_dim"
        yield Problem("model.attention.n_heads", spec.attention.n_heads, rule)
        return
    try:
        reading, again = read({"model_type": family.model_type} | _written(spec, family))
    except InvalidInput as error:
        yield from _never(spec, family)
        yield from error.problems
        return
    yield from reading.weight_problems
    ours, theirs = fields_of(spec), fields_of(again)
    others: tuple[str, ...] = ("name.",)
    for path in dict.fromkeys([*ours, *theirs]):
        wanted, got = ours.get(path), theirs.get(path)
        if wanted == got or f"{path}.".startswith(others):
            continue
        others += (f"{path}.",)  # of another kind all fields are others
        every = f"every {family.model_type} has" if path in family.always else f"here a {family.model_type} has"
        yield Problem(f"model.{path}", wanted, f"{every} {'none' if got is None else shown(got)}", got)


def _never(spec: ModelSpec, family: Family) -> Iterator[Problem]:
    for path, value in family.always.items():
        if field_at(spec, path) != value and path not in _NOT_ALONE:
            rule = f"every {family.model_type} has {shown(value)}"
            yield Problem(f"model.{path}", field_at(spec, path), rule, value)
