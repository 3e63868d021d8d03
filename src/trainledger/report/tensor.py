"""A tensor, and a chain of operations on it, for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainledger.dtypes import BLOCK_FORMATS
from trainledger.report.table import sentence, table, wrapped
from trainledger.units import GIB, GIGA, KIB, KILO, MEGA, MIB, format_nbytes

if TYPE_CHECKING:
    from trainledger.tensors.strided import Chain, Strided
    from trainledger.tensors.tensor import Tensor

_UNITS = (("kB", KILO), ("KiB", KIB), ("MB", MEGA), ("MiB", MIB), ("GB", GIGA), ("GiB", GIB))


def shape_text(shape: Sequence[int]) -> str:
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


def chain(one: Chain, total: bool = True) -> str:
    """What each operation makes: where the elements lie, what it costs, and why; ``total`` adds what all write."""
    rows = [["", "", *_layout(one.start), format_nbytes(one.start.storage_nbytes)]]
    rows += [[str(number), _tight(each.word), *_layout(each.result), each.cost.removesuffix(", free")]
             for number, each in enumerate(one.steps, start=1)]  # fmt: skip
    if one.failure is not None:
        rows.append([str(len(rows)), _tight(one.failed), "", "", "", "", "", "fails"])
    columns, align = ["", "step", "gives", "stride", "offset", "contiguous", "storage", "cost"], "rlllrlll"
    if not any(each.result.offset for each in one.steps):
        columns, align, rows = [*columns[:4], *columns[5:]], "rllllll", [[*row[:4], *row[5:]] for row in rows]
    parts = [table(columns, rows, align=align)]
    if one.steps:
        why = [wrapped(f"{number} {each.word.partition('(')[0]}: {each.why}.")
               for number, each in enumerate(one.steps, start=1)]  # fmt: skip
        end = "lies over the storage of the first" if one.shares else "has a storage of its own"
        said = f"Copies and results write {one.written_nbytes:,} bytes; the last tensor {end}."
        parts += ["\n".join(why), *([wrapped(said)] if total else [])]
    return "\n\n".join(parts)


def _layout(one: Strided) -> list[str]:
    order = one.memory_format.replace("contiguous", "yes") or "no"
    return [_tight(one.title), _tight(shape_text(one.stride)), str(one.offset), order, _letter(one)]


def _tight(text: str) -> str:
    """Without spaces, so that columns stay narrow."""
    return text.replace(", ", ",")


def _letter(one: Strided) -> str:
    """A letter for the storage; numbers behind the alphabet."""
    return chr(ord("A") + one.storage) if one.storage < 26 else str(one.storage + 1)


def elements(one: Chain, index: Sequence[int], places: Sequence[int | None]) -> str:
    """Where ``tensor[index]`` lies at each step."""
    tensors = [one.start, *(each.result for each in one.steps)]
    words = ["at first", *(f"{number} {each.word}" for number, each in enumerate(one.steps, start=1))]
    rows = [
        [word, "no such index", ""] if place is None else
        [word, f"{place:,} of {_letter(each)}", f"{place * each.itemsize:,}"]
        for word, each, place in zip(words, tensors, places, strict=True)
    ]  # fmt: skip
    shown = table([f"element {shape_text(index)}", "in the storage", "byte"], rows, align="lrr")
    return "\n".join([shown, "", "Bytes are counted from the storage's first, whose address comes on top."])


def drawing(one: Strided, word: str) -> str:
    """A tensor drawn over its storage."""
    drawn = one.drawing()
    if drawn.startswith("no drawing"):
        return wrapped(sentence(drawn))
    return f"{word}: {one.title}\n{drawn}"


def strided_to_json(one: Strided) -> dict[str, Any]:
    return {
        "dtype": one.dtype, "shape": one.shape, "elements": one.elements, "nbytes": one.nbytes, "strides": one.stride,
        "offset": one.offset, "contiguous": one.contiguous, "memory_format": one.memory_format,
        "storage": one.storage, "storage_nbytes": one.storage_nbytes,
    }  # fmt: skip


def chain_to_json(one: Chain, places: Sequence[int | None] | None) -> dict[str, Any]:
    """The steps in figures; ``element`` where an index was asked for, null where a tensor has no such index."""
    steps: list[dict[str, Any]] = [
        {"operation": each.word, "kind": each.kind, "written_nbytes": each.written_nbytes, "why": each.why,
         **strided_to_json(each.result)}
        for each in one.steps
    ]  # fmt: skip
    start = strided_to_json(one.start)
    for told, each, place in zip(
        (start, *steps), (one.start, *(each.result for each in one.steps)), places or (), strict=False
    ):
        told["element"] = None if place is None else {"place": place, "byte": place * each.itemsize}
    return {"start": start, "steps": steps, "written_nbytes": one.written_nbytes, "shares": one.shares}
