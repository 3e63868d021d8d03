"""Write docs/accuracy.md: how sure each kind of prediction is, what has witnesses, and how to read it.

``python tools/published/accuracy_page.py`` writes it from what `fit_devices.py`, `left_out.py`, `error_rows.py` and
`throughput_hours.py` have stored (some seconds); a test compares the page with what it would write.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import exp
from pathlib import Path
from statistics import mean, median

from error_model import (
    BASES,
    Class,
    apart,
    class_of_peak,
    class_of_step,
    fitting,
    memory_intervals,
    pair_intervals,
    pairs_of_one_device,
    pairs_of_two_devices,
    step_intervals,
    step_spread,
    widening,
)
from error_rows import step_rows
from error_statistics import Interval, coverage
from later_runs import later_runs
from published_case import read_rows
from published_runs import case_of
from tables import Page, Table
from throughput_hours import read_hours, whole_runs
from throughput_predictions import percent, predicted_cases
from unseen_page import left_out_of
from unseen_runs import unseen

TEXT = Path(__file__).parent / "accuracy.txt"
BINS = (0.0, 0.05, 0.2, 0.5, 0.8, 0.95, 1.0)
PRETRAINING = "dense pretraining, 16 bit"
KNOWN = {
    "own": "steps of other sources on its device type", "other": "the constants of another device of its maker",
    "bound": "the data sheet alone",
}  # fmt: skip


def page() -> Page:
    """The whole page."""
    head, method, reading, tail = TEXT.read_text(encoding="utf-8").split("\n----\n")
    tables = (_by_source(),)
    parts = [head, *_summary(), *_in_sample(), *_by_class(), method]
    parts += [
        f"\n## By source\n\nEach with the interval from all other sources: {tables[0].link}.\n",
        *_fits(),
        *_unlike(),
    ]
    return Page("accuracy", "".join([*parts, *_left_out(), reading, tail]), tables)


def _summary() -> Iterator[str]:
    yield "\n| prediction | known of it | rows | sources | median absolute error | median width | inside: of rows | "
    yield "of sources |\n|---|---|--:|--:|--:|--:|--:|--:|\n"
    for basis in BASES:
        name = "**step time**" if basis == "own" else "step time"
        yield _line(f"{name} | {KNOWN[basis]}", step_intervals(basis))
        if basis == "own":
            csv = [interval for interval in step_intervals() if interval.row.name.startswith("R")]
            yield _line(f"of these the rows of `runs.csv` | {KNOWN[basis]}", csv)
    yield _line("**memory** | peaks of other sources", memory_intervals())
    dense = [interval for interval in memory_intervals() if interval.row.group == PRETRAINING]
    yield _line(f"of these {PRETRAINING} | peaks of other sources", dense)
    found = coverage(pair_intervals())
    yield (
        f"| ratio of two steps | pairs of other sources, each on one device | {found.rows:,} | {found.sources} | "
        f"{percent(exp(_middle_of_pairs()) - 1)} | {percent(exp(2 * apart(pairs_of_one_device())) - 1)} | "
        f"{percent(found.of_rows)} | {percent(found.of_sources)} |\n"
    )
    yield (
        "| ratio of two steps | steps of two sources on two device types | | | | "
        f"{percent(exp(2 * pairs_of_two_devices()) - 1)} | | |\n"
    )


_DEVICES = ("1 device", "2 to 8 devices", "9 to 64 devices", "65 to 512 devices", "more than 512 devices")


def _by_class() -> Iterator[str]:
    """How often intervals hold in each class of runs, and how wide they are."""
    yield "\n## By class\n\n| of | class | rows | sources | median absolute error | median width | inside: of rows | "
    yield "of sources |\n|---|---|--:|--:|--:|--:|--:|--:|\n"
    steps = [(interval, class_of_step(interval.row)) for interval in step_intervals()]
    for name, chosen in (
        *((name, lambda of, place=place: of.devices == place) for place, name in enumerate(_DEVICES)),
        ("below 1 s", lambda of: of.one), ("1 s and more", lambda of: not of.one), ("experts", lambda of: of.other),
    ):  # fmt: skip
        yield _line(f"step time | {name}", [interval for interval, of in steps if chosen(of)])
    peaks = [(interval, class_of_peak(interval.row)) for interval in memory_intervals()]
    for name, chosen in (
        *((name, lambda of, place=place: of.devices == place) for place, name in enumerate(_DEVICES)),
        ("all weights trained", lambda of: not of.one), ("adapters on frozen weights", lambda of: of.one),
    ):  # fmt: skip
        yield _line(f"memory | {name}", [interval for interval, of in peaks if chosen(of)])
    for figure, name in FIGURES.items():
        yield _line(f"memory | {name}", [interval for interval, _ in peaks if interval.row.figure == figure])


FIGURES = {"driver": "all that the driver counts", "reserved": "reserved by the allocator", "allocated": "allocated"}


def _middle_of_pairs() -> float:
    return median(each.error for each in pairs_of_one_device())


def _line(name: str, some: Sequence[Interval]) -> str:
    if not some:
        return ""
    found = coverage(some)
    error = median(abs(exp(-interval.row.error) - 1) for interval in some)
    cells = (
        name, str(found.rows), str(found.sources), percent(error), percent(exp(found.width) - 1),
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
    low, high = step_spread(step_rows(), Class(len(_DEVICES) - 1, one=False), "own").bounds
    held = mean(exp(low) <= each.hours / each.predicted <= exp(high) for each in hours)
    yield (
        f"\nOf {len(hours)} whole runs with published device-hours, whose layouts mostly are not published and were "
        f"assumed, {percent(held)} are in the interval of their steps (median absolute error "
        f"{percent(median(abs(each.error) for each in hours))}). Days and money have the interval of a step: where "
        "more than the layout is assumed, take it as too narrow.\n"
    )


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
        "run has a property that no two sources with a figure have: adapters (step time), fp32 matmuls, fp8 (memory), "
        "more devices than any of them or longer sequences. The factor is measured where possible: the interval of a "
        "step predicted by the constants of another device of its maker is that much wider. That it holds for other "
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
        f"{sum(memory.values()) - memory[silent]} have one that is not predicted: {reasons}.\n\n"
    )
    runs, left_out = later_runs()
    whys = Counter(re.sub(r" = [\d,]+: .*", ": not a layout that is accounted for", why) for _, why in left_out)
    reasons = "; ".join(f"{count} {why}" for why, count in whys.most_common())
    yield (
        f"Of the {len(runs) + len(left_out)} facts of November 2026 (`facts_2026_11.csv`) {len(runs)} are predicted. "
        f"Not: {reasons}.\n"
    )


if __name__ == "__main__":
    page().write()
