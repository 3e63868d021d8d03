"""The catalog's links: each whole and with its source, and every device joined by some."""

import pytest

from trainledger import catalog
from trainledger.spec.cluster import Cluster
from trainledger.spec.problem import InvalidInput


@pytest.mark.parametrize("name", catalog.link_names())
def test_every_link_is_whole(name: str) -> None:
    link = catalog.link(name)
    assert link.title
    assert link.bytes_per_second > 1e9
    assert 0 < link.share <= 1
    assert link.switch_share is None or 0 < link.switch_share <= 1
    assert link.source
    assert link.date
    assert set(link.unverified) <= {"bandwidth", "share", "switch_share", "host_share", "host_memory_bandwidth"}
    assert link.protocols
    for each in link.protocols:
        assert 0 < each.ring_share <= 1
        assert 0 < each.tree_share <= 1
        assert 0 <= each.ring_step_seconds <= 1e-4
        assert 0 <= each.start_seconds <= 1e-4
    assert link.bound.reached == link.bytes_per_second
    assert link.bound.basis == "bound"


@pytest.mark.parametrize("name", catalog.device_names())
def test_every_device_stands_in_a_node(name: str) -> None:
    device = catalog.device(name)
    assert device.fabric is not None
    assert device.fabric.devices_per_node >= 1
    if (host := device.fabric.host) is not None:  # whose memory is quicker than the link to it
        assert (host.memory_bytes_per_second or 0) > host.bytes_per_second
    if device.link_bytes_per_second is not None and "bridge" not in device.link:
        # The device's own figure and its link's, which may have been read in another source.
        assert device.fabric.node.bytes_per_second == pytest.approx(device.link_bytes_per_second, rel=0.05)


def test_a_cluster_changes_what_the_catalog_says() -> None:
    device = catalog.device("h100-sxm")
    usual = catalog.fabric(device, Cluster(device="h100-sxm"))
    assert usual == device.fabric
    other = catalog.fabric(
        device, Cluster(device="h100-sxm", devices_per_node=4, network="hdr", network_bytes_per_second=10**10)
    )
    assert other is not None
    assert other.network is not None
    assert (other.devices_per_node, other.network.name, other.network.bytes_per_second) == (4, "hdr", 1e10)
    with pytest.raises(InvalidInput, match=r"cluster.network = 'infiniband'"):
        catalog.fabric(device, Cluster(device="h100-sxm", network="infiniband"))


def test_a_measured_network_is_taken_as_it_is() -> None:
    """No share of the catalog is taken of what was measured, and a bound keeps the data sheet's rate."""
    device = catalog.device("a100-sxm-80gb")
    for reached, sheet in ((2_531_250_000, 6_250_000_000), (7_000_000_000, 7_000_000_000)):
        cluster = Cluster(device="a100-sxm-80gb", network="edr-half", network_reached_bytes_per_second=reached)
        joined = catalog.fabric(device, cluster)
        assert joined is not None
        assert joined.network is not None
        assert joined.network.reached == pytest.approx(reached)
        assert joined.network.basis == "measured"
        assert joined.bound.network is not None
        assert joined.bound.network.reached == sheet
    unnamed = catalog.fabric(
        catalog.device("rtx-4090"), Cluster(device="rtx-4090", network_reached_bytes_per_second=10**9)
    )
    assert unnamed is not None
    assert unnamed.network is not None
    assert unnamed.network.reached == pytest.approx(1e9)


def test_what_a_node_reached_is_not_taken_for_a_device() -> None:
    """nccl-tests tell a bus bandwidth of all rails of a node; up to twice a link is what sums in switches reach."""
    device = catalog.device("h100-sxm")
    joined = catalog.fabric(device, Cluster(device="h100-sxm", network_reached_bytes_per_second=100 * 10**9))
    assert joined is not None
    assert joined.network is not None
    assert joined.network.reached == 100e9
    with pytest.raises(InvalidInput) as refused:
        catalog.fabric(device, Cluster(device="h100-sxm", network_reached_bytes_per_second=370 * 10**9))
    assert str(refused.value).startswith(
        "cluster.network_reached_bytes_per_second = 370000000000: is more than twice the 50 GB/s that a device has of "
        "its network (InfiniBand NDR"
    )
    assert "it is the part of one of its 8 devices; nearest that works: 46250000000" in str(refused.value)
    faster = Cluster(
        device="h100-sxm", network_bytes_per_second=200 * 10**9, network_reached_bytes_per_second=370 * 10**9
    )
    assert catalog.fabric(device, faster) is not None


def test_a_device_without_a_usual_network_takes_the_one_that_is_named() -> None:
    device = catalog.device("rtx-4090")
    assert device.fabric is not None
    assert device.fabric.network is None
    joined = catalog.fabric(device, Cluster(device="rtx-4090", network_bytes_per_second=10**9))
    assert joined is not None
    assert joined.network is not None
    assert joined.network.bytes_per_second == 1e9
