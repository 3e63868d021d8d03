"""The figure of several ranks: under one another on one time axis, what each does when in the same step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainledger.answers.pages.profile_figures import GROUPS, UNEXPLAINED_COLOUR
from trainledger.forecast.predict.forecast import UNEXPLAINED
from trainledger.observe.profiler.ranks import WAITS, RankRow, Ranks
from trainledger.report.document import Figure
from trainledger.report.style import COLOURS, arranged
from trainledger.spec.units import format_percent

_MOST, _FINE = 16, 8  # ranks that are drawn, and drawn in all pieces
_ROW, _AROUND, _GAP = 40, 130, 0.22  # pixels of a rank and of what is around all; of a row, what is empty
_ALIKE = 0.08  # of a piece: neighbours whose groups differ by less are drawn as one
_GROUPS = (*GROUPS[:4], (WAITS, COLOURS[5], (WAITS,)), *GROUPS[4:])
_LEAST = 0.004  # of a piece: less is not drawn
Run = tuple[int, int, list[float]]  # the first piece, the one behind the last, and the share of each group


def rank_figure(found: Ranks) -> dict[str, Figure]:
    """The timeline under its title; empty where the ranks have no step in common."""
    timeline = found.timeline
    if timeline is None:
        return {}
    late = {each.rank for each in found.stragglers}
    rows = _drawn(timeline.rows, late)
    some = f"{len(rows)} of {len(timeline.rows):,} ranks" if len(rows) < len(timeline.rows) else "the ranks"
    title = f"What {some} do when in step {timeline.step}"
    clocks = "clocks set by the ends of shared collectives" if timeline.is_aligned else "each from when its step begins"
    layout = arranged(title, height=_AROUND + _ROW * len(rows), barmode="stack", bargap=0.0)
    end_ms = max(each.begin_ns + each.nanoseconds for each in rows) / 1e6
    for at, row in enumerate(rows):
        number, low = _axis(at), 1 - (at + 1) / len(rows)
        words = f"rank {row.rank}, late" if row.rank in late else f"rank {row.rank}"
        layout[f"xaxis{number}"] = layout["xaxis"] | {
            "range": [0, end_ms], "anchor": f"y{number}", "showticklabels": False, "zeroline": False,
        }  # fmt: skip
        layout[f"yaxis{number}"] = layout["yaxis"] | {
            "range": [0, 1], "domain": [low + _GAP / 2 / len(rows), low + (1 - _GAP / 2) / len(rows)],
            "anchor": f"x{number}", "tickvals": [0.5], "ticktext": [words], "showgrid": False, "zeroline": False,
        }  # fmt: skip
    layout[f"xaxis{_axis(len(rows) - 1)}"] |= {
        "showticklabels": True, "title": {"text": f"milliseconds ({clocks})", "standoff": 10},
    }  # fmt: skip
    # Bars of a row are stacked in the order of the groups.
    runs = [list(_runs(row, 1 if len(rows) <= _FINE else 2)) for row in rows]
    data = []
    for group, (name, colour, _) in enumerate([*_GROUPS, (UNEXPLAINED, UNEXPLAINED_COLOUR, ())]):
        own = [bars for at, row in enumerate(rows) if (bars := _bars(row, runs[at], group, name, colour, _axis(at)))]
        data += [each | {"showlegend": at == 0} for at, each in enumerate(own)]
    return {title: {"data": data, "layout": layout}}


def _axis(at: int) -> str:
    return "" if at == 0 else str(at + 1)


def _drawn(rows: Sequence[RankRow], late: set[int]) -> list[RankRow]:
    """All ranks, or of many those that are late, those that wait most and least, and others evenly."""
    if len(rows) <= _MOST:
        return list(rows)
    by_wait = sorted(rows, key=lambda row: sum(row.pieces_ns[WAITS]))
    even = [rows[at * len(rows) // _MOST] for at in range(_MOST)]
    chosen = [*(row for row in rows if row.rank in late), by_wait[-1], by_wait[0], *even]
    numbers = list(dict.fromkeys(row.rank for row in chosen))[:_MOST]
    return [row for row in rows if row.rank in numbers]


def _bars(row: RankRow, runs: Sequence[Run], group: int, name: str, colour: str, axis: str) -> dict[str, Any] | None:
    """The bars of one group of a rank; None where it has none."""
    own = [(begin, end, shares[group]) for begin, end, shares in runs if shares[group] > _LEAST]
    if not own:
        return None
    piece_ms, first_ms = row.nanoseconds / _count(row) / 1e6, row.begin_ns / 1e6
    return {
        "type": "bar", "name": name, "legendgroup": name, "xaxis": f"x{axis}", "yaxis": f"y{axis}",
        "x": [first_ms + (begin + end) / 2 * piece_ms for begin, end, _ in own],
        "y": [share for *_, share in own], "width": [(end - begin) * piece_ms for begin, end, _ in own],
        "marker": {"color": colour, "line": {"width": 0}},
        "text": [f"{format_percent(share)} of {(end - begin) * piece_ms:.4g} ms" for begin, end, share in own],
        "textposition": "none", "hovertemplate": f"rank {row.rank}: {name}, %{{text}}<extra></extra>",
    }  # fmt: skip


def _runs(row: RankRow, together: int) -> Iterator[Run]:
    """Neighbouring pieces that are alike as one, with the mean share of each group and of what is in none.

    So many pieces ``together`` are one whether or not they are alike.
    """
    piece_ns = max(row.nanoseconds / _count(row), 1e-9)
    begin, some = 0, list[list[float]]()
    for at in range(_count(row)):
        shares = [sum(row.pieces_ns[part][at] for part in parts) / piece_ns for _, _, parts in _GROUPS]
        shares.append(max(1 - sum(shares), 0.0))
        if some and at % together == 0 and max(abs(a - b) for a, b in zip(some[0], shares, strict=True)) > _ALIKE:
            yield begin, at, _mean(some)
            begin, some = at, []
        some.append(shares)
    yield begin, _count(row), _mean(some)


def _count(row: RankRow) -> int:
    return len(row.pieces_ns[WAITS])


def _mean(some: Sequence[Sequence[float]]) -> list[float]:
    return [sum(each) / len(some) for each in zip(*some, strict=True)]
