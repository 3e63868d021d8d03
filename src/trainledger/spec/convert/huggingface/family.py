"""A model type of transformers as one record: its config.json and the names of its tensors; and what all share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any

from trainledger.spec.frozen import frozen
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import field_at


@frozen
class ExpertNames:
    """The storage of a layer's experts: a module for each (names of gate, up and down), or stacked.

    ``interleaved`` stacks are gpt-oss's: transposed, and gate and up alternate.
    """

    at: str = "mlp.experts"
    each: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    interleaved: bool = False


@frozen
class Names:
    """A family's names of the parts of a model. ``top`` and ``block`` rename modules; the longest name wins.

    ``qkv`` is one matrix of queries, keys and values: one after the other, or ``grouped``, where each key-value
    head follows the query heads that share it. ``gate_up`` is one matrix of gate and up. ``transposed``: the
    matrices of blocks are.
    """

    prefix: str = "model."
    layers: str = "layers"
    head: str = "lm_head"
    other_head: str | None = None  # its name in newer or older files
    top: Mapping[str, str] = field(default_factory=dict)
    block: Mapping[str, str] = field(default_factory=dict)
    where: tuple[str, object, Mapping[str, str]] | None = None  # more of ``block`` where a field has a value
    qkv: str | None = None
    grouped: bool = False
    gate_up: str | None = None
    transposed: bool = False
    correction_rows: bool = False  # a router's correction is a matrix of one row
    experts: ExpertNames = ExpertNames()

    def of(self, spec: ModelSpec) -> Names:
        """The names in a model with this spec."""
        if self.where is None or field_at(spec, self.where[0]) != self.where[1]:
            return self
        return replace(self, block={**self.block, **self.where[2]})


@frozen
class Switch:
    """A flag of a config that sets fields: those of ``on`` where it is true, those of ``off`` where it is false."""

    default: bool
    on: Mapping[str, object]
    off: Mapping[str, object]

    def of(self, spec: ModelSpec) -> bool:
        """The flag of a spec, by the first field; the default where that has neither value."""
        path = next(iter(self.off))
        return {self.on[path]: True, self.off[path]: False}.get(field_at(spec, path), self.default)


@frozen
class Family:
    """A model type of transformers: which key holds which field, and what is the same in all of its models.

    A key that no field below names is refused. Fields of a `ModelSpec` are named by their paths. ``windows`` says
    which layers have a sliding window: ``none``; ``all``; ``after`` = those from max_window_layers on;
    ``alternate`` = the odd ones before it; a number n = all but every n-th. ``flagged``: only if use_sliding_window
    is true. ``theta`` is the rotary base where the config has none (None: the family has no rotary positions that
    a config describes), ``rotated`` the part of a head that rope rotates where it has none (None: it rotates whole
    heads, whatever the config).
    """

    model_type: str = ""
    architectures: tuple[str, ...] = ()  # the first is written
    keys: Mapping[str, str] = field(default_factory=dict)  # our field -> their key
    always: Mapping[str, object] = field(default_factory=dict)  # fields that every model of the family has
    defaults: Mapping[str, object] = field(default_factory=dict)  # what transformers takes where a key is absent
    switches: Mapping[str, Switch] = field(default_factory=dict)  # their flag -> the fields it sets
    names: Names = Names()
    also: tuple[str, ...] = ()  # other model types with the same keys
    activations: Mapping[str, str] = field(default_factory=dict)  # theirs -> ours
    written: Mapping[str, str] = field(default_factory=dict)  # ours -> theirs
    constants: Mapping[str, object] = field(default_factory=dict)  # keys that are written and never read
    allowed: Mapping[str, tuple[object, ...]] = field(
        default_factory=dict
    )  # keys that change the cost unless they have one of these values
    values: Mapping[str, tuple[object, ...]] = field(
        default_factory=dict
    )  # the same for keys that change only what is computed
    ignored: tuple[str, ...] = ()  # keys that change nothing
    left_out: tuple[str, ...] = ()  # keys of modules that transformers does not build; reported where they are on
    dropouts: tuple[str, ...] = ()
    code: tuple[str, ...] = ()  # keys that name Python code
    aliases: Mapping[str, str] = field(default_factory=dict)  # their key -> its other name
    reads: tuple[str, ...] = ()  # further keys that ``read`` looks at
    windows: str | int = "none"
    window: int | None = None  # the window where sliding_window is absent
    flagged: bool = False
    theta: float | None = 10000.0
    rotated: float | None = None
    rope_default: Mapping[str, object] = field(default_factory=dict)  # rope_parameters where there are none
    rope_aliases: Mapping[str, str] = field(default_factory=dict)  # rope_theta or partial_rotary_factor -> old key
    letters: Mapping[str, str] = field(default_factory=dict)  # of layer_types -> of `ModelSpec.layers`
    reads_only: bool = False  # no config is written, and no weights are read
    divides: bool = False  # transformers requires heads that divide the width, for any head width
    local_theta: float | None = None  # local layers have a separate rotary base, never scaled
    read: Callable[..., None] | None = None  # of a `reading.Reading`: what no table can say
    write: Callable[[ModelSpec], dict[str, Any]] | None = None

    def like(self, model_type: str, *architectures: str, **changes: Any) -> Family:
        """A family that differs from this one: mappings are added to (None removes a key), the rest is replaced.

        Its architecture is named as transformers usually does where none is given.

        >>> one = Family("one", keys={"d_model": "hidden_size", "norm.eps": "eps"}, window=4)
        >>> two = one.like("two_moe", keys={"norm.eps": None, "n_layers": "num_hidden_layers"})
        >>> two.keys, two.window, two.architectures
        ({'d_model': 'hidden_size', 'n_layers': 'num_hidden_layers'}, 4, ('TwoMoeForCausalLM',))
        """
        for name in ("keys", "always", "defaults", "switches", "constants", "allowed", "values", "aliases", "letters"):
            both = {**getattr(self, name), **changes.get(name, {})}
            changes[name] = {inner: value for inner, value in both.items() if value is not None or name == "defaults"}
        usual = "".join(word.capitalize() for word in model_type.split("_")) + "ForCausalLM"
        return replace(self, model_type=model_type, architectures=architectures or (usual,), **changes)
