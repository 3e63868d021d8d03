"""A tensor and a chain of operations: the storage drawn, strides, which step is free, which copies, which fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainledger.answers import tensor as report
from trainledger.answers.pages.storage import (
    elements_chart,
    elements_table,
    storage_chart,
    storage_table,
    why_not_drawn,
)
from trainledger.report.document import Document
from trainledger.report.table import sentence
from trainledger.spec.dtypes import FORMATS, OTHER_NBYTES
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.tensors.chain import chain, places, read_index
from trainledger.tensors.einsum import Tensor, read_shape
from trainledger.tensors.number import known_format
from trainledger.tensors.strided import Chain, Strided, list_text
from trainledger.web.calculator import BAD, GOOD, Drawing, Headline, Progress, Reply, calculator, headline
from trainledger.web.field import Query, one_of

_DTYPES = [name for name, number_format in FORMATS.items() if number_format.bits % 8 == 0] + [*OTHER_NBYTES]


def _reply(query: Query, progress: Progress) -> Reply:
    one = Tensor(known_format(query["dtype"], "dtype"), read_shape(query["shape"], "shape"))
    chained = chain(one, query["operations"])
    index = _index(query, chained.result)
    found = [] if index is None else places(chained, index, "at")
    steps = (chained.start, *(step.result for step in chained.steps))
    drawn = _drawn(query, steps)
    failure = chained.failure
    return Reply(
        document=_document(one, chained, index or (), found),
        headlines=tuple(_headlines(chained, index or (), found)),
        verdict=_said(chained) if failure is None else f"{failure}",
        tone=GOOD if failure is None else BAD,
        drawings=tuple(_drawings(steps[drawn], _name(chained, drawn))),
        values={"draw": str(drawn), "at": "" if index is None else ",".join(map(str, index))},
        choices={"draw": tuple((str(at), _name(chained, at)) for at in range(len(steps)))},
        words=_words(query, index),
        python=_python(query),
        notes=tuple(_notes(steps[drawn])),
    )


def _index(query: Query, last: Strided) -> tuple[int, ...] | None:
    """The index whose address is shown: the one that is given, else the last; None where there is no element."""
    if query["at"]:
        return read_index(query["at"], "at")
    return tuple(size - 1 for size in last.shape) if last.elements else None


def _drawn(query: Query, steps: Sequence[Strided]) -> int:
    """Which step is drawn: the one that is chosen, at most the last; else the last that is not contiguous."""
    last = len(steps) - 1
    if not query["draw"]:
        return next((at for at in range(last, -1, -1) if not steps[at].contiguous), last)
    if not query["draw"].isdecimal():
        rule = f"is no step of the chain: 0 is the tensor itself, {last} the last that works"
        raise InvalidInput([Problem("draw", query["draw"], rule, last)])
    return min(int(query["draw"]), last)


def _document(one: Tensor, chained: Chain, index: Sequence[int], found: Sequence[int | None]) -> Document:
    """As the command line has it: a tensor alone without operations and index."""
    if not chained.steps and not chained.failed and not found:
        return report.alone(one)
    return report.chain(one, chained, index, found)


def _name(chained: Chain, at: int) -> str:
    return f"after {chained.steps[at - 1].word}" if at else "at first"


def _said(chained: Chain) -> str:
    """What each step costs."""
    steps = "; ".join(f"{step.word}: {step.cost}" for step in chained.steps)
    return steps or f"{chained.start.title}, {chained.start.nbytes:,} bytes in one storage"


def _headlines(chained: Chain, index: Sequence[int], found: Sequence[int | None]) -> Iterator[Headline]:
    last = chained.result
    written = [(step.word, step.written_nbytes) for step in chained.steps]
    terms = " + ".join(f"{nbytes:,} ({word})" for word, nbytes in written) or "no operation"
    formula = f"the sum of its steps, a view writing none: {terms} = {chained.written_nbytes:,} B"
    yield headline("tensor.written_nbytes", chained.written_nbytes, formula)
    formula = f"elements x bytes of one = {last.elements:,} x {last.itemsize} = {last.nbytes:,} B"
    yield headline("tensor.nbytes", last.nbytes, formula)
    if found and found[-1] is not None:
        yield headline("tensor.byte", last.byte(index), _address(last, index), index=list_text(index))
    said = list_text(last.stride) if last.stride else "none"
    yield headline("tensor.strides", None, _strides(chained), said=said)
    formula = f"each dim's stride is the stride of the dim behind it times that dim's size; here {last.contiguity}"
    yield headline("tensor.contiguous", None, formula, said="yes" if last.contiguous else "no")


def _address(one: Strided, index: Sequence[int]) -> str:
    """The formula of an element's byte, with its numbers."""
    places = [at % size for at, size in zip(index, one.shape, strict=True)]
    terms = " + ".join(f"{at} x {step}" for at, step in zip(places, one.stride, strict=True)) or "0"
    return (
        f"(offset + sum of index x stride) x bytes of one = ({one.offset} + {terms}) x {one.itemsize} = "
        f"{one.byte(index):,}"
    )


def _strides(chained: Chain) -> str:
    """Why the strides of the last tensor are what they are."""
    if chained.steps:
        last = chained.steps[-1]
        return f"{last.word}: {last.why}; strides {list_text(last.result.stride)} elements"
    return f"the product of the sizes behind each dim: {list_text(chained.start.stride)} elements"


def _drawings(one: Strided, name: str) -> Iterator[Drawing]:
    if why_not_drawn(one):
        return
    for title, chart, table in (
        (f"The storage {name}", storage_chart, storage_table),
        (f"The tensor {name}", elements_chart, elements_table),
    ):
        yield Drawing(chart=chart(one, f"{title}: {one.title}"), table=table(one))


def _notes(one: Strided) -> Iterator[str]:
    if why := why_not_drawn(one):
        yield sentence(f"no drawing: {why}")


def _words(query: Query, index: Sequence[int] | None) -> tuple[str, ...]:
    at = [] if index is None else ["--at", ",".join(map(str, index))]
    return "tensor", _named(query), *([query["operations"]] if query["operations"] else []), *at


def _python(query: Query) -> str:
    return (
        "from trainledger.tensors.chain import chain\nfrom trainledger.tensors.einsum import read_tensor\n\n"
        f"print(chain(read_tensor({_named(query)!r}), {query['operations']!r}))"
    )


def _named(query: Query) -> str:
    return f"{query['dtype']}[{query['shape']}]"


TENSOR = calculator("tensor", _reply, {"dtype": one_of(_DTYPES)})
