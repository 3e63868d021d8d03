"""FLOPs of the operators of mixers (`engine.nn.scans`), of their shapes alone."""

from __future__ import annotations

from collections.abc import Callable

from trainledger.ledger import rules
from trainledger.trace.operators.custom import Count
from trainledger.trace.patches import Args


def _convolution(inputs: Args, numbers: Args) -> int:
    batch, tokens, channels = inputs[0].shape
    return int(rules.matmul_flops(batch * tokens, channels, inputs[1].shape[1]))


def _state_space(inputs: Args, numbers: Args) -> int:
    (batch, tokens, heads, width), (groups, state) = inputs[0].shape, inputs[4].shape[2:]
    return int(rules.state_space_flops(batch, tokens, heads, groups, width, state, int(numbers[0])))


def _delta_rule(inputs: Args, numbers: Args) -> int:
    batch, tokens, heads, value = inputs[0].shape
    return int(rules.delta_rule_flops(batch, tokens, heads, inputs[1].shape[-1], value, int(numbers[0])))


# The order of the inputs is that of `engine.nn.scans`; a backward has the gradient before them, a cached run its state.
RULES: dict[str, tuple[str, Count]] = {
    "trainledger::gated_norm": (
        "norm",
        lambda args, out: rules.FLOPS_PER_ELEMENT["gated rmsnorm"] * args[0][0].numel(),
    ),
    "trainledger::gated_norm_backward": (
        "norm",
        lambda args, out: rules.FLOPS_PER_ELEMENT["gated rmsnorm backward"] * args[1][0].numel(),
    ),
}
MODEL_FLOPS: dict[str, Count] = {}


def _register(name: str, flops: Callable[[Args, Args], int]) -> None:
    RULES[name] = ("matmul", lambda args, out: flops(*args[:2]))
    RULES[f"{name}_cached"] = ("matmul", lambda args, out: flops(*args[1:3]))
    RULES[f"{name}_backward"] = ("matmul", lambda args, out: 3 * flops(*args[1:3]))
    MODEL_FLOPS[f"{name}_backward"] = lambda args, out: 2 * flops(*args[1:3])


_register("trainledger::convolution", _convolution)
_register("trainledger::state_space", _state_space)
_register("trainledger::delta_rule", _delta_rule)
