"""What a dispatched operator is: its kind, its FLOPs, and whether it only makes a view."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainledger.ledger import rules
from trainledger.ledger.optimizers.update_rules import UPDATE_FLOPS_PER_PARAMETER
from trainledger.trace.fakes import results
from trainledger.trace.operators import matmuls
from trainledger.trace.operators.custom import CUSTOM, Args, Count, Operator, registered_with_torch
from trainledger.trace.operators.scratch import SCRATCH
from trainledger.trace.recorder.storages import tensors_in

# Operators of aten by kind and rule of FLOPs, for each element of the largest input (`ledger.rules.FLOPS_PER_ELEMENT`).
_COUNTED: dict[tuple[str, str], str] = {
    ("norm", "layernorm"): """
        native_layer_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm native_group_norm
    """,
    ("norm", "rmsnorm"): "_fused_rms_norm _weight_norm_interface",
    ("norm", "norm backward"): """
        native_layer_norm_backward _fused_rms_norm_backward native_batch_norm_backward cudnn_batch_norm_backward
        native_group_norm_backward _weight_norm_interface_backward
    """,
    ("softmax", "softmax"): "_softmax _log_softmax _safe_softmax",
    ("softmax", "softmax backward"): "_softmax_backward_data _log_softmax_backward_data",
    ("reduction", "reduction"): """
        sum mean linalg_vector_norm amax amin aminmax argmax max min cumsum var_mean var histc any all prod logsumexp
        norm std max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d avg_pool3d _adaptive_avg_pool3d
        adaptive_max_pool2d adaptive_max_pool3d max_pool3d_with_indices mse_loss smooth_l1_loss huber_loss
        binary_cross_entropy soft_margin_loss std_mean cumprod cummax cummin logcumsumexp nansum argmin median kthvalue
        mode dist trace count_nonzero scatter_reduce multi_margin_loss multilabel_margin_loss_forward
        fractional_max_pool2d fractional_max_pool3d
    """,
}
# Operators of aten without FLOPs, by kind.
_UNCOUNTED: dict[str, str] = {
    # Rows picked out, put in or sorted.
    "embedding": """
        embedding embedding_dense_backward index_select gather scatter scatter_add index index_put_ index_put
        _unsafe_index index_add nll_loss_forward nll_loss_backward slice_backward select_backward scatter_
        _index_put_impl_ index_add_ one_hot masked_select nonzero topk sort searchsorted bucketize embedding_renorm_
        nll_loss2d_forward nll_loss2d_backward _embedding_bag_dense_backward _embedding_bag_sparse_backward
        embedding_sparse_backward index_fill index_fill_ index_copy index_copy_ masked_scatter masked_scatter_
        scatter_add_ bincount unique_dim _unique2 unfold_backward max_unpool2d _coalesce sparse_mask
        _embedding_bag_backward diagonal_backward
    """,
    # What is written as it is read, or without reading.
    "copy": """
        clone _to_copy copy_ cat stack repeat fill_ zero_ full full_like zeros zeros_like ones ones_like arange
        _foreach_copy_ constant_pad_nd scalar_tensor roll new_zeros new_full new_ones triu tril flip _foreach_zero_
        lift_fresh_copy split_with_sizes_copy repeat_interleave lift_fresh eye linspace concatenate _foreach_clone
        tril_indices triu_indices logspace diag_embed pixel_shuffle pixel_unshuffle channel_shuffle im2col
        reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
        block_diag view_as_complex_copy _sparse_coo_tensor_with_dims_and_tensors select_scatter slice_scatter
        expand_copy permute_copy diagonal_copy tril_ triu_ fill copy
    """,
    # Memory that nothing is written to, and views in place.
    "allocate": """
        empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize_ unsqueeze_ squeeze_ transpose_
        t_ as_strided_ detach_ set_ _efficientzerotensor
    """,
    # Draws of a generator.
    "random": """
        native_dropout bernoulli_ bernoulli rand randn randint randperm uniform_ normal_ rand_like randn_like
        exponential_ random_ geometric_ log_normal_ cauchy_ multinomial poisson
    """,
    # What the program asks of the device, or only of a tensor's shape.
    "transfer": """
        _local_scalar_dense is_same_size equal sym_size item _assert_async _assert_scalar _linalg_check_errors
        record_stream is_pinned
    """,
}
# Pointwise operators that torch does not tag so; those at the end it has tagged since 2.12.
_POINTWISE = """
    floor_divide polar __or__ __and__ __xor__ silu_backward gelu_backward native_dropout_backward sigmoid_backward
    tanh_backward masked_fill masked_fill_ threshold_backward relu_ softplus_backward hardtanh_backward where lerp lerp_
    addcdiv_ addcmul_ glu glu_backward leaky_relu_backward elu_backward max_pool2d_with_indices_backward
    avg_pool2d_backward _adaptive_avg_pool2d_backward max_pool3d_with_indices_backward avg_pool3d_backward
    _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward mse_loss_backward
    smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward binary_cross_entropy_with_logits hardswish
    fractional_max_pool2d_backward fractional_max_pool3d_backward
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams fake_quantize_per_tensor_affine_cachemask
    fake_quantize_per_channel_affine_cachemask _fake_quantize_learnable_per_tensor_affine
    _fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_tensor_affine_backward
    _fake_quantize_learnable_per_channel_affine_backward _fused_moving_avg_obs_fq_helper multi_margin_loss_backward
    multilabel_margin_loss_backward soft_margin_loss_backward mish_backward hardswish_backward hardsigmoid_backward
    log_sigmoid_backward log_sigmoid_forward _prelu_kernel _prelu_kernel_backward complex rrelu_with_noise
    rrelu_with_noise_backward softshrink_backward col2im reflection_pad1d_backward reflection_pad2d_backward
    reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    affine_grid_generator affine_grid_generator_backward grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward
    grid_sampler_3d_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
    upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward upsample_linear1d_backward
    upsample_bilinear2d_backward upsample_trilinear3d_backward upsample_bicubic2d_backward celu_ elu_ hardsigmoid_
    hardtanh_ leaky_relu leaky_relu_ selu_
