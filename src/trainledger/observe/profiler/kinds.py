"""What kind of work a kernel or an operator is, by their names.

The operator that launched a kernel says it best; the kernel's own name says it where none is known (graphs, compiled
code, other libraries). A name that nothing fits is ``other``, never a guess.
"""

from __future__ import annotations

import re

# In the order in which the moments of a step are given to them where several run at once.
KINDS = (
    "matmul", "attention", "convolution", "recomputation", "optimizer", "norm", "loss", "embedding", "reduction",
    "elementwise", "views and autograd", "other",
)  # fmt: skip
CALLS = "views and autograd"  # of a program on the host: operators that compute nothing
RECOMPUTATION = "recomputation"
COMMUNICATION = "communication"

UPDATE = re.compile(r"^Optimizer\.step#")  # what PyTorch calls the annotation around an optimizer's update
COLLECTIVE = re.compile(  # but for what FSDP copies into the message of a gather
    r"nccl|rccl|c10d(_functional)?::|gloo|all_?reduce|all_?gather(?!_copy)|reduce_?scatter|all_?to_?all", re.IGNORECASE
)
_OF_OPERATORS = (
    ("elementwise", r"^fsdp::"),  # copies into and out of messages
    ("attention", r"attention|flash|fmha|scaled_dot_product|ring_attn"),
    ("convolution", r"conv"),
    ("matmul", r"::(mm|addmm|bmm|baddbmm|addmv|mv|dot|linear|matmul|einsum|_scaled_mm|_grouped_mm|_scaled_grouped_mm"
               r"|_int_mm|_addmm_activation|addbmm)$|gemm|MmBackward"),
    ("optimizer", r"_fused_(adam|adamw|sgd|adagrad)|Optimizer\.step|adamw?_step"),
    ("norm", r"norm(?!al)"),
    ("loss", r"cross_entropy|nll_loss|log_softmax|kl_div|mse_loss"),
    ("embedding", r"embedding|index_select|index_put|gather|scatter|::index$"),
    ("reduction", r"::(sum|mean|max|min|amax|amin|argmax|cumsum|var|std|prod|any|all|topk|sort|_softmax.*|softmax)$"),
    ("elementwise", r"::(add|sub|mul|div|neg|pow|rsqrt|sqrt|exp|log|tanh|sigmoid|gelu.*|silu.*|relu.*|threshold.*|where"
                    r"|copy|fill|zero|clamp.*|cat|to|_to_copy|clone|contiguous|native_dropout.*|dropout.*|masked_fill"
                    r"|lerp|addcmul|addcdiv|reciprocal|abs|sin|cos|eq|ne|lt|gt|le|ge|bitwise.*|logical.*|rsub|split"
                    r"|constant_pad_nd|tril|triu|roll|flip|repeat|stack|zeros.*|ones.*|full.*|empty.*|arange"
                    r"|random.*|normal.*|uniform.*)_?$|_foreach_"),
)  # fmt: skip
_OF_KERNELS = (
    ("attention", r"flash|fmha|attention|sdpa|_attn_"),
    ("convolution", r"conv|wgrad|dgrad|fprop|winograd|igemm|im2col|col2im|nchwToNhwc|nhwcToNchw"),
    ("matmul", r"gemm|gemv|cutlass|cublas|nvjet|^Cijk_|_mm_|wgmma|triton_(tem|mm)|matmul|splitK"),
    ("optimizer", r"multi_tensor_apply|adam|FusedOptimizer"),
    ("norm", r"norm(?!al)|rms_|bn_(fw|bw)"),
    ("loss", r"nll_loss|cross_entropy|SoftMax.*Log|LogSoftMax"),
    ("embedding", r"embedding|indexSelect|index_elementwise|gather|scatter|permute_|_jagged"),
    ("reduction", r"reduce_kernel|softmax|cub::|triton_(per|red)|Scan|Sort|sum_"),
    ("elementwise", r"elementwise|CatArray|copy|fill|triton_poi|batched_transpose|SubTensorOp|transpose|dropout"),
)  # fmt: skip
_CALLS = re.compile(
    r"^autograd::|^Python(DispatchMode|Subclass)$|Backward\d*$|AccumulateGrad$|^(aten::)?(detach|detach_|view|reshape|_unsafe_view|t|transpose|permute|expand"
    r"|expand_as|as_strided|slice|select|narrow|squeeze|unsqueeze|unbind|alias|resolve_conj|resolve_neg|result_type"
    r"|is_nonzero|item|_local_scalar_dense|view_as|view_as_real|view_as_complex|_conj|flatten|unflatten|split_with_sizes|movedim|swapaxes|chunk|set_|resize_|requires_grad_|lift_fresh)$"
)
_OPERATORS = tuple((kind, re.compile(pattern)) for kind, pattern in _OF_OPERATORS)
_KERNELS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _OF_KERNELS)


def is_collective(name: str) -> bool:
    """Whether a kernel or an operator of this name sends something to other ranks.

    >>> is_collective("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    True
    """
    return COLLECTIVE.search(name) is not None


def kind_of_kernel(name: str) -> str:
    """The kind of a kernel by its own name.

    >>> kind_of_kernel("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n"), kind_of_kernel("_anything_new")
    ('matmul', 'other')
    """
    return next((kind for kind, pattern in _KERNELS if pattern.search(name)), "other")


def kind_on_host(name: str) -> str:
    """The kind of an operator that runs on the host itself, where also those that compute nothing take time.

    >>> kind_on_host("aten::view"), kind_on_host("autograd::engine::evaluate_function: MmBackward0")
    ('views and autograd', 'views and autograd')
    """
    return COMMUNICATION if is_collective(name) else CALLS if _CALLS.search(name) else kind_of_operator(name)


def kind_of_operator(name: str) -> str:
    """The kind of an operator by its name.

    >>> kind_of_operator("aten::addmm"), kind_of_operator("aten::native_layer_norm"), kind_of_operator("aten::view")
    ('matmul', 'norm', 'other')
    """
    if name.startswith("triton_"):
        return kind_of_kernel(name)
    return next((kind for kind, pattern in _OPERATORS if pattern.search(name)), "other")
