"""Rows of uneven length, each padded to the longest of its micro-batch: the mean step, and what padding costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import Any

from trainledger.forecast.predict.forecast import UNEXPLAINED, Bar, Forecast, bottleneck, nanoseconds
from trainledger.forecast.predict.interval import OF_STEPS, Interval
from trainledger.spec.frozen import frozen
from trainledger.spec.row_lengths import LengthLaw, longest_of, usual_of
from trainledger.spec.run import Run
from trainledger.spec.units import ceil_div

_MOST = 10  # lengths that are accounted for
_OF_TIME = (*OF_STEPS, "run_step_seconds", "kwh", "co2_kg", "interruptions")
_SPLIT = ("step_seconds_by_phase", "step_seconds_by_kind", "step_seconds_by_bound", "step_causes", "seconds_by_phase")
STRAGGLERS = "stragglers"


@frozen
class PaddedRows:
    """Rows of one pass over the data, cut at ``recipe.seq_len``, their tokens, and those with padding in the mean.

    ``padded`` tokens are the mean longest of ``micro_batch`` rows, ``usual`` the longest of nine in ten micro-batches;
    ``cut`` rows were longer than ``recipe.seq_len``.
    ``packed_step_seconds`` is a step of full rows. Where the longest rows do not fit, ``fitting`` are the tokens of the
    longest that do (None: none), and ``share`` of the micro-batches have no longer one.
    """

    rows: int
    tokens: int
    micro_batch: int
    padded: float
    usual: int
    longest: int
    cut: int
    packed_step_seconds: float | None = None
    fitting: int | None = None
    share: float = 1.0

    @property
    def waste(self) -> float:
        """The share of the computed tokens that is padding."""
        return 1 - self.tokens / (self.rows * self.padded)

    def saved(self, step_seconds: float | None, seq_len: int) -> float | None:
        """The share of the time for the same tokens that packing saves, beside padded steps of so many seconds."""
        if self.packed_step_seconds is None or not step_seconds:
            return None
        return 1 - self.packed_step_seconds / seq_len / (step_seconds / (self.tokens / self.rows))


def padding(run: Run) -> PaddedRows:
    """What padding the rows of ``data.lengths`` takes."""
    rows = cut_rows(run)
    law = longest_of(rows, run.device_batch)
    return PaddedRows(
        rows=sum(count for _, count in rows),
        tokens=sum(tokens * count for tokens, count in rows),
        micro_batch=run.device_batch,
        padded=sum(share * tokens for tokens, share in law),
        usual=usual_of(law),
        longest=rows[-1][0],
        cut=sum(count for tokens, count in run.data.lengths or () if tokens > run.recipe.seq_len),
    )


def cut_rows(run: Run) -> tuple[tuple[int, int], ...]:
    """Tokens and how many rows have them, ascending; longer rows are cut at ``recipe.seq_len``."""
    most, rows = run.recipe.seq_len, run.data.lengths or ()
    cut = sum(count for tokens, count in rows if tokens >= most)
    return *((tokens, count) for tokens, count in rows if tokens < most), *(((most, cut),) if cut else ())


def share_within(law: LengthLaw, most: int) -> float:
    """The probability of at most so many tokens."""
    return sum(share for tokens, share in law if tokens <= most)


# A step waits for launches below some length, and tiles of matmuls make its time uneven above it: three points of a
# quadratic were up to 12 % off (docs/log), ten with straight lines between them 1 %. FLOPs are exactly quadratic.
def lengths_to_account(run: Run) -> tuple[int, ...]:
    """The lengths whose steps give the mean step: all that micro-batches have, or the shortest, the longest and others
    between which equally many tokens are computed; whole multiples of what a loss in chunks and context ranks divide.
    """
    rows, top = cut_rows(run), run.recipe.seq_len
    law = [*longest_of(rows, run.device_batch), *longest_of(rows, run.device_batch * run.layout.data_ranks)]
    sizes = sorted({tokens for tokens, _ in law})
    if len(sizes) > _MOST:
        law, tokens, mass, chosen = sorted(law), sum(share * size for size, share in law), 0.0, [sizes[0]]
        for size, share in law:
            mass += share * size
            if mass * (_MOST - 2) >= tokens * (len(chosen) - 0.5):
                chosen.append(size)
        sizes = chosen
    unit = (run.recipe.loss.chunks or 1) * (2 * run.layout.context if run.layout.context > 1 else 1)
    return tuple(sorted({*(min(top, ceil_div(size, unit) * unit) for size in sizes), top}))


def weights(law: LengthLaw, lengths: Sequence[int]) -> list[float]:
    """Weights of quantities at some lengths that give their mean by a law, straight between neighbours.

    >>> weights([(1, 0.5), (3, 0.5)], [1, 2, 4])
    [0.5, 0.25, 0.25]
    """
    shares = dict.fromkeys(lengths, 0.0)
    for tokens, share in law:
        above = next((length for length in lengths if length >= tokens), lengths[-1])
        below = max((length for length in lengths if length < tokens), default=above)
        part = (tokens - below) / (above - below) if above > below else 1.0
        shares[above] += share * min(part, 1.0)
        shares[below] += share * (1 - min(part, 1.0))
    return [shares[length] for length in lengths]


def square_weights(law: LengthLaw, lengths: Sequence[int]) -> list[float]:
    """Weights at three of some lengths (fewer where there are fewer) that give the mean of what is quadratic: FLOPs.

    >>> [round(weight, 3) for weight in square_weights([(1, 0.5), (5, 0.5)], [1, 2, 3, 4])]
    [0.667, 0.0, -1.0, 1.333]
    """
    shares = dict.fromkeys(lengths, 0.0)
    three = {lengths[0], lengths[len(lengths) // 2], lengths[-1]}
    for at in three:
        others = [other for other in three if other != at]
        mean = sum(share * prod(tokens - other for other in others) for tokens, share in law)
        shares[at] = mean / prod(at - other for other in others)
    return [shares[length] for length in lengths]


def mean_step(run: Run, by_length: Mapping[int, Forecast]) -> Forecast:
    """The forecast of a run whose micro-batches are padded, from those of `lengths_to_account`.

    Memory is that of the longest, time and FLOPs are means. Ranks wait for the longest row of all: in each micro-batch
    where parameters are gathered in it, else for the rank whose sum is largest, of sums that are nearly normal (Blom
    1958, Statistical Estimates and Transformed Beta-Variables).
    """
    rows, lengths, top = cut_rows(run), list(by_length), by_length[max(by_length)]
    law, ranks = longest_of(rows, run.device_batch), run.layout.data_ranks
    shares, of_flops = weights(law, lengths), square_weights(law, lengths)

    def mean(of: list[Any], by: Sequence[float] = shares) -> Any:
        return None if None in of else sum(weight * value for weight, value in zip(by, of, strict=True))

    def split(name: str, by: Sequence[float] = shares) -> dict[str, Any]:
        parts = [getattr(by_length[at], name) for at in lengths]
        keys = {key: 0 for part in parts for key in part}
        return {key: mean([part.get(key, 0) for part in parts], by) for key in keys}

    facts = {name: mean([getattr(by_length[at], name) for at in lengths]) for name in _OF_TIME}
    facts |= {name: split(name) for name in _SPLIT}
    facts["flops"] = {kind: round(flops) for kind, flops in split("flops", of_flops).items()}
    facts["model_flops"] = round(mean([by_length[at].model_flops for at in lengths], of_flops))
    step, tokens = facts["step_seconds"], sum(size * count for size, count in rows) / sum(count for _, count in rows)
    facts["tokens_per_step"] = round(tokens * run.recipe.global_batch)
    if not step:
        return replace(top, **facts)
    seconds = [by_length[at].step_seconds or 0.0 for at in lengths]
    # FSDP gathers and reduces in each micro-batch, which no rank leaves before the slowest; DDP's all-reduce comes with
    # the last one, so that long and short batches of a rank make up for each other.
    if run.grad_accum == 1 or (run.layout.zero == 3 and run.layout.shard > 1):
        waited = mean(seconds, weights(longest_of(rows, run.device_batch * ranks), lengths))
    else:
        from statistics import NormalDist

        deviation = sqrt(max(0.0, mean([value**2 for value in seconds]) - step**2) / run.grad_accum)
        waited = step + deviation * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else step
    longer = max(1.0, waited / step)
    facts |= {name: facts[name] * longer for name in _OF_TIME if facts[name] is not None}
    facts["step_causes"][STRAGGLERS] = facts["step_causes"].get(STRAGGLERS, 0.0) + step * (longer - 1)
    for share, of, by in (
        ("mfu", "step_seconds", of_flops),
        ("hfu", "step_seconds", of_flops),
        ("goodput", "total_seconds", shares),
    ):
        parts = [(getattr(by_length[at], share), getattr(by_length[at], of)) for at in lengths]
        known = all(None not in part for part in parts)
        facts[share] = mean([value * time for value, time in parts], by) / facts[of] if known else None
    for rate, of in (("tokens_per_second", "step_seconds"), ("run_tokens_per_second", "run_step_seconds")):
        facts[rate] = tokens * run.recipe.global_batch / facts[of] if facts[of] else None
    facts["intervals"] = {
        name: interval if name not in OF_STEPS else _moved(interval, facts[name] / getattr(top, name))
        for name, interval in top.intervals.items()
    }
    facts["waterfall"] = bars = _bars([by_length[at].waterfall for at in lengths], shares, facts["total_seconds"])
    if top.fits is not False and bars:
        facts["bottleneck"] = bottleneck(bars, mfu=facts["mfu"])
    return replace(top, **facts)


def _moved(interval: Interval, by: float) -> Interval:
    return Interval(interval.low * by, interval.high * by)


def _bars(waterfalls: Sequence[tuple[Bar, ...]], shares: Sequence[float], total: float | None) -> tuple[Bar, ...]:
    """The mean waterfall; what ranks wait for each other is the rest of the total."""
    if total is None or not all(waterfalls):
        return ()
    causes: dict[str, float] = {}
    for share, bars in zip(shares, waterfalls, strict=True):
        for bar in bars:
            causes[bar.cause] = causes.get(bar.cause, 0.0) + share * bar.nanoseconds
    rounded = {cause: round(value) for cause, value in causes.items() if cause != UNEXPLAINED}
    rounded[STRAGGLERS] = rounded.get(STRAGGLERS, 0) + nanoseconds(total) - sum(rounded.values())
    return tuple(Bar(cause, value) for cause, value in rounded.items())
