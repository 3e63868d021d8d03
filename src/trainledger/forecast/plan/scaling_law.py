"""Scaling laws: the loss of a model of N parameters after D tokens, and the N and D that a budget of FLOPs is best for.

N parameters, D tokens, C = 6 N D training FLOPs (Kaplan et al. 2020, section 2.1). Coefficients, sources and dates are
in the catalog (scaling_laws.toml); here is what follows from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log, sqrt
from typing import Any

from trainledger.catalog import scaling_laws
from trainledger.spec.frozen import frozen

_FLOPS = 6  # of training, for each parameter and token
_LARGE_BUDGET = 1e24  # FLOP
_USUAL_TOKENS, _MANY_TOKENS = 4 * 10**6, 16 * 10**6  # of a step


@frozen
class Between:
    """A value and what is known of its uncertainty: None where nothing is published, ``means`` in words."""

    value: float
    low: float | None = None
    high: float | None = None
    means: str = ""


@frozen(kw_only=True)
class Law:
    """N and D of a budget by one rule; with its source, the date it was read, and what to know of it."""

    name: str
    title: str
    source: str = ""
    date: str = ""
    note: str = ""

    def parameters(self, flops: float) -> Between:
        """N of a budget; without embeddings where the law counts none (`note`)."""
        raise NotImplementedError

    def tokens(self, flops: float) -> float:
        """D of a budget: C / 6 N."""
        return flops / (_FLOPS * self.parameters(flops).value)


@frozen(kw_only=True)
class RatioLaw(Law):
    """D = k N."""

    tokens_per_parameter: float

    def parameters(self, flops: float) -> Between:
        """N of C = 6 k N^2.

        >>> law = RatioLaw(name="rule-20", title="20 tokens per parameter", tokens_per_parameter=20)
        >>> round(law.parameters(1.2e20).value), round(law.tokens(1.2e20))
        (1000000000, 20000000000)
        """
        return Between(sqrt(flops / (_FLOPS * self.tokens_per_parameter)))


@frozen(kw_only=True)
class FixedSize(Law):
    """The requested N, at every budget."""

    size: float

    def parameters(self, flops: float) -> Between:
        return Between(self.size)


@frozen(kw_only=True)
class LineLaw(Law):
    """N = n (C / c)^a: a straight line in logarithms.

    ``exponents`` is the published interval of a. Where the line turns when a changes is not published: it is assumed to
    be the middle of the fitted budgets, in logarithms (``fitted_flops``).
    """

    reference_parameters: float
    reference_flops: float
    exponent: float
    exponents: tuple[float, float] | None = None
    exponents_mean: str = ""
    fitted_flops: tuple[float, float] | None = None

    def parameters(self, flops: float) -> Between:
        value = self.reference_parameters * (flops / self.reference_flops) ** self.exponent
        if self.exponents is None or self.fitted_flops is None:
            return Between(value)
        turn = sqrt(self.fitted_flops[0] * self.fitted_flops[1])
        ends = [value * (flops / turn) ** (exponent - self.exponent) for exponent in self.exponents]
        return Between(value, min(*ends, value), max(*ends, value), self.exponents_mean)


@frozen(kw_only=True)
class LossLaw(Law):
    """L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, equation 2).

    ``covariance`` is that of (ln A, ln B, ln E, alpha, beta), row by row; None where none is known. ``repeated_data``
    and ``excess_parameters`` are R_D* and R_N* of Muennighoff et al. 2023.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    covariance: tuple[tuple[float, ...], ...] | None = None
    covariance_source: str = ""
    repeated_data: float | None = None
    excess_parameters: float | None = None

    def loss(self, parameters: float, tokens: float) -> float:
        """L(N, D) in nats per token."""
        return float(self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta)

    def loss_between(self, parameters: float, tokens: float) -> Between:
        """L(N, D) with 1.96 standard errors, carried through to first order."""
        of_parameters, of_tokens = self.A / parameters**self.alpha, self.B / tokens**self.beta
        slopes = (of_parameters, of_tokens, self.E, -log(parameters) * of_parameters, -log(tokens) * of_tokens)
        value, error = self.E + of_parameters + of_tokens, self._error(slopes)
        return Between(value) if error is None else Between(value, value - 1.96 * error, value + 1.96 * error, _MEANS)

    def parameters(self, flops: float) -> Between:
        """N = G (C / 6)^a with a = beta / (alpha + beta), G = (alpha A / beta B)^(1 / (alpha + beta)).

        The minimum of L under C = 6 N D in closed form (Hoffmann et al. 2022, equation 4), with 1.96 standard errors.
        """
        total = self.alpha + self.beta
        of_g = log(self.alpha * self.A / (self.beta * self.B))
        of_c = log(flops / _FLOPS)
        here = (of_g + self.beta * of_c) / total
        # Slopes of ln N along (ln A, ln B, ln E, alpha, beta).
        slopes = (1 / total, -1 / total, 0.0, (1 / self.alpha - here) / total, (of_c - 1 / self.beta - here) / total)
        error = self._error(slopes)
        value = exp(here)
        if error is None:
            return Between(value)
        return Between(value, value * exp(-1.96 * error), value * exp(1.96 * error), _MEANS)

    def flops_of_loss(self, loss: float) -> float:
        """The least C that reaches a loss; infinite where the loss is not above E.

        On the frontier alpha A / N^alpha = beta B / D^beta, so that the loss is E + (1 + alpha / beta) A / N^alpha.
        """
        if loss <= self.E:
            return float("inf")
        parameters = ((1 + self.alpha / self.beta) * self.A / (loss - self.E)) ** (1 / self.alpha)
        return float(_FLOPS * parameters * self.tokens_at_loss(parameters, loss))

    def tokens_at_loss(self, parameters: float, loss: float) -> float:
        """D that brings N parameters to a loss; infinite where N is too small for it ever to be reached."""
        rest = loss - self.E - self.A / parameters**self.alpha
        return float("inf") if rest <= 0 else float((self.B / rest) ** (1 / self.beta))

    def best_parameters_for(self, tokens: float) -> float:
        """The N for which D tokens are compute-optimal: alpha A / N^alpha = beta B / D^beta."""
        return float((self.alpha * self.A * tokens**self.beta / (self.beta * self.B)) ** (1 / self.alpha))

    def constrained_loss(self, parameters: float, tokens: float, unique: float) -> float:
        """L where only ``unique`` tokens are new and the rest repetitions (Muennighoff et al. 2023, equations 5, 6).

        A repeated token is worth less with every pass: D' = U + U R (1 - exp(-(D / U - 1) / R)); so is a parameter
        beyond those that U is best for. Raises ValueError where the law has no R_D* and R_N*.
        """
        if self.repeated_data is None or self.excess_parameters is None:
            raise ValueError(f"{self.name} has no constants for repeated data")
        enough = min(parameters, self.best_parameters_for(min(unique, tokens)))
        return self.loss(
            _worth(parameters, enough, self.excess_parameters), _worth(tokens, min(unique, tokens), self.repeated_data)
        )

    def _error(self, slopes: tuple[float, ...]) -> float | None:
        if self.covariance is None:
            return None
        rows = zip(slopes, self.covariance, strict=True)
        total = sum(a * sum(b * each for b, each in zip(slopes, row, strict=True)) for a, row in rows)
        return sqrt(max(0.0, total))


