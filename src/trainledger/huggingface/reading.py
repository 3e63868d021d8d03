"""A config.json on its way to a `ModelSpec`: the fields found so far, and everything that stands in the way.

A key that changes the cost is understood or refused by name. A key that changes only the values computed, and that
a spec cannot hold, does not hinder an account; whoever wants the weights as well must refuse it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any

from trainledger.huggingface.family import ALLOWED, CODE, DROPOUTS, IGNORED, VALUES, Family
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import with_fields
from trainledger.spec.problem import Problem, shown
from trainledger.spec.reading import field_of
from trainledger.spec.setting import Broken, may_be_none, read_value, rule_of

_MODEL = {"model": ModelSpec}
_ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"})
_LARGEST = 10**9


def _field(path: str) -> Field[Any]:
    found = field_of(_MODEL, f"model.{path}")
    assert found is not None, path
    return found


class Reading:
    """What is read of one config: ``fields`` of the spec by path, ``problems``, what is ``unheld``, and notes."""

    def __init__(self, config: Mapping[str, Any], family: Family, told: list[str]) -> None:
        self.config = config
        self.family = family
        self.fields: dict[str, Any] = dict(family.always)
        self.problems: list[Problem] = []
        self.unheld: list[Problem] = []
        self.told = told

    def given(self, key: str) -> Any:
        """The value of a key or of its other name; None where neither is given."""
        value = self.config.get(key)
        other = self.family.aliases.get(key)
        return self.config.get(other) if value is None and other is not None else value

    def refuse(self, key: str, value: Any, rule: str, nearest: Any = None) -> None:
        self.problems.append(Problem(key, value, rule, nearest))

    def cannot_hold(self, key: str, value: Any, rule: str) -> None:
        """Note a key that changes what is computed and not what it costs, where the spec has no field for it."""
        self.unheld.append(Problem(key, value, rule))

    def checked(self, name: str, key: str, value: Any) -> Any:
        """``value`` if it obeys what the ModelSpec field says of itself, else None and a problem."""
        each = _field(name)
        try:
            if isinstance(value, str) or value is None:  # JSON numbers are no text with units
                raise Broken("must be a number" if rule_of(each)["quantity"] != "flag" else "must be true or false")
            return read_value(each, value)
        except Broken as broken:
            self.refuse(key, value, f"{broken.rule} ({rule_of(each)['doc']})", broken.nearest)
            return None

    def take(self, name: str, key: str, default: Any = None) -> Any:
        """Set a field from a key, from ``default`` where it is not given; the value, None after a problem."""
        value = self.given(key)
        self.fields[name] = default if value is None else self.checked(name, key, value)
        return self.fields[name]

    def whole(self, key: str, default: int, at_least: int = 0) -> int:
        """A whole number that is no field of the spec; ``default`` after a problem."""
        value = self.given(key)
        if value is None:
            return default
        if type(value) is not int or not at_least <= value <= _LARGEST:
            self.refuse(key, value, f"must be a whole number from {at_least} to {_LARGEST}", default)
            return default
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A flag that is no field of the spec; ``default`` after a problem."""
        value = self.given(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, value, "must be true or false", default)
            return default
        return value

    def has(self, *names: str) -> bool:
        """Whether these fields were read without a problem."""
        return all(self.fields.get(each) is not None for each in names)

    def head_size(self) -> int | None:
        """The width of a head, or None where it cannot be told."""
        if self.fields.get("attention.rope_head_dim") is not None:
            return int(self.fields["attention.rope_head_dim"])
        if self.fields.get("attention.head_dim") is not None:
            return int(self.fields["attention.head_dim"])
        return (
            self.fields["d_model"] // self.fields["attention.n_heads"]
            if self.has("d_model", "attention.n_heads")
            else None
        )


def read_tables(reading: Reading) -> None:
    """Every key by the tables of the family: strangers are found, and the fields that are keys are set."""
    _strangers(reading)
    for name, key in reading.family.keys.items():
        _take(reading, name, key)


