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
from trainledger.trace import fused_layers, linear_algebra, pairs, sparse_results
from trainledger.trace.scratch import SCRATCH, Scratch
from trainledger.trace.tensor_facts import tensors_in

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
    names = [each.name for each in func._schema.arguments]
    place = names.index("is_causal")

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
    **linear_algebra.RULES,
    **pairs.RULES,
}
_ASSUMED = {"aten::_fft_r2c", "aten::_fft_c2r", "aten::_fft_c2c", *linear_algebra.RULES}
_ALL_SCRATCH = {**SCRATCH, **fused_layers.FUSED_SCRATCH, **linear_algebra.SCRATCH}
for _name, _shape in _SHAPES.items():
    _RULES.setdefault(_name, ("matmul", _products(_shape)))
for _kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
    _RULES[f"aten::_scaled_dot_product_{_kernel}"] = ("attention", _attention)
    _backward = "flash_attention_for_cpu_backward" if _kernel.endswith("cpu") else f"{_kernel}_backward"
    _RULES[f"aten::_scaled_dot_product_{_backward}"] = ("attention", _attention_backward)

_BY_ELEMENT = {
    "norm": (
        ("native_layer_norm", "layernorm"), ("_fused_rms_norm", "rmsnorm"),
        ("native_layer_norm_backward", "norm backward"), ("_fused_rms_norm_backward", "norm backward"),
        ("native_batch_norm", "layernorm"), ("_native_batch_norm_legit", "layernorm"),
        ("cudnn_batch_norm", "layernorm"), ("native_batch_norm_backward", "norm backward"),
        ("cudnn_batch_norm_backward", "norm backward"),
        ("native_group_norm", "layernorm"), ("native_group_norm_backward", "norm backward"),
        ("_weight_norm_interface", "rmsnorm"), ("_weight_norm_interface_backward", "norm backward"),
    ),
    "softmax": (
        ("_softmax", "softmax"), ("_log_softmax", "softmax"), ("_safe_softmax", "softmax"),
        ("_softmax_backward_data", "softmax backward"), ("_log_softmax_backward_data", "softmax backward"),
    ),
}  # fmt: skip
for _kind, _pairs in _BY_ELEMENT.items():
    for _name, _what in _pairs:
        _RULES[f"aten::{_name}"] = (_kind, _per_input_element(_what))
for _name in ("sum", "mean", "linalg_vector_norm", "amax", "amin", "aminmax", "argmax", "max", "min", "cumsum",
              "var_mean", "var",
              "histc", "any", "all", "prod", "logsumexp", "norm", "std", "max_pool2d_with_indices", "avg_pool2d",
              "_adaptive_avg_pool2d", "avg_pool3d", "_adaptive_avg_pool3d", "adaptive_max_pool2d",
              "adaptive_max_pool3d",
              "max_pool3d_with_indices", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
              "soft_margin_loss", "std_mean", "cumprod", "cummax", "cummin", "logcumsumexp", "nansum", "argmin",
              "median", "kthvalue", "mode", "dist", "trace", "count_nonzero", "scatter_reduce", "multi_margin_loss",
              "multilabel_margin_loss_forward", "fractional_max_pool2d", "fractional_max_pool3d"):  # fmt: skip
    _RULES[f"aten::{_name}"] = ("reduction", _per_input_element("reduction"))
for _name in ("embedding", "embedding_dense_backward", "index_select", "gather", "scatter", "scatter_add", "index",
              "index_put_", "index_put", "_unsafe_index", "index_add", "nll_loss_forward", "nll_loss_backward",
              "slice_backward", "select_backward", "scatter_", "_index_put_impl_", "index_add_", "one_hot",
              "masked_select", "nonzero", "topk", "sort", "searchsorted", "bucketize",
              "embedding_renorm_", "nll_loss2d_forward", "nll_loss2d_backward",
              "_embedding_bag_dense_backward", "_embedding_bag_sparse_backward", "embedding_sparse_backward",
              "index_fill", "index_fill_", "index_copy", "index_copy_", "masked_scatter", "masked_scatter_",
              "scatter_add_", "bincount", "unique_dim", "_unique2", "unfold_backward",
              "max_unpool2d", "_coalesce", "sparse_mask", "_embedding_bag_backward",
              "diagonal_backward"):  # fmt: skip
    _RULES[f"aten::{_name}"] = ("embedding", _none)
