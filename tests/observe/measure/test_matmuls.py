import json
import os
import subprocess
import sys

import pytest
import torch

from trainledger.ledger.rules import matmul_flops
from trainledger.observe.measure.kernels import ColdPool
from trainledger.observe.measure.matmuls import FACTORS, measure_matmuls, shapes_of
from trainledger.spec.calibration import STRAIGHT
from trainledger.spec.problem import InvalidInput


@pytest.mark.parametrize("factors", FACTORS)
def test_every_layout_of_the_factors_is_a_matmul_of_the_shape(factors):
    pool = ColdPool(torch.device("cpu"), torch.float32, 4 * 4096)
    assert FACTORS[factors](pool, 6, 10, 14)().shape == (6, 10)


def test_the_layouts_lie_as_they_say():
    seen = []
    pool = ColdPool(torch.device("cpu"), torch.float32, 4 * 4096)
    with torch.overrides.BaseTorchFunctionMode(), _Factors(seen):
        for each in FACTORS.values():
            each(pool, 6, 10, 14)()
    assert seen == [((14, 1), (10, 1)), ((14, 1), (1, 14)), ((1, 6), (10, 1)), ((28, 2), (10, 1))]


class _Factors(torch.utils._python_dispatch.TorchDispatchMode):
    """The strides of both factors of each matmul that is dispatched."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.mm.default:
            self.seen.append(tuple(each.stride() for each in args))
        return operator(*args, **(kwargs or {}))


def test_each_sweep_moves_its_own_size():
    assert {shape[1:] for shape in shapes_of("batch", large=True)} == {(4096, 4096)}
    assert all(n == k for _, n, k in shapes_of("width", large=False))
    assert {1001, 1024} <= {n for _, n, _ in shapes_of("width", large=False)}
    assert (1001, 1001, 1001) in shapes_of(None, large=False)


def test_rates_are_those_of_the_shapes_that_were_asked_for():
    shapes = [(64, 32, 48), (256, 256, 256)]
    told = []
    found = measure_matmuls(
        "cpu", shapes=shapes, dtypes=["fp32"], seconds_each=0.01, tell=lambda share, name: told.append(share)
    )
    straight = [each for each in found.matmuls if each.factors == STRAIGHT]
    assert [each.shape for each in straight] == shapes
    assert {each.factors for each in found.matmuls if each.shape == (256, 256, 256)} == set(FACTORS)
    for each in found.matmuls:
        m, n, k = each.shape
        assert each.flops == matmul_flops(m, n, k)
        assert each.nbytes == 4 * (m * k + k * n + m * n)
        assert 0 < each.flops_per_second <= found.best("fp32")
    assert found.memory_bytes_per_second > 0
    assert told == sorted(told)
    assert len(told) > 0


def test_factors_larger_than_the_memory_are_refused():
    with pytest.raises(InvalidInput, match="half of this machine's memory"):
        measure_matmuls("cpu", shapes=[(2**20, 2**20, 2**20)], dtypes=["fp32"])


@pytest.mark.process
def test_the_verb_prints_and_draws_what_it_measured(tmp_path):
    words = ["measure", "matmul", "--shapes", "64x64x64", "96x64x64", "128x64x64", "--dtype", "fp32", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "trainledger", *words, "--html", "rates.html"], cwd=tmp_path, capture_output=True,
        text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["shape"] for each in found["matmuls"]][:3] == [[64, 64, 64], [96, 64, 64], [128, 64, 64]]
    assert found["best_flops_per_second"]["fp32"] == max(each["flops_per_second"] for each in found["matmuls"])
    page = (tmp_path / "rates.html").read_text()
    assert "Measured matmuls under the roofline" in page
    assert "The rate over the size" in page
    assert "<script" not in page
