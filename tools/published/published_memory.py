"""Predicted and published memory side by side: the figures, the errors by source, and what fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

from published_case import Case, Errors, Row, Source, read_rows
from published_runs import case_of, labels_beside

from trainledger import catalog
from trainledger.forecast.predict.device_memory import DeviceMemory, device_memory
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.ranks import RankAccount, accounts

OVERHEADS = catalog.overheads()
COUNTS = "dense pretraining, 16 bit"  # the group whose median must be at most 10 %


@dataclass(frozen=True)
class Prediction:
    """What a run is predicted to hold: the figure that its source measured, on which rank, and of what.

    ``device_nbytes`` is all that the heaviest rank holds, which ``fits`` compares with ``usable_nbytes``.
    """

    case: Case
    nbytes: int
    rank: RankAccount
    peak_nbytes: int
    fits: bool
    device_nbytes: int = 0
    usable_nbytes: int = 0

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        assert self.case.measured is not None
        return self.nbytes / self.case.measured - 1


def figure(source: Source, memory: DeviceMemory) -> int:
    """What the source measured, of all that a device holds."""
    if source.figure == "driver":
        return int(memory.nbytes)
    return int(memory.reserved_nbytes if source.figure == "reserved" else memory.allocated_nbytes)


_RANKS: dict[str, tuple[tuple[RankAccount, int], ...]] = {}


def ranks_of(case: Case) -> tuple[tuple[RankAccount, int], ...]:
    """The account of every rank of a run with its peak, made once."""
    if case.name not in _RANKS:
        found = accounts(case.run, backend="cuda")
        _RANKS[case.name] = tuple((each, int(peak_nbytes(each.ledger))) for each in found)
    return _RANKS[case.name]


def predict(case: Case) -> Prediction:
    """The figure of the rank that was read, and whether every rank fits."""
    source, overheads = case.source, OVERHEADS
    if source.context is not None:
        overheads = {**overheads, "cuda_context": replace(overheads["cuda_context"], nbytes=source.context)}
    found: list[Prediction] = []
    fits, heaviest, usable = True, 0, 0
    for rank, peak in ranks_of(case):
        groups = case.run.layout.communicators
        memory = device_memory(
            peak, case.device, overheads, groups=groups, recipe=case.run.recipe,
            reserved=rank.ledger.reserved,
        )  # fmt: skip
        assert memory.usable_nbytes is not None
        fits = fits and bool(memory.fits)
        heaviest, usable = max(heaviest, int(memory.nbytes)), memory.usable_nbytes
        if _was_read(source, rank):
            found.append(Prediction(case, figure(source, memory), rank, peak, fits=True))
    most = max(found, key=lambda each: each.nbytes)
    return replace(most, fits=fits, device_nbytes=heaviest, usable_nbytes=usable)


def _was_read(source: Source, rank: RankAccount) -> bool:
    return source.stages == "all" or rank.plan.first or (source.stages == "ends" and rank.plan.last)


@cache
def predictions() -> tuple[tuple[Prediction, ...], tuple[tuple[Row, str], ...]]:
    """Every row that can be predicted, with its prediction, in the file's order, and the others with their reason."""
    rows = read_rows()
    found: list[Prediction] = []
    left_out: list[tuple[Row, str]] = []
    for row in rows:
        case = case_of(row)
        if isinstance(case, str):
            left_out.append((row, case))
        else:
            found.append(predict(case))
    found += [predict(each) for each in labels_beside(rows)]
    return tuple(found), tuple(left_out)


@dataclass(frozen=True, kw_only=True)
class SourceErrors(Errors):
    """The errors of one source's rows."""

    source: Source


def by_source() -> tuple[SourceErrors, ...]:
    """The errors of all rows with a figure, by source, in the order in which the sources come."""
    errors: dict[Source, list[float]] = {}
    for each in predictions()[0]:
        if each.case.measured is not None:
            errors.setdefault(each.case.source, []).append(each.error)
    return tuple(SourceErrors(errors=tuple(each), source=source) for source, each in errors.items())


def median_that_counts() -> float:
    """The median absolute error over the rows of dense pretraining in 16 bits."""
    return median(abs(each) for found in by_source() if found.source.group == COUNTS for each in found.errors)


def median_if(change: Callable[[Case], Case]) -> float:
    """The median that counts with something else assumed of every run."""
    counting = [each.case for each in predictions()[0] if each.case.source.group == COUNTS]
    return median(abs(predict(change(each)).error) for each in counting if each.measured is not None)


@dataclass(frozen=True)
class Labels:
    """How often "does not fit" was said, and how often it was so."""

    said_and_so: int
    said_in_vain: int
    missed: int
    fitted_and_said: int

    @property
    def precision(self) -> float:
        return self.said_and_so / (self.said_and_so + self.said_in_vain)

    @property
    def recall(self) -> float:
        return self.said_and_so / (self.said_and_so + self.missed)


def labels(group: str | None = None) -> Labels:
    """The confusion of "does not fit" over the runs that are known to fit or not, of one group or of all."""
    counts = {(said, so): 0 for said in (True, False) for so in (True, False)}
    for each in predictions()[0]:
        if group is None or each.case.source.group == group:
            counts[not each.fits, each.case.too_large] += 1
    return Labels(counts[True, True], counts[True, False], counts[False, True], counts[False, False])
