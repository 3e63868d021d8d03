"""Memory over the operations of a step as charts: live bytes by category, the peak, and what it is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from trainledger.answers.pages.peak import place, tensors_at_peak
from trainledger.ledger.entry import CATEGORIES, HOST, Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import Moment, timeline
from trainledger.report.chart import COLOURS, DARK, GREY, PALE, Area, Axis, Band, Bars, Chart, Line, Mark, bar_chart
from trainledger.report.document import Table
from trainledger.spec.units import GIGA, KILO, MEGA, ceil_div, counted, format_nbytes

COLOUR_OF = dict(zip(CATEGORIES, COLOURS, strict=True))
_MOST_POINTS, _FEW_POINTS = 1200, 320  # drawn of one ledger
_MOST_UNROLLED = 40_000  # the most operations of an unrolled loop
_GAP, _WIDE_GAP = 12, 1  # rounds that are not drawn take a twelfth of the room of those drawn, or as much
_SCALES = ((GIGA, "GB"), (MEGA, "MB"), (KILO, "kB"), (1.0, "bytes"))
_TICKS = 6
_MOST_BANDS, _NAMED = 200, 0.06  # phases that are drawn; of the whole step, one that is named
_NEAR = 2  # usable memory is drawn up to so many times the peak
_PART_OF = {"recompute": "backward"}  # phases that alternate with another within one stretch of the step


def memory_chart(
    ledger: Ledger,
    title: str = "Memory over one step",
    usable_nbytes: int | None = None,
    moments: Sequence[Moment] | None = None,
) -> Chart:
    """Live bytes over the operations of a step, stacked by category: phases shaded, the peak marked, and under the
    pointer an operation's module and line.

    A loop of at most 40,000 operations is unrolled; of a longer one the first and the last round are drawn. Of many
    operations those with the most live bytes among their neighbours are drawn, the peak always. ``usable_nbytes`` is
    the memory of the device: a line, unless all is far below it. Of its ``moments`` (`timeline`) a chart is drawn in
    milliseconds: it has the first and the last round of each loop, and a quarter of the points. Raises ValueError for
    a ledger without entries.
    """
    return memory_charts([(title, ledger)], usable_nbytes, moments)[0]


def memory_charts(
    sides: Sequence[tuple[str, Ledger]], usable_nbytes: int | None = None, moments: Sequence[Moment] | None = None
) -> list[Chart]:
    """The same of several ledgers, by title, on one scale."""
    lanes = [lane_of(ledger, moments) for _, ledger in sides]
    highest = max((max(each.totals) for each in lanes), default=0)
    scale, unit = next((each for each in _SCALES if highest >= each[0]), _SCALES[-1])
    usable = usable_nbytes if usable_nbytes is not None and usable_nbytes <= _NEAR * highest else None
    top = 1.25 * max(highest, usable or 0) / scale
    charts = []
    for (title, ledger), lane in zip(sides, lanes, strict=True):
        totals = [nbytes / scale for nbytes in lane.totals]
        layers = {category: [each / scale for each in nbytes] for category, nbytes in lane.live.items()}
        said = [
            "\n".join(
                [
                    *(f"{category}: {layer[at]:.4f} {unit}" for category, layer in layers.items() if layer[at]),
                    f"all: {totals[at]:.4f} {unit}",
                    words,
                ]
            )
            for at, words in enumerate(lane.texts)
        ]
        x, y, says = lane.x[lane.peak], totals[lane.peak], f"peak {format_nbytes(lane.totals[lane.peak])}"
        colours = [COLOUR_OF.get(category, GREY) for category in layers]
        marks: list[Mark] = [
            *_bands(lane),
            Area(lane.x, layers, colours, said, step=lane.has_steps),
            Line(lane.x, totals, colour=DARK, width=1, said=(), step=lane.has_steps),
            Line([x], [y], colour=DARK, symbol="circle", size=5, texts=[says], said=[f"{says}\n{lane.peak_text}"]),
        ]
        if usable is not None:
            marks.append(Band("y", usable / scale, text=f"{format_nbytes(usable)} usable"))
        below = [
            "operations of one optimizer step"
            + (f" (each point the highest of {lane.every})" if lane.every > 1 else ""),
            f"peak: {lane.peak_text}",
            *([f"PARTIAL: {ledger.partial}"] if ledger.partial else ()),
        ]
        ticks = {float(at): f"{number:,}" for at, number in lane.ticks} or None
        across = Axis("\n".join(below), ends=(0, lane.end), ticks=ticks)
        charts.append(Chart(title, tuple(marks), across, Axis(f"live bytes ({unit})", ends=(0, top))))
    return charts


def phases_table(moments: Sequence[Moment]) -> Table:
    """The most live bytes in each phase of a step, and the operation that runs then."""
    highest: dict[str, tuple[int, Entry]] = {}
    for moment in moments:
        phase, nbytes = _PART_OF.get(moment.entry.phase, moment.entry.phase), moment.nbytes
        if phase not in highest or nbytes > highest[phase][0]:
            highest[phase] = nbytes, moment.entry
    rows = tuple((phase, nbytes, place(entry)) for phase, (nbytes, entry) in highest.items())
    return Table("phases", ("phase", "most live", "at"), rows, units=("", "nbytes"), align="lrl")


def peak_chart(ledger: Ledger, top: int = 20) -> Chart | None:
    """The largest tensors live at the peak, those alike as one bar, and the rest; None without tensors."""
    peak = tensors_at_peak(ledger)
    if not peak.live:
        return None
    scale, unit = next((each for each in _SCALES if peak.nbytes >= each[0]), _SCALES[-1])
    shown, rest = peak.live[:top], peak.live[top:]
    rows = [(alike.label, alike.category, alike.nbytes, alike.sentence) for alike in shown]
    left = peak.nbytes - sum(alike.nbytes for alike in shown)
    if left:
        rows.append(
            (
                f"{sum(alike.count for alike in rest):,} others" if rest else "not listed one by one",
                "the rest",
                left,
                "",
            )
        )
    marks = []
    for category in dict.fromkeys((*CATEGORIES, "the rest")):
        own = [(row, nbytes, said) for row, (_, of, nbytes, said) in enumerate(rows) if of == category]
        if own:
            sizes = [nbytes / scale for _, nbytes, _ in own]
            said = [f"{nbytes / scale:.4f} {unit}\n{sentence}".strip() for _, nbytes, sentence in own]
            numbers = [row for row, _, _ in own]
            marks.append(Bars(numbers, [0] * len(own), sizes, category, COLOUR_OF.get(category, PALE), said))
    return bar_chart(
        "The peak", f"{unit} at the peak of {format_nbytes(peak.nbytes)}", [label for label, *_ in rows], marks
    )


@dataclass(frozen=True)
class Lane:
    """One ledger as a drawing: of each point its place, live bytes by category and together, and what runs there.

    ``peak`` is the index of the highest point, ``phases`` are (start, end, name), ``gaps`` (start, end, rounds that
    are not drawn), ``ticks`` (place, number of the operation), ``every`` says how many operations a point covers,
    ``end`` is where the lane ends. Places are numbers of operations, but that rounds not drawn take little room.
    """

    x: list[int]
    live: dict[str, list[int]]
    totals: list[int]
    texts: list[str]
    peak: int
    peak_text: str
    phases: list[tuple[int, int, str]]
    gaps: list[tuple[int, int, str]]
    ticks: list[tuple[int, int]]
    every: int
    end: int

    @property
    def has_steps(self) -> bool:
        """Live bytes change at operations and not between; across rounds that are not drawn they change evenly."""
        return not self.gaps


def lane_of(ledger: Ledger, moments: Sequence[Moment] | None = None) -> Lane:
    """What is drawn of a ledger of numbers, or in brief of its moments."""
    if not len(ledger):
        raise ValueError("nothing was recorded, so there is no memory to draw")
    brief = moments is not None
    moments = timeline(unrolled(ledger)) if moments is None else moments
    numbers, skipped = numbers_of(moments)
    places, gaps = _squeezed(numbers, skipped, _WIDE_GAP if brief else _GAP)
    sizes = [moment.nbytes for moment in moments]
    every = ceil_div(len(moments), _FEW_POINTS if brief else _MOST_POINTS)
    groups = [range(at, min(at + every, len(moments))) for at in range(0, len(moments), every)]
    # The highest of each group, and the first and the last operation: what is there before and what is left after.
    kept = sorted({max(group, key=sizes.__getitem__) for group in groups} | {0, len(moments) - 1})
    highest = max(kept, key=sizes.__getitem__)
    peak = kept.index(highest)
    phases = _phases(moments, places)
    marked = [kept[at * (len(kept) - 1) // _TICKS] for at in range(_TICKS + 1)] if gaps else []
    end = places[-1] + 1
    x = [places[at] for at in kept]
    if not gaps:  # the last operation is as wide as any other
        kept.append(kept[-1])
        x.append(end)
    categories = [*CATEGORIES, *sorted({each for moment in moments for each in moment.live} - {*CATEGORIES, HOST})]
    live = {
        category: [moments[at].live.get(category, 0) for at in kept]
        for category in categories
        if any(moment.live.get(category) for moment in moments)
    }
    return Lane(
        x=x, live=live, totals=[sizes[at] for at in kept],
        texts=[f"operation {numbers[at]:,}: {place(moments[at].entry)}" for at in kept], peak=peak,
        peak_text=place(moments[highest].entry), phases=phases, gaps=gaps,
        ticks=sorted({(places[at], numbers[at]) for at in marked}), every=every, end=end,
    )  # fmt: skip


def unrolled(ledger: Ledger, most: int = _MOST_UNROLLED) -> Ledger:
    """The ledger with every loop unrolled that makes at most so many operations in all its rounds.

    >>> mm = Entry("mm", "", "forward", "matmul", loop=(("micro-batches", 3), ("layers", 4)))
    >>> [each.times for each in unrolled(Ledger((mm,)), most=4)], len(unrolled(Ledger((mm,))))
    ([3, 3, 3, 3], 12)
    """
    return replace(ledger, entries=tuple(_written_out(ledger.entries, 0, most)))


def _written_out(entries: Sequence[Entry], depth: int, most: int) -> Iterator[Entry]:
    """The entries in the order they run, of loops further in than ``depth`` those unrolled that are small enough."""
    for loop, group in groupby(entries, key=lambda entry: entry.loop[depth : depth + 1]):
        body = list(group)
        if not loop:
            yield from body
        elif sum(prod(count for _, count in entry.loop[depth:]) for entry in body) <= most:
            yield from _rounds(body, depth, depth)
        else:
            yield from _written_out(body, depth + 1, most)


def _rounds(entries: Sequence[Entry], depth: int, kept: int) -> Iterator[Entry]:
    """All rounds of all loops further in than ``depth``, as entries of the ``kept`` outer loops alone."""
    for loop, group in groupby(entries, key=lambda entry: entry.loop[depth : depth + 1]):
        body = list(group)
        if loop:
            yield from list(_rounds(body, depth + 1, kept)) * loop[0][1]
        else:
            yield from (replace(entry, loop=entry.loop[:kept]) for entry in body)


def numbers_of(moments: Sequence[Moment]) -> tuple[list[int], list[tuple[int, str]]]:
    """The number of each moment's operation when all rounds of all loops count; and before which moments rounds are
    left out, with a text that says of which loop.
    """
    numbers: list[int] = []
    skipped: list[tuple[int, str]] = []
    number = 0
    starts: list[int] = []
    before: Moment | None = None
    for moment in moments:
        depth = len(moment.iteration)
        for at in range(depth):
            entered = (
                before is None
                or before.entry.loop[: at + 1] != moment.entry.loop[: at + 1]
                or before.iteration[:at] != moment.iteration[:at]
            )
            if entered:
                starts[at:] = [number]
            elif before is not None and before.iteration[at] != moment.iteration[at]:
                rounds = moment.iteration[at] - before.iteration[at] - 1
                if rounds:
                    skipped.append((len(numbers), f"{counted(rounds, 'more round')} of {moment.entry.loop[at][0]}"))
                number += rounds * (number - starts[at])
                starts[at + 1 :] = []
        numbers.append(number)
        number += 1
        before = moment
    return numbers, skipped


def _squeezed(
    numbers: Sequence[int], skipped: Sequence[tuple[int, str]], gap: int
) -> tuple[list[int], list[tuple[int, int, str]]]:
    """Where operations are drawn, rounds that are left out being 1 / ``gap`` as wide as all drawn, and the gaps."""
    width = max(1, len(numbers) // gap)
    texts = dict(skipped)
    places: list[int] = []
    gaps: list[tuple[int, int, str]] = []
    ahead = 0  # of the place, the number
    for at, number in enumerate(numbers):
        if at in texts:
            end = places[-1] + 1 + width
            gaps.append((places[-1], end, texts[at]))
            ahead = number - end
        places.append(number - ahead)
    return places, gaps


def _phases(moments: Sequence[Moment], places: Sequence[int]) -> list[tuple[int, int, str]]:
    """The stretches of the step: (start, end, phase), what alternates with another phase being part of it."""
    starts: list[tuple[int, str]] = []
    for at, moment in zip(places, moments, strict=True):
        phase = _PART_OF.get(moment.entry.phase, moment.entry.phase)
        if not starts or (phase not in (starts[-1][1], "collective")):
            starts.append((at, phase))
    ends = [start for start, _ in starts[1:]] + [places[-1] + 1]
    return [(start, end, name) for (start, name), end in zip(starts, ends, strict=True)]


def _bands(lane: Lane) -> Iterator[Band]:
    """The phases, each second one shaded (none of very many), and the rounds that are left out."""
    for at, (start, end, name) in enumerate(lane.phases if len(lane.phases) <= _MOST_BANDS else ()):
        left_out = sum(min(end, last) - first for first, last, _ in lane.gaps if start <= first < end)
        yield Band("x", start, end, name if end - start - left_out > _NAMED * lane.end else "", "" if at % 2 else DARK)
    for start, end, text in lane.gaps:
        yield Band("x", start, end, text if end - start > _NAMED * lane.end else "", "")
