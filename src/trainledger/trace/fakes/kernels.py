"""Which kernels a trace accounts for: those of a CPU, or of CUDA where they keep or allocate something else.

q, k, v: [B, H, T, head_dim]. What torch decides by the device of real tensors is decided here for fake ones on the
CPU: attention by the rules in ATen/native/transformers/cuda/sdp_utils.cpp, lists of tensors by torch/optim/optimizer.py
and torch/utils/_foreach_utils.py, RMS norms by ATen/native/layer_norm.cpp, autocast by its lists for CUDA
(ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE; torch documentation, Automatic Mixed Precision).
RMS norms are one kernel that keeps its input and a reciprocal root a row, layer norms keep mean and deviation in fp32,
dropout keeps a mask of one byte an element, and a kernel's scratch on a CPU is left out.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._foreach_utils
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trainledger.spec.device import KERNELS, fused_attention
from trainledger.trace.patches import Args, Kwargs, all_replaced, answering, replaced_in
from trainledger.trace.recorder.storages import dtype_name

# What remains different from a step on CUDA:
# - Before compute capability 8.0 (`sm70`) widths of heads are those of 7.x.
# - Code that looks at ``tensor.device.type`` sees a CPU and may go another way, as `nn.attention` does for heads of
#   uneven width, for shared heads under a mask, and for dropout of attention; the engine, for clipping by lists.
# - The closed form does not fill masks and heads up to multiples of 8, as torch does (and this trace).
# - Workspaces of cuBLAS and cuDNN, convolutions of cuDNN, its recurrent nets, and its batch norm's reserve.
# - The caching allocator rounds up to 512 bytes and fragments; a trace counts the tensors' own bytes.
# - Softmax of fp16 under autocast goes to fp32 in one kernel there, in two operations here.
_HALVES = (torch.float16, torch.bfloat16)
_WIDEST_HEAD = 256  # of a flash attention kernel
_CUDNN_WIDTHS = {"sm90": 256, "sm100": 128}  # of cuDNN's, and on the latter 192 with values of 128
_ALIGNED = 8  # elements that kernels of attention load at once
# What both lists have in fp32, losses above all, is left to the CPU's own.
_IN_FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm rms_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity dist pdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
"""
# Their result is fp32 unless the call has a dtype.
_TO_FP32 = """
    softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum
    sum.dim_IntList
"""


@contextmanager
def kernels_of(backend: str) -> Iterator[None]:
    """Inside, attention, RMS norms, dropout, autocast and optimizers' defaults are those of a backend of `KERNELS`.

    On either, clipping and optimizers take lists of fake tensors where they would of real ones. Results that differ in
    their format alone are `cpu_results.results_of` the same backend.
    """
    if backend not in KERNELS:
        raise ValueError(f"kernels must be one of {', '.join(KERNELS)}, not {backend!r}")
    owners = import_module("torch.optim.optimizer"), torch.utils._foreach_utils
    # Fake tensors replace plain ones, of which optimizers and clipping take many at once unless asked otherwise.
    with all_replaced(*((owner, "_foreach_supported_types", lambda kinds: [*kinds, FakeTensor]) for owner in owners)):
        if backend == "cpu":
            yield
            return
        attention = partial(attention_on_cuda, backend=backend)
        devices = answering(["cpu", "cuda"])
        with (
            autocast_as_on_cuda(),
            decomposed_as({"scaled_dot_product_attention": attention, "rms_norm": _rms_norm, "dropout": _dropout}),
            # which refuses gradients on a CPU
            replaced_in("torch.nn.attention.flex_attention", lambda flex: (flex, "_validate_device", answering(None))),
            all_replaced(*((owner, "_get_foreach_kernels_supported_devices", devices) for owner in owners)),
        ):
            yield


