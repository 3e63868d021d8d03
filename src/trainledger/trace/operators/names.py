"""Operators by the kind of work they are, where their name says all that is counted of them."""

from __future__ import annotations

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
