"""A config.json on its way to a `ModelSpec`: the fields found so far, and every problem.

A key that changes the cost is understood or refused by name. A key that changes only the values computed, and has no
place in a spec, is a problem for whoever reads the weights as well, and none for an account.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import Field
from typing import Any

from trainledger.spec.convert.huggingface.family import Family
from trainledger.spec.layers import MIXES, kind_of
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import Problem, shown
from trainledger.spec.reading import field_of
from trainledger.spec.setting import Broken, may_be_none, quantity_of, read_value, rule_of

_ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"})
_LARGEST = 10**9
# Keys of other families for what a field says: true or false is no news where the model has it so.
_SAME: dict[str, tuple[str, object]] = {
    "attention_bias": ("attention.bias", True),
    "qkv_bias": ("attention.bias", True),
    "use_qkv_bias": ("attention.bias", True),
    "mlp_bias": ("feed_forward.bias", True),
    "lm_head_bias": ("head_bias", True),
    "use_qk_norm": ("attention.qk_norm", True),
    "qk_layernorm": ("attention.qk_norm", True),
    "qk_norm": ("attention.qk_norm", True),
    "use_parallel_block": ("block", "parallel"),
    "use_parallel_residual": ("block", "parallel-two-norms"),
    "use_rms_norm": ("norm", "rmsnorm"),
}
_MULTIPLIERS = ("_multiplier", "_factor", "_scale", "_scaling", "full_attn_mod")
_AMOUNTS = ("_size", "_layers", "_experts", "_rank", "_coef", "_noise", "_dropout", "_prob", "_loss")
# Flags that add something where they are true; that of another word may be on by default.
_SWITCH = re.compile(
    r"(.*_)?(bias|use|add|enable|with|has|scale|mup|moe|mtp|clip|quantize|gate)(_(?!rope|rms|glu|gated).*)?"
)


def _field(path: str) -> Field[Any]:
    found = field_of({"model": ModelSpec}, f"model.{path}")
    assert found is not None, path
    return found


class Reading:
    """A config being read: fields of the spec by path, problems, problems of the weights alone, and notes."""

    def __init__(self, config: Mapping[str, Any], family: Family) -> None:
        self.config = config
        self.family = family
        self.fields: dict[str, Any] = dict(family.always)
        self.problems: list[Problem] = []
        self.weight_problems: list[Problem] = []
        self.notes: list[str] = []

    def given(self, key: str) -> Any:
        """The value of a key or of its other name; None where neither is given."""
        value = self.config.get(key)
        other = self.family.aliases.get(key)
        return self.config.get(other) if value is None and other is not None else value

    def refuse(self, key: str, value: Any, rule: str, nearest: Any = None) -> None:
        self.problems.append(Problem(key, value, rule, nearest))

    def refuse_weights(self, key: str, value: Any, rule: str) -> None:
        """Note a key that changes what is computed and not what it costs, where the spec has no field for it."""
        self.weight_problems.append(Problem(key, value, rule))

    def checked(self, name: str, key: str, value: Any) -> Any:
        """``value`` if it obeys the rules of the ModelSpec field, else None and a problem."""
        each = _field(name)
        try:
            if isinstance(value, str) or value is None:  # JSON numbers are no text with units
                raise Broken("must be a number" if quantity_of(each) != "flag" else "must be true or false")
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
        """These fields were read without a problem."""
        return all(self.fields.get(name) is not None for name in names)

    def head_size(self) -> int | None:
        """The width of a head as rope sees it; None where a size is missing."""
        own = self.fields.get("attention.rope_head_dim") or self.fields.get("attention.head_dim")
        if own is not None:
            return int(own)
        if self.has("d_model", "attention.n_heads"):
            return int(self.fields["d_model"] // self.fields["attention.n_heads"])
        return None

    def read_tables(self) -> None:
        """Every key by the tables of the family: unknown ones are refused, and the fields that are keys are set."""
        self._check_architectures()
        for name, key in self.family.keys.items():
            self._take_key(name, key)
        for key, switch in self.family.switches.items():
            self.fields |= switch.on if self.flag(key, switch.default) else switch.off
        self._refuse_unknown()

    def _refuse_unknown(self) -> None:
        family = self.family
        read = {*family.keys.values(), *family.switches, *family.reads, *family.rope_aliases.values(), "layer_types"}
        if family.windows != "none":
            read |= {"sliding_window", "use_sliding_window", "max_window_layers"}
        if family.theta is not None:
            read |= _ROPE_KEYS
        read |= {other for key, other in family.aliases.items() if key in {*read, *family.allowed}}
        for key, value in self.config.items():
            if key in read or key in family.ignored:
                continue
            if key in family.allowed:
                self.check_allowed(key, value)
            elif key in family.values:
                if not is_one_of(value, family.values[key]):
                    rule = "changes what the model computes, not what it costs, and has no place in a ModelSpec"
                    if key == "quantization_config":
                        rule = "says how the weights are stored; formats are the recipe's here"
                    self.refuse_weights(key, value, rule)
            elif key in family.dropouts:
                if value:
                    self.notes.append(f"{key} = {shown(value)} is left out: dropout is recipe.dropout here")
            elif key in family.left_out:
                if value:
                    self.notes.append(f"{key} = {shown(value)} is left out: transformers builds no such module")
            elif key in family.code:
                if value:
                    rule = "the code it names is not read, and the model type is built in"
                    self.notes.append(f"{key} is left out: {rule}")
            elif not self._changes_nothing(key, value):
                rule = f"is no key that is known here for {family.model_type}; it may change the model"
                self.refuse(key, value, rule)

    def _changes_nothing(self, key: str, value: Any) -> bool:
        """A key that the family does not read has the value that means off, or what the model has anyway."""
        if key in _SAME:
            path, on = _SAME[key]
            has = self.fields.get(path)
            return value is None or (isinstance(value, bool) and value is (on in (has, bool(has))))
        if type(value) in (int, float) and value in (0, 1):
            return key.endswith(_MULTIPLIERS if value else _AMOUNTS)
        return value is None or (value is False and _SWITCH.fullmatch(key) is not None)

    def check_allowed(self, key: str, value: Any) -> None:
        """Refuse a value of a key that changes the cost, unless it is one of those that do not."""
        allowed = self.family.allowed[key]
        if not is_one_of(value, allowed):
            rule = "changes what the model costs, and that is not accounted for"
            self.refuse(key, value, rule, "leave it out" if allowed[0] is None else allowed[0])

    def _check_architectures(self) -> None:
        """Another head on the same body costs something else."""
        named, family = self.config.get("architectures"), self.family
        if named is None or named == []:
            return
        bodies = (name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") for name in family.architectures)
        known = {*family.architectures, *(f"{body}Model" for body in bodies)}
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            self.refuse("architectures", named, "must be a list of names")
        elif unknown := [name for name in named if name not in known]:
            rule = f"is not accounted for; {family.model_type} here is {family.architectures[0]}"
            self.refuse("architectures", unknown[0], f"{rule}. `trainledger trace` counts any model's step")

    def _take_key(self, name: str, key: str) -> None:
        """Set a field from its key or the key's other name, checked."""
        family, config, value = self.family, self.config, self.given(key)
        other = family.aliases.get(key)
        if other is not None and config.get(other) is not None and config[other] != value:
            self.refuse(other, config[other], f"is {key} by another name, which is {shown(value)}")
        if value is None:
            self.fields[name] = None
            if key in config and may_be_none(_field(name)):  # null is not the same as absent
                return
            if name in family.defaults:
                self.fields[name] = family.defaults[name]
            else:
                self.refuse(key, None, f"is missing ({rule_of(_field(name))['doc']})")
        elif name == "feed_forward.activation":
            if not isinstance(value, str) or value not in family.activations:
                self.refuse(key, value, f"must be one of {', '.join(family.activations)}")
            self.fields[name] = family.activations.get(value) if isinstance(value, str) else None
        else:
            self.fields[name] = self.checked(name, key if config.get(key) is not None else str(other), value)