def attention_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str = "cuda",
) -> Tensor:
    """What ``F.scaled_dot_product_attention`` runs on CUDA: flash, else memory-efficient, else its parts one by one.

    Generations 9 and 10 take cuDNN's kernel before them, those before 8 have the second alone (`fused_attention`).
    Kernels that the program turns off (``sdpa_kernel``) are left out; RuntimeError, as torch's, where none is left.
    """
    on: Any = torch.backends.cuda
    aten = torch.ops.aten
    has = fused_attention(backend, dtype_name(query.dtype))
    alone = not (on.flash_sdp_enabled() or on.mem_efficient_sdp_enabled() or on.math_sdp_enabled())
    cudnn_first = on.cudnn_sdp_enabled() and (backend in _CUDNN_WIDTHS or (alone and "cudnn" in has))
    cudnn_width = _CUDNN_WIDTHS.get(backend, 128) if cudnn_first else 0
    width = value.shape[-1]
    keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if _cudnn_takes(query, key, value, dropout_p, enable_gqa, cudnn_width):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = _added(attn_mask, query.dtype)
        run = aten._scaled_dot_product_cudnn_attention
        out = run(query, key, value, attn_mask, keeps, dropout_p, is_causal, False, scale=scale)
    elif (
        "flash" in has and on.flash_sdp_enabled() and _flash_takes(query, key, value, attn_mask, is_causal, enable_gqa)
    ):
        scale = 1 / math.sqrt(width) if scale is None else scale
        query, key, value = (_to_multiple(tensor) for tensor in (query, key, value))
        run = aten._scaled_dot_product_flash_attention
        out = run(query, key, value, dropout_p, is_causal, False, scale=scale)
    elif "efficient" in has and on.mem_efficient_sdp_enabled() and _efficient_takes(query, key, value, backend):
        if attn_mask is not None:
            attn_mask = _aligned(_added(attn_mask, query.dtype)).expand(
                *query.shape[:2], query.shape[-2], key.shape[-2]
            )
        run = aten._scaled_dot_product_efficient_attention
        out = run(query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale)
    elif not on.math_sdp_enabled():
        raise RuntimeError(f"No available kernel: {backend} has none of those that sdpa_kernel allows")
    else:
        run = aten._scaled_dot_product_attention_math
        out = run(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    first: Tensor = out[0]
    return first if first.shape[-1] == width else first[..., :width]


def _to_multiple(x: Tensor) -> Tensor:
    # The flash kernel wants heads of a multiple of 8 elements (sdp_utils.cpp; torch pads them in
    # transformers/attention.cpp).
    missing = -x.shape[-1] % _ALIGNED
    return F.pad(x, (0, missing)) if missing else x


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to the scores."""
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype)) if mask.dtype == torch.bool else mask


def _aligned(mask: Tensor) -> Tensor:
    """A mask whose rows begin at multiples of 8 elements."""
    if mask.stride(-1) == 1 and all(each % _ALIGNED == 0 for each in mask.stride()[:-1]):
        return mask
    keys = mask.shape[-1]
    return F.pad(mask, (0, _ALIGNED - keys % _ALIGNED))[..., :keys]


def _cudnn_takes(q: Tensor, k: Tensor, v: Tensor, dropout: float, grouped: bool, widest: int) -> bool:
    if not widest or not _of_formats(_HALVES, q, k, v):
        return False
    if torch.are_deterministic_algorithms_enabled() or (dropout and q.shape[-2] == 1):
        return False
    width, wide = q.shape[-1], v.shape[-1]
    if width % _ALIGNED or wide % _ALIGNED or (max(width, wide) > widest and (width, wide) != (192, 128)):
        return False
    return (_same_heads(q, k, v) or grouped) and k.shape[-2] != 1


def _flash_takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, grouped: bool) -> bool:
    width = q.shape[-1]
    if mask is not None or not _of_formats(_HALVES, q, k, v) or width > _WIDEST_HEAD:
        return False
    return (
        width == k.shape[-1] == v.shape[-1]
        and (_same_heads(q, k, v) or grouped)
        and (not causal or q.shape[-2] == k.shape[-2])
    )


def _efficient_takes(q: Tensor, k: Tensor, v: Tensor, backend: str) -> bool:
    aligned = 8 if q.dtype in _HALVES else 1 if backend == "sm70" else 4  # whose fp32 has no tensor cores
    known = _of_formats((*_HALVES, torch.float32), q, k, v)
    return known and _same_heads(q, k, v) and q.shape[-1] % aligned == 0 and v.shape[-1] % aligned == 0


def _of_formats(formats: tuple[torch.dtype, ...], q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.dim() == 4 and q.dtype in formats and q.dtype == k.dtype == v.dtype


def _same_heads(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return bool(q.shape[1] == k.shape[1] == v.shape[1])


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is not None and weight.dtype != x.dtype:
        parts: Tensor = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]
        return parts
    return FusedRMSNorm.apply(x, weight, tuple(shape), eps)  # type: ignore[no-any-return, no-untyped-call]


class FusedRMSNorm(torch.autograd.Function):
    """RMS norm as one kernel in each direction. On a CPU autograd would see its parts, of which it keeps more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, shape: tuple[int, ...], eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            y: Tensor
            y, root = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, root, weight)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, root, weight = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:2])
        with torch._C._AutoDispatchBelowAutograd():
            gx, gw = torch.ops.aten._fused_rms_norm_backward(g, x, ctx.shape, root, weight, wanted)
        return gx if wanted[0] else None, gw if wanted[1] else None, None, None


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or not x.numel():
        return x
    # Keeps a mask of one byte an element
    return x * 0 if p == 1 else torch.native_dropout(x, p, True)[0]


@contextmanager
def decomposed_as(parts: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, operators that torch composes of others are these functions, whoever calls them: a compiler too.

    Replaced by name (``F.dropout``) they would break Dynamo's graphs, and who imported the name would not see it.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name, function in parts.items():
                library.impl(name, function, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def widened(value: Any) -> Any:
    """Tensors in half precision as fp32, looking into lists and tuples."""
    if isinstance(value, Tensor) and value.dtype in _HALVES:
        return value.float()
    if isinstance(value, (list, tuple)):
        return type(value)(widened(each) for each in value)
    return value


@contextmanager
def autocast_as_on_cuda() -> Iterator[None]:
    """Inside, autocast of a CPU has in fp32 what CUDA's has."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def outside(run: Callable[..., Any], args: Args, options: Kwargs) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return run(*args, **options)

    def in_fp32(run: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*args: Any, **options: Any) -> Any:
            return outside(run, tuple(map(widened, args)), {name: widened(option) for name, option in options.items()})

        return kernel

    def to_fp32(run: Callable[..., Any]) -> Callable[..., Any]:
        place = [argument.name for argument in run._schema.arguments].index("dtype")  # type: ignore[attr-defined]

        def kernel(*args: Any, **options: Any) -> Any:
            asked = args[place] if len(args) > place else options.get("dtype")
            if asked is None and args[0].is_floating_point() and args[0].dtype != torch.float64:
                args, options = args[:place], options | {"dtype": torch.float32}
            return outside(run, args, options)

        return kernel

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for names, kernel_of in ((_IN_FP32, in_fp32), (_TO_FP32, to_fp32)):
            for part in names.split():
                name, _, overload = part.partition(".")
                packet = getattr(torch.ops.aten, name, None)
                if packet is not None and (overload or "default") in packet.overloads():
                    kernel = kernel_of(getattr(packet, overload or "default"))
                    library.impl(part, kernel, "AutocastCPU")  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
