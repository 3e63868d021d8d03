"""The runs of a directory, live while they train: each quantity as forecast and as measured so far."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from trainledger.answers.pages.reconciliation import document as report_of
from trainledger.answers.pages.reconciliation import loss_curve
from trainledger.answers.pages.record import RunRecord, is_run, read_run
from trainledger.answers.pages.runs import document as listing_of
from trainledger.observe.reconcile import Row
from trainledger.report.document import Document, Figure, Table, shown
from trainledger.report.style import COLOURS, arranged, line, points
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.runfile import read
from trainledger.web.calculator import BAD, GOOD, UNKNOWN, Calculator, Drawing, Headline, Progress, Reply
from trainledger.web.field import Field, Query

EVERY_SECONDS = 1.0  # how often a page asks again while a run trains
RESTING_SECONDS = 3.0  # and while none does: it may be resumed, or another one begin
_TONES = {"finished": GOOD, "running": GOOD, "diverged": BAD, "failed": BAD, "killed": BAD}
_QUANTITIES = ("step_seconds", "tokens_per_second", "mfu", "peak_nbytes")
_LAST = 12  # lines of the table beside a curve


def runs_in(folder: Path) -> Calculator:
    """The calculator of the runs in a directory, which `trainledger train` writes.

    A query names a run of the listing, never a path.
    """
    return Calculator(
        name="runs",
        title="Runs",
        question="How does a run go, and does it go as it was forecast?",
        fields=(Field(name="name", title="run", about=f"a run in {folder.name}; empty: the newest"),),
        reply=partial(_reply, folder),
        presets={},
    )


def _reply(folder: Path, query: Query, progress: Progress) -> Reply:
    found = {each.name: each for each in _newest_first(folder)}
    choices = {"name": tuple((each, each) for each in found)}
    if not found:
        made = listing_of(folder, [])
        return Reply(
            document=made,
            verdict=f"No runs in {folder.name}.",
            values={},
            words=("runs",),
            again_seconds=RESTING_SECONDS,
        )
    name = query["name"] or next(iter(found))
    if name not in found:
        near = nearest_text(name, found)
        raise InvalidInput([Problem("name", name, f"is no run of {folder.name}", near)])
    record = read_run(found[name], ledgers=False)
    state = str(record.state.get("state", "unknown"))
    return Reply(
        document=_document(folder, record, list(found.values())),
        headlines=tuple(_headlines(record)),
        verdict=_verdict(record, state),
        tone=_TONES.get(state, UNKNOWN),
        drawings=tuple(_drawings(record)),
        values={"name": name},
        choices=choices,
        words=("reconcile", str(found[name])),
        python=f"import trainledger as tl\n\n# forecast and measurement\n!trainledger reconcile {found[name]}",
        again_seconds=EVERY_SECONDS if state == "running" else RESTING_SECONDS,
    )


def _newest_first(folder: Path) -> list[Path]:
    found = [each for each in folder.iterdir() if is_run(each)] if folder.is_dir() else []
    return sorted(found, key=lambda each: each.stat().st_mtime_ns, reverse=True)


def _document(folder: Path, record: RunRecord, found: Sequence[Path]) -> Document:
    """The report of the run, then the listing."""
    report = report_of(record)
    listing = listing_of(folder, [read_run(each, ledgers=False) for each in found])
    return Document(report.title, (*report.sections, *listing.sections), data=report.data, figures=report.figures)


def _verdict(record: RunRecord, state: str) -> str:
    steps = record.steps
    if not steps:
        return f"{record.path.name}: {state}, no step yet"
    last, planned = steps[-1], _planned_steps(record.path / "run.toml")
    whole = f" of {planned:,}" if planned else ""
    return f"{record.path.name}: {state}, step {last['step']:,}{whole}, loss {last['loss']:.3f}"


def _planned_steps(file: Path) -> int | None:
    """The steps that a run file asks for; None where it cannot be read."""
    try:
        steps: int = read(file).recipe.total_steps
    except InvalidInput:
        return None
    return steps


def _headlines(record: RunRecord) -> list[Headline]:
    """Each quantity as measured, with the forecast of it."""
    rows = record.reconciliation
    return [_headline(rows[name]) for name in _QUANTITIES if rows[name].measured is not None]


def _headline(row: Row) -> Headline:
    ratio = "" if row.ratio is None else f"; measured / forecast = {row.ratio:.3f}"
    return Headline(
        name=row.quantity, title=row.title, value=row.measured, unit=row.unit, basis="measured",
        formula=f"forecast {shown(row.predicted, row.unit) or 'unknown'}{ratio}",
        source="metrics.jsonl of the run, its disturbed steps left out; forecast.json",
    )  # fmt: skip


def _drawings(record: RunRecord) -> list[Drawing]:
    """The loss and the time of each step, and the figures of the report."""
    steps = record.steps
    if not steps:
        return []
    rows = tuple((each["step"], each["loss"], each.get("seconds")) for each in steps[-_LAST:])
    last = Table("last steps", ("step", "loss", "time"), rows, units=("integer", "ratio", "seconds"))
    loss = loss_curve(record)
    found = [] if loss is None else [Drawing(title="Loss", figure=loss, table=last)]
    found.append(Drawing(title="Time of each step", figure=_step_times(record), table=last))
    own = report_of(record)
    quantities = own.tables["quantities"]
    more = {title: each for title, each in own.figures().items() if title not in ("Loss", "Step time")}
    return [*found, *(Drawing(title=title, figure=each, table=quantities) for title, each in more.items())]


def _step_times(record: RunRecord) -> Figure:
    """Seconds of each step, with the forecast across them."""
    timed = [each for each in record.steps if isinstance(each.get("seconds"), int | float)]
    curve = points(
        "measured", [each["step"] for each in timed], [each["seconds"] for each in timed], "lines",
        line={"color": COLOURS[0], "width": 1.2},
    )  # fmt: skip
    layout = arranged(x="step", y="seconds")
    layout["yaxis"]["rangemode"] = "tozero"
    if record.forecast is not None and record.forecast.step_seconds is not None:
        layout["shapes"].append(line("h", record.forecast.step_seconds, COLOURS[1], "x domain", "y", dash="dash"))
        layout["annotations"] = [
            {
                "x": 1, "xref": "x domain", "y": record.forecast.step_seconds, "yref": "y", "text": "forecast",
                "showarrow": False, "xanchor": "right", "yanchor": "bottom", "font": {"color": COLOURS[1]},
            }
        ]  # fmt: skip
    return {"data": [curve], "layout": layout}
