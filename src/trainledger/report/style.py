"""How every figure looks: colours that any eye can distinguish, dark text, room for a title and a legend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

from trainledger.report.document import Figure
from trainledger.spec.units import GIGA, format_nbytes

# Okabe and Ito's colours, which people with any colour vision can distinguish.
COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#999999",
    "#000000",
    "#332288",
)
DARK, GREY = "#222222", "#555555"
_TITLE = 44  # pixels that a title takes
_ROW = 44  # pixels of a bar and of its name above it
_MARGINS = {"l": 70, "r": 40, "t": 36, "b": 55}


def arranged(title: str = "", x: str = "", y: str = "", *, height: int = 360, **options: Any) -> dict[str, Any]:
    """The ``layout`` of a figure; ``x`` and ``y`` name the axes with their units, ``options`` win over all.

    ``height`` is in pixels, what a title takes not counted.

    >>> arranged("Memory", y="bytes (GB)")["yaxis"]["title"]["text"]
    'bytes (GB)'
    """
    made: dict[str, Any] = {
        "template": "none", "height": height, "margin": dict(_MARGINS), "shapes": [],
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": DARK}, "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        # Placed in the whole drawing, a legend of several lines pushes the plot down and not itself over the title.
        "legend": {"orientation": "h", "xref": "paper", "x": 0, "yref": "container", "y": 1, "yanchor": "top"},
        "modebar": {"orientation": "v", "bgcolor": "rgba(0,0,0,0)", "color": "#bbb", "activecolor": "#555"},
    }  # fmt: skip
    for name, text in (("xaxis", x), ("yaxis", y)):
        made[name] = {
            "gridcolor": "#e4e4e4", "zerolinecolor": "#999", "automargin": True, "ticks": "outside", "ticklen": 5,
            "tickcolor": "rgba(0,0,0,0)",
        }  # fmt: skip
        if text:
            made[name]["title"] = {"text": text, "standoff": 10}
    made |= options
    return titled(made, title) if title else made


def titled(layout: dict[str, Any], text: str) -> dict[str, Any]:
    """The layout with a title, and room for it above the legend."""
    layout = untitled(layout)
    margin, height = layout["margin"], layout["height"] + _TITLE
    return layout | {
        "height": height,
        "margin": margin | {"t": margin["t"] + _TITLE},
        "legend": layout["legend"] | {"y": 1 - _TITLE / height},
        "title": {"text": text, "x": 0, "xref": "paper", "xanchor": "left", "y": 1, "yref": "container",
                  "yanchor": "top", "pad": {"t": 12}, "font": {"size": 16, "color": DARK}},
    }  # fmt: skip


def untitled(layout: dict[str, Any]) -> dict[str, Any]:
    """The layout without its title and without the room for it, where a page has its own titles.

    >>> untitled(arranged("Memory", height=200)) == arranged(height=200)
    True
    """
    if "title" not in layout:
        return layout
    margin = layout["margin"]
    return {name: each for name, each in layout.items() if name != "title"} | {
        "height": layout["height"] - _TITLE,
        "margin": margin | {"t": margin["t"] - _TITLE},
        "legend": layout["legend"] | {"y": 1},
    }


def around(values: Iterable[float]) -> list[float]:
    """The ends of an axis that shows all of these with a twentieth of room on both sides, from 0 on at the least.

    >>> around([85.0, 1000.0]), around([0.0, 20.0])
    ([39.25, 1045.75], [0.0, 21.0])
    """
    low, high = min(values := list(values)), max(values)
    room = (high - low or high) / 20
    return [max(0.0, low - room), high + room]


def folded(text: str, width: int = 40) -> str:
    """A text over lines that a telephone shows whole.

    >>> folded("operations of one step", 12)
    'operations<br>of one step'
    """
    return "<br>".join(wrap(text, width, break_long_words=False, break_on_hyphens=False))


def points(name: str, x: Sequence[Any], y: Sequence[Any], mode: str = "markers", **options: Any) -> dict[str, Any]:
    """Points or lines of one name, as Plotly takes them."""
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, **options}


def bars(name: str, rows: Sequence[Any], values: Sequence[Any], colour: str, hover: str, **more: Any) -> dict[str, Any]:
    """Horizontal bars of one name and colour, by the names or the numbers of their rows."""
    shown = {"marker": {"color": colour}, "hovertemplate": hover}
    return {"type": "bar", "orientation": "h", "name": name, "y": rows, "x": values, **shown, **more}


def bar_figure(title: str, x: str, names: Iterable[str], data: Sequence[dict[str, Any]], **options: Any) -> Figure:
    """Horizontal bars under their names; ``x`` names the axis with its unit, ``options`` are of the layout."""
    names = list(names)
    layout = arranged(title, x, height=_MARGINS["t"] + _MARGINS["b"] + _ROW * len(names), **options)
    # Above each bar a long name has the whole width.
    layout["yaxis"] |= {"autorange": "reversed", "showticklabels": False, "showgrid": False, "zeroline": False}
    layout["bargap"] = layout["waterfallgap"] = 0.55
    layout["margin"] |= {"l": 10}
    place = {"x": 0, "xref": "paper", "xanchor": "left", "yref": "y", "yanchor": "bottom", "yshift": 11}
    layout["annotations"] = [{**place, "y": at, "text": name, "showarrow": False} for at, name in enumerate(names)]
    return {"data": list(data), "layout": layout}


def mark_usable(layout: dict[str, Any], nbytes: int | None, memory: Iterable[float]) -> None:
    """Marks usable memory, where it is known, on an axis in GB that shows it and all of ``memory``."""
    if nbytes is not None:
        layout["xaxis"] |= {"range": around([*memory, nbytes / GIGA])}
        mark(layout, "v", nbytes / GIGA, f"{format_nbytes(nbytes)} usable")


def by_turns(numbers: Iterable[int]) -> list[str]:
    """On which side of a point its number is: neighbours on different ones, since they may be close together."""
    sides = ("top right", "bottom right", "top left", "bottom left")
    return [sides[each % len(sides)] for each in numbers]


def key_of(layout: dict[str, Any]) -> list[str]:
    """What the numbers in a figure name, from 1 on: ``layout["meta"]["key"]``, which is shown below the figure."""
    found: list[str] = layout.get("meta", {}).get("key", [])
    return found


def line(way: str, at: float, colour: str, xref: str, yref: str, dash: str = "solid") -> dict[str, Any]:
    """A shape across a figure: vertical (``v``) at an x, or horizontal at a y."""
    ends = {"x0": at, "x1": at, "y0": 0, "y1": 1} if way == "v" else {"x0": 0, "x1": 1, "y0": at, "y1": at}
    return {"type": "line", "xref": xref, "yref": yref, **ends, "line": {"color": colour, "width": 1.2, "dash": dash}}


def mark(layout: dict[str, Any], way: str, at: float, text: str, axis: str = "") -> None:
    """Adds a dashed line across a plot and what it says: at its upper end (``v``), or at its left one.

    ``axis`` is the number of the plot's axes, where there are several. Of a ``v`` the x axis has its range already.
    """
    x, y = f"x{axis}", f"y{axis}"
    ends = (x, f"{y} domain") if way == "v" else (f"{x} domain", y)
    layout["shapes"].append(line(way, at, DARK, *ends, dash="dash"))
    place: dict[str, Any] = {"x": 0, "y": at, "xanchor": "left"}
    if way == "v":
        low, high = layout[f"xaxis{axis}"]["range"]
        left = at < (low + high) / 2  # next to the line, where there is room
        place = {"x": at, "y": 1, "xanchor": "left" if left else "right", "xshift": 4 if left else -4}
    layout.setdefault("annotations", []).append(
        {
            **place, "xref": ends[0], "yref": ends[1], "yanchor": "top" if way == "v" else "bottom", "text": text,
            "showarrow": False, "font": {"size": 11, "color": DARK},
        }
    )  # fmt: skip
