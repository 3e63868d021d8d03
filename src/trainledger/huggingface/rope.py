"""Rotary positions in a config.json: rope_parameters (transformers 5), or rope_theta and rope_scaling (before).

The scalings are those of transformers' modeling_rope_utils: linear; llama3 (Llama 3.1); yarn (Peng et al. 2023,
YaRN, sections 3.2 to 3.4); longrope (Ding et al. 2024, LongRoPE); dynamic, which acts beyond the longest sequence.
"""

from __future__ import annotations

import math
from typing import Any

from trainledger.huggingface.reading import Reading
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import fields_of
from trainledger.spec.positions import Rope
from trainledger.spec.problem import shown

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_ALWAYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_ORIGINAL = "original_max_position_embeddings"
_OF_TYPE = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", _ORIGINAL),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor", _ORIGINAL),
}
_BETA = {"beta_slow": 1.0, "beta_fast": 32.0}
_THEIRS = {"original_seq_len": _ORIGINAL}


def read_rope(reading: Reading) -> None:
    """Set the rotary fields of a family that has them."""
    found = _tables(reading)
    if found is None:
        return
    at, rope, local = found
    family, config = reading.family, reading.config
    theta = _theta(reading, at, rope)
    reading.fields["positions.theta"] = theta
    _turned(reading, at, rope)
    _scaling(reading, at, rope)
    if family.local_theta is not None and reading.fields.get("attention.window") is not None:
        key = "rope_local_base_freq"
        value = local.get("rope_theta", config.get(key))
        given = reading.checked("positions.local_theta", key, value) if value is not None else family.local_theta
        if given != theta or reading.fields.get("positions.scaling.factor") is not None:
            reading.fields["positions.local_theta"] = given
        kind = local.get("rope_type", "default")
        if kind != "default":
            reading.refuse(f"rope_parameters.{_LOCAL}.rope_type", kind, "local layers are never scaled here", "default")


def rope_parameters(spec: ModelSpec, share: bool = False) -> dict[str, Any]:
    """What ``rope_parameters`` says of a spec; ``share`` names the part of a head that is turned."""
    positions = spec.rope or Rope()
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": positions.theta}
    if share:
        rope["partial_rotary_factor"] = spec.rotary_size / spec.head_size
    if positions.scaling is None:
        return rope
    scaling = {_THEIRS.get(name, name): value for name, value in fields_of(positions.scaling).items()}
    return rope | {"rope_type": positions.scaling.kind} | scaling


def rope_of_each_kind(spec: ModelSpec) -> dict[str, Any]:
    """``rope_parameters`` of a family whose local layers have a rotary base of their own."""
    rope = spec.rope or Rope()
    local = rope.theta if rope.local_theta is None else rope.local_theta
    return {_GLOBAL: rope_parameters(spec), _LOCAL: {"rope_type": "default", "rope_theta": local}}


def magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's growth of the attention's temperature with the stretch (section 3.4): 0.1 w ln(s) + 1.

    >>> round(magnitude(40.0, 0.707), 4), magnitude(0.5)
    (1.2608, 1.0)
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _tables(reading: Reading) -> tuple[str, dict[str, Any], dict[str, Any]] | None:
    """The key that holds the rotary parameters, those of the global layers, and those of the local ones."""
    config = reading.config
    forms = [key for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    if len(forms) == 2 and config[forms[0]] != config[forms[1]]:
        reading.refuse(forms[1], config[forms[1]], f"contradicts {forms[0]}; only one of them may be given")
    at = forms[0] if forms else "rope_parameters"
    rope = config[at] if forms else dict(reading.family.rope_default)
    if not isinstance(rope, dict):
        reading.refuse(at, rope, "must be a JSON object, { ... }")
        return None
    local: dict[str, Any] = {}
    if _GLOBAL in rope or _LOCAL in rope:
        if reading.family.local_theta is None:
            reading.refuse(at, rope, f"differs by layer, which no {reading.family.model_type} does")
            return None
        local, strangers = rope.get(_LOCAL) or {}, set(rope) - {_GLOBAL, _LOCAL}
        rope = rope.get(_GLOBAL) or {}
        if strangers or not isinstance(rope, dict) or not isinstance(local, dict):
            reading.refuse(at, None, f"must be one table, or one for each of {_GLOBAL} and {_LOCAL}")
            return None
        at = f"{at}.{_GLOBAL}"
    rope = {key: value for key, value in rope.items() if value is not None}
    return at, rope, {key: value for key, value in local.items() if value is not None}


def _theta(reading: Reading, at: str, rope: dict[str, Any]) -> float | None:
    config = reading.config
    old = reading.family.rope_aliases.get("rope_theta", "rope_theta")
    theta = rope.get("rope_theta", config.get(old))
    if config.get(old) is not None and config[old] != theta:
        reading.refuse(old, config[old], f"contradicts {at}.rope_theta = {shown(theta)}")
    return reading.family.theta if theta is None else reading.checked("positions.theta", "rope_theta", theta)


def _turned(reading: Reading, at: str, rope: dict[str, Any]) -> None:
    """The part of a head that is turned."""
    old = reading.family.rope_aliases.get("partial_rotary_factor", "partial_rotary_factor")
    name = f"{at}.partial_rotary_factor" if "partial_rotary_factor" in rope else old
    share = rope.get("partial_rotary_factor", reading.config.get(old))
    whole = reading.family.rotated
    if share is None:
        share = 1.0 if whole is None else whole
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        reading.refuse(name, share, "must be a number above 0 and at most 1", 1.0)
        return
    if whole is None and share != 1:
        reading.refuse(name, share, f"every {reading.family.model_type} turns whole heads", 1.0)
        return
    head = reading.head_size()
    if not head or share == 1:  # that more heads than width are no heads is said elsewhere
        return
    width = int(head * share)
    if width < 2:
        reading.refuse(name, share, f"turns {width} of the {head} numbers of a head; rope turns pairs", 2 / head)
    elif width != head:
        reading.fields["positions.dim"] = width


def _scaling(reading: Reading, at: str, rope: dict[str, Any]) -> None:
    """The fields that say how long waves are stretched."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "su" or (kind == "yarn" and reading.family.model_type == "phi3"):
        kind = "longrope"
    if not isinstance(kind, str) or kind not in _OF_TYPE:
        reading.refuse(f"{at}.rope_type", kind, f"must be one of {', '.join(_OF_TYPE)}", "default")
        return
    for key in rope:
        if key not in _ALWAYS and key not in _OF_TYPE[kind]:
            reading.refuse(f"{at}.{key}", rope[key], f"is no key of the rope type {kind}")
    if kind == "default":
        return
    if kind == "dynamic":
        reading.notes.append(f"{at} is left out: dynamic scaling acts beyond the longest sequence only")
        return
    longest = reading.fields.get("max_seq_len")
    if kind != "linear":
        original = reading.config.get(_ORIGINAL, rope.get(_ORIGINAL, longest))
        original = _number(reading, at, kind, _ORIGINAL, original)
        if original is not None and longest is not None and kind != "llama3":
            rope.setdefault("factor", max(1.0, longest / original))
    factor = _number(reading, at, kind, "factor", rope.get("factor"))
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            _number(reading, at, kind, key, rope.get(key))
    elif kind == "yarn" and factor is not None:
        _yarn(reading, at, rope, factor)
    elif kind == "longrope" and factor is not None:
        _longrope(reading, at, rope, factor)


def _yarn(reading: Reading, at: str, rope: dict[str, Any], factor: float) -> None:
    for key, usual in _BETA.items():
        _number(reading, at, "yarn", key, rope.get(key) or usual)
    weights = [rope.get("mscale") or 0, rope.get("mscale_all_dim") or 0]
    if not all(isinstance(each, int | float) and 0 <= each < 1e6 for each in weights):
        reading.refuse(f"{at}.mscale", weights, "must be numbers from 0")
        return
    attention = rope.get("attention_factor")
    if attention is None:
        attention = magnitude(factor, weights[0]) / magnitude(factor, weights[1]) if all(weights) else magnitude(factor)
    _number(reading, at, "yarn", "attention_factor", attention)
    if (
        reading.has("attention.nope_head_dim", "attention.rope_head_dim") and weights[1]
    ):  # DeepSeek's own: the scores grow as well
        width = reading.fields["attention.nope_head_dim"] + reading.fields["attention.rope_head_dim"]
        reading.fields["attention.scale"] = width**-0.5 * magnitude(factor, weights[1]) ** 2
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        reading.refuse(f"{at}.truncate", truncate, "must be true or false", True)
    reading.fields["positions.scaling.truncate"] = truncate


def _longrope(reading: Reading, at: str, rope: dict[str, Any], factor: float) -> None:
    for key in ("short_factor", "long_factor"):
        if not isinstance(rope.get(key), list):
            reading.refuse(f"{at}.{key}", rope.get(key), "must be a list of numbers")
            return
    attention, original = rope.get("attention_factor"), reading.fields.get("positions.scaling.original_seq_len")
    if attention is None and original is not None:
        grown = math.log(factor) / math.log(original) if original > 1 else 0.0
        attention = math.sqrt(1 + grown)
    _number(reading, at, "longrope", "attention_factor", attention)
    reading.refuse_weights(
        f"{at}.short_factor", rope["short_factor"], "a factor for every wave has no place in a ModelSpec"
    )


def _number(reading: Reading, at: str, kind: str, key: str, value: Any) -> Any:
    """Set a field of the scaling from a key of the rotary parameters; the value, None after a problem."""
    path = f"positions.scaling.{'original_seq_len' if key == _ORIGINAL else key}"
    reading.fields["positions.scaling"] = kind
    reading.fields[path] = reading.checked(path, f"{at}.{key}", value)
    return reading.fields[path]
