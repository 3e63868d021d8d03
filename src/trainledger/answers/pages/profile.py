"""The document of a profiler's recording: where a step's time went, what its kernels reached, what is doubtful."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from trainledger.answers.pages.plain_data import plain
from trainledger.answers.pages.profile_figures import figures
from trainledger.observe.profiler.causes import MeasuredBar
from trainledger.observe.profiler.profile import Profile
from trainledger.report.document import Bars, Document, Facts, Item, Items, Table, notes, section, sections, shown
from trainledger.spec.units import (
    NANOSECONDS_PER_SECOND,
    format_count,
    format_flops_per_second,
    format_nbytes,
    format_percent,
)

_CAUSES = 4
_ROWS, _ROWS_OF_A_PAGE = 12, 100
_LONGEST_NAME, _LONGEST_BAR = 60, 43


def document(found: Profile, *, most: int = _ROWS) -> Document:
    """Steps, parts of the median one, its kernels, matmuls and collectives, and what the recording cannot say.

    Tables have ``most`` rows.
    """
    step = found.step
    length = max(step.nanoseconds, 1)
    parts = Table(
        "parts",
        ("of the time of a step", "time", "share", "shortest", "longest"),
        tuple(
            (name, each, each / length, *_range(found, name))
            for name, each in step.parts_ns.items()
            if any(_range(found, name))
        ),
        ("", "nanoseconds", "share", "nanoseconds", "nanoseconds"),
    )
    kernels = Table(
        "kernels",
        ("kernel", "kind", "runs", "time", "share"),
        tuple(
            (short_name(each.name, _room(most)), each.kind, each.count, each.nanoseconds, each.nanoseconds / length)
            for each in found.kernels[:most]
        ),
        ("", "", "count", "nanoseconds", "share"),
    )
    matmuls = Table(
        "matmuls",
        ("kind", "shape", "format", "runs", "time", "speed", "of peak", "again"),
        tuple(_matmul(found, most)),
        ("", "", "", "count", "nanoseconds", "flops_per_second", "share", ""),
    )
    sent = Table(
        "collectives",
        ("collective", "elements", "format", "ranks", "runs", "time"),
        tuple(
            (each.collective, each.elements_in, each.dtype, each.ranks, each.count, each.nanoseconds)
            for each in found.collectives[:most]
        ),
        ("", "count", "", "count", "count", "nanoseconds"),
    )
    return Document(
        title=f"{found.path}: where the time of a step went",
        sections=sections(
            Facts(tuple(_facts(found))),
            section(_step_title(found), Bars(tuple(short_bars(found.waterfall))), parts),
            section("Where to look first", causes_of(found)) if found.causes else None,
            section("Kernels", kernels) if found.kernels else None,
            section("Matmuls", matmuls) if found.matmuls else None,
            section("Collectives", sent) if found.collectives else None,
            notes(found.doubts),
        ),
        data=lambda: _data(found),
        figures=lambda: figures(found, found.waterfall),
    )


def short_bars(bars: Iterable[MeasuredBar]) -> Iterator[tuple[str, int]]:
    """Bars of a waterfall with names that a terminal has room for."""
    for each in bars:
        yield short_name(each.title, _LONGEST_BAR), each.nanoseconds


def _step_title(found: Profile) -> str:
    count = len(found.steps)
    return f"Step {found.step.step.name}" + (f", the median of {count}" if count > 1 else "")


def short_name(name: str, most: int = _LONGEST_NAME) -> str:
    """The name of a kernel without what all names have: namespaces, and the arguments of the function."""
    for common in ("void ", "at::native::", "(anonymous namespace)::", "pytorch_flash::"):
        name = name.replace(common, "")
    return name if len(name) <= most else f"{name[: most - 3]}..."


def _room(most: int) -> int:
    """Characters of a kernel's name: a page with all rows has room for more."""
    return _LONGEST_NAME if most < _ROWS_OF_A_PAGE else 5 * _LONGEST_NAME


