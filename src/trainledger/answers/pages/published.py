"""The published runs most like a plan's, with our error on them: a section of its document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainledger.answers.pages.plain_data import plain
from trainledger.forecast.plan.published import PublishedRun, Resemblance
from trainledger.report.document import Facts, Section, Table, section
from trainledger.report.table import sentence
from trainledger.spec.units import format_percent

NEAREST = "Nearest published runs"  # the title


def nearest_section(resemblances: Sequence[Resemblance]) -> Section:
    """The table of the runs, our errors on them, and how each differs; without parts where nothing was found."""
    if not resemblances:
        return section("")
    return section(NEAREST, table(resemblances), errors(resemblances), Facts(tuple(_differences(resemblances))))


def table(resemblances: Sequence[Resemblance]) -> Table:
    """A row for each run: what was published of it, what is predicted, and the errors: predicted over measured, less 1.

    The column of the memory's error is left out where no run has one.
    """
    with_memory = any(resemblance.published.memory_error is not None for resemblance in resemblances)
    more = ("memory error",) if with_memory else ()
    columns = ("model", "devices", "layout", "published step", "our prediction", "error", *more, "source")
    units = ("", "", "", "seconds", "seconds", "change", *(with_memory * ("change",)), "")
    rows = tuple(_row(resemblance.published, with_memory) for resemblance in resemblances)
    return Table("nearest published runs", columns, rows, units=units, align="lllrrr" + "r" * with_memory + "l")


def _row(each: PublishedRun, with_memory: bool) -> tuple[str | float | None, ...]:
    recomputed = "" if each.recomputation == "none" else f"{each.recomputation} recompute"
    layout = ", ".join(filter(None, (each.layout, recomputed))) or "-"
    errors = (each.error, each.memory_error) if with_memory else (each.error,)
    devices = f"{each.devices:,} x {each.device}"
    return (each.model, devices, layout, each.step_seconds, each.predicted_step_seconds, *errors, each.id)


def errors(resemblances: Sequence[Resemblance]) -> str:
    """Our errors on the runs in one sentence.

    >>> from trainledger.answers.load import load
    >>> from trainledger.forecast.plan.published import nearest
    >>> run = load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 1024, "global_batch": 480, "micro_batch": 12,
    ...             "steps": 1, "precision": "bf16-mixed"}, "layout": {"replicate": 8},
    ...             "cluster": {"device": "a100-sxm-40gb", "count": 8}})
    >>> errors(nearest(run, 2))
    'Predicted step times are 14.5 % off in the median and 15.5 % at most. No constant is fitted on a run it predicts.'
    """
    steps = [
        abs(resemblance.published.error) for resemblance in resemblances if resemblance.published.error is not None
    ]
    memory = [
        abs(resemblance.published.memory_error)
        for resemblance in resemblances
        if resemblance.published.memory_error is not None
    ]
    said = [f"predicted {what} {_size(of)}" for what, of in (("step times are", steps), ("peaks are", memory)) if of]
    return f"{sentence('; '.join(said))} No constant is fitted on a run it predicts."


def _size(errors: Sequence[float]) -> str:
    if len(errors) == 1:
        return f"{format_percent(errors[0])} off"
    return f"{format_percent(_median(errors))} off in the median and {format_percent(max(errors))} at most"


def _median(values: Sequence[float]) -> float:
    """As `statistics.median`, whose module takes as long to import as all else here."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _differences(resemblances: Sequence[Resemblance]) -> Iterator[tuple[str, str]]:
    """What differs most, and the source where it is not that of the run before."""
    before = ""
    for resemblance in resemblances:
        yield resemblance.published.id, resemblance.differs
        if resemblance.published.source != before:
            yield "", resemblance.published.source
        before = resemblance.published.source


def data(resemblances: Sequence[Resemblance]) -> list[dict[str, Any]]:
    """The runs with their errors, the distance and what differs, for JSON."""
    return [
        plain(resemblance.published, more={PublishedRun: ("error", "memory_error")})
        | {"distance": resemblance.distance, "differs": resemblance.differs}
        for resemblance in resemblances
    ]
