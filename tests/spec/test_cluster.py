"""Rates of a cluster: what is written without a unit is bytes per second, and too little of that is an error."""

import pytest

import trainledger as tl
from trainledger.spec.problem import InvalidInput

TABLE = {
    "model": {"preset": "gpt2"}, "recipe": {"seq_len": 64, "global_batch": 16, "steps": 1},
    "layout": {"shard": 16}, "cluster": {"device": "a100-sxm-80gb", "count": 16},
}  # fmt: skip
RATES = ["network_bytes_per_second", "network_reached_bytes_per_second", "storage_bytes_per_second"]


@pytest.mark.parametrize("field", RATES)
@pytest.mark.parametrize("value", [1, 400, 400_000, "50", "999.999kB/s"])
def test_a_rate_that_was_meant_in_another_unit_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=r"must be at least 1000000 \(bytes per second ") as found:
        tl.load(TABLE, {f"cluster.{field}": value})
    assert "nearest that works: 1000000" in str(found.value)


def test_the_refusal_says_how_a_network_is_written() -> None:
    with pytest.raises(InvalidInput) as found:
        tl.load(TABLE, ["cluster.network_bytes_per_second=400"])
    assert str(found.value) == (
        "cluster.network_bytes_per_second = 400: must be at least 1000000 (bytes per second for each device; of "
        '400 Gbit/s write "400Gbit/s"); nearest that works: 1000000'
    )
    assert tl.load(TABLE, ["cluster.network_bytes_per_second=400Gbit/s"]).cluster.network_bytes_per_second == 50 * 10**9


def test_slow_networks_that_there_are_can_be_planned() -> None:
    """Ethernet of 1 Gbit/s and of 100 Mbit/s, shared by the eight devices of a node."""
    seconds = []
    for rate in ("1Gbit/s", "125Mbit/s", "12.5Mbit/s"):
        forecast = tl.predict(tl.load(TABLE, {"cluster.network_bytes_per_second": rate}))
        assert forecast.step_seconds is not None
        seconds.append(forecast.step_seconds)
    assert seconds == sorted(seconds)


def test_a_part_of_the_power_is_at_most_all_of_it() -> None:
    assert tl.load(TABLE, {"cluster.power_share": 1.0}).cluster.power_share == 1.0
    with pytest.raises(InvalidInput, match=r"cluster.power_share = 1.2: must be at most 1; nearest that works: 1"):
        tl.load(TABLE, {"cluster.power_share": 1.2})
