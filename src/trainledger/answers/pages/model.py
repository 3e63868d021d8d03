"""Tables and figures of a model: parameters and forward FLOPs by component, and their shares as sizes grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10

from trainledger.ledger.model.parameters import MTP, SCORES
from trainledger.report.document import Cell, Figure, Table
from trainledger.report.style import COLOURS, GREY, arranged, bar_figure, bars, mark, points
from trainledger.spec.units import format_count

# In the order in which a token meets them, those at both ends of the model at the ends.
COMPONENTS = (
    "embedding", "positions", "attention", SCORES, "mlp", "experts", "shared experts", "router", "norms", "head", MTP,
)  # fmt: skip
_TITLES = {"attention": "attention projections"}
_COLOUR_OF = dict(zip(COMPONENTS, (*COLOURS, GREY), strict=True))


def title_of(component: str) -> str:
    """A component's name: of attention the projections are one component, queries against keys another."""
    return _TITLES.get(component, component)


def ordered(*amounts: Mapping[str, float]) -> list[str]:
    """The components that have any of the amounts."""
    found = {name for each in amounts for name, amount in each.items() if amount}
    return [each for each in COMPONENTS if each in found]


def components_table(parameters: Mapping[str, int], flops: Mapping[str, int]) -> Table:
    """Parameters and forward FLOPs of each component, with their shares."""
    n, work = sum(parameters.values()), sum(flops.values())
    rows: list[tuple[Cell, ...]] = []
    for name in ordered(parameters, flops):
        own, done = parameters.get(name, 0), flops.get(name, 0)
        rows.append((title_of(name), own, own / n, done, done / work))
    rows.append(("all", n, None, work, None))
    columns = ("component", "parameters", "share", "forward FLOPs", "share ")
    return Table("components", columns, tuple(rows), units=("", "count", "share", "flops", "share"), align="lrrrr")


def components_figure(parameters: Mapping[str, int], flops: Mapping[str, int]) -> Figure:
    """The shares of the components of all parameters and of all forward FLOPs."""
    rows = {"parameters": parameters, "forward FLOPs": flops}
    data = [
        bars(
            title_of(name), list(rows), [100 * each.get(name, 0) / sum(each.values()) for each in rows.values()],
            _COLOUR_OF[name], f"%{{x:.1f}} % {title_of(name)}<extra>%{{y}}</extra>",
        )
        for name in ordered(*rows.values())
    ]  # fmt: skip
    figure = bar_figure("", "share (%)", rows, data, barmode="stack")
    figure["layout"]["xaxis"] |= {"range": [0, 100]}
    figure["layout"]["legend"] |= {"traceorder": "normal"}
    return figure


def shares_figure(sizes: Sequence[int], amounts: Sequence[Mapping[str, int]], x: str, y: str, marked: int) -> Figure:
    """The shares of the components over a growing size, stacked to 100 %, and the requested size."""
    data = []
    for name in ordered(*amounts):
        values = [100 * each.get(name, 0) / sum(each.values()) for each in amounts]
        data.append(
            points(
                title_of(name), list(sizes), values, "lines", stackgroup="all",
                line={"width": 0.5, "color": _COLOUR_OF[name]}, hovertemplate="%{y:.1f} %",
            )
        )  # fmt: skip
    layout = arranged("", x, f"share of {y} (%)", height=320, hovermode="x unified")
    layout["yaxis"] |= {"range": [0, 100]}
    layout["xaxis"] |= {"type": "log", "range": [sizes[0], sizes[-1]]}
    mark(layout, "v", marked, f"{marked:,}" if marked < 10**7 else format_count(marked))
    _in_powers(layout)
    return {"data": data, "layout": layout}


def _in_powers(layout: Figure) -> None:
    """Plotly takes the range of a logarithmic axis, and the place of words on it, as powers of ten."""
    layout["xaxis"]["range"] = [log10(each) for each in layout["xaxis"]["range"]]
    for each in layout["annotations"]:
        each["x"] = log10(each["x"])


def shares_table(name: str, sizes: Sequence[int], amounts: Sequence[Mapping[str, int]], first: str) -> Table:
    """The same shares as a table, a row for each size."""
    known = ordered(*amounts)
    rows: list[tuple[Cell, ...]] = []
    for size, each in zip(sizes, amounts, strict=True):
        whole = sum(each.values())
        rows.append((size, *(each.get(part, 0) / whole for part in known)))
    units = ("count" if first == "parameters" else "integer", *("share" for _ in known))
    return Table(name, (first, *map(title_of, known)), tuple(rows), units=units)
