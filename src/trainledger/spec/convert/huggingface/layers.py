"""Which layers of a config.json are local, have rotary positions, or have experts; and the same the other way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainledger.spec.convert.huggingface.reading import Reading
from trainledger.spec.layers import kind_of
from trainledger.spec.model import ModelSpec

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def read_windows(reading: Reading) -> None:
    """Set the window and ``global_every``."""
    family, config = reading.family, reading.config
    types = config.get("layer_types")
    if not reading.has("n_layers"):
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
    every = every_so_many([each == _GLOBAL for each in types])
    if every is None:
        reading.refuse("layer_types", types, "only a window in all layers, or in all but every n-th, is accounted for")
    elif every == 1:
        reading.fields["attention.window"] = None
    elif every:
        reading.fields["attention.global_every"] = every


def layer_types(spec: ModelSpec) -> list[str]:
    """``layer_types`` of a spec."""
    kinds = (kind_of(spec, each) for each in range(spec.n_layers))
    return [_GLOBAL if each.window is None else _LOCAL for each in kinds]


def every_so_many(marked: Sequence[bool]) -> int | None:
    """n where exactly every n-th of a sequence is marked, 0 where none is, None where there is no such n.

    >>> every_so_many([False, True, False, True]), every_so_many([False, False]), every_so_many([True, False])
    (2, 0, None)
    """
    if True not in marked:
        return 0
    first = marked.index(True) + 1
    return first if all(each == (number % first == 0) for number, each in enumerate(marked, 1)) else None


def read_skipped_rope(reading: Reading) -> None:
    """Set ``skip_every`` of the positions from no_rope_layers (0 where a layer has none) or their interval."""
    if not reading.has("n_layers"):
        return
    n_layers = reading.fields["n_layers"]
    listed = reading.config.get("no_rope_layers")
    if listed is None:
        every = reading.whole("no_rope_layer_interval", 4, 1)
        reading.fields["positions.skip_every"] = every if every <= n_layers else None
    elif not isinstance(listed, list) or not set(map(repr, listed)) <= {"0", "1"} or len(listed) < n_layers:
        reading.refuse("no_rope_layers", listed, f"must be a list of 0 and 1 for each of the {n_layers} layers")
    else:
        skipped = every_so_many([each == 0 for each in listed[:n_layers]])
        if skipped is None:
            reading.refuse("no_rope_layers", listed, "only every n-th layer without positions is accounted for")
        reading.fields["positions.skip_every"] = skipped or None


def read_sparse_layers(reading: Reading) -> None:
    """Set ``every`` and ``n_dense_layers`` of the experts from decoder_sparse_step and mlp_only_layers (Qwen)."""
    if not reading.has("n_layers"):
        return
    n_layers = reading.fields["n_layers"]
    step = reading.whole("decoder_sparse_step", 1, 1)
    dense = reading.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(each) is int and each >= 0 for each in dense):
        reading.refuse("mlp_only_layers", dense, "must be a list of layer numbers from 0")
        return
    listed = {each for each in dense if each < n_layers}
    if listed != set(range(len(listed))):
        reading.refuse("mlp_only_layers", dense, "only the first layers may be dense here", list(range(len(listed))))
        return
    reading.fields["feed_forward.every"] = step
    reading.fields["feed_forward.n_dense_layers"] = len(listed)


def _are_known(reading: Reading, types: Any) -> bool:
    n_layers, kind = reading.fields["n_layers"], reading.family.model_type
    known = (_GLOBAL,) if reading.family.windows == "none" else (_GLOBAL, _LOCAL)
    if not isinstance(types, list) or not all(isinstance(each, str) and each in known for each in types):
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
        local = (each >= edge if windows == "after" else each % 2 == 0 and each < edge for each in range(n_layers))
        return [_LOCAL if each else _GLOBAL for each in local]
    if isinstance(windows, int):
        every = reading.whole("sliding_window_pattern", windows, 1)
        return [_GLOBAL if each % every == 0 else _LOCAL for each in range(1, n_layers + 1)]
    return [_GLOBAL if windows == "none" else _LOCAL] * n_layers
