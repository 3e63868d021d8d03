"""Initialization that keeps the variance of activations constant in depth.

Rule: a matrix has deviation 1 / sqrt(fan_in), so that unit input gives unit output; a norm makes the input of
every branch unit. Routers and stacks of experts follow it too: the fan-in is the last dim. Weights of
norms begin at one (at zero where the norm multiplies by 1 + its weight), those of mixers as their authors have them
(`vector_start`), all other vectors at zero.
What reads or follows a matrix changes the rule in five places:

* o_proj and down_proj write into the residual stream, 2 n_layers times in all. Each is divided by
  sqrt(2 n_layers), so that what all blocks add together is the same at any depth (Radford et al. 2019, section 2.3).
* Embeddings have no fan-in: a row is read as it is. Deviation 1 starts the stream at variance 1, beside which each
  block adds a little; a token's row and a learned position's share it, 1 / sqrt(2) each. A token's row is divided by
  the scale that it is multiplied by on its way into the stream.
* A tied matrix follows the rule for its use as head, 1 / sqrt(d_model): with deviation 1 every token would
  begin with a logit near sqrt(d_model) for itself. The stream then starts small and the blocks give it its scale;
  learned positions start as small as the tokens.
* muP (Yang et al. 2022, arXiv 2203.03466, table 3) wants what reads the stream and gives no width, the head and
  routers, to start smaller by the root of how much wider the model is than its base; all else here is as it wants it.
* An untied head has half of the rule: logits of variance 1 put the first loss 1/2 nat above ln(V), of variance 1/4
  they put it 1/8 above. What multiplies the logits is taken off it.

A norm after a branch (post, sandwich) gives unit output for any input. Those weights begin at one as in
OLMo 2 and Gemma 2, so that there the stream's variance does grow with depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from trainledger.engine.nn.lora import AdaptedLinear
from trainledger.spec.initialization import TRUNCATION, start_of, vector_start
from trainledger.spec.model import ModelSpec

# The deviation that is left when a standard normal is cut at TRUNCATION.
_LEFT = math.sqrt(
    1 - 2 * TRUNCATION * math.exp(-(TRUNCATION**2) / 2) / math.sqrt(2 * math.pi) / math.erf(TRUNCATION / math.sqrt(2))
)


Put = Callable[[Any, Tensor], object]


def initialize(model: nn.Module, *, seed: int, put: Put = Tensor.copy_, width_factor: float = 1.0) -> None:
    """Fill the parameters of a model, or of a part of it, in place: truncated normal matrices, norm weights one,
    biases zero.

    A parameter's values depend on the spec, its name and ``seed`` alone: not on the device, on former values, on the
    global generator, or on which other parameters this process holds. ``put`` writes a whole matrix into a parameter,
    of which a rank may hold a part; ``model.spec`` is that of the whole model, ``width_factor`` its width over that of
    its base (muP).
    """
    spec: ModelSpec = model.spec  # type: ignore[assignment]
    norms = {id(each.weight) for each in model.modules() if isinstance(each, nn.LayerNorm | nn.RMSNorm)}
    adapted = adapted_layers(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module, _, part = name.rpartition(".")
            layer = adapted.get(module)
            if part.startswith("lora_") or (layer is not None and part not in ("weight", "bias")):
                continue  # adapters are drawn apart; scales are those of the weight
            shape = tuple(parameter.shape if layer is None or part == "bias" else layer.shape)
            if len(shape) > 1 and not name.endswith("bias"):
                of_name = blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(of_name, "big") >> 1)
                _, wide = start_of(name, shape[-1], spec, width_factor)
                values = normal(shape, wide, generator)
                if layer is None:
                    put(parameter, values)
                else:
                    layer.store(values, put)
            elif (start := vector_start(name, parameter.numel())) is not None:
                put(parameter, torch.tensor(start))
            else:
                parameter.fill_(float(id(parameter) in norms))


def draw(model: nn.Module, *, seed: int, put: Put = Tensor.copy_) -> None:
    """Give every ``lora_a`` deviation 1 / sqrt(I), so that unit input gives unit output, and every ``lora_b`` zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            if layer.lora_a is not None and layer.lora_b is not None:
                shape = tuple(layer.lora_a.shape)
                put(layer.lora_a, normal(shape, 1 / math.sqrt(shape[1]), generator))
                layer.lora_b.zero_()
        for name, stack in model.named_parameters():
            if ".lora_a_" in name:
                put(stack, normal(tuple(stack.shape), 1 / math.sqrt(stack.shape[-1]), generator))
            elif ".lora_b_" in name:
                stack.zero_()


def take_weights(model: nn.Module, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor], put: Put) -> None:
    """Write weights, read by name, into the tensors of a model; frozen layers store theirs in their format."""
    adapted = adapted_layers(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            module, _, part = name.rpartition(".")
            if part.startswith("lora_"):
                continue
            if module not in adapted or part == "bias":
                put(tensor, read(name))
            elif part == "weight":
                adapted[module].store(read(name), put)


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """The frozen linear layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


def fill(weight: nn.Parameter, deviation: float, generator: torch.Generator) -> None:
    """Put `normal` values into a parameter."""
    weight.copy_(normal(tuple(weight.shape), deviation, generator))


def normal(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> Tensor:
    """Normal values, cut at three deviations, with ``deviation`` after the cut, fp32; drawn on the CPU, so the same
    anywhere.

    What lies beyond the cut is drawn again, as torch's `trunc_normal_` does since 2.12. Torch 2.11 goes by the inverse
    of the distribution: by torch's own function, a seed would begin with other weights there.
    """
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    wide = deviation / _LEFT
    limit = torch.tensor(TRUNCATION * wide, dtype=torch.float32)
    values.normal_(0.0, wide, generator=generator)
    while (beyond := values.abs() > limit).any():
        values = torch.where(beyond, torch.empty_like(values).normal_(0.0, wide, generator=generator), values)
    return values
