"""Products of tensors for a terminal of 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainledger.predict.roofline import NoRate, peak_rate
from trainledger.report.table import sentence, table, wrapped
from trainledger.report.tensor import chain, chain_to_json, shape_text
from trainledger.units import format_flops, format_nbytes, format_seconds

if TYPE_CHECKING:
    from trainledger.predict.roofline import Machine
    from trainledger.tensors.einops import Rearranged
    from trainledger.tensors.einsum import Einsum


def einsum(one: Einsum, machine: Machine | None) -> str:
    """One product: its steps, its totals, and what bounds it on a device."""
    operands = " and ".join(shape_text(each) for each in one.operands)
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
    if one.view:
        said = "No arithmetic: torch gives a view, and the bytes move only where a copy is made of it."
        parts.append(wrapped(said))
    if machine is not None:
        parts.append(wrapped(_bound(one, machine)))
    return "\n\n".join(parts)


def pattern(one: Rearranged) -> str:
    """A pattern of einops on one tensor: its sizes, its steps on torch, and what they cost."""
    result = one.result
    head = f"{one.pattern}: {one.chain.start.title} to {result.title} by {one.function}"
    sizes = ", ".join(f"{name} = {size:,}" for name, size in one.sizes.items())
    end = "A view: nothing is copied." if one.view else (
        f"Not a view: {format_nbytes(one.chain.written_nbytes)} are written, {one.chain.written_nbytes:,} bytes."
    )  # fmt: skip
    rows = [["FLOPs", f"{one.flops:,}", format_flops(one.flops)],
            ["bytes moved", f"{one.moved_nbytes:,}", format_nbytes(one.moved_nbytes)]]  # fmt: skip
    parts = [wrapped(head), wrapped(sizes), chain(one.chain, total=False), end]
    parts.append(table(["", "", ""], rows, align="lrr").split("\n", 2)[2])
    return "\n\n".join(each for each in parts if each)


def pattern_to_json(one: Rearranged) -> dict[str, Any]:
    """A pattern in figures, with its steps as those of a chain."""
    return {
        "pattern": one.pattern, "function": one.function, "sizes": one.sizes, "dtype": one.result.dtype,
        "shape": one.result.shape, "view": one.view, "flops": one.flops, "nbytes": one.moved_nbytes,
        **chain_to_json(one.chain, None),
    }  # fmt: skip


def _seconds(one: Einsum, machine: Machine) -> tuple[float, float]:
    """Least seconds to compute and to move, from the machine's peaks; NoRate where one is not known."""
    bandwidth = machine.memory_bytes_per_second
    if bandwidth is None:
        raise NoRate(f"{machine.title} has no memory bandwidth on record")
    return one.flops / peak_rate(machine, one.dtype), one.nbytes / bandwidth


def _bound(one: Einsum, machine: Machine) -> str:
    try:
        compute, move = _seconds(one, machine)
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
        "view": one.view, "operands": one.operands,
        "steps": [vars(each) for each in one.steps], "compute_seconds": None, "memory_seconds": None,
    }  # fmt: skip
    if machine is not None:
        try:
            found["compute_seconds"], found["memory_seconds"] = _seconds(one, machine)
        except NoRate as reason:
            found["note"] = str(reason)
    return found
