"""What limits the growth of a run: each limit compares a number of the run with the most that it may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainledger.catalog import critical_batch as published_laws
from trainledger.forecast.plan.scaling_law import LossLaw, laws
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.predict import NEVER
from trainledger.ledger.model.parameters import parameters
from trainledger.spec.frozen import frozen
from trainledger.spec.plain import table_beside
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run
from trainledger.spec.units import format_count

EXPOSED = 0.2  # of the step: the most that exposed communication, or the bubble, may take
LOST = 0.1  # of the whole time: the most that checkpoints and failures together may take
DOMINATING = 0.5  # of the peak
PASSES = 4.0  # over the same text, from which on repeated tokens are worth less (Muennighoff et al. 2023, section 6)
MEMORY, POSITIONS, LOGITS, CRITICAL_BATCH = "device memory", "positions", "vocabulary logits", "critical batch"


@frozen
class Reading:
    """A number of a run and the most it may be; ``basis`` as in the ledger."""

    amount: float
    most: float
    basis: str

    @property
    def holds(self) -> bool:
        return self.amount <= self.most


@frozen
class Limits:
    """The largest acceptable shares, and how many different tokens there are (None: not known)."""

    exposed: float = EXPOSED
    lost: float = LOST
    unique_tokens: int | None = None
    positions: int | None = None  # of the planned model


@frozen
class Limit:
    """One limit: ``read`` gives the number and its most, None where nothing is known.

    ``what`` says what is compared, ``remedy`` what to do, ``not_known`` what is missing where nothing is known.
    ``needs_forecast`` is off where ``read`` ignores the forecast (None then); ``of_layout`` says whether another layout
    can keep the limit. Beyond a limit a run does not run, or wastes more than is acceptable; one that only ``warns`` is
    a mark beyond which it runs as well as before.
    """

    name: str
    unit: str
    what: str
    remedy: str
    source: str
    read: Callable[[Run, Forecast | None, Limits], Reading | None]
    not_known: str = ""
    needs_forecast: bool = True
    of_layout: bool = False
    warns: bool = False


def critical_batch(run: Run) -> float:
    """Tokens of the critical batch of a run at its end, from the loss that it will have (Kaplan et al. 2020).

    The loss is that of the refitted Chinchilla law (Besiroglu et al. 2024) at the run's parameters (of a mixture of
    experts the active ones) and tokens. Training at this batch takes about twice the fewest steps and twice the fewest
    tokens (McCandlish et al. 2018, equation 2.11).
    """
    law = laws()["besiroglu"]
    assert isinstance(law, LossLaw)
    tokens = run.recipe.total_steps * run.recipe.tokens_per_step
    entry = published_laws()["kaplan"]
    return float(entry["tokens"] / law.loss(parameters(run.model).active, tokens) ** entry["loss_exponent"])


def critical_batch_of_tokens(run: Run) -> float:
    """The same by the tokens trained on alone (Bergsma et al. 2025): a power law in D."""
    entry = published_laws()["bergsma"]
    tokens = run.recipe.total_steps * run.recipe.tokens_per_step
    return float(entry["sequences"] * tokens ** entry["exponent"] * entry["sequence_tokens"])


def _memory(run: Run, forecast: Forecast | None, limits: Limits) -> Reading | None:
    if forecast is None or forecast.device_nbytes is None or forecast.usable_nbytes is None:
        return None
    return Reading(forecast.device_nbytes, forecast.usable_nbytes, forecast.basis.get("device_nbytes", "assumed"))


def _logits(run: Run, forecast: Forecast | None, limits: Limits) -> Reading | None:
    if forecast is None or not forecast.peak_nbytes:
        return None
    return Reading(forecast.peak_by_category.get("logits and loss", 0) / forecast.peak_nbytes, DOMINATING, "exact")


def _share_of_step(cause: str) -> Callable[[Run, Forecast | None, Limits], Reading | None]:
    def read(run: Run, forecast: Forecast | None, limits: Limits) -> Reading | None:
        if forecast is None or not forecast.step_seconds or cause not in forecast.step_causes:
            return None
        basis = forecast.basis.get("step_seconds", "assumed")
        return Reading(forecast.step_causes[cause] / sum(forecast.step_causes.values()), limits.exposed, basis)

    return read


def _lost(forecast: Forecast | None, *causes: str) -> float | None:
    """The share of the whole time that bars of the waterfall take; all of it where the run would never end."""
    if forecast is None:
        return None
    if NEVER in forecast.notes:
        return 1.0
    bars = {bar.cause: bar.seconds for bar in forecast.waterfall}
    if not forecast.total_seconds or not any(cause in bars for cause in causes):
        return None
    return sum(bars.get(cause, 0.0) for cause in causes) / forecast.total_seconds


def _failures(run: Run, forecast: Forecast | None, limits: Limits) -> Reading | None:
    share = _lost(forecast, "checkpoints", "failures")
    return None if share is None else Reading(share, limits.lost, "assumed")


def _data(run: Run, forecast: Forecast | None, limits: Limits) -> Reading | None:
    share = _lost(forecast, "data")
    return None if share is None else Reading(share, 0.0, "assumed")


def _critical_batch(run: Run, forecast: Forecast | None, limits: Limits) -> Reading | None:
    """None where the law, which is of training from scratch, says nothing: for trained weights and for one step."""
    recipe = run.recipe
    if recipe.lora is not None or recipe.initial_weights is not None or recipe.total_steps == 1:
        return None
    return Reading(recipe.tokens_per_step, critical_batch(run), "assumed")


def _positions(run: Run, forecast: Forecast | None, limits: Limits) -> Reading | None:
    return None if limits.positions is None else Reading(run.recipe.seq_len, limits.positions, "exact")


def _passes(most: float, basis: str) -> Callable[[Run, Forecast | None, Limits], Reading | None]:
    def read(run: Run, forecast: Forecast | None, limits: Limits) -> Reading | None:
        if limits.unique_tokens is None:
            return None
        tokens = run.recipe.total_steps * run.recipe.tokens_per_step
        return Reading(tokens / limits.unique_tokens, most, basis)

    return read


_ASYNC = "recipe.checkpoints.asynchronous=true or "
_DALY = ", or checkpoints at Daly's interval (recipe.checkpoints.every=none)"
_READ = {
    MEMORY: _memory, POSITIONS: _positions, LOGITS: _logits, CRITICAL_BATCH: _critical_batch,
    **{cause: _share_of_step(cause) for cause in ("exposed communication", "pipeline bubble")},
    "data throughput": _data, "failures": _failures,
    "dataset exhausted": _passes(1.0, "exact"), "repetition": _passes(PASSES, "assumed"),
}  # fmt: skip
_WRITTEN = table_beside(__file__)
LIMITS = tuple(Limit(name=name, read=_READ[name], **row) for name, row in _WRITTEN.items())


def comparison(limit: Limit, run: Run) -> str:
    """What is compared, in words; of the critical batch also that of another law, as the two are far apart."""
    if limit.name != CRITICAL_BATCH:
        return limit.what
    by_tokens = format_count(critical_batch_of_tokens(run))
    return f"{limit.what}; a law of the tokens alone says {by_tokens} (Bergsma et al. 2025)"


def remedy(limit: Limit, run: Run) -> str:
    """What to do where a limit is passed, without what the run does already or has no account of."""
    recipe, words = run.recipe, limit.remedy
    for each, useless in ((_ASYNC, recipe.checkpoints.asynchronous), (_DALY, recipe.checkpoints.every is None)):
        words = words.replace(each, "") if useless else words
    return words


@frozen
class Judge:
    """Compares runs with some limits; ``forecast`` predicts a run."""

    of: Sequence[Limit]
    limits: Limits
    forecast: Callable[[Run], Forecast]

    def reading(self, limit: Limit, run: Run) -> Reading | None:
        return limit.read(run, self.forecast(run) if limit.needs_forecast else None, self.limits)

    def readings(self, run: Run) -> dict[str, Reading | None]:
        return {limit.name: self.reading(limit, run) for limit in self.of}

    def holds(self, limit: Limit, run: Run) -> bool:
        reading = self.reading(limit, run)
        return reading is None or reading.holds

    def laid_out_well(self, run: Run) -> bool:
        """Whether a run obeys all rules and keeps the limits of memory and step that its layout decides about."""
        if next(run_problems(run), None) is not None:
            return False
        return all(self.holds(limit, run) for limit in self.of if limit.of_layout and limit.needs_forecast)
