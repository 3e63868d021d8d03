"""Models and devices: one TOML file each, every number with its source and the date it was read.

A lookup parses one small file, once, so the size of the catalog does not slow the start.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

from trainledger.catalog.device_names import ADDED, device_meant, device_near
from trainledger.spec.cluster import Cluster, Fabric, Link, Protocol
from trainledger.spec.device import Device, Efficiency, ErrorModel, Overhead, Published, limited
from trainledger.spec.frozen import frozen
from trainledger.spec.plain import from_plain
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.units import counted, format_nbytes, parse_nbytes

_HERE = os.path.dirname(__file__)
_NEEDED = {
    "devices": ("title", "peak", "memory", "memory_bandwidth", "link", "source", "date", "unverified"),
    "links": ("title", "bandwidth", "share", "hardware", "source", "date", "unverified"),
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_USUAL = ("h100-sxm", "a100-sxm-80gb", "v100-sxm-32gb", "gh200-96gb")  # that most large models were trained on


def model_names() -> list[str]:
    """The names of the catalog's models.

    >>> "llama-3-8b" in model_names()
    True
    """
    return [*_names("models")]


def device_names() -> list[str]:
    """The names of the catalog's devices."""
    return [*_names("devices")]


def model(name: str, field: str = "model.preset") -> dict[str, Any]:
    """The `ModelSpec` fields of a model; raises InvalidInput with the nearest name where it is unknown.

    >>> model("gpt2")["d_model"]
    768
    """
    fields: dict[str, Any] = model_entry(name, field)["model"]
    return fields


def model_entry(name: str, field: str = "model.preset") -> dict[str, Any]:
    """The catalog's entry of a model: title, exact ``parameters``, source, date, verified, fields."""
    return _entry("models", name, field)


def known_as(name: str, known: Iterable[str], field: str) -> str:
    """The known name that a text means, in upper or lower case; raises InvalidInput with the nearest.

    A device may be written as its driver does, or without its variant; a model may be a Hugging Face hub id.

    >>> known_as("H200", device_names(), "cluster.device"), known_as("h100", device_names(), "cluster.device")
    ('h200', 'h100-sxm')
    >>> known_as("meta-llama/Llama-3.1-8B", model_names(), "model.preset")
    'llama-3.1-8b'
    """
    known, lower = list(known), name.lower()
    said = lower, _hub_name(lower), _table("driver_names.toml").get(name)
    if (found := next((name for name in said if name in known), None)) is not None:
        return found
    memory_of = {own: str(_table("devices", f"{own}.toml")["memory"]) for own in device_names() if own in known}
    if (meant := device_meant(name, memory_of, _USUAL)) is not None:
        return meant
    longer = [name for name in known if name.startswith(lower)] if name else []
    near = next((name for name in (*_USUAL, *longer) if name in longer), None) or nearest_text(name, known)
    near = near or device_near(name, list(memory_of), _USUAL)
    rule = "is not in the catalog" + (f" ({', '.join(longer)})" if len(longer) > 1 else "")
    if not longer and not near:
        kind = next((f" {kind}" for kind in ADDED if known == [*_names(kind)]), "")
        rule += f" (trainledger catalog{kind} lists all){ADDED.get(kind.strip(), '')}"
    raise InvalidInput([Problem(field, name, rule, near)])


def _hub_name(name: str) -> str:
    """The catalog's name of a hub id in lower case; the last part of the id where the catalog has no other."""
    last = name.rpartition("/")[2] if _HUB_ID.fullmatch(name) else name
    return str(_table("hub_names.toml").get(last, last))


def is_hub_id(name: str) -> bool:
    """A text is ``organisation/model`` with a model of the catalog, and not a path."""
    return _HUB_ID.fullmatch(name) is not None and not os.path.exists(name) and _hub_name(name.lower()) in model_names()