"""
_PRIMITIVE = "add sub mul div neg where convert_element_type"
_SENDS = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")  # whose operators are collectives


def _none(args: Args, out: Any) -> int:
    return 0


def _fourier(args: Args, out: Any) -> int:
    # 5 N log2 N for complex values, half of it for real ones (the convention of FFTW's benchmarks).
    x, dims = args[0], args[1]
    real = not (x.is_complex() and out.is_complex())
    larger = (out if x.is_complex() else x) if real else max(x, out, key=Tensor.numel)
    length = prod(larger.shape[each] for each in dims)
    flops = int(5 * larger.numel() * max(1, (length - 1).bit_length()))
    return flops // 2 if real else flops


def _each_input(what: str) -> Count:
    """For each element of the largest argument."""
    count = rules.FLOPS_PER_ELEMENT[what]
    return lambda args, out: count * max((each.numel() for each in tensors_in(args)), default=0)


def _each_output(args: Args, out: Any) -> int:
    return sum(each.numel() for each in tensors_in(out))


def _each_of_list(args: Args, out: Any) -> int:
    return sum(int(each.numel()) for each in args[0])


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
    **matmuls.FACTORIZATIONS,
    **matmuls.RULES,
    **{
        f"aten::{each}": (kind, _each_input(what)) for (kind, what), named in _COUNTED.items() for each in named.split()
    },
    **{f"aten::{each}": (kind, _none) for kind, named in _UNCOUNTED.items() for each in named.split()},
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
        shape = matmuls.SHAPES.get(schema, Operator.shape)
        if kind == "attention":
            shape = matmuls.attention_shape(func, 1 if "backward" in name else 0)
        assumed = kind in ("norm", "softmax") or schema in _ASSUMED
        share = matmuls.MODEL_FLOPS.get(schema)
        return Operator(name, kind, flops, share, assumed=assumed, shape=shape, scratch=scratch)
    if library in _SENDS:
        return Operator(name, "collective", _none)
    if name.startswith("_fused_") and name.endswith("_"):
        return Operator(name, "update", _update(name[len("_fused_") : -1]), assumed=True, takes_options=True)
    if name.startswith("_foreach_"):
        return Operator(name, "elementwise", _each_of_list)
    primitive = library == "prims" and name in _PRIMITIVE.split()
    if torch.Tag.pointwise in func.tags or name in _POINTWISE.split() or primitive:
        return Operator(name, "elementwise", _each_output, scratch=scratch)
    return registered_with_torch(func) or Operator(schema, "unknown", _none)


def assumed_of(ran: Iterable[str]) -> tuple[str, ...]:
    """What is assumed of the operators that ran."""
    notes = {**matmuls.NOTES, **results.NOTES}
    return tuple(notes[each] for each in sorted(notes.keys() & set(ran)))
