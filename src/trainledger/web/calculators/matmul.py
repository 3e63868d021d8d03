"""Matmul and roofline: FLOPs, bytes, the bound on devices side by side, and what tiles and waves cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainledger import catalog
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
from trainledger.web.calculator import PLAIN, UNKNOWN, Calculator, Drawing, Headline, Progress, Reply
from trainledger.web.field import Field, Query, one_of

_ROOFLINE = "Williams et al. 2009, Roofline: An Insightful Visual Performance Model"
_COUNTED = "2 FLOPs for a multiplication and an addition"
_MOVED = "each operand read once, the result written once"
_TILES = "NVIDIA, Matrix Multiplication Background User's Guide: tile and wave quantization"
_SIDE_BY_SIDE = ("fp32", "bf16")
_SIZES = (
    *("1", "8", "16", "32", "64", "128", "256", "512", "768", "1024", "1536", "2048", "3072", "4096", "5120", "6144"),
    *("8192", "11008", "12288", "14336", "16384", "28672", "32768", "50257", "50304", "65536", "128256", "131072"),
)
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
    yield Headline(
        name="flops", title="FLOPs", value=one.flops, unit="flops", basis="exact", source=_COUNTED,
        formula=f"{terms} = {numbers} = {one.flops:,}",
    )  # fmt: skip
    elements = " + ".join(f"{step.read_elements:,} + {step.written_elements:,}" for step in one.steps)
    yield Headline(
        name="nbytes", title="bytes moved", value=one.nbytes, unit="nbytes", basis="exact", source=_MOVED,
        formula=f"(elements read + written) in {one.dtype} = {elements} elements = {one.nbytes:,} B",
    )  # fmt: skip
    yield Headline(
        name="intensity", title="FLOPs per byte", value=one.intensity, unit="amount", basis="exact", source=_ROOFLINE,
        formula=f"FLOPs / bytes = {one.flops:,} / {one.nbytes:,} = {one.intensity:.4g}",
    )  # fmt: skip


def _of_device(one: Einsum, time: EinsumTime) -> Iterator[Headline]:
    if time.compute_seconds is None or time.memory_seconds is None:
        return
    peak, bandwidth = time.peak_flops_per_second or 0, time.memory_bytes_per_second or 0
    compute, memory = format_seconds(time.compute_seconds), format_seconds(time.memory_seconds)
    bound = Headline(
        name="bound_seconds", title=f"at least on {time.device}", value=time.bound_seconds, unit="seconds",
        formula=f"the longer of FLOPs / peak = {short(one.flops)} / {short(peak)} = {compute} and bytes / bandwidth = "
                f"{short(one.nbytes)} / {short(bandwidth)} = {memory}",
        basis="bound", source=_ROOFLINE,
    )  # fmt: skip
    if time.seconds is None or time.flops_per_second is None or time.peak_share is None:
        yield bound
        return
    terms = " + ".join(f"{format_seconds(bar.seconds)} ({bar.cause})" for bar in time.bars if bar.nanoseconds)
    yield Headline(
        name="seconds",
        title=f"predicted on {time.device}",
        value=time.seconds,
        unit="seconds",
        basis="assumed",
        formula=f"{terms} = {format_seconds(time.seconds)}, {format_percent(time.peak_share)} of the peak",
        source=_TILES,
    )
    yield bound
    yield Headline(
        name="reached",
        title=f"of the peak of {time.device}",
        value=time.peak_share,
        unit="share",
        basis="assumed",
        formula=f"FLOPs / seconds / peak = {short(time.flops_per_second)} / {short(peak)}",
        source=_TILES,
    )
    for cut in time.tilings[:1]:
        yield Headline(
            name="waves", title="waves of tiles", value=cut.waves, unit="integer", basis="assumed", source=_TILES,
            formula=f"tiles x split / multiprocessors, rounded up = {cut.tiles:,} x {cut.split} / {cut.workers} = "
                    f"{cut.waves:,}: {cut_text(cut)}",
        )  # fmt: skip


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


MATMUL = Calculator(
    name="matmul",
    title="Matmul and roofline",
    question="How long does a matmul take, what bounds it, and what do tiles and waves cost?",
    fields=(
        Field(name="m", title="m", default="4096", stops=_SIZES, about="rows of [m, k] @ [k, n]"),
        Field(name="n", title="n", default="4096", stops=_SIZES, about="columns of the result"),
        Field(name="k", title="k", default="4096", stops=_SIZES, about="the length that is summed over"),
        Field(name="dtype", title="dtype", default="bf16",
              choices=one_of(("bf16", "fp16", "fp32", "fp64", "e4m3", "e5m2", "mxfp8", "mxfp4", "nvfp4", "int8"))),
        Field(name="device", title="devices", default="h100-sxm,a100-sxm-80gb,b200",
              choices=one_of(catalog.device_names()), about="of the catalog, commas between them; the first in detail"),
        Field(name="sweep", title="grows", default="n", choices=one_of(("m", "n", "k")), strict=True,
              about="the size over which the last drawing goes"),
        Field(name="equation", title="einsum", group="Any einsum",
              about='in place of m, n and k: such as "bthd,bshd->bhts", or words as in einops'),
        Field(name="shapes", title="shapes", group="Any einsum",
              about="of the operands, with spaces between them: 8,1024,16,64 8,1024,16,64"),
    ),
    reply=_reply,
    presets={
        "A square matmul": {"m": "4096", "n": "4096", "k": "4096"},
        "A100 and H100 in fp32 and bf16": {"device": "a100-sxm-80gb,h100-sxm"},
        "One token of decoding: memory-bound": {"m": "1", "n": "4096", "k": "4096", "sweep": "m"},
        "A head of 50,257 columns, not aligned": {"m": "8192", "n": "50257", "k": "768"},
        "The same padded to 50,304": {"m": "8192", "n": "50304", "k": "768"},
        "One tile more than a wave": {"m": "4096", "n": "4352", "k": "4096", "device": "h100-sxm"},
        "Scores of attention": {"equation": "bthd,bshd->bhts", "shapes": "4,4096,32,128 4,4096,32,128"},
        "A chain, whose order decides": {"equation": "ab,bc,cd->ad", "shapes": "8192,64 64,8192 8192,64"},
    },
)  # fmt: skip