for _name in ("clone", "_to_copy", "copy_", "cat", "stack", "repeat", "fill_", "zero_", "full", "full_like", "zeros",
              "zeros_like", "ones", "ones_like", "arange", "_foreach_copy_", "constant_pad_nd", "scalar_tensor", "roll",
              "new_zeros", "new_full", "new_ones", "triu", "tril", "flip", "_foreach_zero_", "lift_fresh_copy",
              "split_with_sizes_copy", "repeat_interleave", "lift_fresh", "eye", "linspace", "concatenate",
              "_foreach_clone", "tril_indices", "triu_indices", "logspace", "diag_embed", "pixel_shuffle",
              "pixel_unshuffle", "channel_shuffle", "im2col", "reflection_pad1d", "reflection_pad2d",
              "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d", "block_diag",
              "view_as_complex_copy", "_sparse_coo_tensor_with_dims_and_tensors", "select_scatter",
              "slice_scatter", "expand_copy", "permute_copy", "tril_", "triu_", "fill", "copy"):  # fmt: skip
    _RULES[f"aten::{_name}"] = ("copy", _none)
for _name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_",
              "unsqueeze_", "squeeze_", "transpose_", "t_", "as_strided_", "detach_", "set_",
              "_efficientzerotensor"):  # fmt: skip
    _RULES[f"aten::{_name}"] = ("allocate", _none)
for _name in ("native_dropout", "bernoulli_", "bernoulli", "rand", "randn", "randint", "randperm", "uniform_",
              "normal_", "rand_like", "randn_like", "exponential_", "random_", "geometric_", "log_normal_", "cauchy_",
              "multinomial", "poisson"):  # fmt: skip
    _RULES[f"aten::{_name}"] = ("random", _none)
for _name in ("_local_scalar_dense", "is_same_size", "equal", "sym_size", "item", "_assert_async", "_assert_scalar",
              "_linalg_check_errors", "record_stream", "is_pinned"):  # fmt: skip
    _RULES[f"aten::{_name}"] = ("transfer", _none)
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
    if torch.Tag.pointwise in func.tags or name in _POINTWISE or schema in _PRIMITIVE:
        return Operator(name, "elementwise", _per_element("elementwise"), scratch=SCRATCH.get(schema))
    from trainledger.trace.custom import registered_with_torch

    return registered_with_torch(func) or Operator(schema, "unknown", _none)


_PRIMITIVE = {f"prims::{each}" for each in ("add", "sub", "mul", "div", "neg", "where", "convert_element_type")}


def assumed_of(names: Iterable[str]) -> tuple[str, ...]:
    """What is assumed of the operators that ran."""
    said = {**linear_algebra.NOTES, **sparse_results.NOTES}
    return tuple(said[each] for each in sorted(said.keys() & set(names)))


_POINTWISE = {
    "floor_divide", "polar", "__or__", "__and__", "__xor__",
    "silu_backward", "gelu_backward", "native_dropout_backward", "sigmoid_backward", "tanh_backward", "masked_fill",
    "masked_fill_", "threshold_backward", "relu_", "softplus_backward", "hardtanh_backward", "where", "lerp",
    "lerp_", "addcdiv_", "addcmul_", "glu", "glu_backward", "leaky_relu_backward", "elu_backward",
    "max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward",
    "max_pool3d_with_indices_backward", "avg_pool3d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward", "mse_loss_backward", "smooth_l1_loss_backward",
    "huber_loss_backward", "binary_cross_entropy_backward", "binary_cross_entropy_with_logits",
    "hardswish", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "fake_quantize_per_tensor_affine_cachemask",
    "fake_quantize_per_channel_affine_cachemask", "_fake_quantize_learnable_per_tensor_affine",
    "_fake_quantize_learnable_per_channel_affine", "_fake_quantize_learnable_per_tensor_affine_backward",
    "_fake_quantize_learnable_per_channel_affine_backward", "_fused_moving_avg_obs_fq_helper",
    "multi_margin_loss_backward", "multilabel_margin_loss_backward",
    "soft_margin_loss_backward", "mish_backward", "hardswish_backward", "hardsigmoid_backward", "log_sigmoid_backward",
    "log_sigmoid_forward", "_prelu_kernel", "_prelu_kernel_backward", "complex", "rrelu_with_noise",
    "rrelu_with_noise_backward", "softshrink_backward", "col2im", "reflection_pad1d_backward",
    "reflection_pad2d_backward", "reflection_pad3d_backward", "replication_pad1d_backward",
    "replication_pad2d_backward", "replication_pad3d_backward", "affine_grid_generator",
    "affine_grid_generator_backward", "grid_sampler_2d", "grid_sampler_3d",
    "grid_sampler_2d_backward", "grid_sampler_3d_backward", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "upsample_nearest1d_backward",
    "upsample_nearest2d_backward", "upsample_nearest3d_backward", "upsample_linear1d_backward",
    "upsample_bilinear2d_backward", "upsample_trilinear3d_backward", "upsample_bicubic2d_backward",
    # Those that torch has tagged as pointwise since 2.12.
    "celu_", "elu_", "hardsigmoid_", "hardtanh_", "leaky_relu", "leaky_relu_", "selu_",
}  # fmt: skip
