"""What may mend a run that does not fit: changes of its fields, each as a button sets them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

from trainledger.forecast.plan.changes import memory_savings, value_of
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.interval import EVEN
from trainledger.ledger.model.parameters import parameters
from trainledger.spec.run import Run
from trainledger.spec.run_text import as_override
from trainledger.spec.units import format_nbytes
from trainledger.web.calculator import Remedy
from trainledger.web.field import CONFIG, FILE, RUN, Query, declared
from trainledger.web.run import words_of

_NODE, _MOST = 8, 4096  # devices
_LORA = {"recipe.lora.rank": "16", "recipe.precision": "bf16"}
_OF_THE_RUN = (CONFIG, FILE, "recipe.seq_len")


def too_large(forecast: Forecast) -> str:
    """The sentence of a run that does not fit; empty where it does, and where nobody knows."""
    if forecast.fits is not False or forecast.device_nbytes is None or forecast.usable_nbytes is None:
        return ""
    needed, usable = forecast.device_nbytes, forecast.usable_nbytes
    return (
        f"Does not fit: a device needs {format_nbytes(needed)} and has {format_nbytes(usable)} usable: "
        f"{format_nbytes(needed - usable)} short."
    )


def likely(forecast: Forecast) -> bool:
    """Whether a run that fits by the prediction does so rather than not."""
    return forecast.as_likely_as(EVEN)


def that_fit(run: Run, forecast: Forecast, query: Query) -> tuple[Remedy, ...]:
    """What needs less memory in a layout whose axes are given: each change alone, all together, and another layout."""
    if not too_large(forecast) and likely(forecast):
        return ()
    # Of frozen weights that are a small part of the memory, FSDP2's buffers take more than sharing them saves.
    few = run.recipe.lora is not None and 8 * parameters(run.model).total < (forecast.usable_nbytes or 0)
    ranks = 0 if few else _enough(forecast, run.layout.shard)
    spread = {} if not ranks else {f"Shard over {ranks:,} ranks (FSDP)": {"layout.shard": str(ranks)}}
    remedies = [*_together(dict(_savings(run)) | spread)]
    if run.layout.alone and run.recipe.lora is None:
        remedies.append(Remedy(title="Train adapters alone (LoRA, rank 16)", fields=_LORA))
    if ranks:
        remedies.append(_search(query, run.cluster.count * ranks // run.layout.shard))
    return tuple(remedies)


def that_fit_devices(run: Run, forecast: Forecast, query: Query, count: str) -> tuple[Remedy, ...]:
    """What needs less memory where parameters are sharded over the devices; ``count`` is the field of their number."""
    if not too_large(forecast):
        return ()
    savings = {title: kept for title, each in _savings(run) if (kept := _but_layout(each))}
    devices = _enough(forecast, run.cluster.count)
    spread = {f"Take {devices:,} devices": {count: str(devices)}} if devices else {}
    searched = [_search(query, devices or run.cluster.count)]
    return (*_together(savings | spread), *searched)


def _savings(run: Run) -> Iterator[tuple[str, dict[str, str]]]:
    """Changes that leave the result as it is, each with the fields that it sets to another value."""
    for change in memory_savings(run):
        fields = dict(
            as_override(name, value).split("=", 1) for name, value in change.fields if value_of(run, name) != value
        )
        if fields:
            yield f"{change.what[0].upper()}{change.what[1:]}", fields


def _but_layout(fields: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in fields.items() if not name.startswith("layout.")}


def _together(each: Mapping[str, Mapping[str, str]]) -> Iterator[Remedy]:
    """Every change alone, then all of them."""
    yield from (Remedy(title=title, fields=fields) for title, fields in each.items())
    if len(each) > 1:
        together = {name: text for fields in each.values() for name, text in fields.items()}
        yield Remedy(title="All of these together", fields=together)


def _enough(forecast: Forecast, now: int) -> int:
    """A power of two of ranks, at least a node, among which the bytes of a device would be few enough; 0: too many."""
    assert forecast.device_nbytes is not None
    assert forecast.usable_nbytes is not None
    wanted = max(_NODE, 2 * now, ceil(now * forecast.device_nbytes / forecast.usable_nbytes))
    ranks = 1 << (wanted - 1).bit_length()
    return ranks if ranks <= _MOST else 0


def _search(query: Query, devices: int) -> Remedy:
    """The same run in the calculator of layouts."""
    device = query["device" if "device" in query.fields else "cluster.device"]
    own = {name: text for name, text in query.given.items() if name in _OF_THE_RUN or name.startswith("model.")}
    fields = {RUN: query[RUN]} | own | {"cluster.device": device, "cluster.count": str(devices)}
    asked = Query(fields, {field.name: field for field in declared("shared", {}, None) if "." not in field.name})
    return Remedy(
        title=f"Search the layouts of {devices:,} devices",
        fields=fields,
        calculator="layouts",
        command=words_of("layouts", asked),
    )
