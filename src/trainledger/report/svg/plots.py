"""The plots of a figure: the traces between each pair of axes, as bars or points, and what the axes must show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainledger.report.document import Figure
from trainledger.report.svg.axes import Axis, Extent, axis_of, has_range, kind_of, place
from trainledger.report.svg.bars import Bar, bars_of, is_bar, is_upright
from trainledger.report.svg.curves import modes_of, stacked
from trainledger.report.svg.elements import lines_of
from trainledger.report.svg.frame import axis_layout, title_of
from trainledger.spec.frozen import frozen

Trace = dict[str, Any]
Kind = tuple[str, list[str]]  # linear, log or category, and the names of the last in their order


@frozen
class Plot:
    """The traces between one pair of axes, by their numbers: those that are bars, as bars; and those that are not.

    ``titles`` are those of the axes in a line each; ``stands`` says whether bars are vertical.
    """

    x: str
    y: str
    barred: dict[int, Trace]
    bars: tuple[Bar, ...]
    points: tuple[tuple[int, Trace], ...]
    titles: tuple[str, str]
    stands: bool = True


def plots_of(figure: Figure) -> tuple[list[Plot], dict[str, Axis]]:
    """The plots of a figure, and its axes by name, not yet put between pixels."""
    layout = figure["layout"]
    pairs: dict[tuple[str, str], list[tuple[int, Trace]]] = {} if figure["data"] else {("x", "y"): []}
    for at, trace in enumerate(figure["data"]):
        pairs.setdefault((trace.get("xaxis", "x"), trace.get("yaxis", "y")), []).append((at, trace))
    kinds = {name: _kind(figure, name) for name in dict.fromkeys(name for pair in pairs for name in pair)}
    plots = [_plot(pair, traces, layout, kinds) for pair, traces in pairs.items()]
    axes = {}
    for name, kind in kinds.items():
        own = axis_layout(layout, name)
        axes[name] = axis_of(own, *kind, [] if has_range(own) else list(_extents(plots, layout, name, kind)))
    return plots, axes


def _kind(figure: Figure, name: str) -> Kind:
    layout, letter = axis_layout(figure["layout"], name), name[0]
    own = [trace for trace in figure["data"] if trace.get(f"{letter}axis", letter) == name]
    lists = [values for trace in own if (values := trace.get(letter))]
    kind = kind_of(layout, (each[0] for each in lists))
    if kind != "category":
        return kind, []
    names = (*layout.get("categoryarray", ()), *(each for values in lists for each in values))
    return kind, list(dict.fromkeys(str(each) for each in names))


def _plot(
    pair: tuple[str, str], traces: Sequence[tuple[int, Trace]], layout: dict[str, Any], kinds: dict[str, Kind]
) -> Plot:
    x, y = pair
    barred = {at: each for at, each in traces if is_bar(each)}
    points = tuple((at, each) for at, each in traces if not is_bar(each))
    stands = any(map(is_upright, barred.values()))
    across, down = (" ".join(lines_of(title_of(axis_layout(layout, name)))) for name in pair)
    bars = bars_of(list(barred.items()), layout, kinds[x if stands else y], (across, down))
    return Plot(x, y, barred, tuple(bars), points, (across, down), stands)


def _extents(plots: Sequence[Plot], layout: dict[str, Any], name: str, kind: Kind) -> Iterator[Extent]:
    """What an axis must show: traces, all names, and lines across the plot."""
    for plot in plots:
        if name in (plot.x, plot.y):
            yield from _of_bars(plot, name, kind)
            yield from _of_points(plot, name, kind)
    for shape in layout.get("shapes", ()):
        if shape.get(f"{name[0]}ref", name[0]) == name:
            yield from _around(_known((shape[f"{name[0]}{at}"] for at in (0, 1)), kind))
    if kind[0] == "category":
        yield Extent(-0.5, len(kind[1]) - 0.5, below=False, above=False)


def _of_bars(plot: Plot, name: str, kind: Kind) -> Iterator[Extent]:
    if plot.bars and plot.stands == (name == plot.x):
        sides = [each.middle + side * each.thick / 2 for each in plot.bars for side in (-1, 1)]
        yield Extent(min(sides), max(sides), below=False, above=False)
    elif ends := _known((end for each in plot.bars for end in (each.start, each.end)), kind):
        yield Extent(min(ends), max(ends), below=min(ends) < 0 or kind[0] == "log", above=max(ends) > 0)


def _of_points(plot: Plot, name: str, kind: Kind) -> Iterator[Extent]:
    sums = stacked(plot.points) if name == plot.y else {}
    for at, trace in plot.points:
        room = name == plot.y or "markers" in modes_of(trace)
        yield from _around(_known([0.0, *sums[at]] if at in sums else trace.get(name[0]) or (), kind), room)


def _known(values: Any, kind: Kind) -> list[float]:
    return [each for each in (place(value, *kind) for value in values) if each is not None]


def _around(places: list[float], room: bool = True) -> Iterator[Extent]:
    if places:
        yield Extent(min(places), max(places), room, room)
