"""The catalog: its models, devices and links in tables, and one of them with all that is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from trainledger import catalog as known
from trainledger.answers.copies import table as copies_of
from trainledger.answers.question import question, word
from trainledger.catalog.host_copies import host_copies
from trainledger.forecast.plan.napkin import short
from trainledger.report.document import Cell, Document, Table, sections
from trainledger.spec.plain import to_plain

KINDS = ("models", "devices", "links")


@question(plots=False)
def catalog(
    what: Annotated[str | None, word("models, devices, links, or the name of one of them (all)")] = None,
) -> Document:
    """List the models, devices and links that are known by name, each with its source."""
    if what is None or what in KINDS:
        return of_kinds([what] if what else KINDS)
    names = [*known.model_names(), *known.device_names(), *known.link_names()]
    return of_one(known.known_as(what, names, "name"))


def of_kinds(kinds: Sequence[str]) -> Document:
    """A table of each kind; in JSON all that the catalog says of each."""
    entries = {kind: {name: _entry(name) for name in _NAMES[kind]()} for kind in kinds}
    made = {"models": _models, "devices": _devices, "links": _links}
    tables = (made[kind](entry) for kind, entry in entries.items())
    return Document("The catalog", sections(*tables), data=lambda: entries)


def of_one(name: str) -> Document:
    """All that the catalog says of a model, a device or a link; of a device also its ridge points."""
    entry = _entry(name)
    rows = tuple((key, _cell(key, value)) for key, value in entry.items() if value)
    peaks = _peaks(name) if name in known.device_names() else None
    copies, found = copies_of(name), host_copies().get(name)
    if found is not None:
        entry = entry | {"host_copies": found["copies"], "host_copies_source": found["source"]}
        rows += (("host copies", f"{found['source']} ({found['date']})"),)
    return Document(
        name, sections(Table(name, (name, ""), rows, align="ll"), peaks, copies), data=lambda: {name: entry}
    )


_NAMES = {"models": known.model_names, "devices": known.device_names, "links": known.link_names}


def _entry(name: str) -> dict[str, Any]:
    if name in known.model_names():
        return known.model_entry(name)
    entry: dict[str, Any] = to_plain(known.device(name) if name in known.device_names() else known.link(name))
    return entry


# Two sizes of a device, of which the second may be the larger: GB of a data sheet may be GiB.
_SIZES = {
    "memory_nbytes": "by the data sheet, whose GB may be GiB",
    "usable_nbytes": "the total that PyTorch reports: a run's memory, its CUDA context and vLLM's share are of it",
}


def _cell(key: str, value: Any) -> str:
    if key == "errors":
        return _errors(value)
    return f"{_plain(value)} ({_SIZES[key]})" if key in _SIZES else _plain(value)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        if {"name", "value", "what"} <= value.keys():
            return f"{value['name']} = {short(value['value'])} ({value['what']}; {value['source']})"
        short_of = value.get("name") or value.get("what")  # what has a name is named: its parts are in --json
        return str(short_of) if short_of else ", ".join(f"{key} = {_plain(each)}" for key, each in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(_plain(each) for each in value)
    return short(value) if isinstance(value, float) else str(value)


def _errors(errors: dict[str, Any]) -> str:
    """What predictions of a step were off by; the rest is in JSON."""
    step = errors["step"]
    usual = next(each for each in step["classes"] if each["devices"] == 8)
    return (
        f"four of five of {step['rows']} published steps ({step['sources']} sources) took {usual['low']:.3g} to "
        f"{usual['high']:.3g} times the prediction on 2 to 8 devices (--json has other classes, and memory's errors)"
    )


def _peaks(name: str) -> Table:
    """Each dense peak, its ratio to fp32's, and the ridge point: FLOPs per byte above which compute is the limit."""
    device = known.device(name)
    peaks, bandwidth = device.peak_flops_per_second, device.memory_bytes_per_second
    rows = tuple(
        (
            dtype,
            peak,
            f"{peak / peaks['fp32']:.4g} x" if "fp32" in peaks else "",
            "" if bandwidth is None else f"{peak / bandwidth:.4g}",
        )
        for dtype, peak in sorted(peaks.items(), key=lambda peak: peak[1])
    )
    columns = ("dtype", "dense peak", "of fp32", "ridge point, FLOP/byte")
    return Table("peaks", columns, rows, units=("", "flops_per_second"), align="lrrr")


def _models(entries: dict[str, dict[str, Any]]) -> Table:
    rows = []
    for name, entry in entries.items():
        fields, attention = entry["model"], entry["model"]["attention"]
        heads = f"{attention['n_heads']}/{attention.get('n_kv_heads', attention['n_heads'])}"
        layers, width, vocab, longest = (fields[each] for each in ("n_layers", "d_model", "vocab_size", "max_seq_len"))
        active = entry.get("active_parameters", "")  # where they are fewer
        rows.append(
            (name, entry["parameters"], active, layers, width, heads, fields["feed_forward"]["d_ff"], vocab, longest)
        )
    columns = ("model", "N", "active", "layers", "D", "heads/kv", "d_ff", "vocab", "T max")
    return Table("models", columns, tuple(rows), units=("", "count", "count"), align="lrrrrrrrr")


def _devices(entries: dict[str, dict[str, Any]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, entry in entries.items():
        peaks = entry["peak_flops_per_second"]
        best = "bf16" if "bf16" in peaks else "fp16"
        power = f"{entry['power_watts']:.0f} W" if "power_watts" in entry else ""
        rows.append((name, peaks[best], best, entry["memory_nbytes"], entry["memory_bytes_per_second"], power))
    columns = ("device", "dense peak", "dtype", "memory", "bandwidth", "power")
    units = ("", "flops_per_second", "", "nbytes", "nbytes_per_second")
    return Table("devices", columns, tuple(rows), units=units, align="lrlrrr")


def _links(entries: dict[str, dict[str, Any]]) -> Table:
    rows = tuple(
        (name, entry["bytes_per_second"], f"{entry['share']:.0%}", entry["title"]) for name, entry in entries.items()
    )
    units = ("", "nbytes_per_second")
    return Table("links", ("link", "one way", "reached", ""), rows, units=units, align="lrrl")