def is_one_of(value: Any, allowed: tuple[object, ...]) -> bool:
    """A value is among those allowed, true and 1 being two different values."""
    return any(type(value) is type(choice) and value == choice for choice in allowed)


_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def read_windows(reading: Reading) -> None:
    """Set the window and ``global_every``."""
    family, config = reading.family, reading.config
    types = config.get("layer_types")
    if not reading.has("n_layers"):
        return
    if family.letters:
        read_letters(reading, reading.given("layer_types"))
        return
    if types is not None and not _are_known(reading, types):
        return
    on = family.windows != "none" and (not family.flagged or reading.flag("use_sliding_window", False))
    if on:
        reading.take("attention.window", "sliding_window", None if "sliding_window" in config else family.window)
    window = reading.fields.get("attention.window")
    if types is None:
        types = _pattern(reading)
    if window is None:
        if _LOCAL in types and config.get("layer_types") is not None and not reading.problems:
            reading.refuse("layer_types", types, f"has {_LOCAL}, and no sliding_window is on", _GLOBAL)
        return
    every = every_so_many([kind == _GLOBAL for kind in types])
    if every is None:
        reading.refuse("layer_types", types, "only a window in all layers, or in all but every n-th, is accounted for")
    elif every == 1:
        reading.fields["attention.window"] = None
    elif every:
        reading.fields["attention.global_every"] = every


