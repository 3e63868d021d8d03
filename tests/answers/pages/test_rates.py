import pytest

from drawn import marks
from trainledger.answers.pages.rates import matmul_charts, page
from trainledger.observe.measure.rates import MatmulTimes
from trainledger.report.chart import Line
from trainledger.report.document import records
from trainledger.report.terminal import text
from trainledger.spec.calibration import STRAIGHT, MatmulTime


def matmul(size, seconds, dtype="fp32", factors=STRAIGHT, rows=None):
    m, n, k = (rows or size), size, size
    nbytes = (4 if dtype == "fp32" else 2) * (m * k + n * k + m * n)
    return MatmulTime(
        shape=(m, n, k), dtype=dtype, factors=factors, flops=2 * m * n * k, nbytes=nbytes, seconds=seconds
    )


def times(*matmuls):
    return MatmulTimes(
        title="a <machine>", backend="cpu", date="2026-01-02", torch_version="2.13.0", threads=1, matmuls=matmuls,
        memory_bytes_per_second=1e10,
    )  # fmt: skip


FOUND = times(
    matmul(1024, 0.02), matmul(1001, 0.04), matmul(1024, 0.025, factors="a @ b.T"), matmul(1024, 0.01, "bf16"),
)  # fmt: skip


def test_what_shape_layout_and_dtype_cost_is_said():
    said = text(page(FOUND))
    share = (1001**3 / 0.04) / (1024**3 / 0.02)
    assert f"fp32: 1001 cubed runs at {100 * share:.1f} % of the rate of 1024 cubed." in said
    assert "fp32: a @ b.T runs at 80.0 % of a @ b (1024x1024x1024)." in said
    assert "bf16 runs at 2.00 times the rate of fp32 (1024x1024x1024)." in said
    assert max(map(len, said.splitlines())) <= 80


def test_the_table_has_the_share_of_the_best_of_each_dtype():
    rows = records(page(FOUND), "matmuls")
    assert [each["of best"] for each in rows if each["factors"] == STRAIGHT and "1024" in each["m x n x k"]] == [1, 1]
    assert rows[2]["of best"] == pytest.approx(0.8)


def test_the_points_of_the_roofline_lie_where_they_were_measured_and_its_corner_at_the_ridge():
    chart = matmul_charts(FOUND)[0]
    roofs = {each.name: each for each in marks(chart, Line) if each.width}
    assert roofs.keys() == {"fp32", "bf16"}
    best = FOUND.best("fp32")
    assert roofs["fp32"].xs[1] == pytest.approx(best / 1e10)
    assert roofs["fp32"].ys[-1] == pytest.approx(best / 1e12)
    (dots,) = marks(chart, Line, "fp32, factors by rows")
    assert list(zip(dots.xs, dots.ys, strict=True)) == [
        (each.intensity, each.flops_per_second / 1e12)
        for each in FOUND.matmuls
        if each.dtype == "fp32" and each.factors == STRAIGHT
    ]


def test_a_sweep_is_drawn_over_the_size_that_moves():
    rows = times(*(matmul(64, 0.01, rows=each) for each in (1, 2, 3)))
    widths = times(*(matmul(each, 0.01, rows=5) for each in (64, 128, 256)))
    assert [matmul_charts(each)[1].x.title for each in (rows, widths)] == ["m", "n = k"]
    assert len(matmul_charts(FOUND)) == 1
    assert len(matmul_charts(times(*(matmul(each, 0.01) for each in (64, 128, 256))))) == 1
