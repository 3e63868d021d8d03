"""The compute-optimal model and data for a budget, by every published law, and what other choices cost.

N parameters, D tokens, C = 6 N D training FLOPs. Losses are those of one law (`LossLaw`), in nats per token of the data
that it was fitted on: differences between losses mean more than the losses.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log

from trainledger.forecast.plan.affordable import Affordable
from trainledger.forecast.plan.quantity import Budget
from trainledger.forecast.plan.scaling_law import Between, Law, LossLaw, laws
from trainledger.ledger.rules_of_thumb import forward_flops_per_token, training_flops
from trainledger.report.document import Answer
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text

RATIOS = (5, 10, 20, 40, 100, 200, 500, 1000, 2000)
LOSS_LAW, REPEATED_LAW, FOLLOWED_LAW = "besiroglu", "muennighoff", "rule-20"
_FEWEST, _MOST = 1e3, 1e16  # parameters and tokens that are looked at


@frozen
class Choice:
    """A law's N and D for a budget; ``loss`` is by the loss law, whichever law chose them."""

    law: Law
    parameters: Between
    tokens: float
    loss: Between

    @property
    def ratio(self) -> float:
        """Tokens per parameter."""
        return self.tokens / self.parameters.value


@frozen
class OffOptimum:
    """A model of another size that spends the same budget.

    ``penalty`` is its loss less the best one, ``same_loss_flops`` the least FLOPs that reach its loss: what it could
    have cost. ``overhead`` is how much more it costs than that.
    """

    parameters: float
    tokens: float
    loss: float
    penalty: float
    same_loss_flops: float
    overhead: float


@frozen
class Served:
    """The model that costs least in training and serving together, at the loss of the compute-optimal one.

    6 N D + 2 N D_inference (Sardana et al. 2023, arXiv 2401.00448, equation 3). ``saved`` is the share of all FLOPs
    that the compute-optimal model would take with the same use.
    """

    inference_tokens: float
    parameters: float
    tokens: float
    training_flops: float
    inference_flops: float
    optimal_total_flops: float

    @property
    def total_flops(self) -> float:
        return self.training_flops + self.inference_flops

    @property
    def saved(self) -> float:
        return 1 - self.total_flops / self.optimal_total_flops


@frozen
class Repeated:
    """The best model where only ``unique`` tokens exist (Muennighoff et al. 2023, arXiv 2305.16264).

    ``unconstrained_parameters`` is what the same law would choose with data without end, ``loss_of_it`` its loss on the
    data that there is.
    """

    law: LossLaw
    unique: float
    parameters: float
    tokens: float
    loss: float
    unconstrained_parameters: float
    loss_of_it: float

    @property
    def epochs(self) -> float:
        return self.tokens / self.unique


@frozen
class Optimal(Answer, report="pages.optimal"):
    """What a budget is best spent on. ``chosen`` is the choice of the law that is followed further (``law``)."""

    budget: Budget
    choices: tuple[Choice, ...]
    law: str
    loss_law: LossLaw
    off: tuple[OffOptimum, ...]
    asked: OffOptimum | None = None
    served: Served | None = None
    repeated: Repeated | None = None
    affordable: Affordable | None = None  # where a device, how many and the time are known

    @property
    def chosen(self) -> Choice:
        return next(choice for choice in self.choices if choice.law.name == self.law)

    @property
    def parameters(self) -> int:
        return round(self.chosen.parameters.value)

    @property
    def tokens(self) -> int:
        return round(self.chosen.tokens)

    def __repr__(self) -> str:
        return f"Optimal({self.budget.flops:.3g} FLOP: {self.parameters:.4g} parameters on {self.tokens:.4g} tokens)"