def read_letters(reading: Reading, types: Any) -> None:
    """Set the pattern of layers from a list of their kinds, or from a text of letters."""
    letters, n_layers = reading.family.letters, reading.fields["n_layers"]
    if types is None:
        return
    known = isinstance(types, list | str) and all(isinstance(kind, str) and kind in letters for kind in types)
    if not known or len(types) != n_layers:
        rule = f"must be {n_layers} of {', '.join(letters)}, one for each layer"
        reading.refuse("layer_types", types, rule)
        return
    pattern = "".join(letters[kind] for kind in types)
    size = next(size for size in range(1, n_layers + 1) if (pattern[:size] * n_layers)[:n_layers] == pattern)
    reading.fields["layers"] = pattern[:size]
    if not set(pattern) & MIXES:
        gone = ("mixer",) if "G" in pattern else ("mixer", "layers")
        own = [name for name in reading.fields if name.partition(".")[0] in gone]
        for name in own:
            del reading.fields[name]


def layer_types(spec: ModelSpec) -> list[str]:
    """``layer_types`` of a spec."""
    kinds = (kind_of(spec, layer) for layer in range(spec.n_layers))
    return [_GLOBAL if kind.window is None else _LOCAL for kind in kinds]


def every_so_many(marked: Sequence[bool]) -> int | None:
    """n where exactly every n-th of a sequence is marked, 0 where none is, None where there is no such n.

    >>> every_so_many([False, True, False, True]), every_so_many([False, False]), every_so_many([True, False])
    (2, 0, None)
    """
    if True not in marked:
        return 0
    first = marked.index(True) + 1
    return first if all(mark == (number % first == 0) for number, mark in enumerate(marked, 1)) else None


def _are_known(reading: Reading, types: Any) -> bool:
    n_layers, kind = reading.fields["n_layers"], reading.family.model_type
    known = (_GLOBAL,) if reading.family.windows == "none" else (_GLOBAL, _LOCAL)
    if not isinstance(types, list) or not all(isinstance(kind, str) and kind in known for kind in types):
        reading.refuse("layer_types", types, f"only {' and '.join(known)} are accounted for in {kind}")
        return False
    if len(types) != n_layers:
        reading.refuse("layer_types", types, f"has {len(types)} entries for {n_layers} layers")
        return False
    return True


def _pattern(reading: Reading) -> list[str]:
    """The kind of each layer where the config does not list them."""
    n_layers, windows = reading.fields["n_layers"], reading.family.windows
    if windows in ("after", "alternate"):
        edge = reading.whole("max_window_layers", 28)
        local = (layer >= edge if windows == "after" else layer % 2 == 0 and layer < edge for layer in range(n_layers))
        return [_LOCAL if number else _GLOBAL for number in local]
    if isinstance(windows, int):
        every = reading.whole("sliding_window_pattern", windows, 1)
        return [_GLOBAL if layer % every == 0 else _LOCAL for layer in range(1, n_layers + 1)]
    return [_GLOBAL if windows == "none" else _LOCAL] * n_layers
