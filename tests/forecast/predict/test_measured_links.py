import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.forecast.predict.clock import bus_factor, link_fit, link_fits
from trainledger.forecast.predict.collective import Placement, collective_seconds
from trainledger.spec.calibration import COLLECTIVES, CollectiveTime
from trainledger.spec.cluster import Fabric, Link


def sample(nbytes, seconds, name="all_reduce", ranks=2):
    return CollectiveTime(name=name, backend="gloo", ranks=ranks, nbytes=nbytes, seconds=seconds)


@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e12), st.sampled_from(COLLECTIVES), st.integers(2, 16))
def test_a_planted_latency_and_bandwidth_are_found_again(latency, rate, name, ranks):
    fit = link_fit([sample(n, latency + n / rate, name, ranks) for n in (10**3, 10**5, 10**7, 10**9)])
    assert fit.latency_seconds == pytest.approx(latency, rel=1e-3)
    assert fit.bytes_per_second == pytest.approx(rate, rel=1e-3)
    assert fit.worst < 1e-3
    assert fit.bus_bytes_per_second == fit.bytes_per_second * bus_factor(name, ranks)


@given(st.lists(st.tuples(st.integers(1, 2**30), st.floats(1e-6, 10)), min_size=2, max_size=8))
def test_no_sample_makes_a_negative_number(samples):
    fit = link_fit([sample(*each) for each in samples])
    assert fit.latency_seconds >= 0
    assert fit.bytes_per_second > 0


@pytest.mark.parametrize("name", [each for each in COLLECTIVES if each != "broadcast"])
def test_bus_bandwidth_is_the_rate_of_the_links_in_the_forecast(name):
    fabric = Fabric(devices_per_node=4, node=Link(name="x", title="x", bytes_per_second=1e9))
    seconds = collective_seconds(name, 8e6, Placement(4, 1, 4), fabric)
    assert 8e6 / seconds * bus_factor(name, 4) == pytest.approx(1e9)


def test_a_group_of_one_size_has_no_fit():
    times = [sample(10, 1.0), sample(10, 1.1), sample(10, 1.0, "broadcast"), sample(20, 1.5, "broadcast")]
    assert [each.name for each in link_fits(times)] == ["broadcast"]
