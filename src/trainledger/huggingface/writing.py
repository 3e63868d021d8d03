"""A `ModelSpec` as config.json: the families that can express it are those that read back what was written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from trainledger.huggingface.family import Family
from trainledger.huggingface.layers import layer_types
from trainledger.huggingface.read_config import FAMILIES, read, refuse_all
from trainledger.huggingface.reading import canonical
from trainledger.huggingface.rope import rope_of_each_kind, rope_parameters
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem, shown

_OF_EXPERTS = (
    "experts_per_token", "expert_d_ff", "n_shared_experts", "shared_expert_gate", "n_dense_layers", "expert_every",
)  # fmt: skip
_OF_SCALING = ("rope_scaling", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_seq_len",
               "rope_attention_factor", "rope_truncate")  # fmt: skip


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
    config: dict[str, Any] = {key: getattr(spec, name) for name, key in family.keys.items()}
    derived: dict[str, Any] = {
        "n_kv_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "expert_d_ff": spec.expert_width,
    }
    derived["activation"] = family.written.get(spec.activation)
    config |= {family.keys[name]: value for name, value in derived.items() if name in family.keys}
    if family.theta is not None:
        config["attention_dropout"] = 0.0
        if family.local_theta is not None:
            config["rope_parameters"] = rope_of_each_kind(spec)
        else:
            config["rope_parameters"] = rope_parameters(spec, share=family.turned is not None)
    if family.windows != "none":
        config["sliding_window"] = spec.window
        if family.windows != "all":
            config["layer_types"] = layer_types(spec)
        if family.flagged:
            config["use_sliding_window"] = spec.window is not None
    return config | (family.write(spec) if family.write is not None else {})


def _obstacles(spec: ModelSpec, family: Family) -> Iterator[Problem]:
    """What differs where a spec is written as a config of the family and read back."""
    if family.divides and spec.d_model % spec.n_heads:
        rule = f"transformers wants a divisor of d_model = {spec.d_model}, whatever head_dim is"
        yield Problem("model.n_heads", spec.n_heads, rule)
        return
    try:
        reading, again = read({"model_type": family.model_type} | _written(spec, family))
    except InvalidInput as error:
        yield from _never(spec, family)
        yield from error.problems
        return
    yield from reading.unheld
    for each in fields(ModelSpec):
        wanted, got = getattr(spec, each.name), getattr(again, each.name)
        if wanted != got and each.name != "name" and not _unused(spec, each.name):
            every = (
                f"every {family.model_type} has" if each.name in family.always else f"here a {family.model_type} has"
            )
            yield Problem(f"model.{each.name}", wanted, f"{every} {'none' if got is None else shown(got)}", got)


def _never(spec: ModelSpec, family: Family) -> Iterator[Problem]:
    for name, value in family.always.items():
        if getattr(spec, name) != value and name not in ("positions", "block", "norm_place"):
            yield Problem(f"model.{name}", getattr(spec, name), f"every {family.model_type} has {shown(value)}", value)


def _unused(spec: ModelSpec, name: str) -> bool:
    """Whether a field means nothing in this spec, so that its value need not come back."""
    if name.startswith("rope") and spec.positions != "rope":
        return True
    if spec.rope_factor is None and name in _OF_SCALING:
        return True
    return spec.n_experts is None and (name.startswith("router") or name in _OF_EXPERTS)
