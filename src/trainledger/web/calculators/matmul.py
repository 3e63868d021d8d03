"""Matmul and roofline: FLOPs, bytes, the bound on devices side by side, and what tiles and waves cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainledger.answers.einsum import causes_table, cut_text, devices_named, einsum_times, page, times_table
from trainledger.answers.pages.einsum_figures import (
    formats_chart,
    formats_table,
    roofline_chart,
    sweep_chart,
    sweep_table,
)
from trainledger.answers.pages.plan_figures import waterfall
from trainledger.forecast.plan.napkin import short
from trainledger.forecast.plan.quantity import read
from trainledger.forecast.predict.einsum_time import DIMS, EinsumTime, swept
from trainledger.spec.device import Device
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import counted, format_flops_per_second, format_percent, format_seconds, parse_count
from trainledger.tensors import einsum as einsums
from trainledger.tensors.einsum import Einsum, read_shape
from trainledger.tensors.number import known_format
from trainledger.web.calculator import PLAIN, UNKNOWN, Drawing, Headline, Progress, Reply, calculator, headline
from trainledger.web.field import Query

_SIDE_BY_SIDE = ("fp32", "bf16")
_MOST = 10**9  # of a size


def _reply(query: Query, progress: Progress) -> Reply:
    equation, words = _asked(query)
    dtype = known_format(query["dtype"], "dtype")
    shapes = [read_shape(word, f"shape {number}") for number, word in enumerate(words, start=1)]
    one = einsums.einsum(equation, shapes, dtype)
    devices = devices_named(query["device"])
    times = einsum_times(one, devices)
    return Reply(
        document=page(one, times),
        headlines=tuple(_headlines(one, times)),
        verdict=_verdict(one, times),
        tone=PLAIN if any(time.bound_seconds is not None for time in times) else UNKNOWN,
        drawings=tuple(_drawings(one, times, devices, query["sweep"])),
        values={},
        unused=_unused(query, one),
        words=("einsum", equation, *words, "--dtype", dtype, *(["--device", query["device"]] if devices else [])),
        python=_python(equation, shapes, dtype, query["device"]),
        notes=tuple(_notes(one, times)),
    )


def _asked(query: Query) -> tuple[str, list[str]]:
    """The equation and the shapes of its operands: those that are given, else those of m, n and k."""
    if query["equation"]:
        return query["equation"], query["shapes"].split()
    problems: list[Problem] = []
    m, n, k = (read(each, query[each], parse_count, problems, least=1, most=_MOST) for each in ("m", "n", "k"))
    if problems:
        raise InvalidInput(problems)
    return "mk,kn->mn", [f"{m},{k}", f"{k},{n}"]


def _unused(query: Query, one: Einsum) -> dict[str, str]:
    """The fields that do not count, with the reason."""
    if not query["equation"]:
        return {}
    found = dict.fromkeys(("m", "n", "k"), "the einsum is asked about")
    if len(one.steps) > 1 or one.steps[0].matmul is None:
        found["sweep"] = "the einsum is no single matmul"
    return found


def _verdict(one: Einsum, times: Sequence[EinsumTime]) -> str:
    first = next((time for time in times if time.bound_seconds is not None), None)
    if first is None:
        return f"{one.intensity:.4g} FLOPs per byte; " + (times[0].note if times else "no device is chosen")
    predicted = "" if first.seconds is None else f", {format_seconds(first.seconds)} predicted"
    return f"{first.device}: at least {format_seconds(first.bound_seconds or 0)}, {first.bound}-bound{predicted}"


def _headlines(one: Einsum, times: Sequence[EinsumTime]) -> Iterator[Headline]:
    for time in times[:1]:
        yield from _of_device(one, time)
    first = one.steps[0]
    shape = first.matmul if len(one.steps) == 1 else None
    terms = "the sum of its steps" if shape is None else "2 m n k" if shape[0] == 1 else "2 batch m n k"
    numbers = " + ".join(f"{step.flops:,}" for step in one.steps)
    if shape is not None:
        numbers = " x ".join(f"{each:,}" for each in (2, *(shape[1:] if shape[0] == 1 else shape)))
    yield headline("matmul.flops", one.flops, f"{terms} = {numbers} = {one.flops:,}")
    elements = " + ".join(f"{step.read_elements:,} + {step.written_elements:,}" for step in one.steps)
    formula = f"(elements read + written) in {one.dtype} = {elements} elements = {one.nbytes:,} B"
    yield headline("matmul.nbytes", one.nbytes, formula)
    formula = f"FLOPs / bytes = {one.flops:,} / {one.nbytes:,} = {one.intensity:.4g}"
    yield headline("matmul.intensity", one.intensity, formula)


def _of_device(one: Einsum, time: EinsumTime) -> Iterator[Headline]:
    if time.compute_seconds is None or time.memory_seconds is None:
        return
    peak, bandwidth = time.peak_flops_per_second or 0, time.memory_bytes_per_second or 0
    compute, memory = format_seconds(time.compute_seconds), format_seconds(time.memory_seconds)
    formula = (
        f"the longer of FLOPs / peak = {short(one.flops)} / {short(peak)} = {compute} and bytes / bandwidth = "
        f"{short(one.nbytes)} / {short(bandwidth)} = {memory}"
    )
    bound = headline("matmul.bound_seconds", time.bound_seconds, formula, device=time.device)
    if time.seconds is None or time.flops_per_second is None or time.peak_share is None:
        yield bound
        return
    terms = " + ".join(f"{format_seconds(bar.seconds)} ({bar.cause})" for bar in time.bars if bar.nanoseconds)
    formula = f"{terms} = {format_seconds(time.seconds)}, {format_percent(time.peak_share)} of the peak"
    yield headline("matmul.seconds", time.seconds, formula, device=time.device)
    yield bound
    formula = f"FLOPs / seconds / peak = {short(time.flops_per_second)} / {short(peak)}"
    yield headline("matmul.reached", time.peak_share, formula, device=time.device)
    for cut in time.tilings[:1]:
        numbers = f"{cut.tiles:,} x {cut.split} / {cut.workers} = {cut.waves:,}: {cut_text(cut)}"
        yield headline("matmul.waves", cut.waves, f"tiles x split / multiprocessors, rounded up = {numbers}")


def _drawings(one: Einsum, times: Sequence[EinsumTime], devices: Sequence[Device], dim: str) -> Iterator[Drawing]:
    known = [time for time in times if time.bound_seconds is not None]
    if known and one.intensity:
        title = "The matmul under the roof of each device"
        yield Drawing(chart=roofline_chart(one.intensity, known, title), table=times_table(times))
    if known and times[0].seconds is not None:
        formats = dict.fromkeys((*_SIDE_BY_SIDE, one.dtype), times)
        others = [dtype for dtype in formats if dtype != one.dtype]
        own = formats | {dtype: einsum_times(replace(one, dtype=dtype), devices) for dtype in others}
        title = f"The same in {', '.join(formats)}"
        yield Drawing(chart=formats_chart(own, title), table=formats_table(own))
    for time in times[:1]:
        if time.bars:
            title = f"What leads from the peak to the prediction on {time.title}"
            yield Drawing(chart=waterfall(time.bars, title), table=causes_table(time))
    shape = one.steps[0].matmul if len(one.steps) == 1 else None
    if shape is None or not dim:
        return
    found = {device.name: swept(shape, dim, one.dtype, device) for device in devices}
    sweeps = {name: each for name, each in found.items() if each}
    if sweeps:
        title = f"Predicted FLOP/s as {dim} grows: steps of tiles and waves"
        size = shape[DIMS.index(dim)]
        yield Drawing(chart=sweep_chart(sweeps, dim, size, title), table=sweep_table(sweeps, dim))


def _notes(one: Einsum, times: Sequence[EinsumTime]) -> Iterator[str]:
    for time in times:
        if time.note:
            yield f"{time.device}: {time.note}."
        elif time.seconds is None:
            yield f"{time.device}: nothing is predicted, as its efficiency is not known or a step is no matmul."
        else:
            rate = format_flops_per_second(time.flops_per_second or 0)
            yield f"{time.device}: {rate}; {' '.join(map(cut_text, time.tilings))}"
    if len(one.steps) > 1:
        yield f"The cheapest order of {counted(len(one.operands), 'operand')} is shown, in {len(one.steps)} steps."


def _python(equation: str, shapes: Sequence[tuple[int, ...]], dtype: str, devices: str) -> str:
    return (
        "from trainledger.answers.einsum import devices_named, einsum_times\n"
        "from trainledger.tensors.einsum import einsum\n\n"
        f"one = einsum({equation!r}, {list(shapes)!r}, {dtype!r})\n"
        "print(one.flops, one.nbytes, one.intensity)\n"
        f"print(*einsum_times(one, devices_named({devices!r})), sep=chr(10))"
    )


MATMUL = calculator("matmul", _reply)
