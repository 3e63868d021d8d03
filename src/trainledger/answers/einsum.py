"""An einsum: its steps, its totals, and its time on devices with their tiles and waves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from trainledger import catalog
from trainledger.answers.pages.plain_data import named, plain
from trainledger.answers.question import question, text, word
from trainledger.answers.tensor import pattern, totals
from trainledger.forecast.predict.einsum_time import EinsumTime, Matmul, einsum_time
from trainledger.forecast.predict.kernel import Tiling
from trainledger.report.document import Cell, Content, Document, Table, sections
from trainledger.report.table import sentence
from trainledger.spec.device import Device
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import (
    counted,
    format_flops,
    format_flops_per_second,
    format_nbytes,
    format_percent,
    format_seconds,
)
from trainledger.tensors.chain import start_of
from trainledger.tensors.einops import is_pattern, read_sizes, rearranged
from trainledger.tensors.einsum import Einsum, Tensor, read_shape
from trainledger.tensors.einsum import einsum as costs_of
from trainledger.tensors.number import known_format
from trainledger.tensors.strided import list_text

MOST_DEVICES = 8


@question(intermixed=True, plots=False)
def einsum(
    equation: Annotated[str, word('such as "ij,jk->ik", or a pattern of einops such as "b (h d) -> b h d"')],
    shapes: Annotated[
        Sequence[str], word("of each operand, as 1024,512; or a size, as h=8", several=True, metavar="SHAPE")
    ] = (),
    *,
    reduce: Annotated[
        str | None, text("how dims that vanish become one number: mean, sum, max ...", metavar="HOW")
    ] = None,
    dtype: Annotated[str, text("format of all tensors")] = "fp32",
    device: Annotated[
        str | None, text("devices of the catalog, commas between them, whose peaks bound the time")
    ] = None,
) -> Document:
    """An einsum such as "ij,jk->ik" 1024,512 512,256: FLOPs, bytes, the cheapest order, and what bounds it.

    With --device also the predicted time, and what tiles and waves cost; several devices are shown side by side.

    Indices are letters, or words with spaces as in einops: "batch seq d_model, d_model d_ff -> batch seq d_ff". A
    pattern of einops on one tensor, such as "b (h d) t -> b h t d" 2,64,10 h=8, is read too: what it rearranges,
    repeats or, with --reduce, reduces, and whether that is a view or a copy.

    Raises `InvalidInput`.
    """
    words, sizes = read_sizes(list(shapes))
    operands = [read_shape(shape, f"shape {number}") for number, shape in enumerate(words, start=1)]
    name = known_format(dtype, "--dtype")
    if not is_pattern(equation, operands, sizes, reduce):
        one = costs_of(equation, operands, name)
        return page(one, () if device is None else einsum_times(one, devices_named(device, "--device")))
    if device is not None:
        rule = "bounds the time of an einsum; a pattern on one tensor moves bytes and is not timed"
        raise InvalidInput([Problem("--device", device, rule)])
    if len(operands) != 1:
        rule = f"is a pattern on one tensor, and {len(operands)} shapes are given"
        raise InvalidInput([Problem("equation", equation, rule)])
    return pattern(rearranged(start_of(Tensor(name, operands[0])), equation, sizes, reduction=reduce or ""))


def einsum_times(one: Einsum, devices: Iterable[Device]) -> tuple[EinsumTime, ...]:
    """The time of an einsum in its cheapest order on each device: its bound, and what is predicted.

    >>> from trainledger.tensors.einsum import einsum
    >>> one = einsum("mk,kn->mn", [(4096, 4096), (4096, 4096)], "bf16")
    >>> [(each.device, each.bound) for each in einsum_times(one, devices_named("h100-sxm, b200"))]
    [('h100-sxm', 'compute'), ('b200', 'compute')]
    """
    matmuls = [
        Matmul(
            step.matmul,
            one.dtype,
            step.flops,
            nbytes_in(step.read_elements, one.dtype),
            nbytes_in(step.written_elements, one.dtype),
        )
        for step in one.steps
    ]
    return tuple(einsum_time(matmuls, device) for device in devices)


def devices_named(text: str, field: str = "device") -> tuple[Device, ...]:
    """The devices of the catalog in a text, commas between them; raises `InvalidInput`."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if len(names) > MOST_DEVICES:
        rule = f"names {len(names)} devices, and {MOST_DEVICES} are compared at most"
        raise InvalidInput([Problem(field, text, rule, ",".join(names[:MOST_DEVICES]))])
    return tuple(catalog.device(name, field) for name in names)


