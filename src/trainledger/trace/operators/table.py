"""What a dispatched operator is: its kind, its FLOPs, and whether it only makes a view."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainledger.ledger import rules
from trainledger.ledger.optimizers.update_rules import UPDATE_FLOPS_PER_PARAMETER
from trainledger.trace.fakes import results
from trainledger.trace.operators import factorizations, matmuls
from trainledger.trace.operators.custom import CUSTOM, Args, Flops, Operator, no_shape, registered_with_torch
from trainledger.trace.operators.scratch import SCRATCH
from trainledger.trace.recorder.tensor_facts import tensors_in

# Kind of an operator, and its rule of FLOPs for each element it reads (`ledger.rules.FLOPS_PER_ELEMENT`).
BY_ELEMENT = {
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
# A few FLOPs for each element they read.
REDUCTIONS = (
    "sum", "mean", "linalg_vector_norm", "amax", "amin", "aminmax", "argmax", "max", "min", "cumsum", "var_mean",
    "var", "histc", "any", "all", "prod", "logsumexp", "norm", "std", "max_pool2d_with_indices", "avg_pool2d",
    "_adaptive_avg_pool2d", "avg_pool3d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "max_pool3d_with_indices", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss",
    "std_mean", "cumprod", "cummax", "cummin", "logcumsumexp", "nansum", "argmin", "median", "kthvalue", "mode",
    "dist", "trace", "count_nonzero", "scatter_reduce", "multi_margin_loss", "multilabel_margin_loss_forward",
    "fractional_max_pool2d", "fractional_max_pool3d",
)  # fmt: skip
# Rows picked out, put in or sorted: bytes, no FLOPs.
LOOKUPS = (
    "embedding", "embedding_dense_backward", "index_select", "gather", "scatter", "scatter_add", "index",
    "index_put_", "index_put", "_unsafe_index", "index_add", "nll_loss_forward", "nll_loss_backward",
    "slice_backward", "select_backward", "scatter_", "_index_put_impl_", "index_add_", "one_hot", "masked_select",
    "nonzero", "topk", "sort", "searchsorted", "bucketize", "embedding_renorm_", "nll_loss2d_forward",
    "nll_loss2d_backward", "_embedding_bag_dense_backward", "_embedding_bag_sparse_backward",
    "embedding_sparse_backward", "index_fill", "index_fill_", "index_copy", "index_copy_", "masked_scatter",
    "masked_scatter_", "scatter_add_", "bincount", "unique_dim", "_unique2", "unfold_backward", "max_unpool2d",
    "_coalesce", "sparse_mask", "_embedding_bag_backward", "diagonal_backward",
)  # fmt: skip
# What is written as it is read, or without reading.
COPIES = (
    "clone", "_to_copy", "copy_", "cat", "stack", "repeat", "fill_", "zero_", "full", "full_like", "zeros",
    "zeros_like", "ones", "ones_like", "arange", "_foreach_copy_", "constant_pad_nd", "scalar_tensor", "roll",
    "new_zeros", "new_full", "new_ones", "triu", "tril", "flip", "_foreach_zero_", "lift_fresh_copy",
    "split_with_sizes_copy", "repeat_interleave", "lift_fresh", "eye", "linspace", "concatenate", "_foreach_clone",
    "tril_indices", "triu_indices", "logspace", "diag_embed", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    "im2col", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d",
    "replication_pad3d", "block_diag", "view_as_complex_copy", "_sparse_coo_tensor_with_dims_and_tensors",
    "select_scatter", "slice_scatter", "expand_copy", "permute_copy", "tril_", "triu_", "fill", "copy",
)  # fmt: skip
# Memory that nothing is written to, and views in place.
ALLOCATIONS = (
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_",
    "unsqueeze_", "squeeze_", "transpose_", "t_", "as_strided_", "detach_", "set_", "_efficientzerotensor",
)  # fmt: skip
# Draws of a generator.
RANDOM = (
    "native_dropout", "bernoulli_", "bernoulli", "rand", "randn", "randint", "randperm", "uniform_", "normal_",
    "rand_like", "randn_like", "exponential_", "random_", "geometric_", "log_normal_", "cauchy_", "multinomial",
    "poisson",
)  # fmt: skip
# What the program asks of the device, or only of a tensor's shape.
TRANSFERS = (
    "_local_scalar_dense", "is_same_size", "equal", "sym_size", "item", "_assert_async", "_assert_scalar",
    "_linalg_check_errors", "record_stream", "is_pinned",
)  # fmt: skip
# Pointwise operators that torch does not tag so.
POINTWISE = {
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


def _none(args: Args, out: Any) -> Flops:
    return 0, 0


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
        return UPDATE_FLOPS_PER_PARAMETER.get(name, 0) * _first_list(args, out)[0], 0

    return flops


_RULES: dict[str, tuple[str, Callable[[Args, Any], Flops]]] = {
    "trainledger::group_sums": ("reduction", _first_elements),
    "aten::_amp_foreach_non_finite_check_and_unscale_": ("elementwise", _first_list),
    "aten::_amp_update_scale_": ("elementwise", _per_element("elementwise")),
    "trainledger::to_host": ("transfer", _none),
    "trainledger::to_device": ("transfer", _none),
    "trainledger::dequantize": ("elementwise", _elements_out),
    "aten::_foreach_norm": ("reduction", _first_list),
    "aten::_fft_r2c": ("reduction", _fourier),
    "aten::_fft_c2r": ("reduction", _fourier),
    "aten::_fft_c2c": ("reduction", _fourier),
    "aten::_embedding_bag": ("embedding", _gathered),
    "aten::_embedding_bag_forward_only": ("embedding", _gathered),
    **factorizations.RULES,
    **matmuls.RULES,
}
_ASSUMED = {"aten::_fft_r2c", "aten::_fft_c2r", "aten::_fft_c2c", *factorizations.RULES}
_ALL_SCRATCH = {**SCRATCH, **matmuls.FUSED_SCRATCH, **factorizations.SCRATCH}
for _kind, _pairs in BY_ELEMENT.items():
    for _name, _what in _pairs:
        _RULES[f"aten::{_name}"] = (_kind, _per_input_element(_what))
_RULES |= {f"aten::{each}": ("reduction", _per_input_element("reduction")) for each in REDUCTIONS}
for _kind, _named in (
    ("embedding", LOOKUPS), ("copy", COPIES), ("allocate", ALLOCATIONS),
    ("random", RANDOM), ("transfer", TRANSFERS),
):  # fmt: skip
    _RULES |= {f"aten::{each}": (_kind, _none) for each in _named}
for _name in ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat", "chunk_cat_mixed_dtype"):
    _RULES[f"fsdp::{_name}"] = ("copy", _none)
_WAITS = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan")
for _name in _WAITS:
    _RULES[f"_c10d_functional::{_name}"] = _RULES[f"c10d::{_name}"] = ("allocate", _none)
SENDS = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")  # whose operators are collectives


def operator_of(func: OpOverload) -> Operator:
    """The account of an operator; one that has no rule is of kind ``unknown`` and counts no FLOPs."""
    return CUSTOM.get(func._schema.name) or _known(func)


@cache
def _known(func: OpOverload) -> Operator:
    schema = func._schema.name
    name = schema.split("::")[1]
    if schema in _RULES:
        kind, flops = _RULES[schema]
        shape = matmuls.SHAPES.get(schema, no_shape)
        if kind == "attention":
            shape = matmuls.attention_shape(func, 1 if "backward" in name else 0)
        assumed = kind in ("norm", "softmax") or schema in _ASSUMED
        return Operator(name, kind, flops, assumed=assumed, shape=shape, scratch=_ALL_SCRATCH.get(schema))
    if schema.split("::")[0] in SENDS:
        return Operator(name, "collective", _none)
    if name.startswith("_fused_") and name.endswith("_"):
        return Operator(name, "update", _update(name[len("_fused_") : -1]), assumed=True, takes_options=True)
    if name.startswith("_foreach_"):
        return Operator(name, "elementwise", _first_list)
    if torch.Tag.pointwise in func.tags or name in POINTWISE or schema in _PRIMITIVE:
        return Operator(name, "elementwise", _per_element("elementwise"), scratch=SCRATCH.get(schema))
    return registered_with_torch(func) or Operator(schema, "unknown", _none)


_PRIMITIVE = {f"prims::{each}" for each in ("add", "sub", "mul", "div", "neg", "where", "convert_element_type")}


def assumed_of(ran: Iterable[str]) -> tuple[str, ...]:
    """What is assumed of the operators that ran."""
    notes = {**factorizations.NOTES, **results.NOTES}
    return tuple(notes[each] for each in sorted(notes.keys() & set(ran)))
