"""The formats of CUDA's autocast for tensors of a CPU, whose own autocast has other lists.

CUDA's has norms, softmax, losses, powers and sums in fp32, which a CPU's leaves in the format they come in
(ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE; torch documentation, Automatic Mixed Precision).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# What both lists have in fp32, losses above all, is left to the CPU's own; rms_norm is in `kernels`.
_IN_FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity dist pdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
    upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""
# These are asked to give fp32 unless they are asked for something.
_TO_FP32 = """
    softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum
    sum.dim_IntList
"""


def widened(value: Any) -> Any:
    """Tensors in half precision as fp32, looking into lists and tuples."""
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    if isinstance(value, (list, tuple)):
        return type(value)(widened(each) for each in value)
    return value


@contextmanager
def autocast_as_on_cuda() -> Iterator[None]:
    """Inside, autocast of a CPU has in fp32 what CUDA's has."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def outside(run: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return run(*args, **options)

    def in_fp32(run: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*args: Any, **options: Any) -> Any:
            return outside(run, tuple(map(widened, args)), {name: widened(each) for name, each in options.items()})

        return kernel

    def to_fp32(run: Callable[..., Any]) -> Callable[..., Any]:
        place = [each.name for each in run._schema.arguments].index("dtype")  # type: ignore[attr-defined]

        def kernel(*args: Any, **options: Any) -> Any:
            asked = args[place] if len(args) > place else options.get("dtype")
            if asked is None and args[0].is_floating_point() and args[0].dtype != torch.float64:
                args, options = args[:place], options | {"dtype": torch.float32}
            return outside(run, args, options)

        return kernel

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for names, kernel_of in ((_IN_FP32, in_fp32), (_TO_FP32, to_fp32)):
            for each in names.split():
                name, _, overload = each.partition(".")
                packet = getattr(torch.ops.aten, name, None)
                if packet is not None and (overload or "default") in packet.overloads():
                    kernel = kernel_of(getattr(packet, overload or "default"))
                    library.impl(each, kernel, "AutocastCPU")  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
