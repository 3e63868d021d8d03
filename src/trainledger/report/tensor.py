"""Tensors and their products for a terminal of 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainledger.dtypes import BLOCK_FORMATS
from trainledger.predict.roofline import NoRate, peak_rate
from trainledger.report.table import sentence, table, wrapped
from trainledger.units import GIB, GIGA, KIB, KILO, MEGA, MIB, format_flops, format_nbytes, format_seconds

if TYPE_CHECKING:
    from trainledger.explain.einsum import Einsum
    from trainledger.explain.tensor import Tensor
    from trainledger.predict.roofline import Machine

_UNITS = (("kB", KILO), ("KiB", KIB), ("MB", MEGA), ("MiB", MIB), ("GB", GIGA), ("GiB", GIB))


def shape_text(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def tensor(one: Tensor) -> str:
    """One tensor: bytes in every unit, its layout, and what an operation on each element costs."""
    rows = [
        ["elements", f"{one.elements:,}"],
        ["bytes", f"{one.nbytes:,}"],
        *([unit, f"{one.nbytes / size:,.6g}"] for unit, size in _UNITS if size / 100 <= one.nbytes < 10_000 * size),
        ["strides in elements", shape_text(one.strides)],
        ["elementwise FLOPs", f"{one.elementwise_flops:,}"],
        ["FLOPs per byte", f"{one.elementwise_intensity:.4g}"],
    ]
    if one.dtype in BLOCK_FORMATS:
        block = BLOCK_FORMATS[one.dtype]
        rows.insert(2, ["of them scales", f"{block.scale_nbytes_for(one.elements):,}"])
    notes = "Row-major. Elementwise: one operation on each element (ReLU, a square), the tensor read, one written."
    head = f"{one.dtype}{shape_text(one.shape)}"
    return "\n".join([table([head, ""], rows, align="lr"), "", wrapped(notes)])


def tensor_to_json(one: Tensor) -> dict[str, Any]:
    return {
        "dtype": one.dtype, "shape": one.shape, "elements": one.elements, "nbytes": one.nbytes, "strides": one.strides,
        "elementwise": {
            "flops": one.elementwise_flops, "nbytes": one.elementwise_nbytes, "intensity": one.elementwise_intensity,
        },
    }  # fmt: skip


def einsum(one: Einsum, machine: Machine | None) -> str:
    """One product: its steps, its totals, and what bounds it on a device."""
    operands = " and ".join(shape_text(each) for each in _operands(one))
    parts = [wrapped(f"{one.equation}: {operands} to {shape_text(one.shape)} in {one.dtype}")]
    if len(one.steps) > 1:
        steps = [
            [str(number), each.equation, shape_text(each.shape), f"{each.flops:,}"]
            for number, each in enumerate(one.steps, start=1)
        ]
        parts.append(table(["step", "product", "gives", "FLOPs"], steps, align="rllr"))
    rows = [
        ["FLOPs", f"{one.flops:,}", format_flops(one.flops)],
        ["bytes moved", f"{one.nbytes:,}", format_nbytes(one.nbytes)],
        ["FLOPs per byte", f"{one.intensity:.4g}", ""],
    ]
    if len(one.steps) > 1:
        rows.insert(1, ["all at once", f"{one.at_once_flops:,}", format_flops(one.at_once_flops)])
    parts.append(table(["", "", ""], rows, align="lrr").split("\n", 2)[2])
    if machine is not None:
        parts.append(wrapped(_bound(one, machine)))
    return "\n\n".join(parts)


def _operands(one: Einsum) -> list[tuple[int, ...]]:
    return [tuple(one.sizes[each] for each in indices) for indices in one.equation.partition("->")[0].split(",")]


def _bound(one: Einsum, machine: Machine) -> str:
    try:
        compute, move = one.seconds(machine)
    except NoRate as reason:
        return sentence(f"no time: {reason}")
    bandwidth = machine.memory_bytes_per_second
    assert bandwidth is not None
    ridge = peak_rate(machine, one.dtype) / bandwidth
    which = "memory" if move > compute else "compute"
    return (
        f"On {machine.title} at least {format_seconds(max(compute, move))}, {which}-bound: {format_seconds(compute)} "
        f"to compute, {format_seconds(move)} to move; the ridge point of {one.dtype} is {ridge:.4g} FLOP/byte."
    )


def einsum_to_json(one: Einsum, machine: Machine | None) -> dict[str, Any]:
    """A product in figures; seconds are null without a device or a rate."""
    found: dict[str, Any] = {
        "equation": one.equation, "sizes": one.sizes, "dtype": one.dtype, "shape": one.shape, "flops": one.flops,
        "at_once_flops": one.at_once_flops, "nbytes": one.nbytes, "intensity": one.intensity,
        "steps": [vars(each) for each in one.steps], "compute_seconds": None, "memory_seconds": None,
    }  # fmt: skip
    if machine is not None:
        try:
            found["compute_seconds"], found["memory_seconds"] = one.seconds(machine)
        except NoRate as reason:
            found["note"] = str(reason)
    return found
