"""Initialization that keeps the variance of activations constant in depth.

What each matrix needs follows from what reads it. A product with a matrix of deviation 1 / sqrt(fan_in)
gives unit variance for unit input, and pre-norm makes every block's input unit. Four matrices differ:

* o_proj and down_proj write into the residual stream, 2 n_layers times in all: each is divided by
  sqrt(2 n_layers), so that the sum of what blocks add is the same at any depth (Radford et al. 2019, section 2.3).
* Embeddings are read as they are, one row a token: deviation 1, the blocks' own scale, so that the stream has
  variance 1 from its start; token and learned position share it, 1 / sqrt(2) each.
* The head has half of what its fan_in gives: logits of unit variance would cost 1/2 nat above ln(V) at the
  first step, those of variance 1/4 cost 1/8.
* A tied matrix has the head's deviation: as an embedding of deviation 1 it would give each token a logit of
  sqrt(d_model) for itself. The stream then starts small and gets its scale from the blocks; learned positions
  start as small as the tokens.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from trainledger.nn.transformer import Transformer
from trainledger.spec.model import ModelSpec

TRUNCATION = 3.0  # standard deviations
LOGIT_DEVIATION = 0.5
# The deviation that is left when a standard normal is cut at TRUNCATION.
_LEFT = math.sqrt(
    1 - 2 * TRUNCATION * math.exp(-(TRUNCATION**2) / 2) / math.sqrt(2 * math.pi) / math.erf(TRUNCATION / math.sqrt(2))
)


def initialize(model: Transformer, *, seed: int) -> None:
    """Fill a model's parameters in place: truncated normal matrices, norm weights one, biases zero.

    The result depends on the spec and ``seed`` alone: not on the device, the parameters' former values or the
    global generator.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1)
            else:
                fill(parameter, deviation(name, parameter, model.spec), generator)


def deviation(name: str, weight: nn.Parameter, spec: ModelSpec) -> float:
    """The standard deviation of a matrix or embedding, by its name."""
    match name.split(".")[-2]:
        case "embed_tokens" | "embed_positions" if not spec.tie_embeddings:
            return 1 / math.sqrt(2 if spec.positions == "learned" else 1)
        case "embed_tokens" | "embed_positions" | "lm_head":
            return LOGIT_DEVIATION / math.sqrt(spec.d_model)
        case "o_proj" | "down_proj":
            return 1 / math.sqrt(weight.shape[1] * 2 * spec.n_layers)
    return 1 / math.sqrt(weight.shape[1])


def fill(weight: nn.Parameter, deviation: float, generator: torch.Generator) -> None:
    """A normal, cut at three deviations, with ``deviation`` after the cut; drawn on the CPU, so the same anywhere."""
    values = torch.empty(weight.shape, dtype=torch.float32)
    wide = deviation / _LEFT
    nn.init.trunc_normal_(values, std=wide, a=-TRUNCATION * wide, b=TRUNCATION * wide, generator=generator)
    weight.copy_(values)
