"""The training loop of a run: steps, epochs, learning rates, tokens on disk, checkpoints, and the loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Unpack

from trainledger.answers.defaults import of_full_rows, with_length
from trainledger.answers.load import Source, resolve
from trainledger.answers.machine import kernels_of, machine_of
from trainledger.answers.pages.plain_data import named, plain, run_data
from trainledger.answers.question import Progress, count, question, silent
from trainledger.answers.source import OfCluster, with_cluster
from trainledger.forecast.plan.training_loop import Checkpointing, TrainingLoop, training_loop
from trainledger.forecast.predict import predict as forecasts
from trainledger.ledger.ranks import account_run
from trainledger.report.chart import COLOURS, Axis, Chart, Line
from trainledger.report.document import Cell, Document, Table, notes, section, sections
from trainledger.report.table import sentence
from trainledger.spec.reading import Overrides
from trainledger.spec.units import SECONDS_PER_HOUR, counted, format_count, format_nbytes, format_seconds

_NAMES = {
    "tokens_per_step": "tokens of a step",
    "micro_batches": "micro-batches",
    "corpus_nbytes": "corpus on disk",
    "checkpoint_nbytes": "checkpoint",
    "checkpoint_every": "checkpoint every",
    "loader_tokens_per_second": "loader",
    "loader_nbytes_per_second": "loader reads",
}
_PLAIN = (
    "tokens_per_step micro_batches steps tokens corpus_tokens epochs token_dtype corpus_nbytes checkpoint_nbytes "
    "checkpoint_every checkpoint_seconds checkpoints step_seconds loader_tokens_per_second loader_nbytes_per_second"
)
SCHEDULE, INTERVALS = "The learning rate over the steps", "What the interval between checkpoints costs"


@question()
def loop(
    run: Source,
    overrides: Overrides = (),
    *,
    corpus: Annotated[
        int | None,
        count("tokens of the text that there is", default_text="as many as are trained on", metavar="TOKENS"),
    ] = None,
    progress: Progress = silent,
    **cluster: Unpack[OfCluster],
) -> TrainingLoop:
    """The training loop: steps and epochs, the learning rate, tokens on disk, checkpoints, and the loader.

    RUN is as of plan. Of a model without a recipe 20 tokens for each parameter are trained on.

    Raises `InvalidInput`.
    """
    run = of_full_rows(with_length(resolve(run, with_cluster(overrides, **cluster), progress=progress)))
    machine = machine_of(run)
    accounted = account_run(run, backend=kernels_of(run))
    return training_loop(run, accounted.ledger, forecasts.forecast(accounted, machine), machine, corpus)


def page(answer: TrainingLoop) -> Document:
    """Steps and tokens with their formulas, the corpus on disk, checkpoints, and what loaders must deliver."""
    rows = tuple(
        (_NAMES.get(formula.name, formula.name), formula.formula, formula.numbers) for formula in answer.formulas
    )
    return Document(
        title=headline(answer),
        verdict=headline(answer),
        sections=sections(
            Table("formulas", ("", "formula", "with its numbers"), rows, align="lll"),
            section("The corpus as tokens on disk", corpus_table(answer)),
            section("Learning rate", schedule_table(answer, 6), detail="the learning rate"),
            section("Checkpoints", *_checkpoints(answer), detail="checkpoints"),
            section("", notes(sentence(note) for note in answer.notes), detail="assumptions"),
        ),
        data=lambda: _data(answer),
        figures=lambda: figures(answer),
    )


def headline(answer: TrainingLoop) -> str:
    """The loop in one line."""
    every = f", a checkpoint every {counted(each, 'step')}" if (each := answer.checkpoint_every) else ""
    steps = f"{counted(answer.steps, 'step')} of {format_count(answer.tokens_per_step)} tokens"
    passes = f"{answer.epochs:.3g}"
    epochs = f"{passes} epoch" if passes == "1" else f"{passes} epochs"
    return f"{answer.run.model.name}: {steps}, {epochs}{every}"


def figures(answer: TrainingLoop) -> list[Chart]:
    """The learning rate, and what an interval of checkpoints costs where that is known."""
    saved = answer.checkpointing
    return [schedule_chart(answer), *([interval_chart(answer, saved)] if saved is not None and saved.lost else ())]


def corpus_table(answer: TrainingLoop) -> Table:
    """Bytes of the corpus by format of a token, and which of them the vocabulary allows."""
    rows: list[tuple[Cell, ...]] = []
    for name, nbytes in answer.corpus_nbytes.items():
        vocabulary = f"{answer.run.model.vocab_size:,}"
        said = f"the smallest for a vocabulary of {vocabulary}" if name == answer.token_dtype else ""
        if name == "uint16" != answer.token_dtype:
            said = f"too small for a vocabulary of {vocabulary}"
        rows.append((name, answer.corpus_tokens, nbytes, said))
    return Table(
        "corpus", ("tokens as", "tokens", "bytes", ""), tuple(rows), units=("", "count", "nbytes"), align="lrrl"
    )


def schedule_table(answer: TrainingLoop, most: int = 24) -> Table:
    """The learning rate at some steps, among them the first, the last and the first of the highest."""
    every = answer.learning_rates
    peak = max(range(len(every)), key=lambda at: every[at][1])
    chosen = sorted({peak, *(round(at * (len(every) - 1) / max(1, most - 1)) for at in range(most))})
    rows = tuple((every[at][0], every[at][0] * answer.tokens_per_step, f"{every[at][1]:.4g}") for at in chosen)
    return Table(
        "learning rate", ("step", "tokens before", "learning rate"), rows, units=("integer", "count"), align="rrr"
    )


def _checkpoints(answer: TrainingLoop) -> Iterator[str | Table]:
    yield f"{format_nbytes(answer.checkpoint_nbytes)} each, {counted(answer.checkpoints, 'time')} in the run."
    saved = answer.checkpointing
    if saved is None:
        return
    yield Table(
        "checkpoints",
        ("", "time"),
        (
            ("saving holds the run up", saved.pause_seconds),
            ("mean time between interruptions", saved.mtbf_seconds),
            ("each costs, in addition to lost work", saved.restart_seconds),
            ("best interval, first order (Young)", saved.young_seconds),
            ("best interval (Daly)", saved.daly_seconds),
        ),
        units=("", "seconds"),
        align="lr",
    )


def interval_table(saved: Checkpointing) -> Table:
    """What intervals between checkpoints add to the time of steps."""
    columns = ("work between checkpoints", "time added")
    return Table("intervals", columns, saved.lost, units=("seconds", "share"), align="rr")


def schedule_chart(answer: TrainingLoop) -> Chart:
    """The learning rate over the steps."""
    steps, rates = [each for each, _ in answer.learning_rates], [rate for _, rate in answer.learning_rates]
    return Chart(SCHEDULE, (Line(steps, rates),), Axis("step"), Axis("learning rate", zero=True), height=210)


def interval_chart(answer: TrainingLoop, saved: Checkpointing) -> Chart:
    """The time that checkpoints and interruptions add, over the interval between checkpoints, with the best marked."""
    hours = [interval / SECONDS_PER_HOUR for interval, _ in saved.lost]
    said = [f"every {format_seconds(interval)}: {100 * lost:.3g} % more time" for interval, lost in saved.lost]
    marks = [Line(hours, [100 * lost for _, lost in saved.lost], "time added", said=said)]
    intervals = [("Young", saved.young_seconds, COLOURS[1]), ("Daly", saved.daly_seconds, COLOURS[2])]
    if answer.checkpoint_every is not None and answer.step_seconds is not None:
        intervals.append(("this run", answer.checkpoint_every * answer.step_seconds, COLOURS[5]))
    for name, seconds, colour in intervals:
        near = min(saved.lost, key=lambda each: abs(each[0] - seconds))
        words = [f"{name}: every {format_seconds(seconds)}"]
        place = [seconds / SECONDS_PER_HOUR]
        marks.append(Line(place, [100 * near[1]], name, colour, 0, symbol="circle", size=9, said=words))
    x = Axis("hours of work between checkpoints", log=True)
    return Chart(INTERVALS, tuple(marks), x, Axis("time added (%)", zero=True), height=230)


def _data(answer: TrainingLoop) -> dict[str, Any]:
    saved = answer.checkpointing
    return {
        **named(answer, _PLAIN),
        "learning_rates": [list(learning_rate) for learning_rate in answer.learning_rates],
        "checkpointing": None if saved is None else plain(saved),
        "formulas": {formula.name: vars(formula) for formula in answer.formulas},
        "notes": list(answer.notes),
        "run": run_data(answer.run),
    }