def optimal(
    budget: Budget,
    *,
    law: str = FOLLOWED_LAW,
    loss_law: str = LOSS_LAW,
    parameters: float | None = None,
    tokens_per_parameter: float | None = None,
    inference_tokens: float | None = None,
    unique_tokens: float | None = None,
) -> Optimal:
    """The N and D of each law for a budget, and what over-training, serving and repeated data change of it.

    ``parameters`` or ``tokens_per_parameter`` asks for one model off the optimum, ``inference_tokens`` for the model
    that is cheapest to train and serve, ``unique_tokens`` for the best one on so much data. Raises InvalidInput.

    >>> from trainledger.forecast.plan.quantity import read_budget
    >>> best = optimal(read_budget(device="h100-sxm", count=32, days=14))
    >>> f"{best.parameters / 1e9:.1f}B on {best.tokens / 1e9:.0f}B tokens"
    '12.6B on 253B tokens'
    """
    known = laws()
    if parameters is not None and tokens_per_parameter is not None:
        rule = "and tokens_per_parameter fix the same size: give one of them"
        raise InvalidInput([Problem("parameters", parameters, rule)])
    by = _loss_law(loss_law, known)
    if law not in known:
        rule = f"must be one of {', '.join(known)}"
        raise InvalidInput([Problem("law", law, rule, nearest_text(law, known))])
    flops = budget.flops
    choices = []
    for each in known.values():
        if each.name == REPEATED_LAW and law != REPEATED_LAW:
            continue
        between, tokens = each.parameters(flops), each.tokens(flops)
        choices.append(Choice(each, between, tokens, by.loss_between(between.value, tokens)))
    asked = None
    if parameters is not None:
        asked = off_optimum(by, flops, parameters)
    elif tokens_per_parameter is not None:
        asked = off_optimum(by, flops, (flops / (6 * tokens_per_parameter)) ** 0.5)
    return Optimal(
        budget=budget,
        choices=tuple(choices),
        law=law,
        loss_law=by,
        off=tuple(off_optimum(by, flops, (flops / (6 * ratio)) ** 0.5) for ratio in RATIOS),
        asked=asked,
        served=None if inference_tokens is None else serve(by, by.parameters(flops).value, inference_tokens, flops),
        repeated=None if unique_tokens is None else repeat(_loss_law(REPEATED_LAW, known), flops, unique_tokens),
    )


def off_optimum(law: LossLaw, flops: float, parameters: float) -> OffOptimum:
    """A model of any size that spends the whole budget, compared with the law's best."""
    tokens = flops / (6 * parameters)
    best = law.parameters(flops).value
    loss = law.loss(parameters, tokens)
    same = min(law.flops_of_loss(loss), flops)  # never more, but for rounding at the optimum itself
    return OffOptimum(
        parameters, tokens, loss, max(0.0, loss - law.loss(best, flops / (6 * best))), same, flops / same - 1
    )


def serve(law: LossLaw, reference: float, inference_tokens: float, flops: float) -> Served:
    """The least 6 N D + 2 N D_inference at the loss that ``reference`` parameters reach with ``flops`` of training."""
    loss = law.loss(reference, flops / (6 * reference))

    def total(parameters: float) -> float:
        tokens = law.tokens_at_loss(parameters, loss)
        return training_flops(parameters, tokens) + forward_flops_per_token(parameters) * inference_tokens  # type: ignore[no-any-return]

    smallest = (law.A / (loss - law.E)) ** (1 / law.alpha)  # with data without end
    found = _lowest(total, smallest * (1 + 1e-9), max(reference, smallest) * 1e3)
    tokens = law.tokens_at_loss(found, loss)
    of_serving = forward_flops_per_token(found) * inference_tokens
    before = flops + forward_flops_per_token(reference) * inference_tokens
    return Served(inference_tokens, found, tokens, training_flops(found, tokens), of_serving, before)


def repeat(law: LossLaw, flops: float, unique: float) -> Repeated:
    """The N that is best for a budget where only so many tokens are new; D = C / 6 N goes over them again."""

    def loss(parameters: float) -> float:
        return law.constrained_loss(parameters, flops / (6 * parameters), unique)

    free = law.parameters(flops).value
    found = _lowest(loss, free / 1e4, free * 1e4)
    return Repeated(law, unique, found, flops / (6 * found), loss(found), free, loss(free))


def _lowest(of: Callable[[float], float], low: float, high: float, *, steps: int = 400) -> float:
    """Where a function of a positive number is lowest: the best of a grid in logarithms, then golden sections."""
    start, width = log(low), (log(high) - log(low)) / steps
    best = min(range(steps + 1), key=lambda step: of(exp(start + step * width)))
    left, right = start + max(0, best - 1) * width, start + min(steps, best + 1) * width
    shrink = (5**0.5 - 1) / 2
    for _ in range(100):
        inner, outer = right - shrink * (right - left), left + shrink * (right - left)
        if of(exp(inner)) < of(exp(outer)):
            right = outer
        else:
            left = inner
    return exp((left + right) / 2)


def _loss_law(name: str, known: dict[str, Law]) -> LossLaw:
    found = known.get(name)
    if isinstance(found, LossLaw):
        return found
    with_loss = [loss_law.name for loss_law in known.values() if isinstance(loss_law, LossLaw)]
    rule = f"must be a law that predicts a loss: {', '.join(with_loss)}"
    raise InvalidInput([Problem("loss_law", name, rule, nearest_text(name, with_loss))])