_MEANS = "1.96 standard errors of the fit"


def _worth(used: float, new: float, decay: float) -> float:
    """What so many uses of fewer new things are worth in new things.

    >>> round(_worth(4.0, 1.0, 15.387756), 3), _worth(1.0, 1.0, 15.387756)
    (3.726, 1.0)
    """
    return new + new * decay * (1 - exp(-(used / new - 1) / decay))


def laws() -> dict[str, Law]:
    """Every law of the catalog, by name."""
    return {name: _law(name, entry) for name, entry in scaling_laws().items()}


def _law(name: str, entry: Mapping[str, Any]) -> Law:
    stated: dict[str, Any] = {"name": name, "date": str(entry["date"])}
    stated |= {key: entry[key] for key in ("title", "source", "note") if key in entry}
    if entry["kind"] == "ratio":
        return RatioLaw(tokens_per_parameter=entry["tokens_per_parameter"], **stated)
    if entry["kind"] == "line":
        return _line(entry, stated)
    covariance = entry.get("covariance")
    known = ("E", "A", "B", "alpha", "beta", "covariance_source", "repeated_data", "excess_parameters")
    return LossLaw(
        **stated,
        **{key: entry[key] for key in known if key in entry},
        covariance=None if covariance is None else tuple(tuple(row) for row in covariance),
    )


def _line(entry: Mapping[str, Any], stated: dict[str, Any]) -> LineLaw:
    if "rows" in entry:
        (parameters, flops), (other_parameters, other_flops) = entry["rows"]
        exponent = log(other_parameters / parameters) / log(other_flops / flops)
    else:
        parameters, flops, exponent = entry["parameters"], entry["flops"], entry["exponent"]
    interval, fitted = entry.get("exponent_interval"), entry.get("fitted_flops")
    return LineLaw(
        **stated,
        reference_parameters=parameters,
        reference_flops=flops,
        exponent=exponent,
        exponents=None if interval is None else tuple(interval),
        exponents_mean=entry.get("exponent_interval_is", ""),
        fitted_flops=None if fitted is None else tuple(fitted),
    )


def default_tokens_per_step(flops: float, at_least: int = 0) -> int:
    """4M tokens, as LLaMA from 7B to 65B (arXiv 2302.13971, table 2); 16M from 1e24 FLOP on, as Llama 3 405B.

    (Llama 3, arXiv 2407.21783, section 3.4.1, comes to 16M in two steps.) Smaller budgets take fewer, 0.2920 C^0.3271
    (DeepSeek LLM, arXiv 2401.02954, section 3.1), which is 4M at 7e21 FLOP: with 4M a model of a day on one device
    would be trained beyond its critical batch, in a few hundred steps. But not fewer than ``at_least``, a sequence for
    each device, up to 16M.

    >>> default_tokens_per_step(1e23), default_tokens_per_step(4e25), default_tokens_per_step(1e18)
    (4000000, 16000000, 225518)
    """
    if flops >= _LARGE_BUDGET:
        return _MANY_TOKENS
    return max(min(_USUAL_TOKENS, int(0.2920 * flops**0.3271)), min(_MANY_TOKENS, at_least))
