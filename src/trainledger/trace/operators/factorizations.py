"""FLOPs and workspaces of LAPACK's factorizations, solutions and functions of matrices, as in Shampoo and Muon.

A: [..., m, n], real; B: [..., n, k]; a batch multiplies, a complex operation counts as 4 real ones. FLOPs are leading
terms of LAPACK Working Note 41 (Anderson, Dongarra, Ostrouchov 1994, table of operation counts) where it has them, else
of Golub & Van Loan, Matrix Computations, 4th ed.: sections 5.2.2 (Q from reflectors), 5.3 (least squares), 7.5.6
(eigenvalues), 8.3 (symmetric ones), 8.6.1 (singular values). How long iterations go on depends on values; these are the
books' averages. The matrix exponential is Taylor's of degree 18 in 5 matmuls (Bader, Blanes, Casas 2019, Computing the
Matrix Exponential with an Optimized Taylor Polynomial Approximation), without squarings: torch takes fewer matmuls for
norms below 1.5, and one squaring for each doubling of a norm beyond 3.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor

from trainledger.trace.operators.custom import Args, Count

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
    """xGEQRF."""
    long, short = max(m, n), min(m, n)
    return 2 * long * short * short - 2 * short**3 // 3


def _reflected(m: int, n: int, k: int) -> int:
    """xORGQR: the first n columns of a product of k reflectors of length m."""
    return 4 * m * n * k - 2 * (m + n) * k * k + 4 * k**3 // 3


def _qr(m: int, n: int, args: Args) -> int:
    """The triangle, and Q unless only R is asked for."""
    mode = _argument(args, 1, "reduced")
    columns = {"r": 0, "complete": m}.get(mode, min(m, n))
    return _triangle(m, n, args) + (_reflected(m, columns, min(m, n)) if columns else 0)


def _lu(m: int, n: int, args: Args) -> int:
    """xGETRF."""
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
    """By singular values, and the product of both sides."""
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
RULES: dict[str, tuple[str, Count]] = {
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
    """xSYEVD's workspaces, which grow as the matrix, where vectors are asked for."""
    n, itemsize = int(args[0].shape[-1]), int(args[0].element_size())
    return (2 * n * n + 6 * n + 2) * itemsize + 4 * (5 * n + 3) if _argument(args, 2, True) else 0


SCRATCH: dict[str, Count] = {
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
