"""List the models, devices and links that are known by name, each with its source."""

from __future__ import annotations

import argparse
from typing import Any

from trainledger import catalog
from trainledger.cli.arguments import add_json, print_json
from trainledger.plan.napkin import short
from trainledger.report.table import table
from trainledger.spec.plain import to_plain
from trainledger.units import format_count, format_flops_per_second, format_nbytes


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", help="models, devices, links, or the name of one of them (all)")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    lists = {"models": (models, _models), "devices": (devices, _devices), "links": (links, _links)}
    if args.what is None or args.what in lists:
        kinds = [args.what] if args.what else list(lists)
        if args.json:
            print_json({kind: lists[kind][0]() for kind in kinds})
        else:
            print("\n\n".join(lists[kind][1]() for kind in kinds))
        return 0
    known = [*catalog.model_names(), *catalog.device_names(), *catalog.link_names()]
    name = catalog.known_as(args.what, known, "name")
    if name in catalog.device_names():
        entry = _device(name)
    else:
        entry = to_plain(catalog.link(name)) if name in catalog.link_names() else catalog.model_entry(name)
    if args.json:
        print_json({name: entry})
    else:
        print(table([name, ""], [[key, _plain(value)] for key, value in entry.items() if value], align="ll"))
        if name in catalog.device_names():
            print("\n" + _peaks(name))
    return 0


def _plain(value: object) -> str:
    if isinstance(value, dict):
        if {"name", "value", "what"} <= value.keys():
            return f"{value['name']} = {short(value['value'])} ({value['what']}; {value['source']})"
        short_of = value.get("name") or value.get("what")  # what has a name is named: its parts are in --json
        return str(short_of) if short_of else ", ".join(f"{key} = {_plain(each)}" for key, each in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(_plain(each) for each in value)
    return short(value) if isinstance(value, float) else str(value)


def models() -> dict[str, Any]:
    """Every model with everything the catalog says of it."""
    return {name: catalog.model_entry(name) for name in catalog.model_names()}


def devices() -> dict[str, Any]:
    """Every device with everything the catalog says of it."""
    return {name: _device(name) for name in catalog.device_names()}


def links() -> dict[str, Any]:
    """Every link with everything the catalog says of it."""
    return {name: to_plain(catalog.link(name)) for name in catalog.link_names()}


def _device(name: str) -> dict[str, Any]:
    entry: dict[str, Any] = to_plain(catalog.device(name))
    return entry


def _peaks(name: str) -> str:
    """Each dense peak beside fp32's, and the ridge point: FLOPs per byte above which a device computes longer."""
    device = catalog.device(name)
    peaks, bandwidth = device.peak_flops_per_second, device.memory_bytes_per_second
    rows = [
        [dtype, format_flops_per_second(peak), f"{peak / peaks['fp32']:.4g} x" if "fp32" in peaks else "",
         "" if bandwidth is None else f"{peak / bandwidth:.4g}"]
        for dtype, peak in sorted(peaks.items(), key=lambda each: each[1])
    ]  # fmt: skip
    return table(["dtype", "dense peak", "of fp32", "ridge point, FLOP/byte"], rows, align="lrrr")


def _models() -> str:
    rows = []
    for name, entry in models().items():
        fields, attention = entry["model"], entry["model"]["attention"]
        heads = f"{attention['n_heads']}/{attention.get('n_kv_heads', attention['n_heads'])}"
        layers, width, vocab, longest = (fields[each] for each in ("n_layers", "d_model", "vocab_size", "max_seq_len"))
        sizes = (layers, width, heads, fields["feed_forward"]["d_ff"], vocab, longest)
        rows.append([name, format_count(entry["parameters"]), *map(str, sizes)])
    columns = ["model", "N", "layers", "d_model", "heads/kv", "d_ff", "vocab", "T max"]
    return table(columns, rows, align="lrrrrrrr")


def _devices() -> str:
    rows = []
    for name, entry in devices().items():
        peaks = entry["peak_flops_per_second"]
        best = "bf16" if "bf16" in peaks else "fp16"
        rows.append([
            name, format_flops_per_second(peaks[best]), best, format_nbytes(entry["memory_nbytes"]),
            format_nbytes(entry["memory_bytes_per_second"]) + "/s",
            f"{entry['power_watts']:.0f} W" if "power_watts" in entry else "",
        ])  # fmt: skip
    return table(["device", "dense peak", "dtype", "memory", "bandwidth", "power"], rows, align="lrlrrr")


def _links() -> str:
    rows = [
        [name, format_nbytes(entry["bytes_per_second"]) + "/s", f"{entry['share']:.0%}", entry["title"]]
        for name, entry in links().items()
    ]
    return table(["link", "one way", "reached", ""], rows, align="lrrl")
