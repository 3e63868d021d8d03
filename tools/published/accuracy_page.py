"""Write docs/accuracy.md: how sure each kind of prediction is, what has witnesses, and how to read it.

``python tools/published/accuracy_page.py`` writes it from what `fit_devices.py`, `left_out.py`, `error_rows.py` and
`throughput_hours.py` have stored (some seconds); a test compares the page with what it would write.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import exp
from pathlib import Path
from statistics import mean, median

from error_model import (
    BASES,
    FACTORS,
    Factor,
    apart,
    fitting,
    kind_of_peak,
    measured_memory,
    memory_intervals,
    pair_intervals,
    pairs_of_one_device,
    pairs_of_two_devices,
    step_intervals,
    widening,
    with_factor,
)
from error_rows import step_rows
from error_statistics import Interval, conformal, coverage, student
from published_case import read_rows
from published_runs import case_of
from tables import Page, Table
from throughput_hours import read_hours, whole_runs
from throughput_predictions import percent, predicted_cases
from unseen_page import left_out_of
from unseen_runs import unseen

TEXT = Path(__file__).parent / "accuracy.txt"
BINS = (0.0, 0.2, 0.5, 0.8, 0.95, 1.0)
GAIN = 0.02  # of the score, from which on intervals would follow a factor
PRETRAINING = "dense pretraining, 16 bit"
KNOWN = {
    "own": "steps of other sources on its device type", "other": "the constants of another device of its maker",
    "bound": "the data sheet alone",
}  # fmt: skip


def page() -> Page:
    """The whole page."""
    head, method, reading, tail = TEXT.read_text(encoding="utf-8").split("\n----\n")
    factors, sources = tables = _factors(), _by_source()
    parts = [head, *_summary(), *_in_sample(), method, *_on_factors(factors)]
    parts += [
        f"\n## By source\n\nEach with the interval from all other sources: {sources.link}.\n",
        *_fits(),
        *_unlike(),
    ]
    return Page("accuracy", "".join([*parts, *_left_out(), reading, tail]), tables)


def _summary() -> Iterator[str]:
    yield "\n| prediction | known of it | rows | sources | median absolute error | 80 %: measured over predicted | "
    yield "median width | inside: of rows | of sources |\n|---|---|--:|--:|--:|--:|--:|--:|--:|\n"
    csv = [each for each in step_intervals() if each.row.name.startswith("R")]
    for basis in BASES:
        low, high = conformal(step_rows(basis))
        yield _line(
            "**step time**" if basis == "own" else "step time", KNOWN[basis], step_intervals(basis), (low, high)
        )
        if basis == "own":
            yield _line("of these the rows of `runs.csv`", KNOWN[basis], csv, None)
    memory = measured_memory()
    known = student(memory, kind_of_peak)
    yield _line("**memory**", "peaks of other sources", memory_intervals(), None)
    dense = [each for each in memory_intervals() if each.row.group == PRETRAINING]
    for name, some in ("adapters", "adapters on frozen weights"), ("memory", "all weights trained"):
        shown = [each for each in memory_intervals() if kind_of_peak(each.row) == name]
        yield _line(f"of these {some}", "peaks of other sources", shown, known[name].bounds)
    yield _line(f"of these {PRETRAINING}", "peaks of other sources", dense, None)
    ratio = apart(pairs_of_one_device())
    found = coverage(pair_intervals())
    yield (
        f"| ratio of two steps | pairs of other sources, each on one device | {found.rows:,} | {found.sources} | "
        f"{percent(exp(_middle_of_pairs()) - 1)} | {exp(-ratio):.2f} to {exp(ratio):.2f} | "
        f"{percent(exp(2 * ratio) - 1)} | {percent(found.of_rows)} | {percent(found.of_sources)} |\n"
    )
    two = pairs_of_two_devices()
    yield (
        "| ratio of two steps | steps of two sources on two device types | | | | "
        f"{exp(-two):.2f} to {exp(two):.2f} | {percent(exp(2 * two) - 1)} | | |\n"
    )


def _middle_of_pairs() -> float:
    return median(each.error for each in pairs_of_one_device())


def _line(name: str, known: str, some: Sequence[Interval], bounds: tuple[float, float] | None) -> str:
    found = coverage(some)
    error = median(abs(exp(-each.row.error) - 1) for each in some)
    between = "" if bounds is None else f"{exp(bounds[0]):.2f} to {exp(bounds[1]):.2f}"
    cells = (
        name, known, str(found.rows), str(found.sources), percent(error), between, percent(exp(found.width) - 1),
        percent(found.of_rows), percent(found.of_sources),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def _in_sample() -> Iterator[str]:
    """What the constants make of the rows that they are fitted on, and whole runs."""
    inside = median(abs(each.error) for each in predicted_cases()[0])
    outside = median(abs(each.error_left_out) for each in predicted_cases()[0])
    yield (
        f"\nIn the sample (by the catalog's constants, which are fitted on them) {len(predicted_cases()[0])} "
        f"steps have a median absolute error of {percent(inside)}; with their source left out {percent(outside)}. The "
        "first says how "
        "well twelve constants describe many runs, the second what to expect of yours.\n"
    )
    catalogs = median(abs(each.error) for each in unseen())
    yield (
        f"\nOf {len(unseen())} further steps, on which no constant is fitted, the median is {percent(catalogs)} by the "
        "catalog's constants, fitted on other rows of most of their sources, and "
        f"{percent(left_out_of(unseen()).median)} by constants fitted without those (docs/unseen_throughput.md).\n"
    )
    whole = {each.row["id"]: each for each in whole_runs()}
    hours = [each for each in read_hours() if not whole[each.row].at_most]
    low, high = conformal(step_rows())
    held = mean(exp(low) <= each.hours / each.predicted <= exp(high) for each in hours)
    yield (
        f"\nOf {len(hours)} whole runs with published device-hours, whose layouts mostly are not published and were "
        f"assumed, {percent(held)} are in the interval of their steps (median absolute error "
        f"{percent(median(abs(each.error) for each in hours))}). Days and money have the interval of a step: where "
        "more than the layout is assumed, take it as too narrow.\n"
    )


def _factors() -> Table:
    before = coverage(step_intervals())
    rows = []
    for factor in FACTORS:
        change = coverage(with_factor(factor)).score / before.score - 1
        for name, some in _split(factor).items():
            error = median(abs(exp(-each.row.error) - 1) for each in some)
            sources = len({each.row.source for each in some})
            shares = (error, mean(each.inside for each in some), coverage(some).of_sources)
            cells = (*map(percent, shares), percent(change, sign=True))
            rows.append((factor.name, name, str(len(some)), str(sources), *cells))
    header = ("step times by", "group", "rows", "sources", "median absolute error %", "inside: of rows %")
    return Table("accuracy_factors", (*header, "of sources %", "score if widths followed %"), rows)


def _on_factors(table: Table) -> Iterator[str]:
    before = coverage(step_intervals())
    scores = {factor.name: coverage(with_factor(factor)).score for factor in FACTORS}
    gains = [name for name, score in scores.items() if score < (1 - GAIN) * before.score]
    yield f"\nEach group: {table.link}. Factors that would make the score at least {percent(GAIN)} better: "
    yield f"{', '.join(gains) or 'none'}.\n"


def _split(factor: Factor) -> dict[str, list[Interval]]:
    split: dict[str, list[Interval]] = defaultdict(list)
    for each in step_intervals():
        split[factor.group(each.row)].append(each)
    return dict(sorted(split.items()))


def _by_source() -> Table:
    rows = []
    for what, some in (("step", step_intervals()), ("memory", memory_intervals())):
        split: dict[str, list[Interval]] = defaultdict(list)
        for each in some:
            split[each.row.source].append(each)
        for source, of in split.items():
            errors = [exp(-each.row.error) - 1 for each in of]
            signed = (percent(median(errors), sign=True), percent(max(errors, key=abs), sign=True))
            rows.append((source, what, str(len(of)), *signed, percent(mean(each.inside for each in of))))
    header = ("source", "of", "rows", "median error %", "worst %", "in the interval %")
    return Table("accuracy_sources", header, rows)


def _fits() -> Iterator[str]:
    yield "\n## Whether it fits\n\n"
    some = fitting()
    ran_out = sum(not each.fitted for each in some)
    yield (
        f"Of {len(some)} published runs {len(some) - ran_out} fitted and {ran_out} ran out of memory. The chance "
        "predicted from the other sources, and how many fitted:\n\n"
        "| predicted chance | runs | mean chance | fitted |\n|---|--:|--:|--:|\n"
    )
    for low, high in pairwise(BINS):
        inside = [each for each in some if low <= each.chance < high or each.chance == high == 1]
        if inside:
            chance, fitted = mean(each.chance for each in inside), mean(each.fitted for each in inside)
            yield f"| {100 * low:.0f} to {100 * high:.0f} % | {len(inside)} | {percent(chance)} | {percent(fitted)} |\n"
    brier = mean((each.chance - each.fitted) ** 2 for each in some)
    yield (
        f"\nBrier's score is {brier:.3f}. Most published runs fitted, so more fit here than the chances say; few runs "
        "are near the limit.\n"
    )


def _unlike() -> Iterator[str]:
    yield (
        f"\n## Runs unlike all published ones\n\nIntervals are {widening():.2g} times as wide (of logarithms) where a "
        "run has a property that no published run with a figure has: experts, adapters (step time), fp32 matmuls, "
        "more devices "
        "than any of them or longer sequences. The factor is measured where possible: the interval of a step "
        "predicted by the constants of another device of its maker is that much wider. That it holds for other "
        "differences is assumed.\n"
    )


def _left_out() -> Iterator[str]:
    yield "\n## Rows that are left out\n\n"
    rows, silent = read_rows(), "no throughput figure"
    counts = Counter(why for _, why in predicted_cases()[1])
    reasons = "; ".join(f"{count} {why}" for why, count in counts.most_common() if why != silent)
    yield (
        f"Of the {len(rows)} rows of `runs.csv` {counts[silent]} have no time of a step or of a run and "
        f"{sum(counts.values()) - counts[silent]} have one that is not predicted: {reasons}.\n\n"
    )
    memory = Counter(found for row in rows if isinstance(found := case_of(row), str))
    silent = "no memory figure"
    reasons = "; ".join(f"{count} {why}" for why, count in memory.most_common() if why != silent)
    yield (
        f"{memory[silent]} rows have no peak of memory, and "
        f"{sum(memory.values()) - memory[silent]} have one that is not predicted: {reasons}.\n"
    )


if __name__ == "__main__":
    page().write()
