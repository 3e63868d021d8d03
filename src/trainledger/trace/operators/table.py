"""What a dispatched operator is: its kind, its FLOPs, and whether it only makes a view."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainledger.ledger import rules
from trainledger.trace.fakes import sparse_results
from trainledger.trace.operators import distance_flops, factorizations, fused_layers, names
from trainledger.trace.operators.scratch import SCRATCH, Scratch
from trainledger.trace.recorder.tensor_facts import tensors_in

Args = tuple[Any, ...]
Flops = tuple[int, int]  # done, and the model's own share of it


def _no_shape(args: Args) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True)
class Operator:
    """How one operator is accounted for; with ``takes_options`` ``flops`` is given its keywords as a last argument."""

    name: str
    kind: str
    flops: Callable[[Args, Any], Flops]
    assumed: bool = False
    shape: Callable[[Args], tuple[int, ...]] = _no_shape
    takes_options: bool = False
    source: str = ""
    scratch: Scratch | None = None  # what a CPU's kernel allocates beside its results


CUSTOM: dict[str, Operator] = {}  # operators with rules of the user's own (`custom.cost_rule`)


def _none(args: Args, out: Any) -> Flops:
    return 0, 0


def _products(shape: Callable[[Args], tuple[int, ...]]) -> Callable[[Args, Any], Flops]:
    def flops(args: Args, out: Any) -> Flops:
        batch, m, n, k = shape(args)
        flops = rules.matmul_flops(m, n, k, batch)
        return flops, flops

    return flops


def _mm(args: Args) -> tuple[int, ...]:
    a, b = args[0], args[1]
    return 1, a.shape[0], b.shape[1], a.shape[1]


def _mv(args: Args) -> tuple[int, ...]:
    return 1, args[0].shape[0], 1, args[0].shape[1]


def _dot(args: Args) -> tuple[int, ...]:
    return 1, 1, 1, args[0].shape[0]


def _bmm(args: Args) -> tuple[int, ...]:
    a, b = args[0], args[1]
    return a.shape[0], a.shape[1], b.shape[2], a.shape[2]


def _behind(shape: Callable[[Args], tuple[int, ...]]) -> Callable[[Args], tuple[int, ...]]:
    """The shape of a product that is added to the first argument."""
    return lambda args: shape(args[1:])


def _grouped_mm(args: Args) -> tuple[int, ...]:
    """Rows by the matrix of their group, or a matrix from the rows of each group, as if all had as many."""
    a, b = args[0], args[1]
    groups = args[2].shape[0]
    if b.dim() == 3:
        return groups, -(-a.shape[0] // groups), b.shape[2], a.shape[1]
    return groups, a.shape[0], b.shape[1], -(-a.shape[1] // groups)


def _grouped_mm_flops(args: Args, out: Any) -> Flops:
    """Every row is multiplied once."""
    a, b = args[0], args[1]
    rows, inner, width = (a.shape[0], a.shape[1], b.shape[-1]) if b.dim() == 3 else (a.shape[1], a.shape[0], b.shape[1])
    flops = rules.matmul_flops(rows, width, inner)
    return flops, flops


def _padded_mm_flops(args: Args, out: Any) -> Flops:
    flops, _ = _products(_bmm)(args, out)
    routed, places = args[2], args[3]
    return flops, flops // places * routed


def _attention_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int, int]:
    batch, heads, queries, head_dim = q.shape
    return batch, heads, queries, k.shape[2], head_dim, v.shape[3]


def _attention(args: Args, out: Any) -> Flops:
    flops = rules.attention_flops(*_attention_sizes(*args[:3]))
    return flops, flops


def _attention_backward(args: Args, out: Any) -> Flops:
    sizes = _attention_sizes(*args[1:4])
    return rules.attention_backward_flops(*sizes), rules.attention_backward_model_flops(*sizes)


def _attention_shape(func: OpOverload, first: int) -> Callable[[Args], tuple[int, ...]]:
    """The shape of an attention kernel whose queries, keys and values are arguments from ``first`` on."""
    arguments = [each.name for each in func._schema.arguments]
    place = arguments.index("is_causal")

    def shape(args: Args) -> tuple[int, ...]:
        batch, heads, queries, keys, width, value_width = _attention_sizes(*args[first : first + 3])
        causal = int(len(args) > place and bool(args[place]))
        return batch * heads, queries, keys, width, value_width, causal

    return shape


def _convolution(args: Args, out: Any) -> Flops:
    weight, transposed = args[1], args[6]
    positions = args[0].shape[2:] if transposed else out.shape[2:]
    taps = 1
    for size in (*positions, *weight.shape):
        taps *= size
    flops = rules.matmul_flops(args[0].shape[0], 1, taps)
    return flops, flops


def _convolution_backward(args: Args, out: Any) -> Flops:
    grad, image, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    forward, _ = _convolution((image, weight, None, None, None, None, transposed), grad)
    flops = forward * (int(wanted[0]) + int(wanted[1]))
    return flops, flops


def _linear(args: Args) -> tuple[int, ...]:
    """Rows of any number of dims by a transposed matrix, as nested tensors and inference take it at once."""
    x, weight = args[0], args[1]
    return 1, x.numel() // x.shape[-1], weight.shape[0], weight.shape[1]


def _recurrent(products: int) -> Callable[[Args, Any], Flops]:
    """A layer of oneDNN's recurrent nets: each step's input and state by their matrices."""

    def flops(args: Args, out: Any) -> Flops:
        x, from_input, from_state = args[:3]
        steps = x.numel() // x.shape[-1]
        done = products * rules.matmul_flops(steps, 1, from_input.numel() + from_state.numel())
        return done, done

    return flops


def _fourier(args: Args, out: Any) -> Flops:
    """5 N log2 N for complex values, half of it for real ones (the convention of FFTW's benchmarks)."""
    x, dims = args[0], args[1]
    larger = max(x, out, key=Tensor.numel)
    length = prod(larger.shape[each] for each in dims)
    real = not (x.is_complex() and out.is_complex())
    if real:
        larger = out if x.is_complex() else x
        length = prod(larger.shape[each] for each in dims)
    flops = 5 * larger.numel() * max(1, (length - 1).bit_length())
    return flops // 2 if real else flops, 0


def _gathered(args: Args, out: Any) -> Flops:
    """Rows of a table added up in bags."""
    return args[1].numel() * args[0].shape[1], 0


def _per_element(what: str) -> Callable[[Args, Any], Flops]:
    count = rules.FLOPS_PER_ELEMENT[what]

    def flops(args: Args, out: Any) -> Flops:
        return count * sum(each.numel() for each in tensors_in(out)), 0

    return flops


def _per_input_element(what: str) -> Callable[[Args, Any], Flops]:
    count = rules.FLOPS_PER_ELEMENT[what]

    def flops(args: Args, out: Any) -> Flops:
        return count * max((each.numel() for each in tensors_in(args)), default=0), 0

    return flops


def _first_elements(args: Args, out: Any) -> Flops:
    return args[0].numel(), 0


def _elements_out(args: Args, out: Any) -> Flops:
    return out.numel(), 0


def _first_list(args: Args, out: Any) -> Flops:
    return sum(each.numel() for each in args[0]), 0


def _update(optimizer: str) -> Callable[[Args, Any], Flops]:
    def flops(args: Args, out: Any) -> Flops:
        *lists, options = args
        name = optimizer
        if optimizer == "sgd" and lists[2]:
            name = "nesterov" if options["nesterov"] else "momentum"
        elif options.get("amsgrad"):
            name = "amsgrad"
        return rules.UPDATE_FLOPS_PER_PARAMETER.get(name, 0) * _first_list(args, out)[0], 0

    return flops


_SHAPES: dict[str, Callable[[Args], tuple[int, ...]]] = {
    "aten::mm": _mm,
    "aten::addmm": _behind(_mm),
    "aten::bmm": _bmm,
    "aten::baddbmm": _behind(_bmm),
    "aten::_scaled_mm": _mm,
    "aten::_int_mm": _mm,
    "aten::mv": _mv,
    "aten::dot": _dot,
    "aten::vdot": _dot,
    "aten::addmv": _behind(_mv),
    "aten::linear": _linear,
    "aten::_grouped_mm": _grouped_mm,
    "trainledger::grouped_mm": _grouped_mm,
    "trainledger::padded_mm": _bmm,
}
_RULES: dict[str, tuple[str, Callable[[Args, Any], Flops]]] = {
    "aten::_grouped_mm": ("matmul", _grouped_mm_flops),
    "trainledger::grouped_mm": ("matmul", _grouped_mm_flops),
    "trainledger::padded_mm": ("matmul", _padded_mm_flops),
    "trainledger::group_sums": ("reduction", _first_elements),
    "aten::_amp_foreach_non_finite_check_and_unscale_": ("elementwise", _first_list),
    "aten::_amp_update_scale_": ("elementwise", _per_element("elementwise")),
    "trainledger::to_host": ("transfer", _none),
    "trainledger::to_device": ("transfer", _none),
    "trainledger::dequantize": ("elementwise", _elements_out),
    "aten::convolution": ("matmul", _convolution),
    "aten::convolution_backward": ("matmul", _convolution_backward),
    "aten::_foreach_norm": ("reduction", _first_list),
    "aten::mkldnn_rnn_layer": ("matmul", _recurrent(1)),
    "aten::mkldnn_rnn_layer_backward": ("matmul", _recurrent(2)),
    "aten::_fft_r2c": ("reduction", _fourier),
    "aten::_fft_c2r": ("reduction", _fourier),
    "aten::_fft_c2c": ("reduction", _fourier),
    "aten::_embedding_bag": ("embedding", _gathered),
    "aten::_embedding_bag_forward_only": ("embedding", _gathered),
    **fused_layers.RULES,
    **factorizations.RULES,
    **distance_flops.RULES,
}
_ASSUMED = {"aten::_fft_r2c", "aten::_fft_c2r", "aten::_fft_c2c", *factorizations.RULES}
_ALL_SCRATCH = {**SCRATCH, **fused_layers.FUSED_SCRATCH, **factorizations.SCRATCH}
for _name, _shape in _SHAPES.items():
    _RULES.setdefault(_name, ("matmul", _products(_shape)))
for _kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
    _RULES[f"aten::_scaled_dot_product_{_kernel}"] = ("attention", _attention)
    _backward = "flash_attention_for_cpu_backward" if _kernel.endswith("cpu") else f"{_kernel}_backward"
    _RULES[f"aten::_scaled_dot_product_{_backward}"] = ("attention", _attention_backward)

for _kind, _pairs in names.BY_ELEMENT.items():
    for _name, _what in _pairs:
        _RULES[f"aten::{_name}"] = (_kind, _per_input_element(_what))
_RULES |= {f"aten::{each}": ("reduction", _per_input_element("reduction")) for each in names.REDUCTIONS}
for _kind, _named in (
    ("embedding", names.LOOKUPS), ("copy", names.COPIES), ("allocate", names.ALLOCATIONS),
    ("random", names.RANDOM), ("transfer", names.TRANSFERS),
):  # fmt: skip
    _RULES |= {f"aten::{each}": (_kind, _none) for each in _named}
for _name in ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat", "chunk_cat_mixed_dtype"):
    _RULES[f"fsdp::{_name}"] = ("copy", _none)
_WAITS = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan")
for _name in _WAITS:
    _RULES[f"_c10d_functional::{_name}"] = _RULES[f"c10d::{_name}"] = ("allocate", _none)
SENDS = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")  # whose operators are collectives


@cache
def operator_of(func: OpOverload) -> Operator:
    """The account of an operator; one that has no rule is of kind ``unknown`` and counts no FLOPs."""
    schema = func._schema.name
    name = schema.split("::")[1]
    if schema in CUSTOM:
        return CUSTOM[schema]
    if schema in _RULES:
        kind, flops = _RULES[schema]
        shape = _SHAPES.get(schema, _no_shape)
        if kind == "attention":
            shape = _attention_shape(func, 1 if "backward" in name else 0)
        assumed = kind in ("norm", "softmax") or schema in _ASSUMED
        return Operator(name, kind, flops, assumed=assumed, shape=shape, scratch=_ALL_SCRATCH.get(schema))
    if schema.split("::")[0] in SENDS:
        return Operator(name, "collective", _none)
    if name.startswith("_fused_") and name.endswith("_"):
        return Operator(name, "update", _update(name[len("_fused_") : -1]), assumed=True, takes_options=True)
    if name.startswith("_foreach_"):
        return Operator(name, "elementwise", _first_list)
    if torch.Tag.pointwise in func.tags or name in names.POINTWISE or schema in _PRIMITIVE:
        return Operator(name, "elementwise", _per_element("elementwise"), scratch=SCRATCH.get(schema))
    from trainledger.trace.operators.custom import registered_with_torch

    return registered_with_torch(func) or Operator(schema, "unknown", _none)


_PRIMITIVE = {f"prims::{each}" for each in ("add", "sub", "mul", "div", "neg", "where", "convert_element_type")}


def assumed_of(ran: Iterable[str]) -> tuple[str, ...]:
    """What is assumed of the operators that ran."""
    said = {**factorizations.NOTES, **sparse_results.NOTES}
    return tuple(said[each] for each in sorted(said.keys() & set(ran)))
