"""Write the error model of the catalog, `catalog/errors.toml`: what intervals of predictions rest on.

``python tools/published/error_model.py`` makes it of what `error_rows.py` reads (a second). The rows and how well their
intervals held are in docs/accuracy.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from math import exp, log
from pathlib import Path
from statistics import median

from error_rows import ErrorRow, MemoryRow, memory_rows, step_rows
from error_statistics import Bounds, Interval, Row, Spread, quantile, sources_left_out, spread, weighted

from trainledger import catalog
from trainledger.forecast.predict.interval import DEVICES, SHORT, student_quantile, student_share
from trainledger.spec.device import SHARE

PATH = Path(catalog.__file__).parent / "errors.toml"
BASES = ("own", "other", "bound")
HEAD = """\
# Written by tools/published/error_model.py: how far predictions were from published runs whose source was left out.
# Errors are measured over predicted; steps: 80 % lie between low and high; memory: Student's t of the
# logarithm. Classes are of runs on at most so many devices. docs/accuracy.md has the method, and how often such
# intervals held.
"""


def measured_memory() -> tuple[MemoryRow, ...]:
    """The rows whose peak is published."""
    return tuple(row for row in memory_rows() if row.measured is not None)


@dataclass(frozen=True)
class Class:
    """What the width of an interval follows: the place of the number of devices in `DEVICES`, and yes or no twice.

    Of a step: predicted below a second; a model with experts. Of a peak: adapters on frozen weights.
    """

    devices: int
    one: bool
    other: bool = False


def class_of_step(row: ErrorRow) -> Class:
    return Class(_place(row.devices), row.seconds < SHORT, "experts" in row.kinds)


def class_of_peak(row: MemoryRow) -> Class:
    return Class(_place(row.devices), "adapters" in row.kinds)


def _place(devices: int) -> int:
    return next(place for place, most in enumerate(DEVICES) if devices <= most)


# How much a row says of another class, for each step in the number of devices and for the answer that differs. Chosen
# among halves, fifths and tenths by coverage on these rows: four numbers for a thousand rows.
APART, LENGTH_APART, EXPERTS_APART, ADAPTERS_APART = 0.5, 0.1, 0.2, 0.1
FURTHER_STEPS, FURTHER_PEAKS = 2.0, 0.5  # weights of a further source: there are few of memory


def step_spread(rows: Sequence[ErrorRow], of: Class, basis: str) -> Spread:
    """How errors of steps of a class lie; around the prediction, but for the data sheet's, which is a bound."""

    def like(row: ErrorRow) -> float:
        there = class_of_step(row)
        length, experts = there.one != of.one, there.other != of.other
        return float(
            APART ** abs(there.devices - of.devices) * (LENGTH_APART if length else EXPERTS_APART if experts else 1)
        )

    return spread(rows, like, further=FURTHER_STEPS, centred=basis != "bound")


def peak_spread(rows: Sequence[MemoryRow], of: Class) -> Spread:
    """How errors of peaks of a class lie: around their median, as libraries keep more than is known."""

    def like(row: MemoryRow) -> float:
        there = class_of_peak(row)
        return float(APART ** abs(there.devices - of.devices) * (ADAPTERS_APART if there.one != of.one else 1))

    return spread(rows, like, further=FURTHER_PEAKS)


@cache
def step_intervals(basis: str = "own") -> tuple[Interval, ...]:
    """Every step with the interval that other sources give it."""

    def method(others: Sequence[ErrorRow]) -> Callable[[ErrorRow], Bounds]:
        known = cache(lambda of: step_spread(others, of, basis).bounds)
        return lambda row: known(class_of_step(row))

    return tuple(sources_left_out(step_rows(basis), method))


@cache
def memory_intervals() -> tuple[Interval, ...]:
    """Every peak with the interval that other sources give it."""

    def method(others: Sequence[MemoryRow]) -> Callable[[MemoryRow], Bounds]:
        known = cache(lambda of: peak_spread(others, of).bounds)
        return lambda row: known(class_of_peak(row))

    return tuple(sources_left_out(measured_memory(), method))


@dataclass(frozen=True)
class Pair:
    """Two rows: ``error`` is how far the logarithm of their ratio is off, whichever comes first."""

    name: str
    source: str
    error: float


@cache
def pairs_of_one_device() -> tuple[Pair, ...]:
    """All pairs of steps of one source on one device, those first that are least apart (so they are sorted once)."""
    split: dict[tuple[str, str], list[ErrorRow]] = defaultdict(list)
    for each in step_rows():
        split[each.source, each.device].append(each)
    pairs = [
        Pair(f"{a.name}, {b.name}", source, abs(a.error - b.error))
        for (source, _), some in split.items() for a, b in combinations(some, 2)
    ]  # fmt: skip
    return tuple(sorted(pairs, key=lambda each: each.error))


