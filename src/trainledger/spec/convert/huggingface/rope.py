"""Rotary positions in a config.json: rope_parameters (transformers 5), or rope_theta and rope_scaling (before).

The scalings are those of transformers' modeling_rope_utils: linear; llama3 (Llama 3.1); yarn (Peng et al. 2023,
YaRN, sections 3.2 to 3.4); longrope (Ding et al. 2024, LongRoPE); dynamic, which acts beyond the longest sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trainledger.spec.block import Rope
from trainledger.spec.convert.huggingface.reading import Reading
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import fields_of
from trainledger.spec.problem import shown

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_ALWAYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_ORIGINAL = "original_max_position_embeddings"
_OF_TYPE = {
    "default": (),
    "linear": ("factor",),
    "proportional": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", _ORIGINAL),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor", _ORIGINAL),
}
_OURS = {_ORIGINAL: "original_seq_len"}


def read_rope(reading: Reading) -> None:
    """Set the rotary fields of a family that has them."""
    table = _table(reading)
    if table is not None:
        table.read_theta()
        table.read_rotated()
        table.read_scaling()
        table.read_local()


def rope_parameters(spec: ModelSpec, share: bool = False) -> dict[str, Any]:
    """``rope_parameters`` of a spec; ``share`` names the part of a head that is rotated."""
    positions = spec.rope or Rope()
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": positions.theta}
    if share:
        rope["partial_rotary_factor"] = spec.rotary_size / spec.head_size
    if positions.scaling is None:
        return rope
    theirs = {ours: key for key, ours in _OURS.items()}
    scaling = {theirs.get(name, name): value for name, value in fields_of(positions.scaling).items()}
    return rope | {"rope_type": positions.scaling.kind} | scaling


def rope_of_each_kind(spec: ModelSpec) -> dict[str, Any]:
    """``rope_parameters`` of a family whose local layers have a separate rotary base."""
    rope = spec.rope or Rope()
    local = rope.theta if rope.local_theta is None else rope.local_theta
    return {_GLOBAL: rope_parameters(spec), _LOCAL: {"rope_type": "default", "rope_theta": local}}


def magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's growth of the attention's temperature with the stretch (section 3.4): 0.1 w ln(s) + 1.

    >>> round(magnitude(40.0, 0.707), 4), magnitude(0.5)
    (1.2608, 1.0)
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _table(reading: Reading) -> _Table | None:
    """The rotary parameters of a config; None after a problem."""
    config, family = reading.config, reading.family
    forms = [key for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    if len(forms) == 2 and config[forms[0]] != config[forms[1]]:
        reading.refuse(forms[1], config[forms[1]], f"contradicts {forms[0]}; only one of them may be given")
    at = forms[0] if forms else "rope_parameters"
    rope: Any = config[at] if forms else family.rope_default
    local: Any = {}
    if not isinstance(rope, dict):
        reading.refuse(at, rope, "must be a JSON object, { ... }")
        return None
    if _GLOBAL in rope or _LOCAL in rope:
        if family.local_theta is None:
            reading.refuse(at, rope, f"differs by layer, which no {family.model_type} does")
            return None
        others = set(rope) - {_GLOBAL, _LOCAL}
        local, rope = rope.get(_LOCAL) or {}, rope.get(_GLOBAL) or {}
        if others or not isinstance(rope, dict) or not isinstance(local, dict):
            reading.refuse(at, None, f"must be one table, or one for each of {_GLOBAL} and {_LOCAL}")
            return None
        at = f"{at}.{_GLOBAL}"
    rope, local = ({key: value for key, value in table.items() if value is not None} for table in (rope, local))
    return _Table(reading, at, rope, local)


@dataclass
class _Table:
    """The rotary parameters of a config: their key, those of the global layers, and those of the local ones."""

    reading: Reading
    at: str
    rope: dict[str, Any]
    local: dict[str, Any]

    @property
    def kind(self) -> Any:
        """The rope type."""
        return self.rope.get("rope_type", self.rope.get("type", "default"))

    def read_theta(self) -> None:
        """The base of the rotary frequencies."""
        reading, config = self.reading, self.reading.config
        old = reading.family.rope_aliases.get("rope_theta", "rope_theta")
        theta = self.rope.get("rope_theta", config.get(old))
        if config.get(old) is not None and config[old] != theta:
            reading.refuse(old, config[old], f"contradicts {self.at}.rope_theta = {shown(theta)}")
        checked = None if theta is None else reading.checked("positions.theta", "rope_theta", theta)
        reading.fields["positions.theta"] = reading.family.theta if theta is None else checked

    def read_local(self) -> None:
        """The base in local layers, where it is another or where only the global ones are scaled."""
        reading, theta = self.reading, self.reading.family.local_theta
        if theta is None or reading.fields.get("attention.window") is None:
            return
        key = "rope_local_base_freq"
        value = self.local.get("rope_theta", reading.config.get(key))
        if value is not None:
            theta = reading.checked("positions.local_theta", key, value)
        if theta != reading.fields["positions.theta"] or reading.has("positions.scaling.factor"):
            reading.fields["positions.local_theta"] = theta
        kind = self.local.get("rope_type", "default")
        if kind != "default":
            reading.refuse(f"rope_parameters.{_LOCAL}.rope_type", kind, "local layers are never scaled here", "default")
        share, head = self.local.get("partial_rotary_factor", 1.0), reading.head_size() or 0
        usual = reading.fields.get("positions.dim") or head
        if type(share) not in (int, float) or not 0 < share <= 1:
            reading.refuse(f"rope_parameters.{_LOCAL}.partial_rotary_factor", share, "must be a number up to 1", 1.0)
        elif "partial_rotary_factor" in self.local and int(head * share) != usual:
            reading.fields["positions.local_dim"] = int(head * share)

    def read_rotated(self) -> None:
        """The part of a head that is rotated."""
        reading, usual = self.reading, self.reading.family.rotated
        key = "partial_rotary_factor"
        old = reading.family.rope_aliases.get(key, key)
        name = f"{self.at}.{key}" if key in self.rope else old
        share = self.rope.get(key, reading.config.get(old))
        if share is None:
            share = 1.0 if usual is None else usual
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            reading.refuse(name, share, "must be a number above 0 and at most 1", 1.0)
        elif self.kind == "proportional":
            reading.fields["positions.scaling.turned"] = share
        elif usual is None and share != 1:
            reading.refuse(name, share, f"every {reading.family.model_type} rotates whole heads", 1.0)
        elif (head := reading.head_size()) and share != 1:  # no head: more heads than width, refused elsewhere
            width = int(head * share)
            if width < 2:
                reading.refuse(
                    name, share, f"rotates {width} of the {head} numbers of a head; rope rotates pairs", 2 / head
                )
            elif width != head:
                reading.fields["positions.dim"] = width

    def read_scaling(self) -> None:
        """The scaling of long waves."""
        reading, rope, kind = self.reading, self.rope, self.kind
        if kind == "su" or (kind == "yarn" and reading.family.model_type == "phi3"):
            kind = "longrope"
        if not isinstance(kind, str) or kind not in _OF_TYPE:
            reading.refuse(f"{self.at}.rope_type", kind, f"must be one of {', '.join(_OF_TYPE)}", "default")
            return
        if kind == "dynamic" and rope.get("alpha") and reading.family.model_type.startswith("hunyuan"):
            self._read_alpha(rope["alpha"])
            return
        for key in rope:
            # Text has one position for all three axes that mrope tells apart.
            if key not in _ALWAYS and key not in _OF_TYPE[kind] and not key.startswith("mrope_"):
                reading.refuse(f"{self.at}.{key}", rope[key], f"is no key of the rope type {kind}")
        if kind == "dynamic":
            reading.notes.append(f"{self.at} is left out: dynamic scaling acts beyond the longest sequence only")
        if kind in ("default", "dynamic"):
            return
        reading.fields["positions.scaling"] = kind
        longest, original = reading.fields.get("max_seq_len"), None
        if kind == "proportional":
            rope.setdefault("factor", 1.0)
        elif kind != "linear":
            original = self._set(_ORIGINAL, reading.config.get(_ORIGINAL, rope.get(_ORIGINAL, longest)))
            if original is not None and longest is not None and kind != "llama3":
                rope.setdefault("factor", max(1.0, longest / original))
        factor = self._set("factor", rope.get("factor"))
        if kind == "llama3":
            for key in ("low_freq_factor", "high_freq_factor"):
                self._set(key, rope.get(key))
        elif kind == "yarn" and factor is not None:
            self._read_yarn(factor)
        elif kind == "longrope" and factor is not None:
            self._read_longrope(factor, original)

    def _read_alpha(self, alpha: Any) -> None:
        """Hunyuan's "dynamic" scaling: one larger base for sequences of any length; its other keys are never read."""
        reading, head = self.reading, self.reading.head_size()
        if type(alpha) not in (int, float) or not 1 <= alpha < 1e9:
            reading.refuse(f"{self.at}.alpha", alpha, "must be a number from 1", 1.0)
        elif head and head > 2 and reading.has("positions.theta"):
            reading.fields["positions.theta"] *= alpha ** (head / (head - 2))

    def _set(self, key: str, value: Any) -> Any:
        """Set a field of the scaling from a key of the rotary parameters; the value, None after a problem."""
        path = f"positions.scaling.{_OURS.get(key, key)}"
        self.reading.fields[path] = self.reading.checked(path, f"{self.at}.{key}", value)
        return self.reading.fields[path]

    def _read_yarn(self, factor: float) -> None:
        reading, rope = self.reading, self.rope
        for key, usual in (("beta_slow", 1.0), ("beta_fast", 32.0)):
            self._set(key, rope.get(key) or usual)
        weights = [rope.get("mscale") or 0, rope.get("mscale_all_dim") or 0]
        if not all(isinstance(weight, int | float) and 0 <= weight < 1e6 for weight in weights):
            reading.refuse(f"{self.at}.mscale", weights, "must be numbers from 0")
            return
        usual = magnitude(factor, weights[0]) / magnitude(factor, weights[1]) if all(weights) else magnitude(factor)
        self._set("attention_factor", rope.get("attention_factor", usual))
        if weights[1] and reading.has("attention.nope_head_dim", "attention.rope_head_dim"):
            # DeepSeek's own: the scores grow as well.
            width = reading.fields["attention.nope_head_dim"] + reading.fields["attention.rope_head_dim"]
            reading.fields["attention.scale"] = width**-0.5 * magnitude(factor, weights[1]) ** 2
        truncate = rope.get("truncate", True)
        if not isinstance(truncate, bool):
            reading.refuse(f"{self.at}.truncate", truncate, "must be true or false", True)
        reading.fields["positions.scaling.truncate"] = truncate

    def _read_longrope(self, factor: float, original: int | None) -> None:
        reading, rope = self.reading, self.rope
        for key in ("short_factor", "long_factor"):
            if not isinstance(rope.get(key), list):
                reading.refuse(f"{self.at}.{key}", rope.get(key), "must be a list of numbers")
                return
        attention = rope.get("attention_factor")
        if attention is None and original is not None:
            attention = math.sqrt(1 + (math.log(factor) / math.log(original) if original > 1 else 0.0))
        self._set("attention_factor", attention)
        rule = "a factor for every wave has no place in a ModelSpec"
        reading.refuse_weights(f"{self.at}.short_factor", rope["short_factor"], rule)
