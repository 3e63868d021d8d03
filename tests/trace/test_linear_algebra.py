"""Factorizations, solutions and functions of matrices: FLOPs beside sums over their steps, scratch beside real runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from zoo import Setup
from zoo_compared import kept_by, quiet, traced, truth

from trainledger.observe.measure.meter import AllocatorPeak
from trainledger.trace.operators.table import operator_of

pytestmark = pytest.mark.torch

aten = torch.ops.aten
M, N, K = 300, 200, 50


def flops(func: Any, *args: Any) -> int:
    operator = operator_of(func)
    assert operator.kind == "matmul"
    assert operator.assumed
    done, own = operator.counted(args, {}, func(*args))
    assert done == own
    return done


def tall() -> Tensor:
    return torch.randn(M, N)


def square(n: int = N) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(n, n) / n**0.5 + 3 * torch.eye(n)


def reflected(m: int, columns: int, reflectors: int) -> int:
    """Each reflector, from the last to the first, on what is not yet only ones and zeros: a product and a sum."""
    return sum(4 * (m - j) * (columns - j) for j in range(reflectors))


# The same by adding up the work of each step: of each column, reflector or row.
TRIANGLE = sum(4 * (M - j) * (N - j) for j in range(N))
LU = sum(2 * (N - j) ** 2 for j in range(N))
STEPS: dict[str, tuple[Any, Any, int]] = {
    "geqrf": (aten.geqrf.default, lambda: (tall(),), TRIANGLE),
    "of a wide matrix": (
        aten.geqrf.default, lambda: (tall().T.contiguous(),), sum(4 * (N - j) * (M - j) for j in range(N)),
    ),
    "reduced qr": (aten.linalg_qr.default, lambda: (tall(),), TRIANGLE + reflected(M, N, N)),
    "complete qr": (aten.linalg_qr.default, lambda: (tall(), "complete"), TRIANGLE + reflected(M, M, N)),
    "r alone": (aten.linalg_qr.default, lambda: (tall(), "r"), TRIANGLE),
    "reflectors": (aten.linalg_householder_product.default, lambda: torch.geqrf(tall()), reflected(M, N, N)),
    "few reflectors": (
        aten.linalg_householder_product.default,
        lambda: (torch.geqrf(tall())[0], torch.geqrf(tall())[1][:K]), reflected(M, N, K),
    ),
    "lu": (aten.linalg_lu_factor_ex.default, lambda: (square(),), LU),
    "determinant": (aten._linalg_det.default, lambda: (square(),), LU),
    "solve": (aten._linalg_solve_ex.default, lambda: (square(), torch.randn(N, K)), LU + K * 2 * N * N),
    "solve one": (aten._linalg_solve_ex.default, lambda: (square(), torch.randn(N)), LU + 2 * N * N),
    "solve a batch": (
        aten._linalg_solve_ex.default, lambda: (torch.stack([square()] * 3), torch.randn(3, N, K)),
        3 * (LU + K * 2 * N * N),
    ),
    "by factors": (
        aten.linalg_lu_solve.default, lambda: (*torch.linalg.lu_factor(square()), torch.randn(N, K)), K * 2 * N * N,
    ),
    "inverse": (aten.linalg_inv_ex.default, lambda: (square(),), LU + N * 2 * N * N),
    "cholesky": (
        aten.linalg_cholesky_ex.default, lambda: (square() @ square().T,), sum((N - j) ** 2 for j in range(N)),
    ),
    "cholesky solve": (
        aten.cholesky_solve.default, lambda: (torch.randn(N, K), torch.linalg.cholesky(square() @ square().T)),
        K * 2 * N * N,
    ),
    "triangular": (
        lambda a, b: aten.linalg_solve_triangular.default(a, b, upper=True), lambda: (square(), torch.randn(N, K)),
        K * N * N,
    ),
    "exponential": (aten.linalg_matrix_exp.default, lambda: (square(),), 5 * 2 * N**3),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_flops_are_those_of_the_steps(name: str) -> None:
    func, args, steps = STEPS[name]
    if name == "triangular":
        given = args()
        done = operator_of(aten.linalg_solve_triangular.default).flops(given, func(*given))
    else:
        done = flops(func, *args())
    assert done == pytest.approx(steps, rel=0.02)  # leading terms


@pytest.mark.parametrize("vectors", [True, False])
def test_values_alone_cost_less(vectors: bool) -> None:
    a = square()
    symmetric = flops(aten._linalg_eigh.default, a, "L", vectors)
    singular = flops(aten._linalg_svd.default, a, False, vectors)
    assert (symmetric, singular) == ((9 * N**3, 26 * N**3) if vectors else (4 * N**3 // 3, 8 * N**3 // 3 + 1))
    assert flops(aten.linalg_eig.default, a) == 25 * N**3


def test_complex_matrices_cost_four_times() -> None:
    a, b = square(), torch.randn(N, K)
    for func, args in ((aten._linalg_solve_ex.default, (a, b)), (aten.linalg_inv_ex.default, (a,))):
        assert flops(func, *(each.to(torch.complex64) for each in args)) == 4 * flops(func, *args)


SCRATCH: dict[str, tuple[Any, Any]] = {
    "reflectors": (aten.linalg_householder_product.default, lambda: torch.geqrf(tall())),
    "of rows": (
        aten.linalg_householder_product.default, lambda: tuple(each.contiguous() for each in torch.geqrf(tall())),
    ),
    "triangle": (aten.geqrf.default, lambda: (tall(),)),
    "inverse": (aten.linalg_inv_ex.default, lambda: (square(),)),
    "singular values": (aten._linalg_svd.default, lambda: (tall(),)),
    "symmetric": (aten._linalg_eigh.default, lambda: (square(),)),
    "determinant": (aten._linalg_det.default, lambda: (square(),)),
    "sign of it": (aten._linalg_slogdet.default, lambda: (square(),)),
    "exponential": (aten.linalg_matrix_exp.default, lambda: (square(),)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRATCH)
def test_scratch_is_what_drivers_allocate(name: str) -> None:
    func, make = SCRATCH[name]
    args = make()
    rule = operator_of(func).scratch
    assert rule is not None
    with AllocatorPeak(torch.device("cpu")) as real:
        out = func(*args)
    assert real.nbytes is not None
    results = sum(each.nbytes for each in out) if isinstance(out, tuple) else out.nbytes
    assert rule(args, out) == pytest.approx(real.nbytes - results, rel=0.02, abs=16 * 1024)


def parametrized(kind: str, **options: Any) -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    for at in (0, 2):
        getattr(parametrizations, kind)(model[at], **options)
    optimizer = torch.optim.AdamW(model.parameters())
    return Setup(model, optimizer, torch.randn(32, 64), lambda out: out.square().mean())


@pytest.mark.parametrize(
    ("kind", "options", "limit", "said"),
    [
        ("weight_norm", {}, 0.0001, ""),
        ("spectral_norm", {}, 0.0001, ""),
        ("orthogonal", {"orthogonal_map": "cayley"}, 0.0001, ""),
        ("orthogonal", {"orthogonal_map": "cayley", "use_trivialization": False}, 0.0001, ""),
        ("orthogonal", {"orthogonal_map": "matrix_exp", "use_trivialization": False}, 0.0001, "degree 18"),
        ("orthogonal", {"orthogonal_map": "householder"}, 0.05, "one more matrix as large as its argument"),
    ],
)
@pytest.mark.long
def test_parametrized_weights_are_as_they_run(kind: str, options: dict[str, Any], limit: float, said: str) -> None:
    setup = parametrized(kind, **options)
    with quiet():
        ledger, real = traced(setup, None), truth(setup, None)
    assert ledger.uncounted == ()
    assert ledger.partial == ""
    assert ledger.peak().nbytes == pytest.approx(real.peak, rel=limit)
    assert kept_by(ledger) == pytest.approx(real.kept, abs=64)
    assert [said in each for each in ledger.notes] == [True] * bool(said)
    if "one more" in said:  # and it is that
        weight = 64 * 256 * 4
        assert ledger.peak().nbytes + weight == pytest.approx(real.peak, abs=64)
