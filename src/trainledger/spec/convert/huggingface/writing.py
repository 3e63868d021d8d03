"""A `ModelSpec` as config.json: the families that can express it are those that read back what was written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainledger.spec.convert.huggingface.family import Family
from trainledger.spec.convert.huggingface.layers import layer_types
from trainledger.spec.convert.huggingface.read_config import FAMILIES, canonical, read, refuse_all
from trainledger.spec.convert.huggingface.rope import rope_of_each_kind, rope_parameters
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import field_at, fields_of
from trainledger.spec.problem import InvalidInput, Problem, shown

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
    for name in FAMILIES if model_type is None else (model_type,):
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
    """What differs where a spec is written as a config of the family and read back."""
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
