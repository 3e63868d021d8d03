"""A step drawn over time: the streams of a rank, or the stages of a pipeline, one lane each."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.predict.streams import Span
from trainledger.report.style import COLOURS, Figure, arranged
from trainledger.units import format_seconds

_COLOUR_OF = {
    "forward": COLOURS[0], "backward": COLOURS[2], "weights": COLOURS[4], "update": COLOURS[3],
    "communication": COLOURS[1], "more": "#dddddd",
}  # fmt: skip
_NAME_OF = {"weights": "gradients of weights", "more": "more rounds, of several kinds"}
_PALER = 0.5  # what stands for many rounds
_WAITING = "waiting, anywhere in the step"
_LEAST = 1e-3  # of a step: less at its end is not drawn
_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def step_timeline(spans: Sequence[Span], step_seconds: float, note: str = "") -> Figure | None:
    """What runs when in a step (`predict.parallel_step.spans`); None where nothing is known of it.

    Many rounds that are alike are one bar: paler where a round is of one kind, grey where it is of several. What
    ``step_seconds`` has more than the spans is waiting that falls between them, nobody knows where: a bar behind them.
    ``note`` is said behind the title.
    """
    if not spans:
        return None
    busy = max(each.end for each in spans)
    last = max(busy, step_seconds)
    scale, unit = next((each for each in _SCALES if last >= each[0]), _SCALES[-1])
    lanes = list(dict.fromkeys(each.stream for each in spans))
    data: list[dict[str, object]] = []
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
    if any(each.what.startswith("more ") for each in spans):  # a bar without length: the legend says what paler is
        data.append(
            {
                "type": "bar", "orientation": "h", "name": "paler: many rounds, alike", "x": [0], "y": lanes[:1],
                "marker": {"color": _COLOUR_OF["forward"]}, "opacity": _PALER, "hoverinfo": "skip",
            }
        )  # fmt: skip
    if last - busy > _LEAST * last:
        data.append(
            {
                "type": "bar", "orientation": "h", "name": _WAITING, "base": [busy / scale] * len(lanes),
                "x": [(last - busy) / scale] * len(lanes), "y": lanes,
                "marker": {"color": "#ffffff", "line": {"width": 0},
                           "pattern": {"shape": "/", "size": 7, "fgcolor": "#aaaaaa"}},
                "hovertemplate": f"{format_seconds(last - busy)} of waiting for the program and for slower devices: "
                                 "somewhere in the step, drawn at its end<extra></extra>",
            }
        )  # fmt: skip
    title = f"One optimizer step: {format_seconds(last)}{note}"
    layout = arranged(title, f"time ({unit})", height=130 + 34 * len(lanes), barmode="overlay", bargap=0.25)
    layout["xaxis"] |= {"range": [0, last / scale]}
    layout["yaxis"] |= {"categoryorder": "array", "categoryarray": lanes[::-1], "gridcolor": "rgba(0,0,0,0)"}
    return {"data": data, "layout": layout}
