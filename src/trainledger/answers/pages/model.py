"""Tables and figures of a model: parameters and forward FLOPs by component, and their shares as sizes grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainledger.ledger.model.parameters import MTP, SCORES
from trainledger.report.chart import COLOURS, GREY, Area, Axis, Band, Chart, bar_chart, stacked
from trainledger.report.document import Cell, Table
from trainledger.spec.model import ModelSpec
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
    return [component for component in COMPONENTS if component in found]


def forward_totals(spec: ModelSpec, flops: Mapping[str, int], tokens: int) -> dict[str, float | None]:
    """FLOPs of a forward of so many tokens, those of a token, the share of scores, and the tokens at which it is half.

    The last is None where scores do not grow with the square of the tokens alone.
    """
    forward, scores = sum(flops.values()), flops[SCORES]
    squared = spec.attention.window is None and not spec.n_mtp_layers
    return {
        "forward": forward,
        "per_token": forward / tokens,
        "scores_share": scores / forward,
        "half_at": tokens * (forward - scores) // scores if squared else None,
    }


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


def components_chart(parameters: Mapping[str, int], flops: Mapping[str, int], title: str) -> Chart:
    """The shares of the components of all parameters and of all forward FLOPs."""
    rows = {"parameters": parameters, "forward FLOPs": flops}
    parts = {
        title_of(name): [100 * row.get(name, 0) / sum(row.values()) for row in rows.values()]
        for name in ordered(*rows.values())
    }
    colours = {title_of(name): colour for name, colour in _COLOUR_OF.items()}
    bars = stacked(parts, colours, lambda name, row: f"{[*rows][row]}: {parts[name][row]:.1f} % {name}")
    return bar_chart(title, Axis("share (%)", ends=(0, 100)), rows, bars)


def shares_chart(
    sizes: Sequence[int], amounts: Sequence[Mapping[str, int]], x: str, y: str, marked: int, title: str
) -> Chart:
    """The shares of the components over a growing size, stacked to 100 %, and the requested size."""
    names = ordered(*amounts)
    layers = {
        title_of(name): [100 * amount.get(name, 0) / sum(amount.values()) for amount in amounts] for name in names
    }
    said = [
        "\n".join([f"{x}: {size:,}", *(f"{name}: {layer[at]:.1f} %" for name, layer in layers.items())])
        for at, size in enumerate(sizes)
    ]
    marks = (
        Area(sizes, layers, [_COLOUR_OF[name] for name in names], said),
        Band("x", marked, text=f"{marked:,}" if marked < 10**7 else format_count(marked)),
    )
    return Chart(title, marks, Axis(x, log=True, ends=(sizes[0], sizes[-1])), Axis(f"share of {y} (%)", ends=(0, 100)))


def shares_table(name: str, sizes: Sequence[int], amounts: Sequence[Mapping[str, int]], first: str) -> Table:
    """The same shares as a table, a row for each size."""
    known = ordered(*amounts)
    rows: list[tuple[Cell, ...]] = []
    for size, amount in zip(sizes, amounts, strict=True):
        whole = sum(amount.values())
        rows.append((size, *(amount.get(part, 0) / whole for part in known)))
    units = ("count" if first == "parameters" else "integer", *("share" for _ in known))
    return Table(name, (first, *map(title_of, known)), tuple(rows), units=units)
