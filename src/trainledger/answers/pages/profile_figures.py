"""The figures of a profile: its waterfall, what runs when, its matmuls under their roofs, and its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainledger.answers.pages.einsum_figures import roof
from trainledger.answers.pages.plan_figures import waterfall
from trainledger.forecast.predict.forecast import UNEXPLAINED, Bar
from trainledger.observe.profiler import step_time as times
from trainledger.observe.profiler.causes import LAUNCH, MEMORY_BOUND, MOVING_MEMORY, MeasuredBar
from trainledger.observe.profiler.kinds import CALLS, RECOMPUTATION
from trainledger.observe.profiler.profile import Profile
from trainledger.observe.profiler.ranks import WAITS, RankRow, Ranks
from trainledger.observe.profiler.step_work import COMPUTE_PARTS
from trainledger.report.chart import AXIS, COLOURS, FAINT, PALE, Area, Axis, Band, Chart, Line, Mark
from trainledger.spec.units import GIGA, TERA, format_flops_per_second, format_percent

GROUPS = (
    ("matmuls, attention, convolutions", COLOURS[0], COMPUTE_PARTS),
    (RECOMPUTATION, COLOURS[2], (RECOMPUTATION,)),
    (MEMORY_BOUND, COLOURS[4], MOVING_MEMORY),
    ("communication and copies", COLOURS[1], (times.EXPOSED, times.COPY)),
    ("data, evaluation, checkpoints", COLOURS[3], (times.WAIT_FOR_DATA, times.EVALUATION, times.CHECKPOINTS)),
    (LAUNCH, FAINT, (times.LAUNCH_GAPS, times.HOST, times.AFTER_SYNC, times.OUTSIDE, CALLS)),
)
_ROOM = 4  # a factor around the matmuls of a roofline
_DASHES = ("solid", "dash", "dot", "dashdot")


def figures(profile: Profile, bars: Sequence[MeasuredBar]) -> list[Chart]:
    """The charts of a profile; ``bars`` are those of its waterfall."""
    step = profile.step.step.name
    charts = [
        waterfall([Bar(bar.title, bar.nanoseconds) for bar in bars], f"Where step {step} goes"),
        _timeline(profile, f"What runs when in step {step}"),
        _roofline(profile, f"The matmuls of step {step}"),
        _memory(profile, f"Memory over step {step}"),
    ]
    return [chart for chart in charts if chart is not None]


def _timeline(profile: Profile, title: str) -> Chart | None:
    """Of each piece of the step, how much of it each cause has."""
    if not profile.pieces or not profile.step.nanoseconds:
        return None
    count = len(next(iter(profile.pieces.values())))
    width_ms = profile.step.nanoseconds / count / 1e6
    shares = {
        name: [sum(profile.pieces[part][at] for part in parts) / 1e6 / width_ms for at in range(count)]
        for name, _, parts in GROUPS
    }
    shares[UNEXPLAINED] = [max(1 - sum(each), 0.0) for each in zip(*shares.values(), strict=True)]
    colour_of = {name: colour for name, colour, _ in GROUPS} | {UNEXPLAINED: PALE}
    layers = {name: [*share, share[-1]] for name, share in shares.items() if max(share) > 1e-6}
    xs = [at * width_ms for at in range(count + 1)]
    said = [
        "\n".join(
            [f"at {x:.4g} ms", *(f"{name}: {layer[at]:.0%}" for name, layer in layers.items() if layer[at] >= 0.005)]
        )
        for at, x in enumerate(xs)
    ]
    mark = Area(xs, layers, [colour_of[name] for name in layers], said, step=True)
    return Chart(title, (mark,), Axis("milliseconds of the step"), Axis("share", ends=(0, 1)))


def _roofline(profile: Profile, title: str) -> Chart | None:
    """FLOP/s over FLOPs per byte of each matmul whose sizes are known, under the roofs of its device."""
    known = [matmul for matmul in profile.matmuls if matmul.intensity and matmul.flops_per_second]
    if not known:
        return None
    values = [matmul_rate.intensity or 0.0 for matmul_rate in known]
    ends = min(values) / _ROOM, max(values) * _ROOM
    dtypes = list(dict.fromkeys(matmul_rate.dtype for matmul_rate in known))
    rate = None if profile.device is None else profile.device.memory_bytes_per_second
    marks = []
    for at, dtype in enumerate(each for each in dtypes if each in profile.peaks and rate is not None):
        dash = _DASHES[at % len(_DASHES)]
        marks.append(
            roof(f"peak in {dtype}", dtype, profile.peaks[dtype], rate or 0.0, ends, COLOURS[at % len(COLOURS)], dash)
        )
    for at, dtype in enumerate(dtypes):
        own = [matmul_rate for matmul_rate in known if matmul_rate.dtype == dtype]
        said = [
            f"{rate.kind} {rate.shape}: {format_flops_per_second(rate.flops_per_second or 0)}, {rate.count} runs"
            for rate in own
        ]
        name = f"matmuls in {dtype or 'an unknown format'}"
        rates = [(matmul_rate.flops_per_second or 0) / TERA for matmul_rate in own]
        colour = COLOURS[at % len(COLOURS)]
        marks.append(
            Line(
                [matmul_rate.intensity for matmul_rate in own], rates, name, colour, width=0, symbol="circle", said=said
            )
        )
    x = Axis("FLOPs per byte, each operand read and written once", log=True)
    return Chart(title, tuple(marks), x, Axis("TFLOP/s", log=True))


def _memory(profile: Profile, title: str) -> Chart | None:
    """What PyTorch's allocator has handed out, and what it has reserved, over the step."""
    memory = profile.memory
    if memory is None:
        return None
    at = [each / 1e6 for each in memory.times_ns]
    marks: list[Mark] = [
        Line(at, [each / GIGA for each in nbytes], name, colour)
        for name, nbytes, colour in (
            ("allocated", memory.allocated_nbytes, COLOURS[0]),
            ("reserved", memory.reserved_nbytes, COLOURS[1]),
        )
        if any(nbytes)
    ]
    marks.append(Band("y", memory.peak_nbytes / GIGA, colour=AXIS, dash="dot"))
    return Chart(title, tuple(marks), Axis("milliseconds of the step, on the host"), Axis("GB", zero=True))


_MOST, _FINE = 16, 8  # ranks that are drawn, and drawn in all pieces
_ROW, _THICK = 40, 0.78  # pixels of a rank; its part of a row
_ALIKE = 0.08  # of a piece: neighbours whose groups differ by less are drawn as one
_GROUPS = (*GROUPS[:4], (WAITS, COLOURS[5], (WAITS,)), *GROUPS[4:])
_COLOUR_OF = {name: colour for name, colour, _ in _GROUPS} | {UNEXPLAINED: PALE}
_LEAST = 0.004  # of a piece: less is not drawn
Run = tuple[int, int, list[float]]  # the first piece, the one behind the last, and the share of each group


def rank_charts(ranks: Ranks) -> list[Chart]:
    """The timeline of the ranks; none where they have no step in common."""
    timeline = ranks.timeline
    if timeline is None:
        return []
    late = {straggler.rank for straggler in ranks.stragglers}
    rows = _drawn(timeline.rows, late)
    some = f"{len(rows)} of {len(timeline.rows):,} ranks" if len(rows) < len(timeline.rows) else "the ranks"
    clocks = "clocks set by the ends of shared collectives" if timeline.is_aligned else "each from when its step begins"
    names = tuple(f"rank {row.rank}, late" if row.rank in late else f"rank {row.rank}" for row in rows)
    end_ms = max(row.begin_ns + row.nanoseconds for row in rows) / 1e6
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
