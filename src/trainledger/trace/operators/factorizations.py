"""FLOPs of factorizations, solutions and functions of matrices, and what LAPACK's drivers allocate beside results.

A: [..., m, n], real; B: [..., n, k]; a batch multiplies. Leading terms of LAPACK Working Note 41 (Anderson, Dongarra,
Ostrouchov 1994, table of operation counts) where it has them, else of Golub & Van Loan, Matrix Computations, 4th ed.:
section 5.2.2 (Q from reflectors), 5.3 (least squares), 7.5.6 (eigenvalues), 8.3 (symmetric ones), 8.6.1 (singular
values). How long iterations go on depends on values; these are the books' averages. The matrix exponential is Taylor's
of degree 18 in 5 products (Bader, Blanes, Casas 2019, Computing the Matrix Exponential with an Optimized Taylor
Polynomial Approximation), without squarings: torch takes fewer products for norms below 1.5, and one squaring for each
doubling of a norm beyond 3. A complex operation is counted as 4 real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor

from trainledger.trace.operators.scratch import Scratch

Args = tuple[Any, ...]
Flops = tuple[int, int]
Count = Callable[[Args], int]  # of one real matrix

_BLOCK = 32  # columns that MKL's blocked QR works on at once, or half of it
_PRODUCTS = 5  # of Taylor's polynomial of degree 18
_COPIES = 12  # matrices that torch holds for it: powers, polynomials and what they are combined into


def _counted(count: Count) -> Callable[[Args, Any], Flops]:
    def flops(args: Args, out: Any) -> Flops:
        a: Tensor = args[0]
        done = prod(a.shape[:-2]) * count(args) * (4 if a.is_complex() else 1)
        return done, done

    return flops


def _sides(args: Args) -> tuple[int, int]:
    """Rows and columns."""
    rows, columns = args[0].shape[-2:]
    return rows, columns


def _tall(args: Args) -> tuple[int, int]:
    """The longer side and the shorter one."""
    return max(_sides(args)), min(_sides(args))


def _right(b: Tensor, side: int) -> int:
    """Right-hand sides: columns of a matrix or of a batch of them, or one vector."""
    return b.shape[-1] if b.dim() > 1 and b.shape[-2] == side else 1


def _triangles(args: Args) -> int:
    """xGEQRF."""
    m, n = _sides(args)
    return 2 * m * n * n - 2 * n**3 // 3 if m >= n else 2 * n * m * m - 2 * m**3 // 3


def _reflected(m: int, n: int, k: int) -> int:
    """xORGQR: the first n columns of a product of k reflectors of length m."""
    return 4 * m * n * k - 2 * (m + n) * k * k + 4 * k**3 // 3


def _reflections(args: Args) -> int:
    m, n = _sides(args)
    return _reflected(m, n, int(args[1].shape[-1]))


def _orthogonal(args: Args) -> int:
    """QR: the triangle, and Q unless only R is asked for."""
    m, n = _sides(args)
    mode = args[1] if len(args) > 1 else "reduced"
    if mode == "r":
        return _triangles(args)
    return _triangles(args) + _reflected(m, m if mode == "complete" else min(m, n), min(m, n))


def _factors(args: Args) -> int:
    """xGETRF."""
    long, short = _tall(args)
    return long * short * short - short**3 // 3


def _substituted(matrix: int, times: int) -> Callable[[Args, Any], Flops]:
    """xTRTRS: n squared FLOPs for each right-hand side, by one triangle or by two; the matrix is this argument."""

    def flops(args: Args, out: Any) -> Flops:
        solved: Tensor = out[0] if isinstance(out, (tuple, list)) else out
        done = times * args[matrix].shape[-1] * solved.numel() * (4 if solved.is_complex() else 1)
        return done, done

    return flops


def _solution(args: Args, out: Any) -> Flops:
    """xGETRF, then by both triangles."""
    factored, solved = _counted(_factors)(args, out)[0], _substituted(0, 2)(args, out)[0]
    return factored + solved, factored + solved


def _inverse(args: Args) -> int:
    """torch solves for the unit matrix."""
    n = int(args[0].shape[-1])
    return _factors(args) + 2 * n**3


def _least_squares(args: Args) -> int:
    m, n = _tall(args)
    return _triangles(args) + _right(args[1], args[0].shape[-2]) * (4 * m * n - n * n)


def _symmetric(args: Args) -> int:
    n = int(args[0].shape[-1])
    vectors = args[2] if len(args) > 2 else True
    return 9 * n**3 if vectors else 4 * n**3 // 3


def _singular(args: Args) -> int:
    m, n = _tall(args)
    full, vectors = bool(args[1]) if len(args) > 1 else False, args[2] if len(args) > 2 else True
    if not vectors:
        return 4 * m * n * n - 4 * n**3 // 3
    return 4 * m * m * n + 22 * n**3 if full else 6 * m * n * n + 20 * n**3


def _pseudo_inverse(args: Args) -> int:
    """By singular values, and the product of both sides."""
    m, n = _tall(args)
    return 6 * m * n * n + 20 * n**3 + 2 * m * n * n


def _nth(power: int, over: int, times: int = 1) -> Count:
    return lambda args: int(times * args[0].shape[-1] ** power // over)


def _exponential(args: Args) -> int:
    return int(_PRODUCTS * 2 * args[0].shape[-1] ** 3)


RULES: dict[str, tuple[str, Callable[[Args, Any], Flops]]] = {
    f"aten::{name}": ("matmul", _counted(count))
    for name, count in {
        "geqrf": _triangles, "linalg_qr": _orthogonal, "linalg_householder_product": _reflections,
        "linalg_lu_factor_ex": _factors, "linalg_lu": _factors, "_linalg_det": _factors, "_linalg_slogdet": _factors,
        "linalg_inv_ex": _inverse,
        "linalg_cholesky_ex": _nth(3, 3), "cholesky": _nth(3, 3), "cholesky_inverse": _nth(3, 3, 2),
        "linalg_ldl_factor_ex": _nth(3, 3), "linalg_lstsq": _least_squares, "_linalg_eigh": _symmetric,
        "linalg_eig": _nth(3, 1, 25), "_linalg_eigvals": _nth(3, 1, 10), "_linalg_svd": _singular,
        "linalg_matrix_exp": _exponential, "linalg_pinv": _pseudo_inverse,
    }.items()
}  # fmt: skip
RULES |= {
    "aten::_linalg_solve_ex": ("matmul", _solution),
    "aten::linalg_lu_solve": ("matmul", _substituted(0, 2)),
    "aten::cholesky_solve": ("matmul", _substituted(1, 2)),
    "aten::linalg_solve_triangular": ("matmul", _substituted(0, 1)),
    "aten::triangular_solve": ("matmul", _substituted(1, 1)),
}


def _of_blocks(args: Args, out: Any) -> int:
    a: Tensor = args[0]
    return _BLOCK * int(a.shape[-1]) * a.element_size()


def _of_inverse(args: Args, out: Any) -> int:
    """The factors, and the pivots."""
    a: Tensor = args[0]
    return int(a.nbytes) + 4 * a.numel() // max(1, int(a.shape[-1]))


def _of_exponential(args: Args, out: Any) -> int:
    return _COPIES * int(args[0].nbytes)


def _of_singular(args: Args, out: Any) -> int:
    return int(args[0].nbytes)


def _of_symmetric(args: Args, out: Any) -> int:
    """xSYEVD's workspaces, which grow as the matrix, where vectors are asked for."""
    n, each = int(args[0].shape[-1]), int(args[0].element_size())
    return (2 * n * n + 6 * n + 2) * each + 4 * (5 * n + 3) if _symmetric(args) == 9 * n**3 else 0


def _of_determinant(args: Args, out: Any) -> int:
    return 13 * int(args[0].shape[-1])


NOTES = {
    "linalg_matrix_exp": "torch.linalg.matrix_exp takes as many products as the norm of its argument asks for: memory "
    "and FLOPs are those of Taylor's degree 18, which is the most but for squarings",
    "linalg_householder_product": "the backward of torch.linalg.householder_product goes another way on fake tensors: "
    "really it holds one more matrix as large as its argument",
}
SCRATCH: dict[str, Scratch] = {
    "aten::linalg_householder_product": _of_blocks,
    "aten::geqrf": _of_blocks,
    "aten::linalg_inv_ex": _of_inverse,
    "aten::linalg_matrix_exp": _of_exponential,
    "aten::_linalg_svd": _of_singular,
    "aten::_linalg_eigh": _of_symmetric,
    "aten::_linalg_det": _of_determinant,
    "aten::_linalg_slogdet": _of_determinant,
}
