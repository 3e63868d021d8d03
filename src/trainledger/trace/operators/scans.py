"""FLOPs of the operators of mixers (`engine.nn.scans`) and of chosen keys (`engine.nn.sparse`), of shapes alone."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, int32

from trainledger.ledger import rules
from trainledger.trace.operators.custom import Count, Shape
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
SHAPES: dict[str, Shape] = {}


def _register(name: str, flops: Callable[[Args, Args], int]) -> None:
    RULES[name] = ("matmul", lambda args, out: flops(*args[:2]))
    RULES[f"{name}_cached"] = ("matmul", lambda args, out: flops(*args[1:3]))
    RULES[f"{name}_backward"] = ("matmul", lambda args, out: 3 * flops(*args[1:3]))
    MODEL_FLOPS[f"{name}_backward"] = lambda args, out: 2 * flops(*args[1:3])


_register("trainledger::convolution", _convolution)
_register("trainledger::state_space", _state_space)
_register("trainledger::delta_rule", _delta_rule)


def _index(args: Args, out: object) -> int:
    (batch, queries, heads, width), keys = args[0].shape, args[1].shape[1]
    return int(rules.index_flops(batch, heads, queries, keys, width))


def _sparse(args: Args) -> tuple[int, int, int, int, int, int]:
    """The sizes of attention to chosen keys, of q, k, v and what is behind them."""
    (batch, queries, heads, width), value = args[0].shape, args[2].shape[-1]
    chosen = next(tensor for tensor in args[3:] if isinstance(tensor, Tensor) and tensor.dtype == int32)
    return batch, heads, queries, chosen.shape[-1], width, value


def _sparse_shape(args: Args) -> tuple[int, ...]:
    batch, heads, queries, keys, width, value = _sparse(args)
    return batch * heads, queries, keys, width, value, 0


_SPARSE = "trainledger::_scaled_dot_product_sparse_attention"
RULES |= {
    "trainledger::choose_keys": ("matmul", _index),
    _SPARSE: ("attention", lambda args, out: rules.attention_flops(*_sparse(args))),
    f"{_SPARSE}_backward": ("attention", lambda args, out: rules.attention_backward_flops(*_sparse(args[1:]))),
}
MODEL_FLOPS[f"{_SPARSE}_backward"] = lambda args, out: rules.attention_backward_model_flops(*_sparse(args[1:]))
SHAPES |= {_SPARSE: _sparse_shape, f"{_SPARSE}_backward": lambda args: _sparse_shape(args[1:])}
