"""Matmuls alone on a device: no prediction beats the bound, tiles and waves multiply to it, and bars add up."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger import catalog
from trainledger.answers.einsum import devices_named, einsum_times
from trainledger.forecast.predict.einsum_time import Matmul, einsum_time, matmul, swept
from trainledger.forecast.predict.kernel import matmul_seconds, tiling
from trainledger.spec.problem import InvalidInput
from trainledger.tensors.einsum import einsum

H100 = catalog.device("h100-sxm")
CALIBRATED = [name for name in catalog.device_names() if catalog.device(name).efficiency is not None]
sizes = st.integers(1, 20_000)
shapes = st.tuples(st.integers(1, 64), sizes, sizes, sizes)


@given(shapes, st.sampled_from(CALIBRATED))
def test_no_prediction_beats_the_bound_and_its_bars_add_up(shape: tuple[int, int, int, int], name: str) -> None:
    dtype = "bf16" if "bf16" in catalog.device(name).peak_flops_per_second else "fp16"
    found = einsum_time([matmul(shape, dtype)], catalog.device(name))
    assert found.seconds is not None
    assert found.bound_seconds is not None
    assert found.seconds >= found.bound_seconds * (1 - 1e-9)
    assert sum(each.nanoseconds for each in found.bars) == pytest.approx(found.seconds * 1e9, abs=len(found.bars))
    assert all(each.nanoseconds >= 0 for each in found.bars)


@given(shapes, st.sampled_from(["bf16", "e4m3", "fp32"]))
def test_the_shares_of_a_tiling_multiply_to_its_time(shape: tuple[int, int, int, int], dtype: str) -> None:
    assert H100.efficiency is not None
    batch, m, n, k = shape
    cut = tiling(shape, dtype, 1e15, H100.efficiency, 132)
    seconds = matmul_seconds(shape, dtype, 1e15, H100.efficiency, 132)
    share = cut.rate * cut.aligned * cut.speed * cut.filled * cut.busy * cut.inside
    assert 2 * batch * m * n * k / 1e15 / share == pytest.approx(seconds)
    assert 0 < cut.filled <= 1
    assert 0 < cut.busy <= 1
    assert cut.waves == -(-cut.tiles * cut.split // 132)


def test_one_tile_more_than_a_wave_costs_a_wave() -> None:
    full = einsum_time([matmul((1, 256 * 12, 128 * 11, 8192), "bf16")], H100).tilings[0]
    assert (full.tiles, full.waves, full.busy) == (132, 1, 1.0)
    rates = dict(swept((1, 256 * 12, 128 * 11, 8192), "n", "bf16", H100))
    sizes = sorted(rates)
    assert any(rates[after] < 0.8 * rates[before] for before, after in pairwise(sizes))
    assert max(sizes) <= 2 * 128 * 11
    assert all(each % 8 == 0 for each in sizes)


def test_what_is_not_known_is_said_and_not_predicted() -> None:
    one = einsum("mk,kn->mn", [(64, 64), (64, 64)], "fp64")
    (l4,) = einsum_times(one, devices_named("l4"))
    assert l4.bound_seconds is None
    assert "has no peak for fp64 on record" in l4.note
    (bound,) = einsum_times(einsum("mk,kn->mn", [(64, 64), (64, 64)], "bf16"), devices_named("l4"))
    assert bound.seconds is None
    assert bound.bound_seconds is not None
    summed = einsum_time([Matmul(None, "bf16", 10, 10, 10)], H100)
    assert summed.seconds is None
    assert summed.bound == "memory"


def test_devices_are_named_with_commas_and_are_few() -> None:
    assert [each.name for each in devices_named(" h100 , b200,")] == ["h100-sxm", "b200"]
    with pytest.raises(InvalidInput, match="names 9 devices, and 8 are compared at most"):
        devices_named(",".join(["b200"] * 9))
    with pytest.raises(InvalidInput, match="--device = 'h101': is not in the catalog"):
        devices_named("h101", "--device")