def pairs_of_two_devices() -> float:
    """Within how much of each other `SHARE` of errors are, of two sources and two types of device."""
    points = [(each.error, weight, each) for each, (_, weight) in zip(step_rows(), weighted(step_rows()), strict=True)]
    found = [
        (abs(a - b), v * w) for (a, v, one), (b, w, other) in combinations(points, 2)
        if one.source != other.source and one.calibration != other.calibration
    ]  # fmt: skip
    return quantile(found, SHARE * sum(weight for _, weight in found))


def apart(pairs: Sequence[Pair]) -> float:
    """Within how much of each other `SHARE` of two errors of a new source are."""
    return quantile(weighted(pairs), SHARE * (len({each.source for each in pairs}) + 1))


def of_pairs(others: Sequence[Pair]) -> Callable[[Pair], Bounds]:
    """What other sources say of a pair."""
    bounds = 0.0, apart(others)
    return lambda row: bounds


@cache
def pair_intervals() -> tuple[Interval, ...]:
    """Every pair with what the pairs of other sources say of it."""
    return tuple(sources_left_out(pairs_of_one_device(), of_pairs))


@cache
def widening() -> float:
    """How much wider the interval of a device is that no step was published of: what unlike runs are widened by.

    Rows by the constants of another device of their maker, against rows by those of their own: the median of classes.
    """
    return median(
        step_spread(step_rows("other"), of, "other").reach / step_spread(step_rows(), of, "own").reach
        for of in _step_classes() if not of.other
    )  # fmt: skip


def _step_classes() -> Iterator[Class]:
    for experts, short in product((False, True), repeat=2):
        yield from (Class(place, short, experts) for place in range(len(DEVICES)))


DEGREES = 2  # of Student's t through the ends of an interval: with them 95 % and 98 % hold about as many peaks


@dataclass(frozen=True)
class Fitting:
    """A run that is known to fit or not, with the chance of fitting that other sources give it."""

    row: MemoryRow
    chance: float

    @property
    def fitted(self) -> bool:
        return not self.row.ran_out


@cache
def fitting() -> tuple[Fitting, ...]:
    """Every run whose peak is published, or of which it is said that it ran out of memory, or fits."""
    found = []
    for source in dict.fromkeys(row.source for row in memory_rows()):
        others = [row for row in measured_memory() if row.source != source]
        for row in memory_rows():
            if row.source == source:
                expected = peak_spread(others, class_of_peak(row))
                reach = (log(row.usable_nbytes / row.device_nbytes) - expected.middle) / scale(expected)
                found.append(Fitting(row, student_share(reach, DEGREES)))
    return tuple(found)


def scale(peaks: Spread) -> float:
    """Of Student's t that has `SHARE` of its errors within a reach."""
    return peaks.reach / student_quantile((1 + SHARE) / 2, DEGREES)


def text() -> str:
    """The whole file."""
    return HEAD + "".join(_lines())


def _lines() -> Iterator[str]:
    yield f"share = {SHARE}\nwidening = {widening():.4g}  # of what is unlike all published runs\n"
    for basis in BASES:
        rows = step_rows(basis)
        yield f"\n[step.{basis}]\n{_counts(rows)}classes = [\n"
        for of in _step_classes():
            low, high = step_spread(rows, of, basis).bounds
            yield (
                f"  {{ devices = {DEVICES[of.devices]}, short = {_yes(of.one)}, experts = {_yes(of.other)}, "
                f"low = {exp(low):.4g}, high = {exp(high):.4g} }},\n"
            )
        yield "]\n"
    rows = step_rows()
    yield f"\n[steps_seen]\ndevices = {_listed({row.device for row in rows})}\n{_seen(rows)}"
    pairs = pairs_of_one_device()
    yield f"\n[one_device]\nratio = {exp(apart(pairs)):.4g}\n{_counts(pairs)}"
    yield f"\n[two_devices]\nratio = {exp(pairs_of_two_devices()):.4g}\n{_counts(rows)}"
    memory = measured_memory()
    yield f"\n[memory_seen]\n{_seen(memory)}"
    for adapters, place in product((False, True), range(len(DEVICES))):
        found = peak_spread(memory, Class(place, adapters))
        yield f"\n[[memory]]\ndevices = {DEVICES[place]}\nadapters = {_yes(adapters)}\nshift = {found.middle:.4g}\n"
        yield f"spread = {scale(found):.4g}\ndegrees = {DEGREES}\n"
        yield _counts([row for row in memory if class_of_peak(row).one == adapters])


def _yes(value: bool) -> str:
    return "true" if value else "false"


def _counts(rows: Sequence[Row]) -> str:
    return f"rows = {len(rows)}\nsources = {len({each.source for each in rows})}\n"


def _seen(rows: Sequence[ErrorRow] | Sequence[MemoryRow]) -> str:
    most, longest = max(each.devices for each in rows), max(each.seq_len for each in rows)
    sources: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        for kind in row.kinds:
            sources[kind].add(row.source)
    kinds = _listed({kind for kind, names in sources.items() if len(names) > 1})  # one source says little of the next
    return f"kinds = {kinds}\nmost_devices = {most}\nlongest = {longest}\n"


def _listed(names: set[str]) -> str:
    return "[" + ", ".join(f'"{each}"' for each in sorted(names)) + "]"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
