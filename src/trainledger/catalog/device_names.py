"""Devices as people, drivers and PyTorch write them: ``rtx4090``, ``h100-80gb``, ``NVIDIA H100 80GB HBM3``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_MAKERS = "nvidia amd geforce tesla instinct google cloud tensor core gpu hbm2 hbm2e hbm3 hbm3e nvl36 nvl72 generation"
_FORMS = {"sxm", "pcie", "nvl", "hgx", "dgx", "oam"}
_SERIES = {"rtx", "tpu"}  # no model of their own
# What to do with what the catalog has not.
ADDED = {
    "models": ": give its config.json in place of its name, or of any other PyTorch module trainledger trace "
    "module:builder",
    "devices": ': add catalog/devices/NAME.toml, a copy of another with its data sheet (docs/architecture.md, "Adding '
    'things"), or give trainledger.on_device a trainledger.Device',
    "links": ': give its rate instead, such as --set cluster.network_bytes_per_second="50GB/s"',
}


def device_meant(text: str, memory_of: Mapping[str, str], usual: Sequence[str]) -> str | None:
    """The device that a text means; None where it means none, or several of which none is ``usual``.

    ``memory_of`` has the names and the memory as text ("80GB"). Every word must be of the device: its model, its form,
    its memory or a word of its maker's.

    >>> known = {"h100-sxm": "80GB", "h100-pcie": "80GB", "l40s": "48GB", "rtx-4090": "24GB", "b200": "180GB"}
    >>> [device_meant(text, known, ["h100-sxm"]) for text in ("NVIDIA H100 80GB HBM3", "rtx4090", "b200-sxm", "L40")]
    ['h100-sxm', 'rtx-4090', 'b200', None]
    """
    words = _words(text)
    meant = [name for name, memory in memory_of.items() if words and _is_of(words, name.split("-"), memory.lower())]
    return meant[0] if len(meant) == 1 else next((name for name in usual if name in meant), None)


def device_near(text: str, names: Sequence[str], usual: Sequence[str]) -> str | None:
    """The device whose model is a word of a text that says something else too; None where there is none.

    >>> known = ["h100-pcie", "h100-sxm", "tpu-v6e"]
    >>> [device_near(text, known, ["h100-sxm"]) for text in ("H100 NVL4", "v6e-8", "p100")]
    ['h100-sxm', 'tpu-v6e', None]
    """
    words = _words(text)
    of_model = [name for name in names if _model(name.split("-")) in words]
    return next((name for name in (*usual, *of_model) if name in of_model), None)


def _words(text: str) -> list[str]:
    """The words of a device's name but its maker's: the memory of ``80g`` is ``80gb``, SXM5 one of several forms."""
    text = re.sub(r"\b(\d+) ?gi?b?\b", r"\1gb", re.sub(r"\b(sxm|pcie)\d\b", r"\1", text.lower()))
    return [word for word in re.findall(r"[a-z0-9]+", text) if word not in _MAKERS.split()]


def _model(parts: Sequence[str]) -> str:
    return next(part for part in parts if part not in _SERIES)


def _is_of(words: Sequence[str], parts: Sequence[str], memory: str) -> bool:
    model = _model(parts)
    glued = "".join(parts)
    of_any_form = _FORMS if not _FORMS & set(parts) else set()
    known = {*parts, glued, memory, *of_any_form}
    return (model in words or glued in words) and known.issuperset(words)
