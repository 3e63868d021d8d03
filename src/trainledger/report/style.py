"""How every figure looks: colours that any eye tells apart, dark text, room for a title and a legend."""

from __future__ import annotations

from typing import Any

Figure = dict[str, Any]

# Okabe and Ito's colours, which people with any colour vision tell apart.
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


def arranged(title: str = "", x: str = "", y: str = "", **options: Any) -> dict[str, Any]:
    """The ``layout`` of a figure; ``x`` and ``y`` name the axes with their units, ``options`` win over all.

    >>> arranged("Memory", y="bytes (GB)")["yaxis"]["title"]["text"]
    'bytes (GB)'
    """
    made: dict[str, Any] = {
        "template": "none", "height": 360, "margin": {"l": 70, "r": 40, "t": 30, "b": 50}, "shapes": [],
        "font": {"family": "system-ui, sans-serif", "size": 13}, "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)", "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "modebar": {"orientation": "v", "bgcolor": "rgba(0,0,0,0)", "color": "#bbb", "activecolor": "#555"},
    }  # fmt: skip
    if title:
        made["title"] = {"text": title, "x": 0, "xref": "paper", "xanchor": "left", "y": 0.97, "yanchor": "top",
                         "font": {"size": 16, "color": DARK}}  # fmt: skip
        made["margin"] = {"l": 70, "r": 40, "t": 80, "b": 55}
        made["font"]["color"] = DARK
        made["height"] = 420
    for name, text in (("xaxis", x), ("yaxis", y)):
        made[name] = {
            "gridcolor": "#e4e4e4", "zerolinecolor": "#999", "automargin": True, "ticks": "outside", "ticklen": 5,
            "tickcolor": "rgba(0,0,0,0)",
        }  # fmt: skip
        if text:
            made[name]["title"] = {"text": text, "standoff": 10}
    return made | options


def line(way: str, at: float, colour: str, xref: str, yref: str, dash: str = "solid") -> dict[str, Any]:
    """A shape across a figure: vertical (``v``) at an x, or horizontal at a y."""
    ends = {"x0": at, "x1": at, "y0": 0, "y1": 1} if way == "v" else {"x0": 0, "x1": 1, "y0": at, "y1": at}
    return {"type": "line", "xref": xref, "yref": yref, **ends, "line": {"color": colour, "width": 1.2, "dash": dash}}
