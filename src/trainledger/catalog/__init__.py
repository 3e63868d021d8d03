"""Models and devices: one TOML file each, every number with its source and the date it was read.

A lookup parses one small file, so that the catalog costs nothing at start-up, however long it grows.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable
from typing import Any

from trainledger.spec.cluster import Device, Overhead
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.units import parse_nbytes

_HERE = os.path.dirname(__file__)


def model_names() -> list[str]:
    """The names of the catalog's models.

    >>> "llama-3-8b" in model_names()
    True
    """
    return _names("models")


def device_names() -> list[str]:
    """The names of the catalog's devices."""
    return _names("devices")


def model(name: str, field: str = "model.preset") -> dict[str, Any]:
    """The `ModelSpec` fields of a model; raises InvalidInput with the nearest name where it is unknown.

    >>> model("gpt2")["d_model"]
    768
    """
    fields: dict[str, Any] = model_entry(name, field)["model"]
    return fields


def model_entry(name: str, field: str = "model.preset") -> dict[str, Any]:
    """Everything the catalog says of a model: title, exact ``parameters``, source, date, verified, fields."""
    return _entry("models", name, field)


def known_as(name: str, known: Iterable[str], field: str) -> str:
    """The one of the known names that is meant, upper case or lower; raises InvalidInput with the nearest.

    >>> known_as("H200", device_names(), "cluster.device")
    'h200'
    """
    known, lower = list(known), name.lower()
    if lower in known:
        return lower
    longer = [each for each in known if each.startswith(lower)] if name else []
    near = longer[0] if longer else nearest_text(name, known)
    listed = longer if len(longer) > 1 else [] if near else known
    rule = f"is not in the catalog ({', '.join(listed)})" if listed else "is not in the catalog"
    raise InvalidInput([Problem(field, name, rule, near)])


def device(name: str, field: str = "cluster.device") -> Device:
    """A device; raises InvalidInput with the nearest name where it is unknown.

    >>> device("h100-sxm").peak_flops_per_second["bf16"], device("h100-sxm").memory_nbytes
    (989500000000000.0, 80000000000)
    """
    entry = _entry("devices", name, field)
    name = name.lower()
    link = entry.get("link_bandwidth")
    return Device(
        name=name,
        title=entry["title"],
        peak_flops_per_second=entry["peak"],
        memory_nbytes=parse_nbytes(entry["memory"]),
        memory_bytes_per_second=float(parse_nbytes(entry["memory_bandwidth"])),
        power_watts=float(entry["power_watts"]),
        source=entry["source"],
        date=str(entry["date"]),
        unverified=tuple(entry["unverified"]),
        link=entry["link"],
        link_bytes_per_second=None if link is None else float(parse_nbytes(link)),
        note=entry.get("note", ""),
        usable_nbytes=parse_nbytes(entry["usable_memory"]) if "usable_memory" in entry else None,
        usable_source=entry.get("usable_memory_source", ""),
        compute_capability=float(entry["compute_capability"]) if "compute_capability" in entry else None,
    )


def overheads() -> dict[str, Overhead]:
    """What a device holds beside tensors, by name, each with its source.

    >>> overheads()["cublas_workspace"].nbytes
    8519680
    """
    with open(os.path.join(_HERE, "overheads.toml"), "rb") as file:
        entries = tomllib.load(file)
    return {
        name: Overhead(
            name=name,
            what=entry["what"],
            source=entry["source"],
            date=str(entry["date"]),
            nbytes=parse_nbytes(entry["nbytes"]) if isinstance(entry.get("nbytes"), str) else entry.get("nbytes", 0),
            share=entry.get("share", 0.0),
        )
        for name, entry in entries.items()
    }


def _names(kind: str) -> list[str]:
    return sorted(each[: -len(".toml")] for each in os.listdir(os.path.join(_HERE, kind)) if each.endswith(".toml"))


def _entry(kind: str, name: str, field: str) -> dict[str, Any]:
    name = known_as(name, _names(kind), field)  # looked up in the listing, so that it can never be a path
    with open(os.path.join(_HERE, kind, f"{name}.toml"), "rb") as file:
        return tomllib.load(file)
