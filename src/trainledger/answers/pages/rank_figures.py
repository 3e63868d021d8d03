"""The figure of several ranks: under one another on one time axis, what each does when in the same step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainledger.answers.pages.profile_figures import GROUPS
from trainledger.forecast.predict.forecast import UNEXPLAINED
from trainledger.observe.profiler.ranks import WAITS, RankRow, Ranks
from trainledger.report.chart import COLOURS, PALE, Area, Axis, Chart
from trainledger.spec.units import format_percent

_MOST, _FINE = 16, 8  # ranks that are drawn, and drawn in all pieces
_ROW, _THICK = 40, 0.78  # pixels of a rank; its part of a row
_ALIKE = 0.08  # of a piece: neighbours whose groups differ by less are drawn as one
_GROUPS = (*GROUPS[:4], (WAITS, COLOURS[5], (WAITS,)), *GROUPS[4:])
_COLOUR_OF = {name: colour for name, colour, _ in _GROUPS} | {UNEXPLAINED: PALE}
_LEAST = 0.004  # of a piece: less is not drawn
Run = tuple[int, int, list[float]]  # the first piece, the one behind the last, and the share of each group


def rank_charts(found: Ranks) -> list[Chart]:
    """The timeline of the ranks; none where they have no step in common."""
    timeline = found.timeline
    if timeline is None:
        return []
    late = {each.rank for each in found.stragglers}
    rows = _drawn(timeline.rows, late)
    some = f"{len(rows)} of {len(timeline.rows):,} ranks" if len(rows) < len(timeline.rows) else "the ranks"
    clocks = "clocks set by the ends of shared collectives" if timeline.is_aligned else "each from when its step begins"
    names = tuple(f"rank {row.rank}, late" if row.rank in late else f"rank {row.rank}" for row in rows)
    end_ms = max(each.begin_ns + each.nanoseconds for each in rows) / 1e6
    together = 1 if len(rows) <= _FINE else 2
    marks = tuple(_area(at, row, list(_runs(row, together))) for at, row in enumerate(rows))
    x = Axis(f"milliseconds ({clocks})", ends=(0, end_ms))
    return [Chart(f"What {some} do when in step {timeline.step}", marks, x, Axis(names=names), height=_ROW * len(rows))]


def _drawn(rows: Sequence[RankRow], late: set[int]) -> list[RankRow]:
    """All ranks, or of many those that are late, those that wait most and least, and others evenly."""
    if len(rows) <= _MOST:
        return list(rows)
    by_wait = sorted(rows, key=lambda row: sum(row.pieces_ns[WAITS]))
    even = [rows[at * len(rows) // _MOST] for at in range(_MOST)]
    chosen = [*(row for row in rows if row.rank in late), by_wait[-1], by_wait[0], *even]
    numbers = list(dict.fromkeys(row.rank for row in chosen))[:_MOST]
    return [row for row in rows if row.rank in numbers]


def _area(at: int, row: RankRow, runs: Sequence[Run]) -> Area:
    """The groups of a rank stacked in its row."""
    piece_ms, first_ms = row.nanoseconds / _count(row) / 1e6, row.begin_ns / 1e6
    said = [
        "\n".join(
            [
                f"rank {row.rank}, {(end - begin) * piece_ms:.4g} ms",
                *(
                    f"{name}: {format_percent(share)}"
                    for name, share in zip(_COLOUR_OF, shares, strict=True)
                    if share > _LEAST
                ),
            ]
        )
        for begin, end, shares in runs
    ]
    layers = {
        name: [-_THICK * shares[group] for _, _, shares in [*runs, runs[-1]]] for group, name in enumerate(_COLOUR_OF)
    }
    xs = [*(first_ms + begin * piece_ms for begin, _, _ in runs), first_ms + runs[-1][1] * piece_ms]
    used = {name: heights for name, heights in layers.items() if min(heights) < -_THICK * _LEAST}
    colours = [_COLOUR_OF[name] for name in used]
    return Area(xs, used, colours, [*said, said[-1]], floor=at + _THICK / 2, step=True)


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
