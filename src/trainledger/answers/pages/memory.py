"""Memory over the operations of a step as figures: live bytes by category with the peak marked, and what it is made of.

``plotly.graph_objects.Figure(memory_figure(ledger))`` opens one in a notebook; `report.plot.write_plot` makes a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from math import prod
from typing import Any

from trainledger.answers.pages.peak import place, tensors_at_peak
from trainledger.ledger.entry import CATEGORIES, HOST, Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import Moment, timeline
from trainledger.report.document import Figure, Table
from trainledger.report.style import COLOURS, DARK, GREY, arranged, bar_figure, bars, folded, line, mark, points
from trainledger.spec.units import GIGA, KILO, MEGA, ceil_div, counted, format_nbytes

COLOUR_OF = dict(zip(CATEGORIES, COLOURS, strict=True))
_MOST_POINTS, _FEW_POINTS = 1200, 320  # drawn of one ledger
_MOST_UNROLLED = 40_000  # the most operations of an unrolled loop
_GAP, _WIDE_GAP = 12, 1  # rounds that are not drawn take a twelfth of the room of those drawn, or as much
_SCALES = ((GIGA, "GB"), (MEGA, "MB"), (KILO, "kB"), (1.0, "bytes"))
_TICKS = 6
_LINE = 100  # characters of a line below the figure
_BANDS = ("rgba(0,0,0,0.045)", "rgba(0,0,0,0)")
_NEAR = 2  # usable memory is drawn up to so many times the peak
_PART_OF = {"recompute": "backward"}  # phases that alternate with another within one stretch of the step


def memory_figure(ledger: Ledger) -> Figure:
    """Live bytes over the operations of a step, stacked by category: phases shaded, the peak marked, and on each
    operation's hover its module and line.

    A loop of at most 40,000 operations is unrolled; of a longer one the first and the last round are drawn. Of many
    operations those with the most live bytes among their neighbours are drawn, the peak always. Raises ValueError for
    a ledger without entries.
    """
    return memory_lanes([("live", ledger)])


def memory_lanes(
    sides: Sequence[tuple[str, Ledger]],
    usable_nbytes: int | None = None,
    moments: Sequence[Moment] | None = None,
) -> Figure:
    """The same of several ledgers, by name, one above the other on one scale.

    ``usable_nbytes`` is the memory of the device: a line, unless all is far below it. Of the ``moments`` of a single
    ledger (`timeline`) the figure is drawn in milliseconds: it has the first and the last round of each loop, and a
    quarter of the points.
    """
    lanes = [lane_of(ledger, moments) for _, ledger in sides]
    highest = max(each.totals[each.peak] for each in lanes)
    scale, unit = next((each for each in _SCALES if highest >= each[0]), _SCALES[-1])
    usable = usable_nbytes if usable_nbytes is not None and usable_nbytes <= _NEAR * highest else None
    top = 1.3 * max(highest, usable or 0) / scale
    layout = arranged(height=380 if len(lanes) == 1 else 80 + 240 * len(lanes), hovermode="x unified")
    layout["annotations"] = []
    data = []
    shown: set[str] = set()
    gap = 0.12 if len(lanes) > 1 else 0.0
    for at, ((name, _), lane) in enumerate(zip(sides, lanes, strict=True)):
        axis = str(at + 1) if at else ""
        axes = {"xaxis": f"x{axis}", "yaxis": f"y{axis}"}
        for category, nbytes in lane.live.items():
            style: dict[str, Any] = {
                "line": {"width": 0.5, "color": COLOUR_OF.get(category, GREY), "shape": lane.shape},
                **axes,
            }
            style |= {"legendgroup": category, "showlegend": category not in shown, "stackgroup": name}
            y, hover = [each / scale for each in nbytes], f"%{{y:.4f}} {unit}"
            data.append(points(category, lane.x, y, "lines", **style, hovertemplate=hover))
            shown.add(category)
        style = {"line": {"width": 1.0, "color": DARK, "shape": lane.shape}, "showlegend": False, **axes}
        y, hover = [each / scale for each in lane.totals], f"%{{y:.4f}} {unit}<br>%{{text}}"
        data.append(points("all", lane.x, y, "lines", text=lane.texts, **style, hovertemplate=hover))
        highs, lows = 1 - at / len(lanes), 1 - (at + 1) / len(lanes)
        layout[f"yaxis{axis}"] = {
            "title": {"text": f"{name} ({unit})"}, "domain": [lows + gap / 2, highs - gap / 2], "range": [0, top],
            "anchor": f"x{axis}", "gridcolor": "#e4e4e4",
        }  # fmt: skip
        layout[f"xaxis{axis}"] = {
            "anchor": f"y{axis}", "range": [0, lane.end], "showgrid": False, "automargin": True
        }  # fmt: skip
        if lane.ticks:
            values, numbers = zip(*lane.ticks, strict=True)
            layout[f"xaxis{axis}"] |= {"tickvals": values, "ticktext": [f"{each:,}" for each in numbers]}
        _draw_phases(layout, lane, axis)
        _draw_gaps(layout, lane, axis)
        layout["annotations"].append(_peak_mark(lane, axis, scale))
        if usable is not None:
            mark(layout, "h", usable / scale, f"{format_nbytes(usable)} usable", axis)
    every = max(each.every for each in lanes)
    notes = ["operations of one optimizer step" + (f" (each point the highest of {every})" if every > 1 else "")]
    alike = len({each.peak_text for each in lanes}) == 1
    peaks = [
        f"peak{'' if alike else f' {name}'}: {each.peak_text}" for (name, _), each in zip(sides, lanes, strict=True)
    ]
    notes += dict.fromkeys(peaks)
    notes += [f"PARTIAL: {each.partial}" for _, each in sides if each.partial]
    below = "<br>".join(folded(escape(each), _LINE) for each in notes)
    layout[f"xaxis{len(lanes) if len(lanes) > 1 else ''}"]["title"] = {"text": below, "standoff": 10}
    return {"data": data, "layout": layout}


def memory_timeline(
    predicted: Ledger | None, measured: Ledger | None, usable_nbytes: int | None = None
) -> Figure | None:
    """Live bytes over the operations of a step, stacked by category: the prediction above the measurement.

    ``usable_nbytes`` is the memory of the device, where that is known.
    """
    sides = [(name, each) for name, each in (("predicted", predicted), ("measured", measured)) if each is not None]
    return memory_lanes(sides, usable_nbytes) if sides else None


def phases_table(moments: Sequence[Moment]) -> Table:
    """The most live bytes in each phase of a step, and the operation that runs then."""
    highest: dict[str, tuple[int, Entry]] = {}
    for moment in moments:
        phase, nbytes = _PART_OF.get(moment.entry.phase, moment.entry.phase), moment.nbytes
        if phase not in highest or nbytes > highest[phase][0]:
            highest[phase] = nbytes, moment.entry
    rows = tuple((phase, nbytes, place(entry)) for phase, (nbytes, entry) in highest.items())
    return Table("phases", ("phase", "most live", "at"), rows, units=("", "nbytes"), align="lrl")


def peak_figure(ledger: Ledger, top: int = 20) -> Figure | None:
    """The largest tensors live at the peak, those alike as one bar, and the rest; None without tensors."""
    peak = tensors_at_peak(ledger)
    if not peak.live:
        return None
    scale, unit = next((each for each in _SCALES if peak.nbytes >= each[0]), _SCALES[-1])
    shown, rest = peak.live[:top], peak.live[top:]
    labels = [each.label for each in shown]
    data = []
    for category in CATEGORIES:
        found = [(at, each) for at, each in enumerate(shown) if each.category == category]
        if found:
            sizes, texts = [each.nbytes / scale for _, each in found], [escape(each.sentence) for _, each in found]
            more = {"text": texts, "textposition": "none"}
            hover = f"%{{x:.4f}} {unit}<br>%{{text}}<extra></extra>"
            data.append(bars(category, [at for at, _ in found], sizes, COLOUR_OF[category], hover, **more))
    left = peak.nbytes - sum(each.nbytes for each in shown)
    if left:
        labels.append(f"{sum(each.count for each in rest):,} others" if rest else "not listed one by one")
        hover = f"%{{x:.4f}} {unit}<extra></extra>"
        data.append(bars("the rest", [len(shown)], [left / scale], "#dddddd", hover))
    x = f"{unit} at the peak of {format_nbytes(peak.nbytes)}"
    figure = bar_figure("", x, map(escape, labels), data, barmode="stack")
    figure["layout"]["legend"] |= {"traceorder": "normal"}
    return figure


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
    def shape(self) -> str:
        """Live bytes change at operations and not between; across rounds that are not drawn they change evenly."""
        return "linear" if self.gaps else "hv"


def lane_of(ledger: Ledger, moments: Sequence[Moment] | None = None) -> Lane:
    """What is drawn of a ledger of numbers, or in brief of its moments."""
    if not len(ledger):
        raise ValueError("nothing was recorded, so there is no memory to draw")
    brief = moments is not None
    moments = timeline(unrolled(ledger)) if moments is None else moments
    numbers, skipped = numbers_of(moments)
    places, gaps = _squeezed(numbers, skipped, _WIDE_GAP if brief else _GAP)
    sizes = [each.nbytes for each in moments]
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
        if any(each.live.get(category) for each in moments)
    }
    return Lane(
        x=x, live=live, totals=[sizes[at] for at in kept],
        texts=[f"operation {numbers[at]:,}: {escape(place(moments[at].entry))}" for at in kept], peak=peak,
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
    for loop, group in groupby(entries, key=lambda each: each.loop[depth : depth + 1]):
        body = list(group)
        if not loop:
            yield from body
        elif sum(prod(count for _, count in each.loop[depth:]) for each in body) <= most:
            yield from _rounds(body, depth, depth)
        else:
            yield from _written_out(body, depth + 1, most)


def _rounds(entries: Sequence[Entry], depth: int, kept: int) -> Iterator[Entry]:
    """All rounds of all loops further in than ``depth``, as entries of the ``kept`` outer loops alone."""
    for loop, group in groupby(entries, key=lambda each: each.loop[depth : depth + 1]):
        body = list(group)
        if loop:
            yield from list(_rounds(body, depth + 1, kept)) * loop[0][1]
        else:
            yield from (replace(each, loop=each.loop[:kept]) for each in body)


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


def _draw_phases(layout: Figure, lane: Lane, axis: str) -> None:
    """Shades each second stretch, and names those that are long enough for a name."""
    if len(lane.phases) > 200:  # very many micro-batches: stripes that no eye can distinguish
        return
    for at, (start, end, name) in enumerate(lane.phases):
        layout["shapes"].append(
            {
                "type": "rect", "xref": f"x{axis}", "yref": f"y{axis} domain", "x0": start, "x1": end, "y0": 0,
                "y1": 1, "fillcolor": _BANDS[at % 2], "line": {"width": 0}, "layer": "below",
            }
        )  # fmt: skip
        if at:
            layout["shapes"].append(line("v", start, "#bbb", f"x{axis}", f"y{axis} domain"))
        left_out = sum(min(end, last) - first for first, last, _ in lane.gaps if start <= first < end)
        if end - start - left_out > 0.06 * lane.end:
            layout["annotations"].append(
                {
                    "x": start, "y": 1, "xref": f"x{axis}", "yref": f"y{axis} domain", "text": name,
                    "showarrow": False, "xanchor": "left", "yanchor": "bottom", "font": {"size": 11, "color": GREY},
                }
            )  # fmt: skip


def _draw_gaps(layout: Figure, lane: Lane, axis: str) -> None:
    """Says where rounds of a loop are left out that go on as their neighbours do."""
    for start, end, text in lane.gaps:
        if end - start > 0.06 * lane.end:
            layout["annotations"].append(
                {
                    "x": (start + end) / 2, "y": 0.02, "xref": f"x{axis}", "yref": f"y{axis} domain",
                    "text": escape(text), "showarrow": False, "yanchor": "bottom", "font": {"size": 11, "color": DARK},
                    "bgcolor": "rgba(255,255,255,0.7)",
                }
            )  # fmt: skip


def _peak_mark(lane: Lane, axis: str, scale: float) -> Figure:
    """An arrow at the peak with its bytes, turned to where there is room."""
    x = lane.x[lane.peak]
    left = x < lane.end / 2
    return {
        "x": x, "y": lane.totals[lane.peak] / scale, "xref": f"x{axis}", "yref": f"y{axis}",
        "text": f"peak {format_nbytes(lane.totals[lane.peak])}", "showarrow": True, "arrowhead": 2, "arrowsize": 0.8,
        "arrowcolor": DARK,
        "ax": 14 if left else -14, "ay": -18, "xanchor": "left" if left else "right", "yanchor": "bottom",
        "font": {"size": 11, "color": DARK}, "bgcolor": "rgba(255,255,255,0.8)",
    }  # fmt: skip
