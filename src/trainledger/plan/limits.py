"""What can give way when a run grows: each a number of the run beside the most that it may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainledger.frozen import frozen
from trainledger.ledger.model.parameters import parameters
from trainledger.spec.run import Run

if TYPE_CHECKING:
    from trainledger.predict.forecast import Forecast

EXPOSED = 0.2  # of the step: what communication, or the bubble, may take before it is said to give way
LOST = 0.1  # of the whole time: what checkpoints and failures together may take
DOMINATING = 0.5  # of the peak
PASSES = 4.0  # over the same text, from which on repeated tokens are worth less (Muennighoff et al. 2023, section 6)


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
    """Shares that a person finds bearable, and how many different tokens there are (None: not known)."""

    exposed: float = EXPOSED
    lost: float = LOST
    unique_tokens: int | None = None
    positions: int | None = None  # that the planned model knows


@frozen
class Limit:
    """One thing that can give way.

    ``read`` is None where nothing is known; ``forecasts`` says whether it looks at the forecast (None: it does not).
    ``what`` says in words what is compared, ``remedy`` what to do.
    """

    name: str
    unit: str
    what: str
    remedy: str
    source: str
    forecasts: bool
    read: Callable[[Run, Forecast | None, Limits], Reading | None]


def critical_batch(run: Run) -> float:
    """Tokens of the critical batch of a run at its end, from the loss that it will have (Kaplan et al. 2020).

    The loss is that of the refitted Chinchilla law (Besiroglu et al. 2024) at the run's parameters (of a mixture of
    experts the active ones) and tokens. Training at this batch takes about twice the fewest steps and twice the fewest
    tokens (McCandlish et al. 2018, equation 2.11).
    """
    from trainledger.catalog import critical_batch as known
    from trainledger.plan.scaling_law import LossLaw, laws

    law = laws()["besiroglu"]
    assert isinstance(law, LossLaw)
    tokens = run.recipe.total_steps * run.recipe.tokens_per_step
    entry = known()["kaplan"]
    return float(entry["tokens"] / law.loss(parameters(run.model).active, tokens) ** entry["loss_exponent"])


def critical_batch_of_tokens(run: Run) -> float:
    """The same by the tokens trained on alone (Bergsma et al. 2025): a power law in D."""
    from trainledger.catalog import critical_batch as known

    entry = known()["bergsma"]
    tokens = run.recipe.total_steps * run.recipe.tokens_per_step
    return float(entry["sequences"] * tokens ** entry["exponent"] * entry["sequence_tokens"])


def _memory(run: Run, told: Forecast | None, limits: Limits) -> Reading | None:
    if told is None or told.device_nbytes is None or told.usable_nbytes is None:
        return None
    return Reading(told.device_nbytes, told.usable_nbytes, told.basis.get("device_nbytes", "assumed"))


def _logits(run: Run, told: Forecast | None, limits: Limits) -> Reading | None:
    if told is None or not told.peak_nbytes:
        return None
    return Reading(told.peak_by_category.get("logits and loss", 0) / told.peak_nbytes, DOMINATING, "exact")


def _share_of_step(cause: str) -> Callable[[Run, Forecast | None, Limits], Reading | None]:
    def read(run: Run, told: Forecast | None, limits: Limits) -> Reading | None:
        if told is None or not told.step_seconds or cause not in told.step_causes:
            return None
        basis = told.basis.get("step_seconds", "assumed")
        return Reading(told.step_causes[cause] / sum(told.step_causes.values()), limits.exposed, basis)

    return read


def _lost(told: Forecast | None, *causes: str) -> float | None:
    """The share of the whole time that bars of the waterfall take; all of it where the run would never end."""
    from trainledger.predict.predict import NEVER

    if told is None:
        return None
    if NEVER in told.notes:
        return 1.0
    bars = {each.cause: each.seconds for each in told.waterfall}
    if not told.total_seconds or not any(each in bars for each in causes):
        return None
    return sum(bars.get(each, 0.0) for each in causes) / told.total_seconds


def _failures(run: Run, told: Forecast | None, limits: Limits) -> Reading | None:
    share = _lost(told, "checkpoints", "failures")
    return None if share is None else Reading(share, limits.lost, "assumed")


def _data(run: Run, told: Forecast | None, limits: Limits) -> Reading | None:
    share = _lost(told, "data")
    return None if share is None else Reading(share, 0.0, "assumed")


def _positions(run: Run, told: Forecast | None, limits: Limits) -> Reading | None:
    return None if limits.positions is None else Reading(run.recipe.seq_len, limits.positions, "exact")


def _critical(run: Run, told: Forecast | None, limits: Limits) -> Reading | None:
    return Reading(run.recipe.tokens_per_step, critical_batch(run), "assumed")


def _passes(most: float, basis: str) -> Callable[[Run, Forecast | None, Limits], Reading | None]:
    def read(run: Run, told: Forecast | None, limits: Limits) -> Reading | None:
        if limits.unique_tokens is None:
            return None
        tokens = run.recipe.total_steps * run.recipe.tokens_per_step
        return Reading(tokens / limits.unique_tokens, most, basis)

    return read


_KAPLAN = "McCandlish et al. 2018 (arXiv 1812.06162); Kaplan et al. 2020 (arXiv 2001.08361), figure 10"
LOGITS = "vocabulary logits"
_SPREAD = ", more sharding; --set layout=auto finds a layout that fits, if there is one"
_ASYNC = "recipe.checkpoint_async=true or "
_DALY = ", or checkpoints at Daly's interval (absent checkpoint_every)"
_STEP = "the predicted step, and the bearable share that was asked for"
LIMITS = (
    Limit(
        "device memory", "nbytes", "what the heaviest device holds, beside what it has", "`trainledger advise` ranks "
        f"what saves memory: activation checkpointing, a smaller micro-batch{_SPREAD}",
        "ledger at its peak, overheads of the catalog", True, _memory,
    ),
    Limit(
        "positions", "tokens", "tokens of a sequence beside those the model knows", "a larger model.max_seq_len, which "
        "is another model: learned positions get new rows, rope wants another base or a scaling", "model.max_seq_len",
        False, _positions,
    ),
    Limit(
        LOGITS, "share", "logits and loss as a share of the peak", "recipe.loss=chunked, fused or "
        "compiled, a smaller micro-batch, or tensor ranks", "ledger at its peak", True, _logits,
    ),
    Limit(
        "critical batch", "tokens", "tokens in a step beside the critical batch", "fewer sequences in a step, or a "
        "batch that grows with the run: above it, more of a batch is wasted than won", _KAPLAN, False, _critical,
    ),
    Limit(
        "exposed communication", "share", "communication that nothing hides, as a share of the step", "larger "
        "micro-batches, fewer tensor or shard ranks across nodes, replicate over shard, or faster links", _STEP, True,
        _share_of_step("exposed communication"),
    ),
    Limit(
        "pipeline bubble", "share", "time in which stages wait for each other, as a share of the step", "more "
        "micro-batches, fewer stages, or layout.schedule=interleaved with virtual stages", _STEP, True,
        _share_of_step("pipeline bubble"),
    ),
    Limit(
        "data throughput", "share", "time in which devices wait for data, as a share of the run", "more loaders, or "
        "faster storage (cluster.loader_tokens_per_second, cluster.storage_bytes_per_second)", "[cluster]", True, _data,
    ),
    Limit(
        "failures", "share", "checkpoints and failures as a share of the run", f"{_ASYNC}faster storage{_DALY}",
        "Daly 2006; [cluster] or published rates of interruption", True, _failures,
    ),
    Limit(
        "dataset exhausted", "passes", "passes over the text there is", "more text, or accept repetition: to about "
        f"{PASSES:g} passes it costs little", "tokens wanted over tokens there are", False, _passes(1.0, "exact"),
    ),
    Limit(
        "repetition", "passes", "passes over the text there is", "more text, or a smaller model for longer; repeated "
        "tokens are worth less and less", "Muennighoff et al. 2023 (arXiv 2305.16264)", False,
        _passes(PASSES, "assumed"),
    ),
)  # fmt: skip


def remedy(limit: Limit, run: Run) -> str:
    """What to do where a limit gives way; nothing that the run does already or has no account of."""
    recipe, words = run.recipe, limit.remedy
    for each, useless in (
        (_SPREAD, recipe.lora_rank is not None),
        (_ASYNC, recipe.checkpoint_async),
        (_DALY, recipe.checkpoint_every is None),
    ):
        words = words.replace(each, "") if useless else words
    return words
