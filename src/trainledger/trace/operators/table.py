"""What a dispatched operator is: its kind, its FLOPs, and whether it only makes a view."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, int32
from torch._ops import OpOverload

from trainledger.ledger import rules
from trainledger.ledger.optimizers.update_rules import UPDATE_FLOPS_PER_PARAMETER
from trainledger.spec.plain import table_beside
from trainledger.trace.fakes import results
from trainledger.trace.operators import matmuls
from trainledger.trace.operators.custom import CUSTOM, Count, Operator, Shape, registered_with_torch
from trainledger.trace.operators.scratch import SCRATCH
from trainledger.trace.patches import Args
from trainledger.trace.recorder.storages import tensors_in

# Operators by kind: counted for each element of an input, uncounted, and pointwise ones that torch does not tag so.
_KINDS: dict[str, Any] = table_beside(__file__, "kinds.toml")
_POINTWISE = {library: frozenset(named.split()) for library, named in _KINDS["pointwise"].items()}
_SENDS = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")  # whose operators are collectives


def _none(args: Args, out: Any) -> int:
    return 0


def _fourier(args: Args, out: Any) -> int:
    # 5 N log2 N for complex values, half of it for real ones (the convention of FFTW's benchmarks).
    x, dims = args[0], args[1]
    real = not (x.is_complex() and out.is_complex())
    larger = (out if x.is_complex() else x) if real else max(x, out, key=Tensor.numel)
    length = prod(larger.shape[dim] for dim in dims)
    flops = int(5 * larger.numel() * max(1, (length - 1).bit_length()))
    return flops // 2 if real else flops


def _each_input(what: str) -> Count:
    """For each element of the largest argument."""
    count = rules.FLOPS_PER_ELEMENT[what]
    return lambda args, out: count * max((tensor.numel() for tensor in tensors_in(args)), default=0)


def _each_output(args: Args, out: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(out))


def _each_of_list(args: Args, out: Any) -> int:
    return sum(int(argument.numel()) for argument in args[0])


def _update(optimizer: str) -> Count:
    def flops(args: Args, out: Any) -> int:
        *lists, options = args
        name = optimizer
        if optimizer == "sgd" and lists[2]:
            name = "nesterov" if options["nesterov"] else "momentum"
        elif options.get("amsgrad"):
            name = "amsgrad"
        return UPDATE_FLOPS_PER_PARAMETER.get(name, 0) * _each_of_list(args, out)

    return flops


# FLOPs of the operators of mixers (`engine.nn.scans`) and of chosen keys (`engine.nn.sparse`), of shapes alone.


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
_SCANS: dict[str, tuple[str, Count]] = {
    "trainledger::gated_norm": (
        "norm",
        lambda args, out: rules.FLOPS_PER_ELEMENT["gated rmsnorm"] * args[0][0].numel(),
    ),
    "trainledger::gated_norm_backward": (
        "norm",
        lambda args, out: rules.FLOPS_PER_ELEMENT["gated rmsnorm backward"] * args[1][0].numel(),
    ),
}
_MODEL_FLOPS: dict[str, Count] = dict(matmuls.MODEL_FLOPS)
_SHAPES: dict[str, Shape] = dict(matmuls.SHAPES)


def _register(name: str, flops: Callable[[Args, Args], int]) -> None:
    _SCANS[name] = ("matmul", lambda args, out: flops(*args[:2]))
    _SCANS[f"{name}_cached"] = ("matmul", lambda args, out: flops(*args[1:3]))
    _SCANS[f"{name}_backward"] = ("matmul", lambda args, out: 3 * flops(*args[1:3]))
    _MODEL_FLOPS[f"{name}_backward"] = lambda args, out: 2 * flops(*args[1:3])


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
_SCANS |= {
    "trainledger::choose_keys": ("matmul", _index),
    _SPARSE: ("attention", lambda args, out: rules.attention_flops(*_sparse(args))),
    f"{_SPARSE}_backward": ("attention", lambda args, out: rules.attention_backward_flops(*_sparse(args[1:]))),
}
_MODEL_FLOPS[f"{_SPARSE}_backward"] = lambda args, out: rules.attention_backward_model_flops(*_sparse(args[1:]))
_SHAPES |= {_SPARSE: _sparse_shape, f"{_SPARSE}_backward": lambda args: _sparse_shape(args[1:])}

_RULES: dict[str, tuple[str, Count]] = {
    "trainledger::group_sums": ("reduction", lambda args, out: args[0].numel()),
    "aten::_amp_foreach_non_finite_check_and_unscale_": ("elementwise", _each_of_list),
    "aten::_amp_update_scale_": ("elementwise", _each_output),
    "trainledger::to_host": ("transfer", _none),
    "trainledger::to_device": ("transfer", _none),
    "trainledger::dequantize": ("elementwise", _each_output),
    "aten::_foreach_norm": ("reduction", _each_of_list),
    **{f"aten::_fft_{each}": ("reduction", _fourier) for each in ("r2c", "c2r", "c2c")},
    # Rows of a table added up in bags.
    **{
        f"aten::_embedding_bag{each}": ("embedding", lambda args, out: args[1].numel() * args[0].shape[1])
        for each in ("", "_forward_only")
    },
    **_SCANS,
    **matmuls.FACTORIZATIONS,
    **matmuls.RULES,
    **{
        f"aten::{name}": (kind, _each_input(what))
        for kind, rules_of_kind in _KINDS["counted"].items()
        for what, named in rules_of_kind.items()
        for name in named.split()
    },
    **{f"aten::{name}": (kind, _none) for kind, named in _KINDS["uncounted"].items() for name in named.split()},
    **{
        f"fsdp::{each}": ("copy", _none)
        for each in ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat", "chunk_cat_mixed_dtype")
    },
    **{
        f"{library}::{each}": ("allocate", _none)
        for library in ("c10d", "_c10d_functional")
        for each in ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan")
    },
}
_ASSUMED = {"aten::_fft_r2c", "aten::_fft_c2r", "aten::_fft_c2c", *matmuls.FACTORIZATIONS}
_SCRATCH = {**SCRATCH, **matmuls.FUSED_SCRATCH, **matmuls.FACTORIZATION_SCRATCH}


def operator_of(func: OpOverload) -> Operator:
    """The account of an operator; one that has no rule is of kind ``unknown`` and counts no FLOPs."""
    return CUSTOM.get(func._schema.name) or _known(func)


@cache
def _known(func: OpOverload) -> Operator:
    schema = func._schema.name
    library, _, name = schema.partition("::")
    scratch = _SCRATCH.get(schema)
    if schema in _RULES:
        kind, flops = _RULES[schema]
        shape = _SHAPES.get(schema, Operator.shape)
        if kind == "attention" and library == "aten":
            shape = matmuls.attention_shape(func, 1 if "backward" in name else 0)
        assumed = kind in ("norm", "softmax") or schema in _ASSUMED
        share = _MODEL_FLOPS.get(schema)
        return Operator(name, kind, flops, share, assumed=assumed, shape=shape, scratch=scratch)
    if library in _SENDS:
        return Operator(name, "collective", _none)
    if name.startswith("_fused_") and name.endswith("_"):
        return Operator(name, "update", _update(name[len("_fused_") : -1]), assumed=True, takes_options=True)
    if name.startswith("_foreach_"):
        return Operator(name, "elementwise", _each_of_list)
    if torch.Tag.pointwise in func.tags or name in _POINTWISE["any"] or name in _POINTWISE.get(library, ()):
        return Operator(name, "elementwise", _each_output, scratch=scratch)
    return registered_with_torch(func) or Operator(schema, "unknown", _none)


def assumed_of(ran: Iterable[str]) -> tuple[str, ...]:
    """What is assumed of the operators that ran."""
    notes = {**matmuls.NOTES, **results.NOTES}
    return tuple(notes[note] for note in sorted(notes.keys() & set(ran)))
