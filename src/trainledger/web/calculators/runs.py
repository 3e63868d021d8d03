"""The runs of a directory, live while they train: each quantity as forecast and as measured so far."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from trainledger.answers.pages.reconciliation import loss_curve
from trainledger.answers.pages.reconciliation import page as report_of
from trainledger.answers.pages.record import RunRecord, is_run, read_run
from trainledger.answers.pages.runs import page as listing_of
from trainledger.observe.reconcile import Row
from trainledger.report.chart import COLOURS, Axis, Band, Chart, Line
from trainledger.report.document import Document, Table, shown
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
        fields=(Field(name="name", title="run", about=f"a run in {folder.name}; empty: the newest", offered=True),),
        reply=partial(_reply, folder),
        presets={},
    )


def _reply(folder: Path, query: Query, progress: Progress) -> Reply:
    paths = {path.name: path for path in _newest_first(folder)}
    choices = {"name": tuple((each, each) for each in paths)}
    if not paths:
        made = listing_of(folder, [])
        return Reply(
            document=made,
            verdict=f"No runs in {folder.name}.",
            values={},
            words=("runs",),
            again_seconds=RESTING_SECONDS,
        )
    name = query["name"] or next(iter(paths))
    if name not in paths:
        near = nearest_text(name, paths)
        raise InvalidInput([Problem("name", name, f"is no run of {folder.name}", near)])
    record = read_run(paths[name], ledgers=False)
    state = str(record.state.get("state", "unknown"))
    return Reply(
        document=_document(folder, record, list(paths.values())),
        headlines=tuple(_headlines(record)),
        verdict=_verdict(record, state),
        tone=_TONES.get(state, UNKNOWN),
        drawings=tuple(_drawings(record)),
        values={"name": name},
        choices=choices,
        words=("reconcile", str(paths[name])),
        python=f"import trainledger as tl\n\n# forecast and measurement\n!trainledger reconcile {paths[name]}",
        again_seconds=EVERY_SECONDS if state == "running" else RESTING_SECONDS,
    )


def _newest_first(folder: Path) -> list[Path]:
    paths = [path for path in folder.iterdir() if is_run(path)] if folder.is_dir() else []
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _document(folder: Path, record: RunRecord, paths: Sequence[Path]) -> Document:
    """The report of the run, then the listing."""
    report = report_of(record)
    listing = listing_of(folder, [read_run(path, ledgers=False) for path in paths])
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
        name=row.quantity,
        title=row.title,
        value=row.measured,
        unit=row.unit,
        basis="measured",
        formula=f"forecast {shown(row.predicted, row.unit) or 'unknown'}{ratio}",
        source="metrics.jsonl of the run, its disturbed steps left out; forecast.json",
    )


def _drawings(record: RunRecord) -> list[Drawing]:
    """The loss and the time of each step, and the figures of the report."""
    steps = record.steps
    if not steps:
        return []
    rows = tuple((step["step"], step["loss"], step.get("seconds")) for step in steps[-_LAST:])
    last = Table("last steps", ("step", "loss", "time"), rows, units=("integer", "ratio", "seconds"))
    loss = loss_curve(record)
    charts = [*([] if loss is None else [loss]), _step_times(record)]
    report = report_of(record)
    quantities = report.tables["quantities"]
    more = [
        Drawing(chart=figure, table=quantities)
        for figure in report.figures()
        if figure.title not in ("Loss", "Step time")
    ]
    return [*(Drawing(chart=chart, table=last) for chart in charts), *more]


def _step_times(record: RunRecord) -> Chart:
    """Seconds of each step, with the forecast across them."""
    timed = [step for step in record.steps if isinstance(step.get("seconds"), int | float)]
    curve = Line([each["step"] for each in timed], [each["seconds"] for each in timed], width=1.2)
    predicted = None if record.forecast is None else record.forecast.step_seconds
    line = [] if predicted is None else [Band("y", predicted, text="forecast", colour=COLOURS[1])]
    return Chart("Time of each step", (curve, *line), Axis("step"), Axis("seconds", zero=True))