def device(name: str, field: str = "cluster.device") -> Device:
    """A device; raises InvalidInput with the nearest name where it is unknown.

    >>> device("h100-sxm").peak_flops_per_second["bf16"], device("h100-sxm").memory_nbytes
    (989500000000000.0, 80000000000)
    """
    found = _device(known_as(name, device_names(), field))
    return replace(found, peak_flops_per_second=dict(found.peak_flops_per_second))  # a caller may change its copy


def device_of_driver(name: str) -> Device | None:
    """The device that a driver calls so, as a profiler's trace does; None where the catalog does not know that name.

    >>> device_of_driver("NVIDIA H100 80GB HBM3").name, device_of_driver("NVIDIA H1000")
    ('h100-sxm', None)
    """
    found = _table("driver_names.toml").get(name)
    return None if found is None else device(found)


@cache
def _device(name: str) -> Device:
    entry = _entry("devices", name, "cluster.device")
    link = entry.get("link_bandwidth")
    return Device(
        name=name,
        title=entry["title"],
        peak_flops_per_second=entry["peak"],
        memory_nbytes=parse_nbytes(entry["memory"]),
        memory_bytes_per_second=float(parse_nbytes(entry["memory_bandwidth"])),
        power_watts=float(entry["power_watts"]) if "power_watts" in entry else None,
        source=entry["source"],
        date=str(entry["date"]),
        unverified=tuple(entry["unverified"]),
        link=entry["link"],
        link_bytes_per_second=None if link is None else float(parse_nbytes(link)),
        note=entry.get("note", ""),
        usable_nbytes=parse_nbytes(entry["usable_memory"]) if "usable_memory" in entry else None,
        usable_source=entry.get("usable_memory_source", ""),
        compute_capability=float(entry["compute_capability"]) if "compute_capability" in entry else None,
        multiprocessors=entry.get("multiprocessors"),
        matrix_unit=entry.get("matrix_unit"),
        efficiency=efficiency(name),
        overheads=tuple(overheads().values()),
        published=published(name),
        errors=errors(name),
        fabric=_fabric(entry["node"]) if "node" in entry else None,
    )


def efficiency(name: str) -> Efficiency | None:
    """The share of its data sheet that a device reaches; None where the catalog has no calibration of it.

    >>> efficiency("h100-sxm").matmul_share < 1
    True
    """
    if not os.path.exists(os.path.join(_HERE, "calibrations", f"{name}.toml")):
        return None
    entry = _table("calibrations", f"{name}.toml")
    return Efficiency(source=entry["source"], date=str(entry["date"]), **entry["efficiency"])


def errors(name: str) -> ErrorModel:
    """The errors of predictions for a device, from published runs whose sources were left out.

    >>> errors("h100-sxm").step.basis, errors("h200").step.basis, errors("l4").step.basis
    ('own', 'other', 'bound')
    """
    entry = {key: value for key, value in _table("errors.toml").items() if key != "share"}
    seen = dict(entry["steps_seen"])
    own, known = name in seen.pop("devices"), efficiency(name) is not None
    basis = "own" if own else "other" if known else "bound"
    step = {"basis": basis, **entry["step"][basis]}
    return from_plain(ErrorModel, {**entry, "step": step, "steps_seen": seen})


def link_names() -> list[str]:
    """The names of the catalog's links."""
    return [*_names("links")]


def link(name: str, field: str = "cluster.network") -> Link:
    """A link inside a node or between nodes; raises InvalidInput with the nearest name where it is unknown.

    >>> link("ndr").bytes_per_second
    50000000000.0
    """
    return _link(name, _entry("links", name, field))


def _link(name: str, entry: dict[str, Any]) -> Link:
    return Link(
        name=name.lower(),
        title=entry["title"],
        bytes_per_second=float(parse_nbytes(entry["bandwidth"])),
        share=entry["share"],
        switch_share=entry.get("switch_share"),
        switch_seconds=entry.get("switch_seconds", 0.0),
        protocols=_protocols(entry["hardware"]),
        source=entry["source"],
        date=str(entry["date"]),
        unverified=tuple(entry["unverified"]),
    )


