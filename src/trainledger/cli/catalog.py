"""List the models and devices that are known by name, each with its source."""

from __future__ import annotations

import argparse
from typing import Any

from trainledger import catalog
from trainledger.cli.arguments import add_json, print_json
from trainledger.plan.napkin import short
from trainledger.report.table import table
from trainledger.units import format_count, format_flops_per_second, format_nbytes


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", help="models, devices, or the name of one of them (all)")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    if args.what in (None, "models", "devices"):
        lists = {"models": (models, _models), "devices": (devices, _devices)}
        kinds = [args.what] if args.what else list(lists)
        if args.json:
            print_json({kind: lists[kind][0]() for kind in kinds})
        else:
            print("\n\n".join(lists[kind][1]() for kind in kinds))
        return 0
    name = catalog.known_as(args.what, [*catalog.model_names(), *catalog.device_names()], "name")
    entry = vars(catalog.device(name)) if name in catalog.device_names() else catalog.model_entry(name)
    if args.json:
        print_json({name: entry})
    else:
        print(table([name, ""], [[key, _plain(value)] for key, value in entry.items() if value], align="ll"))
    return 0


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} = {_plain(each)}" for key, each in value.items())
    if isinstance(value, tuple):
        return ", ".join(value)
    return short(value) if isinstance(value, float) else str(value)


def models() -> dict[str, Any]:
    """Every model with everything the catalog says of it."""
    return {name: catalog.model_entry(name) for name in catalog.model_names()}


def devices() -> dict[str, Any]:
    """Every device with everything the catalog says of it."""
    return {name: vars(catalog.device(name)) for name in catalog.device_names()}


def _models() -> str:
    rows = []
    for name, entry in models().items():
        fields = entry["model"]
        heads = f"{fields['n_heads']}/{fields.get('n_kv_heads', fields['n_heads'])}"
        sizes = [str(fields[each]) for each in ("n_layers", "d_model", "d_ff", "vocab_size", "max_seq_len")]
        rows.append([name, format_count(entry["parameters"]), sizes[0], sizes[1], heads, *sizes[2:]])
    columns = ["model", "N", "layers", "d_model", "heads/kv", "d_ff", "vocab", "T max"]
    return table(columns, rows, align="lrrrrrrr")


def _devices() -> str:
    rows = []
    for name, entry in devices().items():
        peaks = entry["peak_flops_per_second"]
        best = "bf16" if "bf16" in peaks else "fp16"
        rows.append([
            name, format_flops_per_second(peaks[best]), best, format_nbytes(entry["memory_nbytes"]),
            format_nbytes(entry["memory_bytes_per_second"]) + "/s", f"{entry['power_watts']:.0f} W",
        ])  # fmt: skip
    return table(["device", "dense peak", "dtype", "memory", "bandwidth", "power"], rows, align="lrlrrr")
