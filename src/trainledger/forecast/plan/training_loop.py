"""The training loop of a run in numbers: steps, epochs, tokens on disk, learning rates, checkpoints and loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isfinite

from trainledger.forecast.plan.limits import PASSES
from trainledger.forecast.plan.napkin import Formula, short
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.predict import checkpoint_nbytes
from trainledger.forecast.predict.roofline import Machine
from trainledger.forecast.predict.run import (
    Conditions,
    conditions,
    daly,
    expected_seconds,
    occasions,
    write_seconds,
    young,
)
from trainledger.ledger.entry import in_any_memory
from trainledger.ledger.ledger import Ledger
from trainledger.report.document import Answer
from trainledger.spec.dtypes import TOKEN_NBYTES, token_dtype
from trainledger.spec.frozen import frozen
from trainledger.spec.recipe import learning_rate, sampled_steps
from trainledger.spec.run import Run
from trainledger.spec.units import format_count

POINTS = 160  # of the schedule, and of the cost over the interval between checkpoints
_FARTHEST = 30  # a factor around the best interval
MUENNIGHOFF = "Muennighoff et al. 2023, Scaling Data-Constrained Language Models (arXiv 2305.16264)"
DALY = "Daly 2006, A Higher Order Estimate of the Optimum Checkpoint Interval, equation 37"
STORE = "the token store: little-endian uint16 where the vocabulary has at most 65,536 tokens, else uint32"


@frozen
class Checkpointing:
    """When checkpoints cost least: ``pause_seconds`` is how long saving stops the run, ``mtbf_seconds`` the mean time
    between interruptions of the whole run, ``restart_seconds`` what each costs in addition to lost work.

    ``young_seconds`` and ``daly_seconds`` are intervals that cost least; ``lost`` has intervals with the share of the
    time of steps that saving, repeated work and restarts add. Intervals are seconds of work.
    """

    pause_seconds: float
    mtbf_seconds: float
    restart_seconds: float
    young_seconds: float
    daly_seconds: float
    lost: tuple[tuple[float, float], ...]


@frozen(kw_only=True)
class TrainingLoop(Answer, report="loop"):
    """What a run's loop does and needs; times are None where no time of a step is known.

    ``tokens`` are those of all steps, ``epochs`` how often they pass over ``corpus_tokens``; ``micro_batches`` are
    those of a data rank in a step. ``corpus_nbytes`` are the corpus's bytes by format of a token, of which
    ``token_dtype`` is the smallest that the vocabulary allows. ``learning_rates`` are of some steps, by index.
    ``checkpoint_every`` is how many steps lie between checkpoints (None: one at the end), as the recipe says or as
    costs least. ``loader_tokens_per_second`` is what all devices together read while steps run.
    """

    run: Run
    forecast: Forecast
    tokens_per_step: int
    micro_batches: int
    steps: int
    tokens: int
    corpus_tokens: int
    epochs: float
    token_dtype: str
    corpus_nbytes: dict[str, int]
    learning_rates: tuple[tuple[int, float], ...]
    checkpoint_nbytes: int
    checkpoint_every: int | None
    checkpoint_seconds: float | None
    checkpoints: int
    checkpointing: Checkpointing | None
    step_seconds: float | None
    loader_tokens_per_second: float | None
    loader_nbytes_per_second: float | None
    formulas: tuple[Formula, ...]
    remarks: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What qualifies the loop, and what qualifies the forecast of its step."""
        return self.remarks + self.forecast.notes


def training_loop(
    run: Run, ledger: Ledger, forecast: Forecast, machine: Machine | None, corpus_tokens: int | None = None
) -> TrainingLoop:
    """The loop of a run from the ledger of its whole step and its forecast; the corpus is by default read once."""
    recipe = run.recipe
    tokens = recipe.total_steps * recipe.tokens_per_step
    corpus = tokens if corpus_tokens is None else corpus_tokens
    dtype = token_dtype(run.model.vocab_size)
    around = Conditions() if machine is None else conditions(run, machine)
    nbytes = checkpoint_nbytes(ledger)
    write = write_seconds(run, nbytes, around)
    step, steps = forecast.step_seconds, recipe.total_steps
    if step is not None:  # without a layout all devices share the step of one
        step = None if forecast.impossible else step / (run.cluster.count if run.layout.alone else 1)
    every = forecast.checkpoint_every or recipe.checkpoints.every
    rate = None if step is None else recipe.tokens_per_step / step
    made = TrainingLoop(
        run=run, forecast=forecast, tokens_per_step=recipe.tokens_per_step, micro_batches=run.grad_accum, steps=steps,
        tokens=tokens, corpus_tokens=corpus, epochs=tokens / corpus, token_dtype=dtype,
        corpus_nbytes={name: corpus * size for name, size in TOKEN_NBYTES.items()},
        learning_rates=tuple((at, learning_rate(recipe, at)) for at in sampled_steps(recipe, POINTS)),
        checkpoint_nbytes=nbytes, checkpoint_every=every, checkpoint_seconds=None if write is None else write[1],
        checkpoints=occasions(steps, every), checkpointing=_checkpointing(write, around, step, steps),
        step_seconds=step, loader_tokens_per_second=rate,
        loader_nbytes_per_second=None if rate is None else rate * TOKEN_NBYTES[dtype], formulas=(), remarks=(),
    )  # fmt: skip
    state = in_any_memory(ledger.resident)
    return replace(made, formulas=tuple(_formulas(made, state)), remarks=tuple(_remarks(made, around)))