def _range(found: Profile, name: str) -> tuple[int, int]:
    every = [each.parts_ns[name] for each in found.steps]
    return min(every), max(every)


def _facts(found: Profile) -> Iterator[tuple[str, str]]:
    if found.device_name:
        known = f" ({found.device.title})" if found.device is not None else ", which the catalog does not know"
        yield "device", found.device_name + known
    if found.rank is not None:
        yield "rank", f"{found.rank}" + (f" of {found.ranks}" if found.ranks else "")
    lengths = [each.nanoseconds for each in found.steps]
    some = ", ".join(shown(each, "nanoseconds") for each in lengths[:_ROWS])
    yield "steps", f"{format_count(len(lengths))}, found by {found.found_by}: {some}"
    step = found.step
    busy = format_percent(step.busy_ns / max(step.nanoseconds, 1))
    yield "busy", f"{busy} of the step" + ("" if found.on_device else " in operators")
    if step.communication_ns:
        hidden = format_percent(step.overlapped_ns / step.communication_ns)
        yield (
            "communication",
            f"{shown(step.communication_ns, 'nanoseconds')}, of which {hidden} lie beside computation",
        )
    if found.flops:
        rate = format_flops_per_second(found.flops * NANOSECONDS_PER_SECOND / max(step.nanoseconds, 1))
        share = (
            "" if found.mfu is None else f", MFU {format_percent(found.mfu)}, HFU {format_percent(found.hfu or 0.0)}"
        )
        yield "speed", f"{rate}{share} (matmuls, attention and convolutions whose shapes are known)"
    if found.memory is not None:
        yield "memory", f"{format_nbytes(found.memory.peak_nbytes)} at the most in the step, of PyTorch's allocator"
    if found.flops > found.model_flops:
        yield (
            "recomputed",
            f"{format_percent(1 - found.model_flops / found.flops)} of these FLOPs, which MFU leaves out",
        )


def causes_of(found: Profile, most: int = _CAUSES) -> Items:
    """What is most at stake: a sentence each, and the change in code."""
    length = max(found.step.nanoseconds, 1)
    return Items(
        tuple(
            Item(f"{each.name}, {format_percent(each.nanoseconds / length)} of the step: {each.sentence}", each.code)
            for each in found.causes[:most]
        )
    )


def _matmul(found: Profile, most: int) -> Iterator[tuple[Any, ...]]:
    peaks = {} if found.device is None else found.device.peak_flops_per_second
    for each in found.matmuls[:most]:
        speed, peak = each.flops_per_second, peaks.get(each.dtype)
        share = None if speed is None or peak is None else speed / peak
        again = "recomputed" if each.recomputed else ""
        yield each.kind, each.shape, each.dtype, each.count, each.nanoseconds, speed, share, again


def _data(found: Profile) -> dict[str, Any]:
    step = found.step
    return {
        "path": found.path, "device": found.device.name if found.device else None, "device_name": found.device_name,
        "rank": found.rank, "ranks": found.ranks, "steps_found_by": found.found_by,
        "steps": [
            {"name": each.step.name, "nanoseconds": each.nanoseconds, "parts_ns": dict(each.parts_ns)}
            for each in found.steps
        ],
        "step": step.step.name, "step_seconds": step.nanoseconds / NANOSECONDS_PER_SECOND,
        "parts_ns": dict(step.parts_ns), "waterfall": plain(list(found.waterfall)),
        "busy_ns": step.busy_ns, "communication_ns": step.communication_ns, "overlapped_ns": step.overlapped_ns,
        "flops": found.flops, "model_flops": found.model_flops, "mfu": found.mfu, "hfu": found.hfu,
        "kernels": plain(list(found.kernels)),
        "matmuls": plain(list(found.matmuls), more={type(each): ("flops_per_second",) for each in found.matmuls}),
        "collectives": plain(list(found.collectives)), "causes": plain(list(found.causes)),
        "doubts": list(found.doubts), "memory": plain(found.memory),
    }  # fmt: skip