def page(one: Einsum, times: Sequence[EinsumTime] = ()) -> Document:
    """An einsum: its steps, its totals, and what bounds it on devices (`einsum_times`)."""
    operands = " and ".join(map(list_text, one.operands))
    steps = tuple(
        (str(number), step.equation, list_text(step.shape), step.flops) for number, step in enumerate(one.steps, 1)
    )
    several = len(one.steps) > 1
    in_steps = Table("steps", ("step", "einsum", "gives", "FLOPs"), steps, units=("", "", "", "integer"), align="rllr")
    return Document(
        title=one.equation,
        verdict=_verdict(one, times),
        sections=sections(
            f"{one.equation}: {operands} to {list_text(one.shape)} in {one.dtype}",
            in_steps if several else None,
            totals(
                ("FLOPs", one.flops, format_flops(one.flops)),
                *([("all at once", one.at_once_flops, format_flops(one.at_once_flops))] if several else []),
                ("bytes moved", one.nbytes, format_nbytes(one.nbytes)),
                ("FLOPs per byte", f"{one.intensity:.4g}", ""),
            ),
            "No arithmetic: torch returns a view; bytes move only where the view is copied." if one.view else None,
            *(_timed(one, times[0]) if len(times) == 1 else [times_table(times)] if times else []),
        ),
        data=lambda: _data(one, times),
    )


def _verdict(one: Einsum, times: Sequence[EinsumTime]) -> str:
    """What it computes and moves, and what bounds it on a device."""
    work = "A view: no arithmetic" if one.view else f"{format_flops(one.flops)}, {format_nbytes(one.nbytes)} moved"
    bounds = "".join(f", {time.bound}-bound on {time.device}" for time in times[:2])
    return f"{work}{bounds}."


def _timed(one: Einsum, time: EinsumTime) -> Iterator[Content]:
    """An einsum's least time on a device and what limits it, what is predicted, and how it is cut."""
    compute, memory, bound = time.compute_seconds, time.memory_seconds, time.bound_seconds
    if compute is None or memory is None or bound is None:
        yield sentence(f"no time: {time.note}")
        return
    yield (
        f"On {time.title} at least {format_seconds(bound)}, {time.bound}-bound: {format_seconds(compute)} to compute, "
        f"{format_seconds(memory)} to move; the ridge point of {one.dtype} is {time.ridge:.4g} FLOP/byte."
    )
    if time.seconds is not None and time.flops_per_second is not None and time.peak_share is not None:
        rate = f"{format_flops_per_second(time.flops_per_second)}, {format_percent(time.peak_share)} of the peak"
        yield f"Predicted {format_seconds(time.seconds)} (assumed rates): {rate}."
        yield [cut_text(tiling) for tiling in time.tilings]
        yield causes_table(time)


def cut_text(cut: Tiling) -> str:
    """How a matmul is cut, as a sentence.

    >>> from trainledger.catalog import device
    >>> from trainledger.forecast.predict.einsum_time import matmul, einsum_time
    >>> print(cut_text(einsum_time([matmul((1, 4096, 4096, 4096), "bf16")], device("h100-sxm")).tilings[0]))
    512 tiles of 256 x 128 in 4 waves of 132 multiprocessors, which are 97.0 % busy; filled to 100.0 %.
    """
    inner = "" if cut.split == 1 else f", the inner length in {cut.split} parts,"
    waves = "waves that are assumed to be full"
    if cut.workers > 1:
        waves = (
            f"{counted(cut.waves, 'wave')} of {cut.workers} multiprocessors, which are {format_percent(cut.busy)} busy"
        )
    needed = f"filled to {format_percent(cut.filled)}"
    return f"{counted(cut.tiles, 'tile')} of {cut.rows} x {cut.columns}{inner} in {waves}; {needed}."


def causes_table(time: EinsumTime) -> Table:
    """What each cause adds to the time of the FLOPs at the peak, up to the predicted seconds."""
    rows = [(bar.cause, bar.seconds) for bar in time.bars if bar.nanoseconds]
    return Table("causes", ("cause", "time"), (*rows, ("in all", time.seconds)), units=("", "seconds"), align="lr")


def times_table(times: Sequence[EinsumTime]) -> Table:
    """Devices side by side: the bound, what limits it, and what is predicted with which tiles and waves."""
    rows: list[tuple[Cell, ...]] = []
    for time in times:
        waves = ", ".join(f"{cut.waves}" for cut in time.tilings)
        bound = time.bound or "no rate"
        rows.append((time.device, time.bound_seconds, bound, time.ridge, time.seconds, time.peak_share, waves))
    columns = ("device", "at least", "bound by", "ridge", "predicted", "of peak", "waves")
    return Table("devices", columns, tuple(rows), ("", "seconds", "", "amount", "seconds", "share"), align="lrlrrrr")


def _data(one: Einsum, times: Sequence[EinsumTime]) -> dict[str, Any]:
    """An einsum in figures; seconds are those of the first device, null without one or a rate."""
    from trainledger.forecast.predict.einsum_time import EinsumTime

    found = {**plain(one), **named(one, "shape flops nbytes intensity view")}
    found |= {"compute_seconds": None, "memory_seconds": None}
    if times:
        found |= named(times[0], "compute_seconds memory_seconds")
        found |= {"devices": plain(times, more={EinsumTime: ["bound_seconds", "peak_share"]})}
        if times[0].note:
            found["note"] = times[0].note
    return found