def placed(device: Device, cluster: Cluster) -> Device:
    """The device in a cluster: with the cluster's `fabric`, under its power limit, without the memory kept free.

    Raises InvalidInput as `fabric` and `spec.device.limited` do, and where a margin leaves no memory.
    """
    joined = replace(device, fabric=fabric(device, cluster))
    if cluster.memory_margin_nbytes is not None:
        joined = _less_margin(joined, cluster.memory_margin_nbytes)
    if cluster.power_limit_watts is None:
        return joined
    return limited(joined, cluster.power_limit_watts)


def _less_margin(device: Device, nbytes: int) -> Device:
    """The device without so much of its memory; raises InvalidInput where it has none of it left."""
    room, field = device.capacity_nbytes, "cluster.memory_margin_nbytes"
    if room is None:
        raise InvalidInput([Problem(field, nbytes, f"needs the memory of {device.title}, which is not known")])
    if nbytes >= room:
        rule = f"leaves nothing of the {format_nbytes(room)} of {device.title}"
        raise InvalidInput([Problem(field, nbytes, rule, room // 10)])
    return device.keeping_free(nbytes)


def fabric(device: Device, cluster: Cluster) -> Fabric | None:
    """The connections of a cluster's devices: as usual for the device, except for what the cluster gives.

    Raises InvalidInput where the network is unknown, and where the measured rate is above what it can reach.
    """
    joined = device.fabric
    if joined is None:
        return None
    if cluster.devices_per_node is not None:
        joined = replace(joined, devices_per_node=cluster.devices_per_node)
    if cluster.network is not None:
        joined = replace(joined, network=link(cluster.network))
    if cluster.network_bytes_per_second is not None:
        of = joined.network or link("ndr")  # latencies of InfiniBand where no network is named
        rate = float(cluster.network_bytes_per_second)
        joined = replace(joined, network=replace(of, bytes_per_second=rate))
    if cluster.network_reached_bytes_per_second is not None:
        of = joined.network or link("ndr")
        reached = float(cluster.network_reached_bytes_per_second)
        _refuse_rate_of_node(cluster, joined, of)
        sheet = max(reached, of.bytes_per_second)  # a data sheet below the measured rate is no bound
        joined = replace(joined, network=replace(of, bytes_per_second=sheet, share=reached / sheet, basis="measured"))
    return joined


def _refuse_rate_of_node(cluster: Cluster, joined: Fabric, network: Link) -> None:
    """Raises InvalidInput where the measured rate is a node's instead of a device's.

    With reductions in the switch an all-reduce reaches up to twice the rate of a link.
    """
    reached, carries = cluster.network_reached_bytes_per_second or 0, network.bytes_per_second
    if reached <= 2 * carries:
        return
    source = "cluster.network_bytes_per_second" if cluster.network_bytes_per_second else network.title
    rule = (
        f"is more than twice the {format_nbytes(carries)}/s that a device has of its network ({source}); of the bus "
        f"bandwidth of a node it is the part of one of its {counted(joined.devices_per_node, 'device')}"
    )
    near = min(reached // joined.devices_per_node, int(carries))
    raise InvalidInput([Problem("cluster.network_reached_bytes_per_second", reached, rule, near)])


def _fabric(node: dict[str, Any]) -> Fabric:
    return Fabric(
        devices_per_node=node["devices"],
        node=link(node["link"]),
        network=link(node["network"]) if "network" in node else None,
        host=_host(node["host"]) if "host" in node else None,
    )


def _host(name: str) -> Link:
    """A link to the host's memory, with the share that copies reach, undisturbed by other devices."""
    joined = _link(name, entry := _entry("links", name, "host"))
    share, bandwidth = entry.get("host_share", joined.share), parse_nbytes(entry["host_memory_bandwidth"])
    return replace(joined, share=share, memory_bytes_per_second=bandwidth)


def _protocols(hardware: str) -> tuple[Protocol, ...]:
    return tuple(Protocol(name=name, **entry) for name, entry in _table("protocols.toml")[hardware].items())


def overheads() -> dict[str, Overhead]:
    """Memory of a device outside tensors by name, each with its source.

    >>> overheads()["cublas_workspace"].nbytes
    8519680
    """
    return {
        name: Overhead(
            name=name,
            what=entry["what"],
            source=entry["source"],
            date=str(entry["date"]),
            nbytes=parse_nbytes(entry["nbytes"]) if isinstance(entry.get("nbytes"), str) else entry.get("nbytes", 0),
            share=entry.get("share", 0.0),
        )
        for name, entry in _table("overheads.toml").items()
    }


def published(device_name: str) -> tuple[Published, ...]:
    """Published figures of runs on a device: interruptions, restarts, storage; each with its source.

    >>> [round(each.value) for each in published("h100-sxm") if each.name == "mtbf_device_hours"]
    [50677]
    """
    return tuple(
        Published(figure["name"], figure["value"], figure["what"], figure["source"], str(figure["date"]))
        for figure in _table("reliability.toml")["published"]
        if device_name in figure.get("devices", (device_name,))
    )


def published_runs() -> tuple[str, ...]:
    """The table of published runs and their predictions, a line each, the names of columns first.

    Tabs separate the columns; `forecast.plan.published` reads them.
    """
    return _lines("published.tsv")


@cache
def published_sources() -> dict[str, str]:
    """The sources that the column ``source`` of `published_runs` numbers."""
    return dict(line.split("\t") for line in _lines("published_sources.tsv")[1:])


@cache
def _lines(name: str) -> tuple[str, ...]:
    with open(os.path.join(_HERE, name), encoding="utf-8") as file:
        return tuple(file.read().splitlines())


@frozen
class TrainedModel:
    """A published model: the parameters that take part in a token's forward, and the tokens that it was trained on."""

    title: str
    parameters: int
    tokens: int
    source: str


def trained_models() -> tuple[TrainedModel, ...]:
    """Published models and the tokens that they were trained on.

    >>> [each.tokens for each in trained_models() if each.title == "Chinchilla 70B"]
    [1400000000000]
    """
    return tuple(TrainedModel(**record) for record in _table("trained_models.toml")["model"])


def scaling_laws() -> dict[str, dict[str, Any]]:
    """The published scaling laws by name, each with its coefficients and its source.

    >>> scaling_laws()["besiroglu"]["alpha"]
    0.3478
    """
    return deepcopy(_table("scaling_laws.toml"))


def critical_batch() -> dict[str, dict[str, Any]]:
    """The published laws of the critical batch by name, each with its coefficients and its source.

    >>> critical_batch()["kaplan"]["loss_exponent"]
    4.8
    """
    return deepcopy(_table("critical_batch.toml"))


@cache
def _names(kind: str) -> tuple[str, ...]:
    files = (name for name in os.listdir(os.path.join(_HERE, kind)) if name.endswith(".toml"))
    return tuple(sorted(name.removesuffix(".toml") for name in files))


def _entry(kind: str, name: str, field: str) -> dict[str, Any]:
    name = known_as(name, _names(kind), field)  # looked up in the listing, so that it can never be a path
    entry = deepcopy(_table(kind, f"{name}.toml"))  # a caller may change its copy
    missing = [key for key in _NEEDED.get(kind, ()) if key not in entry]
    if missing:
        raise InvalidInput([Problem(field, name, f"catalog/{kind}/{name}.toml has no {', no '.join(missing)}")])
    return entry


@cache
def _table(*path: str) -> dict[str, Any]:
    """The table in a file of the catalog, the same for all who ask."""
    with open(os.path.join(_HERE, *path), "rb") as file:
        return tomllib.load(file)
