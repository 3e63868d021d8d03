"""FLOPs and shapes of matmuls, attention, convolutions, recurrent and fused layers, and distances between vectors.

Shapes are (batch, m, n, k) of a product [m, k] @ [k, n]. Distances: x [..., P, D] and y [..., R, D]. Fused layers are
torch's kernels for whole layers of attention in inference: x [B, T, D], H heads, the MLP F wide; what they allocate was
measured as in `scratch`, in fp32 and fp64; in half precision their matmuls take more, which is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from trainledger.ledger import rules
from trainledger.trace.operators.custom import Args, Flops, Scratch

_ATTENTION = "aten::_native_multi_head_attention"
_LAYER = "aten::_transformer_encoder_layer_fwd"


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


def _linear(args: Args) -> tuple[int, ...]:
    """Rows of any number of dims by a transposed matrix, as nested tensors and inference take it at once."""
    x, weight = args[0], args[1]
    return 1, x.numel() // x.shape[-1], weight.shape[0], weight.shape[1]


def _attention_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int, int]:
    batch, heads, queries, head_dim = q.shape
    return batch, heads, queries, k.shape[2], head_dim, v.shape[3]


def _attention(args: Args, out: Any) -> Flops:
    flops = rules.attention_flops(*_attention_sizes(*args[:3]))
    return flops, flops


def _attention_backward(args: Args, out: Any) -> Flops:
    sizes = _attention_sizes(*args[1:4])
    return rules.attention_backward_flops(*sizes), rules.attention_backward_model_flops(*sizes)


def attention_shape(func: OpOverload, first: int) -> Callable[[Args], tuple[int, ...]]:
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


def _recurrent(products: int) -> Callable[[Args, Any], Flops]:
    """A layer of oneDNN's recurrent nets: each step's input and state by their matrices."""

    def flops(args: Args, out: Any) -> Flops:
        x, from_input, from_state = args[:3]
        steps = x.numel() // x.shape[-1]
        done = products * rules.matmul_flops(steps, 1, from_input.numel() + from_state.numel())
        return done, done

    return flops


def _all_distances(args: Args, out: Any) -> Flops:
    """Each of some vectors from each of others, by one product of both with their squares appended."""
    flops = rules.matmul_flops(1, out.numel(), args[0].shape[-1] + 2)
    return flops, flops


def _trilinear(args: Args, out: Any) -> Flops:
    """Two products and a sum for each term of three tensors that are expanded to each other."""
    terms, dims = 1, args[0].dim() + len(args[3])
    shapes = [iter(each.shape) for each in args[:3]]
    for dim in range(dims):
        terms *= max(1 if dim in new else next(shape) for shape, new in zip(shapes, args[3:6], strict=True))
    return 3 * terms, 3 * terms


def _each_distance(args: Args, out: Any) -> Flops:
    """A difference, its power and a sum for each coordinate."""
    x, y = (args[0], args[1]) if args[0].shape[-1] == args[1].shape[-1] else (args[1], args[2])
    return 3 * x.numel() * y.shape[-2], 0


SHAPES: dict[str, Callable[[Args], tuple[int, ...]]] = {
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
RULES: dict[str, tuple[str, Callable[[Args, Any], Flops]]] = {
    **{name: ("matmul", _products(shape)) for name, shape in SHAPES.items()},
    "aten::_grouped_mm": ("matmul", _grouped_mm_flops),
    "trainledger::grouped_mm": ("matmul", _grouped_mm_flops),
    "trainledger::padded_mm": ("matmul", _padded_mm_flops),
    "aten::convolution": ("matmul", _convolution),
    "aten::convolution_backward": ("matmul", _convolution_backward),
    "aten::mkldnn_rnn_layer": ("matmul", _recurrent(1)),
    "aten::mkldnn_rnn_layer_backward": ("matmul", _recurrent(2)),
    "aten::_trilinear": ("matmul", _trilinear),
    "aten::_euclidean_dist": ("matmul", _all_distances),
    "aten::_cdist_forward": ("reduction", _each_distance),
    "aten::_cdist_backward": ("reduction", _each_distance),
}
for _kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
    RULES[f"aten::_scaled_dot_product_{_kernel}"] = ("attention", _attention)
    _backward = "flash_attention_for_cpu_backward" if _kernel.endswith("cpu") else f"{_kernel}_backward"
    RULES[f"aten::_scaled_dot_product_{_backward}"] = ("attention", _attention_backward)


def _attention_flops(x_BTD: Tensor, heads: int, qkv: Tensor, proj: Tensor) -> int:
    """The four projections, and scores and their sums over all keys: a mask saves nothing."""
    B, T, D = x_BTD.shape
    projections: int = sum(rules.matmul_flops(B * T, *each.shape) for each in (qkv, proj))
    return projections + int(rules.attention_flops(B, heads, T, T, D // heads, D // heads))


def _of_attention(args: Args, out: Any) -> tuple[int, int]:
    flops = _attention_flops(args[0], args[4], args[5], args[7])
    return flops, flops


def _of_layer(args: Args, out: Any) -> tuple[int, int]:
    x_BTD = args[0]
    flops = _attention_flops(x_BTD, args[2], args[3], args[5])
    flops += sum(rules.matmul_flops(x_BTD.shape[0] * x_BTD.shape[1], *each.shape) for each in (args[14], args[16]))
    return flops, flops


def _attention_nbytes(
    x_BTD: Tensor, heads: int, mask: Tensor | None, mask_type: int, *, weights: bool = False, average: bool = False
) -> int:
    """The most at once, its results with it: queries, keys and values twice, or with them the scores.

    With a mask the scores are copied, and it is made one of bools; one of queries (``mask_type`` 0) for each score.
    """
    x, scored = x_BTD.nbytes, x_BTD.numel() // max(1, x_BTD.shape[2]) * heads * x_BTD.shape[1]
    scores = scored * x_BTD.element_size()
    masked = 0 if mask is None else scores + (scored if mask_type == 0 else mask.numel())
    most = max(6 * x, 3 * x + scores + masked)
    if not weights:
        return most
    return max(most, 5 * x + scores, 4 * x + scores + (scores // heads if average else 0))


def _scratch_of_attention(args: Args, out: Any) -> int:
    mask, weights, average, mask_type = (*args, *(None, True, True, None)[len(args) - 9 :])[9:13]
    most = _attention_nbytes(args[0], args[4], mask, mask_type or 0, weights=weights, average=average)
    return int(most - out[0].nbytes - (out[1].nbytes if weights and isinstance(out[1], Tensor) else 0))


def _scratch_of_layer(args: Args, out: Tensor) -> int:
    """Attention, or the MLP's wide values between two of x; norms in front keep one more of x."""
    x_BTD, heads, norm_first, up = args[0], args[2], args[8], args[14]
    mask, mask_type = (*args, *(None, None)[len(args) - 18 :])[18:20]
    x, wide = x_BTD.nbytes, x_BTD.nbytes // max(1, x_BTD.shape[2]) * up.shape[0]
    most = max(_attention_nbytes(x_BTD, heads, mask, mask_type or 0), 2 * x + wide) + (x if norm_first else 0)
    return int(most - out.nbytes)


RULES |= {_ATTENTION: ("matmul", _of_attention), _LAYER: ("matmul", _of_layer)}
FUSED_SCRATCH: dict[str, Scratch] = {_ATTENTION: _scratch_of_attention, _LAYER: _scratch_of_layer}