def canonical(spec: ModelSpec) -> ModelSpec:
    """The same spec with what follows from other fields left absent."""
    heads, rope, experts = spec.attention, spec.rope, spec.experts
    follows = {
        "attention.n_kv_heads": heads.n_kv_heads == heads.n_heads,
        "attention.head_dim": heads.head_dim is not None and heads.head_dim * heads.n_heads == spec.d_model,
        "attention.output_bias": heads.output_bias == heads.bias,
        "attention.scale": heads.scale is not None and abs(heads.scale * spec.head_size**0.5 - 1) < 1e-12,
        "positions.dim": rope is not None and rope.dim == spec.head_size,
        "feed_forward.expert_d_ff": experts is not None and experts.expert_d_ff == experts.d_ff,
    }
    return with_fields(spec, {path: None for path, absent in follows.items() if absent})


def _strangers(reading: Reading) -> None:
    """A problem for each key that is not understood or has a value that is not accounted for."""
    family = reading.family
    allowed, values = ALLOWED | dict(family.allowed), VALUES | dict(family.values)
    read = {*family.keys.values(), *family.reads, *family.rope_aliases.values(), "layer_types"}
    if family.windows != "none":
        read |= {"sliding_window", "use_sliding_window", "max_window_layers"}
    if family.theta is not None:
        read |= _ROPE_KEYS
    read |= {other for key, other in family.aliases.items() if key in read}
    for key, value in reading.config.items():
        if key in read or key in family.ignored:
            continue
        if key in allowed:
            if not is_one_of(value, allowed[key]):
                rule = "changes what the model costs, and that is not accounted for"
                reading.refuse(key, value, rule, "leave it out" if allowed[key][0] is None else allowed[key][0])
        elif key in values:
            if not is_one_of(value, values[key]):
                rule = "changes what the model computes, not what it costs, and has no place in a ModelSpec"
                if key == "quantization_config":
                    rule = "says how the weights are stored; formats are the recipe's here"
                reading.cannot_hold(key, value, rule)
        elif key in DROPOUTS:
            if value:
                reading.told.append(f"{key} = {shown(value)} is left out: dropout is recipe.dropout here")
        elif key in CODE:
            if value:
                reading.told.append(f"{key} is left out: the code it names is not read, and the model type is built in")
        elif key not in IGNORED:
            rule = f"is no key that is known here for {family.model_type}; it may change the model"
            reading.refuse(key, value, rule)
    _architectures(reading)


def _architectures(reading: Reading) -> None:
    """Another head on the same body costs something else."""
    named = reading.config.get("architectures")
    known = {*reading.family.architectures, *(_body_of(each) for each in reading.family.architectures)}
    if named is None or named == []:
        return
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        reading.refuse("architectures", named, "must be a list of names")
    elif unknown := [each for each in named if each not in known]:
        rule = f"is not accounted for; {reading.family.model_type} here is {reading.family.architectures[0]}"
        reading.refuse("architectures", unknown[0], f"{rule}. `trainledger trace` counts any model's step")


def _body_of(architecture: str) -> str:
    for ending in ("ForCausalLM", "LMHeadModel"):
        architecture = architecture.removesuffix(ending)
    return f"{architecture}Model"


def is_one_of(value: Any, allowed: tuple[object, ...]) -> bool:
    """Whether a value is among those allowed, true and 1 being two different values."""
    return any(type(value) is type(each) and value == each for each in allowed)


def _take(reading: Reading, name: str, key: str) -> None:
    """The value of one field from its key (or the key's other name), checked; None after a problem."""
    family, config = reading.family, reading.config
    other = family.aliases.get(key)
    value = reading.given(key)
    if other is not None and config.get(other) is not None and config[other] != value:
        reading.refuse(other, config[other], f"is {key} by another name, which is {shown(value)}")
    if value is None:
        if key in config and may_be_none(_field(name)):  # null is not the same as absent
            reading.fields[name] = None
        elif name in family.defaults:
            reading.fields[name] = family.defaults[name]
        else:
            reading.refuse(key, None, f"is missing ({rule_of(_field(name))['doc']})")
            reading.fields[name] = None
    elif name == "feed_forward.activation":
        if not isinstance(value, str) or value not in family.activations:
            reading.refuse(key, value, f"must be one of {', '.join(family.activations)}")
        reading.fields[name] = family.activations.get(value) if isinstance(value, str) else None
    else:
        reading.fields[name] = reading.checked(name, key if config.get(key) is not None else str(other), value)