def _checkpointing(
    write: tuple[float, float] | None, around: Conditions, step_seconds: float | None, steps: int
) -> Checkpointing | None:
    """The intervals that cost least, and what others cost; None where saving, failing or a step's time is not known."""
    if write is None or around.mtbf_seconds is None or step_seconds is None or write[0] <= 0:
        return None
    pause, mtbf = write[0], around.mtbf_seconds
    again = around.restart_seconds + write[1]
    best, work = daly(pause, mtbf), steps * step_seconds
    lost = []
    for at in range(POINTS // 2):
        interval = best * _FARTHEST ** (2 * at / (POINTS // 2 - 1) - 1)
        if step_seconds <= interval <= work:
            whole = expected_seconds(interval, interval, write=pause, restart=again, mtbf=mtbf)
            if isfinite(whole):
                lost.append((interval, whole / interval - 1))
    return Checkpointing(pause, mtbf, again, young(pause, mtbf), best, tuple(lost))


def _formulas(made: TrainingLoop, state: Mapping[str, int]) -> Iterator[Formula]:
    """Every number with its formula, the same with numbers, and its source."""
    recipe, layout = made.run.recipe, made.run.layout
    batch, length = recipe.global_batch, recipe.seq_len
    yield Formula(
        "tokens_per_step",
        "global batch x sequence length",
        f"{batch:,} x {length:,} = {made.tokens_per_step:,}",
        "arithmetic",
    )
    parts = f"{batch:,} / ({made.run.device_batch:,} x {layout.data_ranks:,}) = {made.micro_batches:,}"
    yield Formula("micro_batches", "global batch / (micro-batch x data ranks)", parts, "arithmetic")
    if recipe.steps is None and recipe.tokens is not None:
        numbers = f"{short(recipe.tokens)} / {made.tokens_per_step:,} = {made.steps:,}"
        yield Formula("steps", "tokens / tokens of a step, whole steps", numbers, "arithmetic")
    else:
        yield Formula("steps", "as given", f"recipe.steps = {made.steps:,}", "the run")
    numbers = f"{short(made.tokens)} / {short(made.corpus_tokens)} = {made.epochs:.4g}"
    yield Formula("epochs", "tokens trained on / tokens of the corpus", numbers, MUENNIGHOFF)
    size = TOKEN_NBYTES[made.token_dtype]
    on_disk = f"{short(made.corpus_tokens)} x {size} B = {short(made.corpus_nbytes[made.token_dtype])} B"
    yield Formula("corpus_nbytes", f"tokens of the corpus x bytes of {made.token_dtype}", on_disk, STORE)
    terms = f"{state.get('parameters', 0):,} + {state.get('optimizer state', 0):,} = {made.checkpoint_nbytes:,} B"
    yield Formula("checkpoint_nbytes", "parameters + optimizer state", terms, "the closed-form ledger of the step")
    yield from _of_times(made)


def _of_times(made: TrainingLoop) -> Iterator[Formula]:
    """The formulas of what follows from the time of a step."""
    saved, step, rate = made.checkpointing, made.step_seconds, made.loader_tokens_per_second
    if saved is not None and step is not None and made.run.recipe.checkpoints.every is None:
        pause, mtbf = f"{short(saved.pause_seconds)} s", f"{short(saved.mtbf_seconds)} s"
        best = f"about sqrt(2 x {pause} x {mtbf}) - {pause} = {short(saved.daly_seconds)} s"
        steps = (
            "one at the end" if made.checkpoint_every is None else f"{made.checkpoint_every:,} steps of {short(step)} s"
        )
        yield Formula(
            "checkpoint_every",
            "sqrt(2 x pause x mtbf) (1 + ...) - pause, over the seconds of a step",
            f"{best}: {steps}",
            DALY,
        )
    if step is not None and rate is not None and made.loader_nbytes_per_second is not None:
        numbers = f"{made.tokens_per_step:,} / {short(step)} s = {short(rate)} tokens/s"
        yield Formula("loader_tokens_per_second", "tokens of a step / its seconds", numbers, "the forecast of the step")
        size = TOKEN_NBYTES[made.token_dtype]
        numbers = f"{short(rate)} x {size} B = {short(made.loader_nbytes_per_second)} B/s"
        yield Formula("loader_nbytes_per_second", f"tokens/s x bytes of {made.token_dtype}", numbers, STORE)


def _remarks(made: TrainingLoop, around: Conditions) -> Iterator[str]:
    if made.epochs > PASSES:
        yield (
            f"{made.epochs:.3g} passes over the corpus: from about {PASSES:g} on repeated tokens are worth less and "
            "less (Muennighoff et al. 2023)"
        )
    if made.forecast.fits is False:
        yield "the run does not fit in the memory of its devices (trainledger plan says what is needed)"
    given, needed = around.loader_tokens_per_second, made.loader_tokens_per_second
    if given is not None and needed is not None and given < needed:
        yield f"steps wait for tokens: loaders deliver {format_count(given)}/s, and {format_count(needed)}/s are needed"
