"""FLOPs, shapes and workspaces of matmuls, attention, convolutions, recurrent and fused layers, and factorizations.

Shapes are (batch, m, n, k) of a matmul [m, k] @ [k, n]. Distances: x [..., P, D] and y [..., R, D]. Fused layers are
torch's kernels for whole layers of attention in inference: x [B, T, D], H heads, the MLP F wide.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from trainledger.ledger import rules
from trainledger.spec.units import ceil_div
from trainledger.trace.operators.custom import Count, Shape
from trainledger.trace.patches import Args

# What the fused layers allocate was measured as in `scratch`, in fp32 and fp64; in half precision their matmuls take
# more, which is not counted.
_ATTENTION = "aten::_native_multi_head_attention"
_LAYER = "aten::_transformer_encoder_layer_fwd"


def _multiplied(shape: Shape) -> Count:
    def flops(args: Args, out: Any) -> int:
        batch, m, n, k = shape(args)
        return int(rules.matmul_flops(m, n, k, batch))

    return flops


def _matmul(first: int) -> Shape:
    """Of two matrices, two batches of them or vectors, which are arguments from ``first`` on."""

    def shape(args: Args) -> tuple[int, ...]:
        a, b = args[first : first + 2]
        batch, rows = (a.shape[0] if a.dim() == 3 else 1), (a.shape[-2] if a.dim() > 1 else 1)
        return batch, rows, (b.shape[-1] if b.dim() > 1 else 1), a.shape[-1]

    return shape


def _grouped_mm(args: Args) -> tuple[int, ...]:
    # Rows by the matrix of their group, or a matrix from the rows of each group, assuming groups of one size.
    a, b = args[0], args[1]
    groups = args[2].shape[0]
    if b.dim() == 3:
        return groups, ceil_div(a.shape[0], groups), b.shape[2], a.shape[1]
    return groups, a.shape[0], b.shape[1], ceil_div(a.shape[1], groups)


def _grouped_mm_flops(args: Args, out: Any) -> int:
    # Every row is multiplied once.
    a, b = args[0], args[1]
    return 2 * int(a.numel()) * int(b.shape[-1])


def _linear(args: Args) -> tuple[int, ...]:
    # Rows of any number of dims by a transposed matrix, as nested tensors and inference take it at once.
    x, weight = args[0], args[1]
    return 1, x.numel() // x.shape[-1], weight.shape[0], weight.shape[1]


def _attention_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int, int]:
    batch, heads, queries, head_dim = q.shape
    return batch, heads, queries, k.shape[2], head_dim, v.shape[3]


def attention_shape(func: OpOverload, first: int) -> Shape:
    """The shape of an attention kernel whose queries, keys and values are arguments from ``first`` on."""
    arguments = [argument.name for argument in func._schema.arguments]
    place = arguments.index("is_causal")

    def shape(args: Args) -> tuple[int, ...]:
        batch, heads, queries, keys, width, value_width = _attention_sizes(*args[first : first + 3])
        causal = int(len(args) > place and bool(args[place]))
        return batch * heads, queries, keys, width, value_width, causal

    return shape


def _convolution(args: Args, out: Any) -> int:
    weight, transposed = args[1], args[6]
    positions = args[0].shape[2:] if transposed else out.shape[2:]
    return int(2 * args[0].shape[0] * prod((*positions, *weight.shape)))


def _convolution_backward(args: Args, out: Any) -> int:
    grad, image, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    forward = _convolution((image, weight, None, None, None, None, transposed), grad)
    return forward * (int(wanted[0]) + int(wanted[1]))


def _recurrent(args: Args, out: Any) -> int:
    # A layer of oneDNN's recurrent nets: each step's input and state by their matrices.
    x, from_input, from_state = args[:3]
    return 2 * int(x.numel() // x.shape[-1]) * int(from_input.numel() + from_state.numel())


def _trilinear(args: Args, out: Any) -> int:
    # Two products and a sum for each term of three tensors that are expanded to each other.
    terms, dims = 1, args[0].dim() + len(args[3])
    shapes = [iter(argument.shape) for argument in args[:3]]
    for dim in range(dims):
        terms *= max(1 if dim in new else next(shape) for shape, new in zip(shapes, args[3:6], strict=True))
    return 3 * terms


def _each_distance(args: Args, out: Any) -> int:
    # A difference, its power and a sum for each coordinate.
    x, y = (args[0], args[1]) if args[0].shape[-1] == args[1].shape[-1] else (args[1], args[2])
    return 3 * int(x.numel()) * int(y.shape[-2])


SHAPES: dict[str, Shape] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::vdot"), _matmul(0)),
    **dict.fromkeys(("aten::_scaled_mm", "aten::_int_mm", "trainledger::padded_mm"), _matmul(0)),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addmv"), _matmul(1)),
    "aten::linear": _linear,
    "aten::_grouped_mm": _grouped_mm,
    "trainledger::grouped_mm": _grouped_mm,
}
# FLOPs that are the model's own, where they are not all: a place of a padded matmul may be empty.
MODEL_FLOPS: dict[str, Count] = {
    "trainledger::padded_mm": lambda args, out: _multiplied(_matmul(0))(args, out) // args[3] * args[2]
}
RULES: dict[str, tuple[str, Count]] = {
    **{name: ("matmul", _multiplied(shape)) for name, shape in SHAPES.items()},
    "aten::_grouped_mm": ("matmul", _grouped_mm_flops),
    "trainledger::grouped_mm": ("matmul", _grouped_mm_flops),
    "aten::convolution": ("matmul", _convolution),
    "aten::convolution_backward": ("matmul", _convolution_backward),
    "aten::mkldnn_rnn_layer": ("matmul", _recurrent),
    "aten::mkldnn_rnn_layer_backward": ("matmul", lambda args, out: 2 * _recurrent(args, out)),
    "aten::_trilinear": ("matmul", _trilinear),
    # By one matmul of all vectors with their squares appended.
    "aten::_euclidean_dist": ("matmul", lambda args, out: 2 * out.numel() * (args[0].shape[-1] + 2)),
    "aten::_cdist_forward": ("reduction", _each_distance),
    "aten::_cdist_backward": ("reduction", _each_distance),
}
for _kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
    _forward = f"aten::_scaled_dot_product_{_kernel}"
    RULES[_forward] = ("attention", lambda args, out: rules.attention_flops(*_attention_sizes(*args[:3])))
    RULES[f"{_forward}_backward"] = (
        "attention",
        lambda args, out: rules.attention_backward_flops(*_attention_sizes(*args[1:4])),
    )
    MODEL_FLOPS[f"{_forward}_backward"] = lambda args, out: rules.attention_backward_model_flops(
        *_attention_sizes(*args[1:4])
    )


def flex_facts(name: str, args: Args) -> dict[str, int]:
    """FLOPs and bytes read of ``flex_attention``, which calls others: dense, as a mask spares nothing; {} of others."""
    if name not in ("flex_attention", "flex_attention_backward"):
        return {}
    sizes = _attention_sizes(*args[:3])
    flops = model_flops = rules.attention_flops(*sizes)
    if name.endswith("backward"):
        flops, model_flops = rules.attention_backward_flops(*sizes), rules.attention_backward_model_flops(*sizes)
    return {"flops": int(flops), "model_flops": int(model_flops), "read": sum(argument.nbytes for argument in args[:3])}


def _attention_flops(x_BTD: Tensor, heads: int, qkv: Tensor, proj: Tensor) -> int:
    # The four projections, and scores and their sums over all keys: a mask saves nothing.
    B, T, D = x_BTD.shape
    projections: int = sum(rules.matmul_flops(B * T, *tensor.shape) for tensor in (qkv, proj))
    return projections + int(rules.attention_flops(B, heads, T, T, D // heads, D // heads))


def _layer_flops(args: Args, out: Any) -> int:
    B, T, _ = args[0].shape
    mlp = sum(rules.matmul_flops(B * T, *each.shape) for each in (args[14], args[16]))
    return _attention_flops(args[0], args[2], args[3], args[5]) + int(mlp)


def _attention_nbytes(
    x_BTD: Tensor, heads: int, mask: Tensor | None, mask_type: int, *, weights: bool = False, average: bool = False
) -> int:
    # The most at once, its results with it: queries, keys and values twice, or with them the scores. With a mask the
    # scores are copied, and it is made one of bools; one of queries (mask_type 0) for each score.
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
    # Attention, or the MLP's wide values between two of x; norms in front keep one more of x.
    x_BTD, heads, norm_first, up = args[0], args[2], args[8], args[14]
    mask, mask_type = (*args, *(None, None)[len(args) - 18 :])[18:20]
    x, wide = x_BTD.nbytes, x_BTD.nbytes // max(1, x_BTD.shape[2]) * up.shape[0]
    most = max(_attention_nbytes(x_BTD, heads, mask, mask_type or 0), 2 * x + wide) + (x if norm_first else 0)
    return int(most - out.nbytes)


RULES |= {
    _ATTENTION: ("matmul", lambda args, out: _attention_flops(args[0], args[4], args[5], args[7])),
    _LAYER: ("matmul", _layer_flops),
}
FUSED_SCRATCH: dict[str, Count] = {_ATTENTION: _scratch_of_attention, _LAYER: _scratch_of_layer}


# Factorizations, solutions and functions of matrices, as in Shampoo and Muon. A: [..., m, n], real; B: [..., n, k]; a
# batch multiplies, a complex operation counts as 4 real ones. FLOPs are leading terms of LAPACK Working Note 41
# (Anderson, Dongarra, Ostrouchov 1994, table of operation counts) where it has them, else of Golub & Van Loan, Matrix
# Computations, 4th ed.: sections 5.2.2 (Q from reflectors), 5.3 (least squares), 7.5.6 (eigenvalues), 8.3 (symmetric
# ones), 8.6.1 (singular values). How long iterations go on depends on values; these are the books' averages.
# The matrix exponential is Taylor's of degree 18 in 5 matmuls (Bader, Blanes, Casas 2019, Computing the Matrix
# Exponential with an Optimized Taylor Polynomial Approximation), without squarings: torch takes fewer matmuls for norms
# below 1.5, and one squaring for each doubling of a norm beyond 3.

_OfMatrix = Callable[[int, int, Args], int]  # of one real matrix, by rows, columns and all arguments

_BLOCK = 32  # columns that MKL's blocked QR works on at once, or half of it
_COPIES = 12  # matrices that torch allocates for an exponential: powers, polynomials and what they are combined into


def _counted(count: _OfMatrix) -> Count:
    def flops(args: Args, out: Any) -> int:
        a: Tensor = args[0]
        rows, columns = a.shape[-2:]
        return prod(a.shape[:-2]) * count(int(rows), int(columns), args) * (4 if a.is_complex() else 1)

    return flops


def _argument(args: Args, index: int, default: Any) -> Any:
    return args[index] if len(args) > index else default


def _triangle(m: int, n: int, args: Args) -> int:
    # LAPACK's xGEQRF.
    long, short = max(m, n), min(m, n)
    return 2 * long * short * short - 2 * short**3 // 3


def _reflected(m: int, n: int, k: int) -> int:
    # xORGQR: the first n columns of a product of k reflectors of length m.
    return 4 * m * n * k - 2 * (m + n) * k * k + 4 * k**3 // 3


def _qr(m: int, n: int, args: Args) -> int:
    # The triangle, and Q unless only R is asked for.
    mode = _argument(args, 1, "reduced")
    columns = {"r": 0, "complete": m}.get(mode, min(m, n))
    return _triangle(m, n, args) + (_reflected(m, columns, min(m, n)) if columns else 0)


def _lu(m: int, n: int, args: Args) -> int:
    # LAPACK's xGETRF.
    long, short = max(m, n), min(m, n)
    return long * short * short - short**3 // 3


def _least_squares(m: int, n: int, args: Args) -> int:
    long, short = max(m, n), min(m, n)
    b: Tensor = args[1]
    sides = b.shape[-1] if b.dim() > 1 and b.shape[-2] == m else 1  # columns of a matrix, or one vector
    return _triangle(m, n, args) + sides * (4 * long * short - short * short)


def _svd(m: int, n: int, args: Args) -> int:
    long, short = max(m, n), min(m, n)
    if not _argument(args, 2, True):  # values alone
        return 4 * long * short * short - 4 * short**3 // 3
    if _argument(args, 1, False):  # full matrices
        return 4 * long * long * short + 22 * short**3
    return 6 * long * short * short + 20 * short**3


def _pseudo_inverse(m: int, n: int, args: Args) -> int:
    # By singular values, and the product of both sides.
    long, short = max(m, n), min(m, n)
    return 8 * long * short * short + 20 * short**3


def _substitution(matrix: int, triangles: int) -> Count:
    """xTRTRS: n squared FLOPs for each right-hand side and triangle; ``matrix`` is the place of the argument."""

    def flops(args: Args, out: Any) -> int:
        solved: Tensor = out[0] if isinstance(out, (tuple, list)) else out
        n: int = args[matrix].shape[-1]
        return triangles * n * solved.numel() * (4 if solved.is_complex() else 1)

    return flops


_COUNTS: dict[str, _OfMatrix] = {
    "geqrf": _triangle,
    "linalg_qr": _qr,
    "linalg_householder_product": lambda m, n, args: _reflected(m, n, int(args[1].shape[-1])),
    **dict.fromkeys(("linalg_lu_factor_ex", "linalg_lu", "_linalg_det", "_linalg_slogdet"), _lu),
    "linalg_inv_ex": lambda m, n, args: _lu(m, n, args) + 2 * n**3,  # torch solves for the unit matrix
    **dict.fromkeys(("linalg_cholesky_ex", "cholesky", "linalg_ldl_factor_ex"), lambda m, n, args: n**3 // 3),
    "cholesky_inverse": lambda m, n, args: 2 * n**3 // 3,
    "linalg_lstsq": _least_squares,
    "_linalg_eigh": lambda m, n, args: 9 * n**3 if _argument(args, 2, True) else 4 * n**3 // 3,
    "linalg_eig": lambda m, n, args: 25 * n**3,
    "_linalg_eigvals": lambda m, n, args: 10 * n**3,
    "_linalg_svd": _svd,
    "linalg_matrix_exp": lambda m, n, args: 10 * n**3,
    "linalg_pinv": _pseudo_inverse,
}
FACTORIZATIONS: dict[str, tuple[str, Count]] = {
    **{f"aten::{name}": ("matmul", _counted(count)) for name, count in _COUNTS.items()},
    # xGETRF, then both triangles.
    "aten::_linalg_solve_ex": ("matmul", lambda args, out: _counted(_lu)(args, out) + _substitution(0, 2)(args, out)),
    "aten::linalg_lu_solve": ("matmul", _substitution(0, 2)),
    "aten::cholesky_solve": ("matmul", _substitution(1, 2)),
    "aten::linalg_solve_triangular": ("matmul", _substitution(0, 1)),
    "aten::triangular_solve": ("matmul", _substitution(1, 1)),
}


def _qr_blocks(args: Args, out: Any) -> int:
    return _BLOCK * int(args[0].shape[-1]) * int(args[0].element_size())


def _eigh_workspace(args: Args, out: Any) -> int:
    # xSYEVD's workspaces, which grow as the matrix, where vectors are asked for.
    n, itemsize = int(args[0].shape[-1]), int(args[0].element_size())
    return (2 * n * n + 6 * n + 2) * itemsize + 4 * (5 * n + 3) if _argument(args, 2, True) else 0


FACTORIZATION_SCRATCH: dict[str, Count] = {
    "aten::linalg_householder_product": _qr_blocks,
    "aten::geqrf": _qr_blocks,
    # The factors, and the pivots.
    "aten::linalg_inv_ex": lambda args, out: int(args[0].nbytes) + 4 * args[0].numel() // max(1, args[0].shape[-1]),
    "aten::linalg_matrix_exp": lambda args, out: _COPIES * int(args[0].nbytes),
    "aten::_linalg_svd": lambda args, out: int(args[0].nbytes),
    "aten::_linalg_eigh": _eigh_workspace,
    "aten::_linalg_det": lambda args, out: 13 * int(args[0].shape[-1]),
    "aten::_linalg_slogdet": lambda args, out: 13 * int(args[0].shape[-1]),
}
NOTES = {
    "linalg_matrix_exp": "torch.linalg.matrix_exp takes as many matmuls as the norm of its argument needs: memory and "
    "FLOPs are those of Taylor's degree 18, the most without squarings",
    "linalg_householder_product": "the backward of torch.linalg.householder_product differs on fake tensors: "
    "on real ones it allocates one more matrix as large as its argument",
}
