from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger import catalog
from trainledger.answers.load import load
from trainledger.answers.machine import machine_of
from trainledger.answers.plan import plan
from trainledger.spec.cluster import Cluster
from trainledger.spec.device import CLOCKED, LEAST, clock_share, limited
from trainledger.spec.problem import InvalidInput

RUN = {
    "model": {"preset": "gpt2"}, "recipe": {"seq_len": 1024, "global_batch": 8, "steps": 100, "precision": "bf16"},
    "cluster": {"device": "a100-sxm-80gb"},
}  # fmt: skip


def run_with(**cluster):
    return load({**RUN, "cluster": {**RUN["cluster"], **cluster}})


@given(st.floats(LEAST, 1), st.floats(LEAST, 1), st.floats(50, 1500))
def test_more_power_never_slows_the_clock_and_a_share_of_it_costs_less_of_the_clock(one, other, rated):
    less, more = sorted((one, other))
    assert 0 < clock_share(less * rated, rated) <= clock_share(more * rated, rated) <= 1 + 1e-12
    assert clock_share(less * rated, rated) >= less - 1e-12  # half the power is more than half the clock


def test_a_limit_slows_matmuls_and_attention_and_nothing_else():
    device = catalog.device("a100-sxm-80gb")
    slow = limited(device, 200)
    clock = clock_share(200, 400)
    assert (slow.power_watts, slow.clock) == (200, clock)
    for name, value in vars(device.efficiency).items():
        share = clock if name in CLOCKED else 1
        if isinstance(value, float):
            assert getattr(slow.efficiency, name) == pytest.approx(value * share), name
    assert replace(slow, power_watts=400.0, clock=1.0, efficiency=device.efficiency) == device


def test_a_plan_under_a_limit_is_slower_takes_less_energy_and_says_so():
    full, capped = plan(run_with()).forecast, plan(run_with(power_limit_watts=250)).forecast
    assert full.total_seconds < capped.total_seconds < full.total_seconds / clock_share(250, 400)
    assert capped.kwh < full.kwh
    assert capped.mfu < full.mfu  # of the same peak
    (note,) = (each for each in capped.notes if "limit of 250 W" in each)
    assert "at 80.6 % of its clock" in note
    assert not any("limit of" in each for each in full.notes)


def test_a_limit_at_the_rated_power_changes_nothing():
    assert machine_of(run_with(power_limit_watts=400)) == machine_of(run_with())


def test_a_device_without_a_calibration_keeps_its_bound():
    device = catalog.device("rtx-5090")
    assert device.efficiency is None
    assert limited(device, 500).peak_flops_per_second == device.peak_flops_per_second


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"power_limit_watts": 450}, "is above the 400 W of NVIDIA A100 SXM 80GB; nearest that works: 400"),
        (
            {"power_limit_watts": 100},
            "is below 30 % of the 400 W of NVIDIA A100 SXM 80GB, where the clock is not known; "
            "nearest that works: 120",
        ),
        (
            {"device": "this-machine", "power_limit_watts": 100},
            "is for devices of the catalog: this machine is predicted as it was measured",
        ),
    ],
)  # fmt: skip
def test_limits_that_cannot_be_are_refused_with_the_nearest(cluster, said):
    with pytest.raises(InvalidInput) as refused:
        machine_of(run_with(**cluster))
    assert f"cluster.power_limit_watts = {float(cluster['power_limit_watts'])}" in str(refused.value)
    assert said in str(refused.value)


def test_a_device_without_a_rated_power_says_that_it_is_missing():
    device = replace(catalog.device("a100-sxm-80gb"), power_watts=None)
    with pytest.raises(InvalidInput, match="needs the rated power of NVIDIA A100 SXM 80GB, which is not known"):
        catalog.placed(device, Cluster(device="a100-sxm-80gb", power_limit_watts=300))
