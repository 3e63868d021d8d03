"""Tensors, chains of operations on them, and patterns of einops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from trainledger.answers.pages.plain_data import named
from trainledger.answers.question import question, text, word
from trainledger.report.document import Answer, Cell, Code, Content, Document, Section, Table, section, sections
from trainledger.report.table import sentence
from trainledger.spec.dtypes import BLOCK_FORMATS
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import Problem
from trainledger.spec.units import GIB, GIGA, KIB, KILO, MEGA, MIB, format_flops, format_nbytes
from trainledger.tensors.chain import chain as chained
from trainledger.tensors.chain import places as places_in
from trainledger.tensors.chain import read_index
from trainledger.tensors.einsum import Tensor, read_tensor
from trainledger.tensors.strided import list_text

if TYPE_CHECKING:
    from trainledger.tensors.einops import Rearranged
    from trainledger.tensors.strided import Chain, Strided

_UNITS = (("kB", KILO), ("KiB", KIB), ("MB", MEGA), ("MiB", MIB), ("GB", GIGA), ("GiB", GIB))
_STRIDED = "dtype shape offset storage storage_nbytes elements nbytes contiguous memory_format"
_VIEW = "A view: nothing is copied."
_ROW_MAJOR = "Row-major. Elementwise: one operation per element (ReLU, a square) that reads the tensor and writes one."


@frozen
class Operated(Answer):
    """A tensor and what operations make of it; ``failure`` is of the first that fails."""

    written: Document
    failure: Problem | None = None

    def document(self, **options: Any) -> Document:
        return self.written


@question(impossible=lambda answer: answer.failure, intermixed=True, plots=False, trains=False)
def tensor(
    tensor: Annotated[str, word('a format and a shape, such as "float32[4,8]"')],
    operations: Annotated[
        Sequence[str], word('such as transpose:0,1 or "view(32)"', several=True, metavar="OPERATION")
    ] = (),
    *,
    at: Annotated[str | None, text("where the element of this index lies, such as 1,2", metavar="INDEX")] = None,
    draw: Annotated[bool, text("draw the storage after each step, not only after the last")] = False,
) -> Operated:
    """A tensor such as "float32[4,8]", and what operations such as transpose and "view(32)" make of it.

    Alone: bytes in every unit, strides, and what one operation on each element costs. With operations, as one would
    write them after the tensor in torch: shape, strides, offset and storage after each, which is a view, which copies
    how many bytes, which fails and what works in its place. transpose:0,1 is short for "transpose(0,1)", "[:,1]" picks
    a part; view and reshape alone flatten.

    Raises `InvalidInput`.
    """
    one = read_tensor(tensor)
    if not operations and at is None and not draw:
        return Operated(alone(one))
    after = chained(one, operations)
    index = () if at is None else read_index(at)
    offsets = [] if at is None else places_in(after, index)
    return Operated(chain(one, after, index, offsets, draw=draw), after.failure)


def alone(one: Tensor) -> Document:
    """A tensor alone: bytes in every unit, its layout, and what an operation on each element costs."""
    return Document(one.dtype, sections(*_tensor(one)), data=lambda: _tensor_data(one))


def _tensor(one: Tensor) -> Iterator[Content]:
    rows: list[tuple[Cell, ...]] = [
        ("elements", one.elements),
        ("bytes", one.nbytes),
        *((unit, f"{one.nbytes / size:,.6g}") for unit, size in _UNITS if size / 100 <= one.nbytes < 10_000 * size),
        ("strides in elements", list_text(one.strides)),
        ("elementwise FLOPs", one.elementwise_flops),
        ("FLOPs per byte", f"{one.elementwise_intensity:.4g}"),
    ]
    if one.dtype in BLOCK_FORMATS:
        rows.insert(2, ("of them scales", BLOCK_FORMATS[one.dtype].scale_nbytes_for(one.elements)))
    head = f"{one.dtype}{list_text(one.shape)}"
    yield Table("tensor", (head, ""), tuple(rows), units=("", "integer"), align="lr")
    yield _ROW_MAJOR


def _tensor_data(one: Tensor) -> dict[str, Any]:
    costs = {"flops": one.elementwise_flops, "nbytes": one.elementwise_nbytes, "intensity": one.elementwise_intensity}
    return {**named(one, "dtype shape elements nbytes strides"), "elementwise": costs}


def chain(
    alone: Tensor, one: Chain, index: Sequence[int] = (), places: Sequence[int | None] = (), *, draw: bool = False
) -> Document:
    """What each operation makes of a tensor, where its element ``index`` is at each step, and drawings of storages.

    ``places`` are those of `tensors.chain.places`, empty where no index was asked for. Without ``draw`` only a last
    tensor that is not contiguous is drawn.
    """
    steps = [("at first", one.start), *((step.word, step.result) for step in one.steps)]
    drawn = steps if draw else [(f"after {one.steps[-1].word}", one.result)] if one.steps else []
    return Document(
        title=one.start.title,
        sections=sections(
            *(_chain(one) if one.steps or one.failed else _tensor(alone)),
            _written(one),
            _elements(one, index, places) if places else None,
            *(_drawing(strided, word, always=draw) for word, strided in drawn),
        ),
        data=lambda: {**_tensor_data(alone), **_chain_data(one, places)},
    )


def _chain(one: Chain) -> Iterator[Content]:
    """A row for each operation, and why it is a view or a copy."""
    rows = [["", "", *_layout(one.start), format_nbytes(one.start.storage_nbytes)]]
    for number, step in enumerate(one.steps, start=1):
        rows.append([str(number), _tight(step.word), *_layout(step.result), step.cost.removesuffix(", free")])
    if one.failure is not None:
        rows.append([str(len(rows)), _tight(one.failed), "", "", "", "", "", "fails"])
    columns, align = ["", "step", "gives", "stride", "offset", "contiguous", "storage", "cost"], "rlllrlll"
    if not any(step.result.offset for step in one.steps):
        columns, align, rows = [*columns[:4], *columns[5:]], "rllllll", [[*row[:4], *row[5:]] for row in rows]
    yield Table("chain", tuple(columns), tuple(map(tuple, rows)), align=align)
    yield (f"{number} {step.word.partition('(')[0]}: {step.why}." for number, step in enumerate(one.steps, start=1))


def _written(one: Chain) -> str:
    end = "shares the storage of the first" if one.shares else "has a storage of its own"
    return f"Copies and results write {one.written_nbytes:,} bytes; the last tensor {end}." if one.steps else ""


def _layout(one: Strided) -> list[str]:
    order = one.memory_format.replace("contiguous", "yes") or "no"
    return [_tight(one.title), _tight(list_text(one.stride)), str(one.offset), order, _letter(one)]


def _tight(text: str) -> str:
    """Without spaces, so that columns stay narrow."""
    return text.replace(", ", ",")


def _letter(one: Strided) -> str:
    """A letter for the storage; numbers after the alphabet."""
    return chr(ord("A") + one.storage) if one.storage < 26 else str(one.storage + 1)


def _elements(one: Chain, index: Sequence[int], places: Sequence[int | None]) -> Section:
    """Where ``tensor[index]`` lies at each step."""
    tensors = [one.start, *(step.result for step in one.steps)]
    words = ["at first", *(f"{number} {step.word}" for number, step in enumerate(one.steps, start=1))]
    rows: list[tuple[Cell, ...]] = [(word, "no such index", None) for word in words]
    for at, (strided, place) in enumerate(zip(tensors, places, strict=True)):
        if place is not None:
            rows[at] = (words[at], f"{place:,} of {_letter(strided)}", place * strided.itemsize)
    columns = (f"element {list_text(index)}", "in the storage", "byte")
    table = Table("elements", columns, tuple(rows), units=("", "", "integer"), align="lrr")
    return section("", table, "Bytes are counted from the first of the storage; its address is not included.")


def _drawing(one: Strided, word: str, *, always: bool) -> Content:
    """A tensor drawn over its storage; the reason where it cannot be drawn, if it is ``always`` asked for."""
    drawn = one.drawing()
    if not always and (one.contiguous or drawn.startswith("no drawing")):
        return None
    return sentence(drawn) if drawn.startswith("no drawing") else section("", f"{word}: {one.title}", Code(drawn))


def _chain_data(one: Chain, places: Sequence[int | None] = ()) -> dict[str, Any]:
    """The steps in figures; ``element`` where an index was asked for, null where a tensor has no such index."""
    tensors = [one.start, *(step.result for step in one.steps)]
    start, *made = ({"strides": strided.stride, **named(strided, _STRIDED)} for strided in tensors)
    steps = [
        {"operation": step.word, **named(step, "kind written_nbytes why"), **result}
        for step, result in zip(one.steps, made, strict=True)
    ]
    for fields, strided, place in zip((start, *steps), tensors, places, strict=False):
        fields["element"] = None if place is None else {"place": place, "byte": place * strided.itemsize}
    return {"start": start, "steps": steps, "written_nbytes": one.written_nbytes, "shares": one.shares}


def totals(*rows: tuple[Cell, ...]) -> Table:
    return Table("totals", ("", "", ""), rows, units=("", "integer"), align="lrr")


def pattern(one: Rearranged) -> Document:
    """A pattern of einops on one tensor: its sizes, its steps on torch, and what they cost."""
    written = one.chain.written_nbytes
    return Document(
        title=one.pattern,
        sections=sections(
            f"{one.pattern}: {one.chain.start.title} to {one.result.title} by {one.function}",
            ", ".join(f"{name} = {size:,}" for name, size in one.sizes.items()),
            *_chain(one.chain),
            _VIEW if one.view else f"Not a view: {format_nbytes(written)} are written, {written:,} bytes.",
            totals(
                ("FLOPs", one.flops, format_flops(one.flops)),
                ("bytes moved", one.moved_nbytes, format_nbytes(one.moved_nbytes)),
            ),
        ),
        data=lambda: {
            **named(one, "pattern function sizes view flops"),
            **named(one.result, "dtype shape"),
            "nbytes": one.moved_nbytes,
            **_chain_data(one.chain),
        },
    )
