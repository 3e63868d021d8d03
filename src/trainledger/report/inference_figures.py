"""The figures of a served model: what a larger batch takes, gives and holds."""

from __future__ import annotations

from collections.abc import Iterator
from math import log10
from typing import TYPE_CHECKING

from trainledger.document import Figure
from trainledger.predict.device_memory import of_a_device
from trainledger.report.inference import head, largest
from trainledger.report.style import COLOURS, GREY, arranged, mark
from trainledger.units import GIGA, KILO, format_nbytes

if TYPE_CHECKING:
    from trainledger.predict.serving import BatchRow, Inference

_BOUND, _EXPECTED = COLOURS[0], COLOURS[1]


def figures(told: Inference) -> dict[str, Figure]:
    """By title: the time of a forward and the tokens per second of each batch, where times are known, and its memory.

    Batches that do not fit have no times here; the first of them is drawn with what it would hold.
    """
    drawn: dict[str, Figure] = {}
    timed = [each for each in told.batches if each.time is not None and each.fits is not False]
    if timed:
        drawn["Batch and latency"] = _latency(told, timed)
        drawn["Latency and tokens per second"] = _throughput(told, timed)
    if told.batches:
        drawn["Batch and memory"] = _memory(told)
    return drawn


def about(told: Inference) -> list[str]:
    """What the page of the figures says above them: what is served, on what, and the largest batch."""
    lines = [f"{each}." for each in head(told)]
    if told.device:
        lines.append(f"On {told.device}.")
    if told.largest_batch is not None:
        lines.append(largest(told.largest_batch))
    return lines


def _curves(told: Inference, rows: list[BatchRow]) -> Iterator[tuple[str, str, list[float], list[float]]]:
    """The bound and the expectation, where there is one: name, colour, milliseconds and tokens per second."""
    times = [each.time for each in rows if each.time is not None]
    rates = [each.bound_tokens_per_second or 0.0 for each in rows]
    sheet = times[0].basis == "bound"
    least = "at least, by the data sheet" if sheet else "products and attention at measured rates"
    yield least, _BOUND, [each.bound_seconds * KILO for each in times], rates
    expected = [each.expected_seconds for each in times if each.expected_seconds is not None]
    if len(expected) == len(times):
        rates = [each.expected_tokens_per_second or 0.0 for each in rows]
        yield "expected", _EXPECTED, [each * KILO for each in expected], rates


def _latency(told: Inference, rows: list[BatchRow]) -> Figure:
    batches = [each.batch for each in rows]
    data = [
        {
            "type": "scatter", "mode": "lines+markers", "name": name, "showlegend": True, "x": batches,
            "y": milliseconds, "line": {"color": colour}, "customdata": rates,
            "hovertemplate": "batch %{x:,}: %{y:.4g} ms, %{customdata:,.4g} tokens/s<extra></extra>",
        }
        for name, colour, milliseconds, rates in _curves(told, rows)
    ]  # fmt: skip
    what = "one token of each sequence" if told.serving.phase == "decode" else "all tokens of all sequences"
    layout = arranged(f"{told.run.model.name}: {what}", "sequences at once", "milliseconds")
    apart = [each for each, after in zip(batches, [*batches[1:], 0], strict=True) if not each < after < 1.5 * each]
    layout["xaxis"] |= {"type": "log", "range": _room(batches), "tickvals": apart, "tickformat": ",d"}
    layout["yaxis"] |= {"rangemode": "tozero"}
    return {"data": data, "layout": layout}


def _throughput(told: Inference, rows: list[BatchRow]) -> Figure:
    places = ("top left", "bottom right")
    data = [
        {
            "type": "scatter", "mode": "lines+markers+text", "name": name, "x": milliseconds, "y": rates,
            "showlegend": True, "cliponaxis": False, "line": {"color": colour},
            "text": [f"{each.batch:,}" for each in rows], "textposition": places[at],
            "hovertemplate": "batch %{text}: %{x:.4g} ms, %{y:,.4g} tokens/s<extra></extra>",
        }
        for at, (name, colour, milliseconds, rates) in enumerate(_curves(told, rows))
    ]  # fmt: skip
    title = f"{told.run.model.name}: each point a batch"
    layout = arranged(title, "milliseconds of a forward", "tokens per second of all sequences")
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"rangemode": "tozero"}
    return {"data": data, "layout": layout}


def _memory(told: Inference) -> Figure:
    beyond = [at for at, each in enumerate(told.batches) if each.fits is False]
    rows = told.batches[: beyond[0] + 1] if beyond else told.batches
    names = [f"{each.batch:,}" for each in rows]
    parts = {
        "weights": [told.weights.nbytes for _ in rows],
        "cache": [each.cache_nbytes for each in rows],
        "activations and what stands around": [
            each.device_nbytes - each.cache_nbytes - told.weights.nbytes for each in rows
        ],
    }
    colours = (COLOURS[0], COLOURS[1], GREY)
    data = [
        {
            "type": "bar", "name": name, "x": names, "y": [each / GIGA for each in nbytes],
            "marker": {"color": colour}, "hovertemplate": "%{y:.3f} GB of " + name + "<extra>batch %{x}</extra>",
        }
        for (name, nbytes), colour in zip(parts.items(), colours, strict=True)
    ]  # fmt: skip
    layout = arranged(f"{told.run.model.name}: what is held", "sequences at once", "memory (GB)", barmode="stack")
    layout["xaxis"] |= {"type": "category"}
    layout["legend"] |= {"traceorder": "normal"}
    if told.memory is not None and told.memory.usable_nbytes is not None:
        usable = told.memory.usable_nbytes
        mark(layout, "h", usable / GIGA, f"{format_nbytes(usable)} {of_a_device(told.memory)}")
    return {"data": data, "layout": layout}


def _room(values: list[int]) -> list[float]:
    """The ends of a logarithmic axis with a little room on both sides, in powers of ten."""
    low, high = log10(min(values)), log10(max(values))
    room = max(high - low, 1.0) / 20
    return [low - room, high + room]
