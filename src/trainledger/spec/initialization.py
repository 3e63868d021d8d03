"""The start of every parameter: the rule for its standard deviation, and the variance that it gives the stream.

`engine.nn.init` draws the values and has the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from trainledger.spec.model import ModelSpec

TRUNCATION = 3.0  # standard deviations
FIRST_LOGITS = 0.5  # deviation, untied
# What gives logits of tokens or of experts, as many in any model: smaller by the root of the width factor (muP).
_OF_FIXED_WIDTH = {"lm_head", "router", "shared_expert_gate"}
_SHARED = 0.5  # of the stream's first variance, for tokens and for learned positions


def start_of(name: str, fan_in: int, spec: ModelSpec, width_factor: float = 1.0) -> tuple[str, float]:
    """The formula and the standard deviation of a matrix, a stack of matrices or an embedding, by its name.

    ``width_factor`` is the model's width over that of its base (muP).

    >>> from trainledger.catalog import model
    >>> from trainledger.spec.parts import from_fields
    >>> start_of("layers.0.mlp.down_proj.weight", 256, from_fields(ModelSpec, model("llama-3-8b")))
    ('1 / sqrt(fan_in) / sqrt(2 n_layers)', 0.0078125)
    """
    rule, value = "1 / sqrt(fan_in)", 1 / math.sqrt(fan_in)
    match name.removesuffix(".weight").split(".")[-1]:
        case "embed_tokens" if not spec.tie_embeddings:
            rule, value = f"{_first(spec)[0]} / embedding_scale", _first(spec)[1] / spec.embedding_scale
        case "embed_positions" if not spec.tie_embeddings:
            rule, value = _first(spec)
        case "lm_head":
            rule, value = f"{FIRST_LOGITS} / sqrt(fan_in) / logit_scale", FIRST_LOGITS * value / spec.logit_scale
        case "o_proj" | "down_proj" | "out_proj":
            rule, value = f"{rule} / sqrt(2 n_layers)", value / math.sqrt(2 * spec.n_layers)
    if width_factor != 1 and not _OF_FIXED_WIDTH.isdisjoint(name.split(".")):
        rule, value = f"{rule} / sqrt(width factor)", value / math.sqrt(width_factor)
    return rule, value


def vector_start(name: str, size: int) -> list[float] | None:
    """The start of a mixer's or router's vector as its authors have it, evenly spread, not drawn; None for others.

    Decay rates from 1 to 16, steps from 0.001 to 0.1 on a logarithmic scale (Dao and Gu 2024, Mamba-2).

    >>> [round(math.exp(value)) for value in vector_start("mixer.A_log", 4)]
    [1, 6, 11, 16]
    """
    shares = [at / max(1, size - 1) for at in range(size)]
    match name.split(".")[-2:]:
        case ["mixer", "A_log"]:
            return [math.log(1 + 15 * share) for share in shares]
        case ["mixer", "dt_bias"]:
            return [math.log(math.expm1(0.001 * 100**share)) for share in shares]  # softplus gives the step
        case ["mixer", "D"] | ["router", "expert_scale"]:
            return [1.0] * size
    return None


def _first(spec: ModelSpec) -> tuple[str, float]:
    """The deviation that tokens, or tokens and learned positions each, give to the stream."""
    return (f"sqrt({_SHARED})", math.sqrt(_SHARED)) if spec.positions.kind == "learned" else ("1", 1.0)


def stream_variances(spec: ModelSpec, tokens: int) -> tuple[float, ...] | None:
    """The variance of the residual stream before the first block and after each, at the first step; assumed.

    Embeddings of tokens are independent, scores of attention and inputs of the activation normal with variance 1. What
    tokens have in common (``shared``, their mean covariance) is followed, as attention does not average it away. None
    where a branch does not begin with a norm alone, or a block has experts.

    >>> from trainledger.catalog import model
    >>> from trainledger.spec.parts import from_fields
    >>> stream = stream_variances(from_fields(ModelSpec, model("llama-3-8b")), 1024)
    >>> len(stream), stream[0], round(stream[-1], 2)
    (33, 1.0, 1.19)
    """
    activation = _ACTIVATIONS.get(spec.feed_forward.activation)
    if (
        spec.experts is not None
        or spec.layers is not None
        or spec.norm_place != "pre"
        or spec.embedding_norm
        or spec.attention.value_scale != 1
        or activation is None
    ):
        return None
    variance, shared = 1.0, 0.0
    if spec.tie_embeddings:  # tokens, and positions that start as small
        variance = (spec.embedding_scale**2 + (spec.positions.kind == "learned")) / spec.d_model
    found, branch = [variance], 1 / (2 * spec.n_layers)
    powers = _powers(activation)
    for _ in range(spec.n_layers):
        alike = shared / variance
        # A softmax over t scores of variance s has squares that sum up to e^s / (t - 1 + e^s): their mean over t.
        e = math.exp(1 - alike)
        own = min(1.0, e * math.log((tokens + e - 0.5) / (e - 0.5)) / tokens)
        common = min(1.0, 2 / tokens)  # of the weights of two tokens, the later of which sees t: 1 / t
        variance += branch * (own + (1 - own) * alike)
        shared += branch * (common + (1 - common) * alike)
        alike = shared / variance
        product = sum(power * alike**degree for degree, power in enumerate(powers))
        variance += branch * sum(powers)
        shared += branch * product * (alike if spec.feed_forward.gated else 1)
        found.append(variance)
    return tuple(found)


def _powers(activation: Callable[[float], float]) -> tuple[float, ...]:
    """The second moment of an activation of normal values, by degree of Hermite polynomials; the last has the rest.

    With inputs that correlate by r the results have the mean product sum(power r^degree).
    """
    step, moments = 1e-3, [0.0, 0.0, 0.0, 0.0]
    for x in (step * at for at in range(-8000, 8001)):
        y, weight = activation(x), math.exp(-x * x / 2) * step / math.sqrt(2 * math.pi)
        for at, term in enumerate((y, x * y, (x * x - 1) * y / math.sqrt(2), y * y)):
            moments[at] += weight * term
    powers = [moment**2 for moment in moments[:3]]
    return (*powers, moments[3] - sum(powers))


_ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}
