"""What to change, for a terminal of 80 columns and as a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainledger.document import Figure
from trainledger.plan.advise import Advice, Advised
from trainledger.plan.changes import EFFECTS, RESULT, ROUNDING, SAME
from trainledger.plan.difference import overrides
from trainledger.report.heading import of_run
from trainledger.report.plan import impossible, on_one
from trainledger.report.style import COLOURS, around, arranged, by_turns, mark
from trainledger.report.table import WIDTH, sentence, wrapped
from trainledger.units import GIGA, format_nbytes, format_percent, format_seconds

_COLOUR_OF = {SAME: COLOURS[0], ROUNDING: COLOURS[2], RESULT: COLOURS[5]}


def text(advice: Advice, most: int = 10) -> str:
    """The run as it is, the changes that help (``most`` of each kind), and what to do together."""
    return "\n\n".join(_parts(advice, most))


def _parts(advice: Advice, most: int) -> Iterator[str]:
    yield _now(advice)
    kinds = (
        ("Changes that leave the result as it is", [each for each in advice.alone if each.effect != RESULT]),
        ("Changes of WHAT IS TRAINED: hold a short run against the old one first",
         [each for each in advice.alone if each.effect == RESULT]),
    )  # fmt: skip
    for title, found in kinds:
        if found:
            yield "\n".join([wrapped(title), *_numbered(found[:most])])
        if len(found) > most:
            yield wrapped(f"{len(found) - most} more gain less (--most {len(found)} or --json has them).")
    if not advice.alone:
        yield wrapped(f"None of {advice.tried} changes that were predicted gains in {advice.goal}.")
    if len(advice.together) > 1 or (advice.together and len(advice.together[0].sets) > 1):
        last = advice.together[-1]
        yield "\n".join(
            [
                "Together, in this order; each beside the one before it",
                *_numbered(advice.together),
                wrapped(f"All of it: {_figures_of(advice, last)}"),
                *_sets(overrides(advice.run, last.run)),
            ]
        )
    if advice.forecast.fits is False and not any(each.fits for each in (*advice.alone, *advice.together)):
        yield wrapped(_unfit(advice))
    if advice.run.cluster.count > 1 and advice.run.recipe.lora_rank is None:
        yield wrapped(
            "A layout is changed here by a factor of two at a time; `trainledger layouts` searches all of them."
        )
    tail = f"{advice.tried} changes were predicted one by one; {advice.refused} more break a rule of the run file."
    basis = advice.forecast.basis.get("step_seconds")
    yield wrapped(tail + (f" Basis of the times: {basis}." if basis else ""))


def _unfit(advice: Advice) -> str:
    """What is left where no change makes a run fit."""
    left = []
    if any(each.effect == RESULT for each in advice.alone) and all(each.effect != RESULT for each in advice.together):
        left.append("changes of what is trained, together (--any-result)")
    if advice.run.recipe.lora_rank is None:
        left.append("more devices to shard over (trainledger layouts)")
        left.append("adapters in place of all weights (recipe.lora_rank)")
    ways = f"{', '.join(left)}, or " if left else ""
    return f"Nothing of this makes it fit: that takes {ways}a smaller model (trainledger fit)."


def _now(advice: Advice) -> str:
    return "\n".join(wrapped(each) for each in (*_as_it_is(advice), f"Ranked by what they gain in {advice.goal}."))


def _as_it_is(advice: Advice) -> list[str]:
    told = advice.forecast
    parts = []
    if told.total_seconds is not None:
        parts.append(f"{format_seconds(told.total_seconds)} in all")
    if told.step_seconds is not None:
        parts.append(f"{format_seconds(told.step_seconds)} a step{on_one(advice.run, told)}")
    if told.device_nbytes is not None:
        holds = f"{format_nbytes(told.device_nbytes)} on the heaviest device"
        if told.usable_nbytes is not None:
            fits = "which fits in" if told.fits else "which does NOT fit in"
            holds += f", {fits} {format_nbytes(told.usable_nbytes)}"
        parts.append(holds)
    if not parts:
        parts.append("no time and no memory are known of this machine")
    lines = [f"Impossible {impossible(advice.run, told)}."] if told.impossible else []
    lines.append(f"{advice.run.model.name} as planned: {'; '.join(parts)}.")
    if told.bottleneck is not None:
        lines.append(sentence(told.bottleneck.sentence))
    return lines


def _numbered(found: Sequence[Advised]) -> Iterator[str]:
    for at, each in enumerate(found, 1):
        head = f"{at:>2}. "
        told = f"{each.what}: {_figures(each.seconds, each.nbytes, each.fits)}"
        if each.effect != SAME:
            told += f"; {EFFECTS[each.effect]}"
        if each.cost:
            told += f"; {each.cost}"
        lines = wrapped(told, WIDTH - len(head)).split("\n")
        yield head + lines[0]
        yield from (" " * len(head) + one for one in lines[1:])
        yield from _sets(each.sets)


def _figures_of(advice: Advice, last: Advised) -> str:
    from trainledger.plan.advise import before_and_after

    seconds, nbytes = before_and_after(advice.forecast, last.forecast)
    return _figures(seconds, nbytes, last.fits)


def _figures(
    seconds: tuple[float | None, float | None], nbytes: tuple[int | None, int | None], fits: bool | None
) -> str:
    parts = []
    if seconds[0] and seconds[1] is not None:
        share = format_percent(seconds[1] / seconds[0] - 1, signed=True)
        parts.append(f"time {share} ({format_seconds(seconds[0])} to {format_seconds(seconds[1])})")
    elif seconds[1] is not None:
        parts.append(f"{format_seconds(seconds[1])} in all")
    if nbytes[0] and nbytes[1] is not None:
        share = format_percent(nbytes[1] / nbytes[0] - 1, signed=True)
        parts.append(f"memory {share} ({format_nbytes(nbytes[0])} to {format_nbytes(nbytes[1])})")
    if fits is False:
        parts.append("does NOT fit")
    return ", ".join(parts)


def _sets(sets: Sequence[str]) -> Iterator[str]:
    """``--set`` lines to paste, several on a line as long as it is not too long."""
    words = [f"--set {_quoted(each)}" for each in sets]
    current = "   "
    for at, word in enumerate(words):
        end = " \\" if at + 1 < len(words) else ""
        if len(current) + 1 + len(word) + len(end) > WIDTH and current.strip():
            yield current + " \\"
            current = "   "
        current += f" {word}"
    if current.strip():
        yield current


def _quoted(each: str) -> str:
    return each if all(one.isalnum() or one in "._=-,+" for one in each) else "'" + each.replace("'", "'\\''") + "'"


def about(advice: Advice) -> list[str]:
    """What the page of the figure says above it: the run as it is."""
    return [*of_run(advice.run), *_as_it_is(advice)]


def figures(advice: Advice) -> dict[str, Figure]:
    """Time against memory of every change that helps, numbered, and the way of those together."""
    drawn = [each for each in advice.alone if each.seconds[1] is not None and each.nbytes[1] is not None]
    points = sorted(drawn, key=lambda each: each.effect == RESULT)  # as the text has them
    if not points:
        return {}
    scale, unit = _unit(max(each.seconds[0] or 0.0 for each in points))
    data = []
    for effect, meaning in EFFECTS.items():
        of_effect = [(number, each) for number, each in enumerate(points, 1) if each.effect == effect]
        if of_effect:
            data.append(_markers(meaning, of_effect, _COLOUR_OF[effect], scale, unit))
    start, first = points[0].nbytes[0] or 0, points[0].seconds[0] or 0.0
    way = [each for each in advice.together if each.seconds[1] is not None and each.nbytes[1] is not None]
    if way:
        x = [start / GIGA, *((each.nbytes[1] or 0) / GIGA for each in way)]
        y = [first / scale, *((each.seconds[1] or 0.0) / scale for each in way)]
        told = ["as planned", *(" ".join(f"--set {one}" for one in each.sets) for each in way)]
        data.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": "together, in order", "x": x, "y": y, "text": told,
                "line": {"color": "#999999", "dash": "dot"}, "marker": {"size": 6, "color": "#999999"},
                "hovertemplate": "%{text}<extra></extra>",
            }
        )  # fmt: skip
    data.append(
        {
            "type": "scatter", "mode": "markers", "name": "as planned", "x": [start / GIGA], "y": [first / scale],
            "marker": {"size": 15, "symbol": "star", "color": "#000000"},
            "hovertemplate": "as planned<extra></extra>",
        }
    )  # fmt: skip
    title = f"Changes of {advice.run.model.name}: time against memory"
    layout = arranged(
        title, "memory of the heaviest device (GB)", f"time ({unit})", height=450, hovermode="closest",
        meta={"key": [each.what for each in points]},
    )  # fmt: skip
    held = [(each.nbytes[1] or 0) / GIGA for each in (*points, *way)] + [start / GIGA]
    if advice.forecast.usable_nbytes is not None:
        gives = advice.forecast.usable_nbytes / GIGA
        layout["xaxis"] |= {"range": around([*held, gives])}
        mark(layout, "v", gives, f"{format_nbytes(advice.forecast.usable_nbytes)} usable")
    return {title: {"data": data, "layout": layout}}


def _markers(
    name: str, numbered: Sequence[tuple[int, Advised]], colour: str, scale: float, unit: str
) -> dict[str, object]:
    found = [each for _, each in numbered]
    return {
        "type": "scatter", "mode": "markers+text", "name": name, "cliponaxis": False,
        "text": [f"{number}" for number, _ in numbered],
        "textposition": by_turns(number for number, _ in numbered),
        "x": [(each.nbytes[1] or 0) / GIGA for each in found],
        "y": [(each.seconds[1] or 0.0) / scale for each in found],
        "customdata": [[each.what, " ".join(f"--set {one}" for one in each.sets)] for each in found],
        "marker": {"size": 11, "color": colour, "line": {"width": 1, "color": "white"}},
        "hovertemplate": f"<b>%{{customdata[0]}}</b><br>%{{customdata[1]}}<br>%{{y:.4g}} {unit}, %{{x:.4g}} GB"
                         "<extra></extra>",
    }  # fmt: skip


def _unit(seconds: float) -> tuple[float, str]:
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
    return next((each for each in units if seconds >= each[0]), (1e-3, "milliseconds"))
