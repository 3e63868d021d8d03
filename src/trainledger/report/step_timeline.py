"""A step drawn over time: the streams of a rank, or the stages of a pipeline, one lane each."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.predict.rank_time import Span
from trainledger.report.style import COLOURS, Figure, arranged
from trainledger.units import format_seconds

_COLOUR_OF = {
    "forward": COLOURS[0], "backward": COLOURS[2], "weights": COLOURS[4], "update": COLOURS[3],
    "communication": COLOURS[1], "more": "#dddddd",
}  # fmt: skip
_NAME_OF = {"weights": "gradients of weights", "more": "more rounds, alike"}
_PALER = 0.5  # what stands for many rounds
_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def step_timeline(spans: Sequence[Span]) -> Figure | None:
    """What runs when in a step (`predict.step_spans.spans`); None where nothing is known of it.

    Many rounds that are alike are one bar: paler where a round is of one kind, grey where it is of several.
    """
    if not spans:
        return None
    last = max(each.end for each in spans)
    scale, unit = next((each for each in _SCALES if last >= each[0]), _SCALES[-1])
    lanes = list(dict.fromkeys(each.stream for each in spans))
    data = []
    for what, colour in _COLOUR_OF.items():
        own = [each for each in spans if each.what.removeprefix("more ") == what]
        if own:
            folded = [each.what != what for each in own]
            data.append(
                {
                    "type": "bar", "orientation": "h", "name": _NAME_OF.get(what, what),
                    "base": [each.start / scale for each in own],
                    "x": [(each.end - each.start) / scale for each in own], "y": [each.stream for each in own],
                    "marker": {"color": colour, "opacity": [_PALER if each else 1.0 for each in folded],
                               "line": {"color": "#ffffff", "width": 0.4}},
                    "text": [f"{each.name}, {format_seconds(each.end - each.start)}" for each in own],
                    "textposition": "none", "hovertemplate": "%{text}<extra></extra>",
                }
            )  # fmt: skip
    layout = arranged(
        "One optimizer step", x=f"time ({unit})", height=170 + 34 * len(lanes), barmode="overlay", bargap=0.25
    )
    layout["xaxis"] |= {"range": [0, last / scale]}
    layout["yaxis"] |= {"categoryorder": "array", "categoryarray": lanes[::-1], "gridcolor": "rgba(0,0,0,0)"}
    return {"data": data, "layout": layout}
