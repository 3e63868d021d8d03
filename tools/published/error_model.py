"""Write the error model of the catalog, `catalog/errors.toml`: what intervals of predictions rest on.

``python tools/published/error_model.py`` makes it of what `error_rows.py` reads (a second). The rows and how well their
intervals held are in docs/accuracy.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import exp, log
from pathlib import Path

from error_rows import ErrorRow, MemoryRow, memory_rows, step_rows
from error_statistics import Bounds, Interval, Row, conformal, quantile, sources_left_out, student, weighted

from trainledger import catalog
from trainledger.forecast.predict.interval import student_share
from trainledger.spec.device import SHARE

PATH = Path(catalog.__file__).parent / "errors.toml"
BASES = ("own", "other", "bound")
HEAD = """\
# Written by tools/published/error_model.py: how far predictions were from published runs whose source was left out.
# Errors are measured over predicted; steps: 80 % lie between low and high; memory: Student's t of the
# logarithm. docs/accuracy.md has the method, and how often such intervals held.
"""


def measured_memory() -> tuple[MemoryRow, ...]:
    """The rows whose peak is published."""
    return tuple(each for each in memory_rows() if each.measured is not None)


def of_steps(others: Sequence[ErrorRow]) -> Callable[[ErrorRow], Bounds]:
    """The interval of a step from the rows of other sources: the same for all."""
    bounds = conformal(others)
    return lambda row: bounds


def of_memory(others: Sequence[MemoryRow]) -> Callable[[MemoryRow], Bounds]:
    """The interval of a peak from the rows of other sources: the same for all of a kind."""
    found = student(others, kind_of_peak)
    return lambda row: found[kind_of_peak(row)].bounds


def kind_of_peak(row: MemoryRow) -> str:
    """Adapters on frozen weights, whose libraries keep more than is known, or any other training."""
    return "adapters" if "adapters" in row.kinds else "memory"


@cache
def step_intervals(basis: str = "own") -> tuple[Interval, ...]:
    """Every step with the interval that other sources give it."""
    return tuple(sources_left_out(step_rows(basis), of_steps))


@cache
def memory_intervals() -> tuple[Interval, ...]:
    """Every peak with the interval that other sources give it."""
    return tuple(sources_left_out(measured_memory(), of_memory))


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


def widening() -> float:
    """How much wider the interval of a device is that no step was published of: what unlike runs are widened by.

    Rows by the constants of another device of their maker, against rows by those of their own.
    """
    own, other = (conformal(step_rows(basis)) for basis in ("own", "other"))
    return (other[1] - other[0]) / (own[1] - own[0])


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
    for source in dict.fromkeys(each.source for each in memory_rows()):
        found_for = student([each for each in measured_memory() if each.source != source], kind_of_peak)
        for each in memory_rows():
            if each.source == source:
                expected = found_for[kind_of_peak(each)]
                reach = (log(each.usable_nbytes / each.device_nbytes) - expected.shift) / expected.spread
                found.append(Fitting(each, student_share(reach, expected.degrees)))
    return tuple(found)


@dataclass(frozen=True)
class Factor:
    """Something that rows differ in, which intervals might depend on."""

    name: str
    group: Callable[[ErrorRow], str]


FACTORS = (
    Factor("type of device", lambda row: row.calibration),
    Factor("devices", lambda row: next(name for most, name in SIZES if row.devices <= most)),
    Factor("model ranks", lambda row: ", ".join(each for each in row.kinds if each in MODEL_RANKS) or "none"),
    Factor("parameters in shards", lambda row: "yes" if "sharded parameters" in row.kinds else "no"),
    Factor("matmuls", lambda row: "8 bits" if "fp8 matmuls" in row.kinds else "16 bits"),
    Factor("program", lambda row: "eager" if row.eager else "fused"),
    Factor("predicted step", lambda row: "below 1 s" if row.seconds < 1 else "1 s and more"),
    Factor("the row leaves open", lambda row: "nothing" if not row.blanks else "something"),
)
SIZES = ((1, "1"), (8, "2 to 8"), (64, "9 to 64"), (512, "65 to 512"), (10**9, "more than 512"))
MODEL_RANKS = ("tensor ranks", "pipeline stages", "context ranks")


@cache
def with_factor(factor: Factor) -> list[Interval]:
    """Every step with an interval whose width follows a factor: its scale learnt of other sources too.

    The scale of a group is the median absolute error of its rows, each source alike, over that of all, drawn towards 1
    as if three further sources had the error of all.
    """

    def method(others: Sequence[ErrorRow]) -> Callable[[ErrorRow], Bounds]:
        scales = _scales(others, factor)
        scaled = [Scaled(each.name, each.source, each.error / scales[factor.group(each)]) for each in others]
        low, high = conformal(scaled)

        def of(row: ErrorRow) -> Bounds:
            scale = scales.get(factor.group(row), 1.0)
            return low * scale, high * scale

        return of

    return sources_left_out(step_rows(), method)


@dataclass(frozen=True)
class Scaled:
    """A row with its error in units of its group's scale."""

    name: str
    source: str
    error: float


def _scales(rows: Sequence[ErrorRow], factor: Factor) -> dict[str, float]:
    whole = _middle(rows)
    split: dict[str, list[ErrorRow]] = defaultdict(list)
    for each in rows:
        split[factor.group(each)].append(each)
    found = {}
    for name, some in split.items():
        sources = len({each.source for each in some})
        found[name] = (_middle(some) / whole) ** (sources / (sources + 3))
    return found


def _middle(rows: Sequence[Row]) -> float:
    points = [(abs(value), weight) for value, weight in weighted(rows)]
    return quantile(points, sum(weight for _, weight in points) / 2)


def text() -> str:
    """The whole file."""
    return HEAD + "".join(_lines())


def _lines() -> Iterator[str]:
    yield f"share = {SHARE}\nwidening = {widening():.4g}  # of what is unlike all published runs\n"
    for basis in BASES:
        rows = step_rows(basis)
        low, high = conformal(rows)
        yield f"\n[step.{basis}]\nlow = {exp(low):.4g}\nhigh = {exp(high):.4g}\n{_counts(rows)}"
    rows = step_rows()
    yield f"\n[steps_seen]\ndevices = {_listed({each.device for each in rows})}\n{_seen(rows)}"
    pairs = pairs_of_one_device()
    yield f"\n[one_device]\nratio = {exp(apart(pairs)):.4g}\n{_counts(pairs)}"
    yield f"\n[two_devices]\nratio = {exp(pairs_of_two_devices()):.4g}\n{_counts(rows)}"
    memory = measured_memory()
    for kind, found in sorted(student(memory, kind_of_peak).items(), reverse=True):
        some = [each for each in memory if kind_of_peak(each) == kind]
        yield f"\n[{kind}]\nshift = {found.shift:.4g}\nspread = {found.spread:.4g}\ndegrees = {found.degrees}\n"
        yield _counts(some)
    yield f"\n[memory_seen]\n{_seen(memory)}"


def _counts(rows: Sequence[Row]) -> str:
    return f"rows = {len(rows)}\nsources = {len({each.source for each in rows})}\n"


def _seen(rows: Sequence[ErrorRow] | Sequence[MemoryRow]) -> str:
    most, longest = max(each.devices for each in rows), max(each.seq_len for each in rows)
    kinds = _listed({kind for each in rows for kind in each.kinds})
    return f"kinds = {kinds}\nmost_devices = {most}\nlongest = {longest}\n"


def _listed(names: set[str]) -> str:
    return "[" + ", ".join(f'"{each}"' for each in sorted(names)) + "]"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
